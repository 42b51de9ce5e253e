"""Socket options and promotion: which keep a connection on TCP and are named as the reason, and which do not."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from sidestep.observe.explain import Explainer, Query
from sidestep.testing import Sidestep

SO_PEEK_OFF, SO_ZEROCOPY, TCP_INQ = 42, 60, 36  # the socket module does not name them
# Talks with itself. Each line of input is run; "talk" answers with a line.
PROGRAM = """
import socket, sys
ZEROCOPY = 0x4000000
def talk(flags=0):
    for a, b in ((one, other), (other, one)):
        assert a.send(b"x" * 600, flags) == 600
        assert b.recv(600, socket.MSG_WAITALL) == b"x" * 600
        while flags:
            try:
                a.recvmsg(1, 100, socket.MSG_ERRQUEUE)
            except BlockingIOError:
                continue
            break
    print(flush=True)
listener = socket.create_server(("127.0.0.1", 0))
def begin():
    global one, other
    one = socket.create_connection(listener.getsockname())
    other = listener.accept()[0]
for line in sys.stdin:
    exec(line)
"""


class Talker:
    """The program, and its connections."""

    def __init__(self, sidestep: Sidestep) -> None:
        self.sidestep = sidestep
        self.program = sidestep.popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, *lines: str) -> None:
        """Runs lines, the last of which answers."""
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        for line in lines:
            self.program.stdin.write(f"{line}\n")
        assert self.program.stdout.readline() == "\n"

    def promoted(self, talk: str = "talk()") -> bool:
        """Whether both ends are promoted in the course of some talk."""
        for _ in range(100):  # both ends claim, consent and switch in calls
            self.tell(talk)
            if sum(c.promoted for c in self.sidestep.connections()) == 2:
                return True
        return False

    def kept_by(self) -> str:
        """Name of the option that keeps the end that has connected on TCP, as it is explained."""
        assert not self.promoted()
        explained = Explainer(self.sidestep.socket).explain(Query(pid=self.program.pid))
        (cause,) = {told.cause for told in explained if told.connection and told.connection.role != "passive"}
        return cause.rpartition(": ")[2].removesuffix(" was set")


@pytest.fixture
def talker(sidestep: Sidestep) -> Talker:
    """One that is not connected yet."""
    return Talker(sidestep)


@pytest.mark.parametrize(
    ("level", "option", "value", "named"),
    [
        (socket.SOL_SOCKET, SO_PEEK_OFF, "0", "SO_PEEK_OFF"),
        (socket.SOL_SOCKET, socket.SO_OOBINLINE, "1", "SO_OOBINLINE"),
        (socket.SOL_SOCKET, 29, "1", "SO_TIMESTAMP"),
    ],
)
def test_the_option_that_keeps_it_on_tcp_is_named(
    talker: Talker, level: int, option: int, value: str, named: str
) -> None:
    talker.tell("begin()", f"one.setsockopt({level}, {option}, {value})", "talk()")
    assert talker.kept_by() == named


def test_fast_open_keeps_it_on_tcp_and_is_named_as_its_option(talker: Talker) -> None:
    """TCP_FASTOPEN_CONNECT and MSG_FASTOPEN do the same."""
    opened = f"one.sendto(b'y', {socket.MSG_FASTOPEN}, listener.getsockname())"
    talker.tell(f"one = socket.socket(); {opened}; other = listener.accept()[0]; other.recv(1)", "talk()")
    assert talker.kept_by() == "TCP_FASTOPEN_CONNECT or MSG_FASTOPEN"


@pytest.mark.parametrize(
    "lines",
    [
        ["begin()", f"one.setsockopt({socket.IPPROTO_TCP}, {TCP_INQ}, 1)"],
        [f"listener.setsockopt({socket.IPPROTO_TCP}, {TCP_INQ}, 1)", "begin()"],
        ["begin()", f"one.setsockopt({socket.SOL_SOCKET}, {SO_ZEROCOPY}, 1)"],
        ["begin()", f"one.setsockopt({socket.IPPROTO_TCP}, {socket.TCP_USER_TIMEOUT}, 5000)"],
    ],
    ids=["inq", "inq-inherited", "zerocopy", "user-timeout"],
)
def test_what_grpc_and_ray_set_is_carried(talker: Talker, lines: list[str]) -> None:
    talker.tell(*lines, "talk()")
    assert talker.promoted()


def test_sends_without_a_copy_are_promoted_once_the_kernel_has_told_of_all(talker: Talker) -> None:
    both = "; ".join(f"{end}.setsockopt({socket.SOL_SOCKET}, {SO_ZEROCOPY}, 1)" for end in ("one", "other"))
    talker.tell("begin()", both, "one.send(b'y', ZEROCOPY); other.recv(1); print()")
    assert not talker.promoted()  # nobody asks for what the kernel has to tell
    told = {c.why for c in talker.sidestep.connections() if c.role == "active"}
    assert len(told) == 1
    assert told.pop().endswith("SO_ZEROCOPY was set")
    talker.tell("one.recvmsg(1, 100, socket.MSG_ERRQUEUE); print()")
    assert talker.promoted("talk(ZEROCOPY)")
