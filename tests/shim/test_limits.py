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


CROWD = """
import os, socket, sys
many = int(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0), backlog=many)
for _ in range(many):
    if os.fork() == 0:
        end = socket.create_connection(listener.getsockname())
        while data := end.recv(1):
            end.sendall(data)
        os._exit(0)
ends = [listener.accept()[0] for _ in range(many)]
while os.read(0, 1):
    for end in ends:
        end.sendall(b"x")
        assert end.recv(1) == b"x"
    os.write(1, b".")
"""


def test_many_peers_with_1024_numbers(sidestep: Sidestep) -> None:
    """What is kept for the next program leaves numbers for connections: the shim has 128."""
    bound = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (1024, 1024))
    argv, pipe = [sys.executable, "-c", CROWD, "50"], subprocess.PIPE
    with sidestep.popen(argv, preexec_fn=bound, stdin=pipe, stdout=pipe, bufsize=0) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for _ in range(20):
            program.stdin.write(b"x")
            assert program.stdout.read(1) == b"."
        sidestep.wait_for(lambda found: len(found) == 100 and all(c.promoted for c in found))
        program.stdin.close()
    assert program.returncode == 0


def test_more_peers_than_numbers(sidestep: Sidestep) -> None:
    """Each other process needs one of the 128, to be woken. Where there are none, the reason says so."""
    bound = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (1024, 1024))
    argv, pipe = [sys.executable, "-c", CROWD, "115"], subprocess.PIPE
    with sidestep.popen(argv, preexec_fn=bound, stdin=pipe, stdout=pipe, bufsize=0) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for _ in range(20):
            program.stdin.write(b"x")
            assert program.stdout.read(1) == b"."
        server = [c for c in sidestep.connections() if c.pid == program.pid]
        program.stdin.close()
    assert program.returncode == 0
    assert len(server) == 115
    assert sum(c.promoted for c in server) >= 50
    assert "NO_RESOURCES" in {c.reason for c in server if not c.promoted}
