"""What siw of Linux 6.1 answers to each defect, as a table.

python tests/interop/siw_answers.py     prints the table
"""

from __future__ import annotations

from typing import Final

from defects import DEFECTS, TOO_MANY_READS, Defect

CLOSES: Final = "closes"  # without a Terminate
TAKEN: Final = "takes it"  # and the connection goes on
SILENT: Final = "nothing"  # the connection stays, and this message has no effect

_DIFFERENT: Final = {
    "Send that is tagged": TAKEN,
    "Write that is untagged": TAKEN,
    "segment of 1 byte": "0/2/05",
    "segment of 10 bytes": "2/0/03",
    "segment of 17 bytes": "2/0/03",
    "other opcode within a message": CLOSES,
    "Send longer than the receive": "1/2/02",
    "Send longer than the receive, in its second segment": "1/2/02",
    "Write whose TO wraps": "1/0/00",
    "Write without the right": "1/1/00",
    "Write to local memory": "1/1/00",
    "Read Response within a Write": CLOSES,
    "Read whose TO wraps": CLOSES,
    "Read without the right": TAKEN,
    "Read from local memory": TAKEN,
    "Read Request on queue 0": "1/2/03",
    "Read Request with MO 4": TAKEN,
    "Read Request without L": SILENT,
    "Read Request of 24 bytes": "2/0/03",
    "Read Request of 32 bytes": CLOSES,
    TOO_MANY_READS: "0/2/07",
    "Read Response to nothing": "1/0/00",
    "Invalidate of no STag": SILENT,
    "Invalidate in another domain": SILENT,
    "Terminate on queue 0": CLOSES,
    "Terminate with MSN 2": CLOSES,
}
assert set(_DIFFERENT) <= {defect.name for defect in DEFECTS}


def answer_of_siw(defect: Defect) -> str:
    """A Terminate's layer/type/code, or one of the words above."""
    return _DIFFERENT.get(defect.name, defect.answer)


def table() -> str:
    """A table of what each peer does wrong, the answer that is due, and the one of siw."""
    lines = ["| what the peer does | due | siw 6.1 |", "| --- | --- | --- |"]
    for defect in DEFECTS:
        theirs = answer_of_siw(defect)
        lines.append(f"| {defect.name} | {defect.answer} | {'same' if theirs == defect.answer else theirs} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
