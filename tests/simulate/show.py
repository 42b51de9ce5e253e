"""Prints the conversation of a seed as the tests play it: `.venv/bin/python tests/simulate/show.py 13389`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sidestep.sdp.simulate.conversation import Surprise
from sidestep.sdp.simulate.trace import Trace
from simulate.conversation import CheckedConversation
from simulate.plan import draw


def main(seed: int) -> str:
    """Plays it; returns the fault, or nothing."""
    trace = Trace()
    conversation = CheckedConversation(draw(seed), trace)
    try:
        print(conversation.run())
    except Surprise as surprise:
        return f"{conversation.describe()}\nseed {seed}: {surprise}"
    finally:
        print(*trace.lines(), sep="\n")
    return ""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])) or None)
