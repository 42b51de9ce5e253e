"""`sidestep run --stats`: what was saved, of a program that has its signals and its terminal as without."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from common import PATIENCE_S

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow  # real programs

DEADLINE_S = PATIENCE_S
# Tells each signal that comes, by its number, until the input ends.
LISTENER = """
import os, signal, sys
def tell(number, frame):
    os.write(1, b"got %d\\n" % number)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGCHLD, signal.SIGTTOU}:
    if number < 32:
        signal.signal(number, tell)
os.write(1, b"ready %d\\n" % os.getpid())
while os.read(0, 1) != b"q":
    pass
"""
# Talks to itself until its connection is promoted, and 1000 times more.
TALKER = """
import os, socket, sys
from pathlib import Path
from sidestep.observe.connections import connections
listener = socket.create_server(("127.0.0.1", 0))
one = socket.create_connection(listener.getsockname())
other = listener.accept()[0]
def talk():
    one.sendall(bytes(100))
    other.recv(100, socket.MSG_WAITALL)
    other.sendall(b"x")
    one.recv(1)
mine = lambda: [each for each in connections(Path(os.environ["SIDESTEP_SOCKET"])) if each.pid == os.getpid()]
while sum(each.promoted for each in mine()) < 2:
    talk()
for _ in range(1000):
    talk()
print("done")
sys.exit(7)
"""

Argv = Callable[..., list[str]]


@pytest.fixture
def argv(sidestep: Sidestep) -> Argv:
    """`sidestep run`, with --stats unless another option is given."""

    def made(*command: str, option: str = "--stats") -> list[str]:
        return [sys.executable, "-m", "sidestep", "run", f"--socket={sidestep.socket}", option, "--", *command]

    return made


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_it_says_what_was_saved(argv: Argv) -> None:
    found = run(argv(sys.executable, "-c", TALKER))
    assert (found.returncode, found.stdout) == (7, "done\n"), found.stderr
    told = re.fullmatch(
        r"sidestep: 2 connections, 2 promoted; (\S+)B by ring, (\S+)B by TCP; ([\d,]+) system calls saved\n",
        found.stderr,
    )
    assert told, found.stderr
    assert (
        202 <= float(told[1].removesuffix("K")) < 10_000
    )  # each byte is counted where it is sent, and where it is read
    assert int(told[3].replace(",", "")) > 1000


def test_a_program_without_connections(argv: Argv) -> None:
    found = run(argv("echo", "hello"))
    assert (found.returncode, found.stdout) == (0, "hello\n")
    assert found.stderr == "sidestep: 0 connections, 0 promoted; 0B by ring, 0B by TCP; 0 system calls saved\n"


@pytest.mark.parametrize(("command", "code"), [
    (("sh", "-c", "exit 77"), 77),
    (("sh", "-c", "kill -SEGV $$"), -signal.SIGSEGV),
    (("sh", "-c", "kill -KILL $$"), -signal.SIGKILL),
    (("sh", "-c", "kill -INT $$"), -signal.SIGINT),
    (("/no/such/program",), 127),
    (("/etc/passwd",), 126),
])  # fmt: skip
def test_it_ends_as_its_program_does(argv: Argv, command: tuple[str, ...], code: int) -> None:
    assert run(argv(*command)).returncode == code


def test_the_program_has_the_dispositions_that_it_would_have(argv: Argv) -> None:
    def inherited() -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})

    shown = [
        subprocess.run(
            argv("grep", "-E", "Sig(Ign|Blk|Cgt)|ShdPnd", "/proc/self/status", option=option), preexec_fn=inherited,
            stdout=subprocess.PIPE, text=True, timeout=60, check=True,
        ).stdout
        for option in ("--stats", "--spin-us=50")
    ]  # fmt: skip
    assert shown[0] == shown[1]
    ignored = int(re.findall(r"SigIgn:\s+(\w+)", shown[0])[0], 16)
    assert all(ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD))


def test_signals_are_passed_on(argv: Argv) -> None:
    numbers = [
        signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH,
        signal.SIGALRM, signal.SIGCONT,
    ]  # fmt: skip
    with subprocess.Popen(
        argv(sys.executable, "-c", LISTENER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline().startswith("ready ")
        for number in numbers:
            process.send_signal(number)
            assert process.stdout.readline() == f"got {number.value}\n"
        process.stdin.write("q")
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_a_stop_and_its_end_are_passed_on(argv: Argv) -> None:
    with subprocess.Popen(
        argv(sys.executable, "-c", LISTENER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        child = int(process.stdout.readline().split()[1])
        os.kill(child, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == f"got {signal.SIGCONT.value}\n"
        process.stdin.write("q")
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


class Terminal:
    """An interactive shell."""

    def __init__(self) -> None:
        self._master, terminal = pty.openpty()
        self.shell = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"], env=os.environ | {"PS1": ""},
            stdin=terminal, stdout=terminal, stderr=terminal,
        )  # fmt: skip
        os.close(terminal)
        self.transcript = ""
        self.said = ""  # of it, what was not waited for yet

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str) -> None:
        """Waits for it behind what was waited for before."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, self.said)):
            if not select.select([self._master], [], [], deadline - time.monotonic())[0]:
                pytest.fail(f"{pattern!r} was never said: {self.said!r}")
            piece = os.read(self._master, 65536).decode()
            self.transcript += piece
            self.said += piece
        self.said = self.said[found.end() :]

    def close(self) -> None:
        self.shell.kill()
        self.shell.wait()
        os.close(self._master)


@contextmanager
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    try:
        yield made
    finally:
        made.close()


def test_the_terminal_is_the_programs(argv: Argv) -> None:
    """What its keys send comes once, a stop stops both for the shell, and it reads what is typed."""
    command = " ".join(f"'{word}'" for word in argv(sys.executable, "-c", LISTENER))
    with terminal() as shell:
        shell.type(command + "\n")
        shell.expect(r"ready \d+\r\n")
        shell.type("\x03")
        shell.expect(rf"got {signal.SIGINT.value}\r\n")
        shell.type("\x1c")
        shell.expect(rf"got {signal.SIGQUIT.value}\r\n")
        shell.type("\x1a")
        shell.expect("Stopped")
        shell.type("echo shell-is-$((40+2))\n")
        shell.expect("shell-is-42")
        shell.type("fg\n")
        shell.expect(rf"got {signal.SIGCONT.value}\r\n")
        shell.type("q\n")
        shell.expect(r"sidestep: 0 connections")
        shell.type("echo code-$?\n")
        shell.expect("code-0")
        for number in (signal.SIGINT, signal.SIGQUIT):
            assert shell.transcript.count(f"got {number.value}\r\n") == 1
