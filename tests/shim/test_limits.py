"""Programs that may have little: what sidestep does without then, the program must not notice."""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from common import PATIENCE_S

from sidestep.testing import Sidestep

TALK = Path(__file__).parent / "programs" / "talk.py"


@pytest.mark.parametrize("limit", [0, 1 << 16, 1 << 20, 1 << 26])
def test_a_small_file_size_limit(sidestep: Sidestep, limit: int) -> None:
    """Shared memory counts as a file: the kernel ends a program by SIGXFSZ that would make more of it."""
    bound = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    # a shell, as Python ignores that signal
    program = sidestep.popen(
        ["/bin/sh", "-c", 'echo up; exec "$@"', "sh", sys.executable, TALK],
        preexec_fn=bound, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.communicate(timeout=PATIENCE_S)[0] == "up\ndone\n"


@pytest.mark.parametrize("limit", range(10, 34, 3))
def test_few_descriptors(sidestep: Sidestep, limit: int) -> None:
    """They run out in one step of promotion or another."""
    bound = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (limit, limit))
    program = sidestep.popen([sys.executable, TALK], preexec_fn=bound, stdout=subprocess.PIPE, text=True)
    assert program.communicate(timeout=PATIENCE_S)[0] == "done\n"
