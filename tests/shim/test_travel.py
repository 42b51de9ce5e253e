"""A connection goes on by ring in the next program of its process, if that is certain to have the shim."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import toolchain
from common import eventually

from sidestep.observe import connections
from sidestep.testing import Connection, Sidestep

pytestmark = pytest.mark.slow

TIMES = 20
NOBODY = 65534
WHOLE = ["server: 0, the end"]


def _landlock() -> bool:
    """Whether the kernel has it: landlock_create_ruleset(2) tells its version."""
    return bool(ctypes.CDLL(None).syscall(444, None, 0, 1) > 0)


def _program(*flags: str) -> Path:
    return toolchain.build("chain", [Path(__file__).parent / "programs/chain.c"], ["-D_GNU_SOURCE", *flags])


def _words(how: str) -> int:
    """How many the client sends."""
    return 50 * TIMES + (TIMES if how == "failing" else 0)


def _chain(
    sidestep: Sidestep, *argv: str | Path, program: Path | None = None, cwd: Path | None = None, **environ: str
) -> list[str]:
    """What the two ends print: all of a run in which every byte is compared."""
    pipe, env = subprocess.PIPE, sidestep.env(**environ)
    with sidestep.popen([program or _program(), *argv], stdin=pipe, stdout=pipe, text=True, cwd=cwd, env=env) as server:
        sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
        said, _ = server.communicate("go", timeout=120)
    return sorted(str(said).splitlines())


def _ends(sidestep: Sidestep) -> list[Connection]:
    return [one.connection for one in connections.ended(sidestep.socket)]


def _server(sidestep: Sidestep) -> Connection:
    """Its end, as it was when it ended."""
    (found,) = [one for one in _ends(sidestep) if one.role == "passive"]
    return found


@pytest.mark.parametrize("how", ["exec", "fork", "failing", "closefrom", "close_range", "two"])
def test_it_goes_on_by_ring(sidestep: Sidestep, how: str) -> None:
    """Words are under way at each exec, and nothing goes back to TCP for it."""
    assert _chain(sidestep, how, str(TIMES)) == [f"client: {_words(how)} whole", *WHOLE]
    ended = _server(sidestep)
    assert ended.promoted
    assert ended.rx.ring_msgs > 0.8 * _words(how)
    assert ended.tx.ring_msgs > 0.8 * _words(how)


@pytest.mark.parametrize("how", ["exec", "fork"])
def test_its_peer_need_not_ring_always(sidestep: Sidestep, how: str, tmp_path: Path) -> None:
    """The peer gets the new program's doorbell; or the program that made the connection has it for itself again."""
    log, pipe = tmp_path / "log", subprocess.PIPE
    env = sidestep.env(SIDESTEP_LOG=str(log))
    with sidestep.popen([_program(), how, "1", "stays"], env=env, stdin=pipe, stdout=pipe, text=True) as server:
        sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
        assert server.stdin is not None
        server.stdin.write("go")
        server.stdin.flush()
        eventually(lambda: "its doorbell is known" in log.read_text())
        said, _ = server.communicate(timeout=120)
    assert ("the peer has another doorbell" in log.read_text()) == (how == "exec")
    assert "server: 0, the end" in said


def test_numbers_that_a_program_has_closed_unseen_are_not_relied_on(sidestep: Sidestep) -> None:
    """Ours among them: the connection is carried by TCP, as into a program without the shim."""
    assert _chain(sidestep, "closed", str(TIMES)) == [f"client: {_words('closed')} whole", *WHOLE]


@pytest.mark.parametrize("word", ["SIDESTEP_DISABLE=1", "LD_PRELOAD=libm.so.6", "LD_PRELOAD="])
def test_into_a_program_without_the_shim_it_goes_by_tcp(sidestep: Sidestep, word: str) -> None:
    assert _chain(sidestep, "environment", str(TIMES), word) == [f"client: {_words('environment')} whole", *WHOLE]


def test_an_environment_of_very_many_entries_arrives_whole(sidestep: Sidestep) -> None:
    assert _chain(sidestep, "crowded", "2") == ["client: 100 whole", *WHOLE]


@pytest.mark.parametrize("how", ["numbers", "clone"])
def test_where_the_next_program_may_not_take_it_up_it_goes_by_tcp(sidestep: Sidestep, how: str) -> None:
    """It has fewer numbers than this one began with, or who executes it is not who holds the connection."""
    assert _chain(sidestep, how, "2") == ["client: 100 whole", *WHOLE]


def test_under_a_limit_of_memory_it_goes_by_tcp(sidestep: Sidestep) -> None:
    """The next program may be larger, and have no room for what this one has mapped."""
    assert _chain(sidestep, "memory", "1", _program("-DLARGE")) == ["client: 50 whole", *WHOLE]


@pytest.mark.skipif(not _landlock(), reason="this kernel has no Landlock")
def test_where_the_next_program_cannot_look_for_it_it_goes_by_tcp(sidestep: Sidestep) -> None:
    assert _chain(sidestep, "landlock", "2") == ["client: 100 whole", *WHOLE]


def test_into_a_program_with_system_calls_of_its_own_it_goes_by_tcp(sidestep: Sidestep) -> None:
    bare = toolchain.build("bare", [Path(__file__).parent / "programs/bare.c"], ["-D_GNU_SOURCE"])
    assert _chain(sidestep, "program", "1", bare) == ["client: 50 whole", *WHOLE]


def test_into_another_program_it_goes_on_by_ring(sidestep: Sidestep) -> None:
    """That program's code was read, and makes no system calls of its own."""
    assert _chain(sidestep, "program", "1", _program("-DCOVERED")) == ["client: 50 whole", *WHOLE]
    ended = _server(sidestep)
    assert ended.rx.ring_msgs > 40
    assert ended.tx.ring_msgs > 40


INETD = """
import os, socket, sys
how, *program = sys.argv[1:]
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
end = listener.accept()[0]
listener.close()
while how == "promoted" and (line := end.recv(8, socket.MSG_WAITALL)):
    end.sendall(line)
    if line == b"the last":
        break
if how == "child" and os.fork():
    end.close()
    os.wait()
    sys.exit()
for number in (0, 1):
    os.dup2(end.fileno(), number)
os.execv(program[0], program)
"""
ASKS = """
import select, socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
number = 0
def ask(line):
    end.sendall(line)
    got = end.recv(8, socket.MSG_WAITALL)
    assert got == line, (got, line)
while not select.select([sys.stdin], [], [], 0)[0]:
    number += 1
    ask(b"%07d\\n" % number)
if sys.argv[2] == "promoted":
    ask(b"the last")
lines = b"".join(b"%07d\\n" % each for each in range(20000))
end.sendall(lines[:16000])
sys.stdin.readline()
sys.stdin.readline()
end.sendall(lines[16000:])
end.shutdown(socket.SHUT_WR)
got = bytearray()
while piece := end.recv(1 << 16):
    got += piece
assert got == lines, (len(got), len(lines))
print("whole")
"""
READERS = {  # of lines that come one by one: by read(2), and by libc's own streams
    "cat": ["/bin/cat"],
    "perl": ["/usr/bin/perl", "-pe", "BEGIN { $| = 1 }"],
    "sed": ["/bin/sed", "-u", ""],
    "sh": ["/bin/sh", "-c", 'while read -r line; do echo "$line"; done'],
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", ["at once", "child", "promoted"])
def test_it_goes_on_as_a_standard_stream(sidestep: Sidestep, how: str, reader: str) -> None:
    """As inetd hands it to what it starts; also with what came before, while the peer waits for something else."""
    pipe = subprocess.PIPE
    server = sidestep.popen([sys.executable, "-c", INETD, how, *READERS[reader]], stdout=pipe, text=True)
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    with sidestep.popen([sys.executable, "-c", ASKS, port, how], stdin=pipe, stdout=pipe, text=True) as client:
        sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
        sidestep.wait_for(lambda found: any(c.role == "passive" and c.program == reader for c in found))
        said, _ = client.communicate("go on\n", timeout=60)
    assert said == "whole\n"
    # between the two programs the provider may take the family for ended
    eventually(lambda: any(one.role == "passive" and one.rx.ring_bytes > 100_000 for one in _ends(sidestep)))
    assert _server(sidestep).promoted


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory where set-id bits count, which pytest's own need not be."""
    with tempfile.TemporaryDirectory(prefix="sidestep-rights-", dir=Path(__file__).parent) as made:
        yield Path(made)


def test_into_a_program_with_more_rights_it_goes_by_tcp(sidestep: Sidestep, place: Path) -> None:
    program = Path(shutil.copy(_program(), place))
    program.chmod(0o4755)
    assert _chain(sidestep, "exec", str(TIMES), program=program) == [f"client: {_words('exec')} whole", *WHOLE]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a program of another user's")
def test_an_empty_name_in_path_is_the_current_directory(sidestep: Sidestep, place: Path, tmp_path: Path) -> None:
    """The program is there, and has no shim; the next directory has one that would."""
    program = Path(shutil.copy(_program(), place / "chain"))
    os.chown(program, NOBODY, NOBODY)
    program.chmod(0o4755)
    shutil.copy(_program(), tmp_path / "chain")
    assert _chain(sidestep, "path", "1", cwd=place, PATH=f":{tmp_path}") == ["client: 50 whole", *WHOLE]


HOLDS = """
import os, select, socket, sys
left, numbers, kept = int(sys.argv[1]), sys.argv[2:], []
listener = socket.create_server(("127.0.0.1", 0))
for _ in range(10):
    ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
    turn = 0
    while turn < 10 or (not numbers and not select.select([sys.stdin], [], [], 0)[0]):
        turn += 1
        ends[turn % 2].sendall(b"x")
        assert ends[1 - turn % 2].recv(1) == b"x"
    if not numbers:
        os.read(0, 3)
        numbers = [str(end.detach()) for end in ends]
        for number in numbers:
            os.set_inheritable(int(number), True)
    else:
        kept.append(ends)
if left:
    os.execv(sys.executable, [sys.executable, "-c", os.environ["CODE"], str(left - 1), *numbers])
ends = [socket.socket(fileno=int(number)) for number in numbers]
ends[0].sendall(b"y")
assert ends[1].recv(1) == b"y"
print("ready", flush=True)
sys.stdin.readline()
"""


def test_slots_of_what_exec_closes_are_free_again(sidestep: Sidestep) -> None:
    """The family's memory outlives the program, and its other connections do not."""
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", HOLDS, "5"]
    program = sidestep.popen(argv, env=sidestep.env(CODE=HOLDS), stdin=pipe, stdout=pipe, text=True)
    sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
    assert program.stdin is not None
    program.stdin.write("go\n")
    program.stdin.flush()
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    found = sidestep.connections()
    assert len(found) == 2 + 20  # what has come by exec, and what this program has made
    assert all(one.promoted for one in sorted(found, key=lambda one: one.born_ns)[:2])
    program.communicate("\n", timeout=60)
    assert program.returncode == 0


MANY = """
import os, resource, select, socket, sys
def echo(end):
    while data := end.recv(1):
        end.sendall(data)
def ask(ends, word):
    for end in ends:
        end.sendall(word)
        assert end.recv(1) == word
if len(sys.argv) == 1:
    listener, ends = socket.create_server(("127.0.0.1", 0), backlog=28), []
    for _ in range(28):
        if os.fork() == 0:
            for end in ends:
                end.close()
            echo(socket.create_connection(listener.getsockname()))
            os._exit(0)
        ends.append(listener.accept()[0])
    listener.close()
    while not select.select([sys.stdin], [], [], 0)[0]:
        ask(ends, b"x")
    os.read(0, 3)
    for end in ends:
        end.set_inheritable(True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ["LIMIT"]), 1024))
    os.execv(sys.executable, [sys.executable, "-c", os.environ["CODE"], *(str(end.fileno()) for end in ends)])
ask([socket.socket(fileno=int(number)) for number in sys.argv[1:]], b"y")
print("whole")
"""


@pytest.mark.parametrize("limit", ["1024", "400"])
def test_many_do_not_need_twice_as_many_descriptors(sidestep: Sidestep, limit: str) -> None:
    """Each has a peer of its own, and with it the most descriptors: with 1,024 numbers there are 128 for the shim.

    A program may lower that limit before it executes the next.
    """
    argv = ["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", sys.executable, "-c", MANY]
    pipe = subprocess.PIPE
    with sidestep.popen(argv, env=sidestep.env(CODE=MANY, LIMIT=limit), stdin=pipe, stdout=pipe, text=True) as program:
        sidestep.wait_for(lambda found: len(found) == 56 and all(c.promoted for c in found))
        said, _ = program.communicate("go\n", timeout=120)
    assert said == "whole\n"


def test_killed_at_any_moment_it_ends(sidestep: Sidestep) -> None:
    """Between the last step of one program and the first of the next, too: the peer does not wait for ever."""
    pipe = subprocess.PIPE
    for seed in range(12):
        program = sidestep.popen([_program(), "exec", "400"], stdin=pipe, stdout=pipe, text=True)
        sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
        assert program.stdin is not None
        program.stdin.write("go")
        program.stdin.close()
        time.sleep(random.Random(seed).uniform(0, 0.5))
        program.kill()
        assert program.stdout is not None
        assert "line" in program.stdout.read()  # to its end: the client has the pipe as well
        program.wait(60)
        sidestep.wait_for(lambda found: not found)
