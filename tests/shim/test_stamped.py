"""Who asks for time stamps gets one with all that comes from then on, wherever the promotion is.

Those of what it sends are no error.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator

import pytest
from told_ends import End, join, promote

from sidestep.testing import Connection, Sidestep

pytestmark = pytest.mark.slow

SO_TIMESTAMPNS, SO_TIMESTAMPING = 35, 37  # asm-generic/socket.h
TX_SOFTWARE, SOFTWARE = 1 << 1, 1 << 4  # linux/net_tstamp.h
ENDS = ("active", "passive")
MOMENTS = ("young", "offered", "attached alone", "consented", "promoted")


@pytest.fixture(autouse=True)
def _the_kernel_stamps() -> Iterator[None]:
    """It begins some time after the first socket has asked for it, and goes on as long as there is one."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            other.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            stamps: list[tuple[int, int, bytes]] = []
            while not stamps:
                one.sendall(b"x")
                _, stamps, _, _ = other.recvmsg(1, 256)
            yield


class Stage:
    """Two ends, one of which is going to ask."""

    def __init__(self, sidestep: Sidestep, asks: str) -> None:
        self._sidestep = sidestep
        ends = {role: End(sidestep) for role in ENDS}
        self._active, self._passive = ends.values()
        self._asks = asks
        self.one = ends.pop(asks)
        (self.other,) = ends.values()
        join(self._active, self._passive)

    def _until(self, role: str, state: str, step: Callable[[], object]) -> None:
        """Takes the step until that end is there."""

        def reached(found: list[Connection]) -> bool:
            if any((c.role, c.state) == (role, state) for c in found):
                return True
            step()
            return False

        self._sidestep.wait_for(reached)

    def _to_the_passive_end(self) -> None:
        self._active.ask("s.sendall(b'x')")
        assert self._passive.ask("s.recv(1)") == b"x"

    def reach(self, moment: str) -> None:
        """Nothing is left to be read by who asks, and the other one makes no call until it sends."""
        if moment == "promoted":
            promote(self._sidestep, self._active, self._passive)
        elif moment == "offered" and self._asks == "active":
            self._until("active", "offered", lambda: self._active.ask("s.sendall(b'x')"))
        elif moment != "young":
            self._until("passive", "offered", self._to_the_passive_end)  # it has claimed
        if moment in ("attached alone", "consented"):
            self._until(self._asks, "attached", lambda: self.one.ask("s.sendall(b'x')"))
            assert {c.role: c.state for c in self._sidestep.connections() if c.role in ENDS} == {
                **dict.fromkeys(ENDS, "offered"), self._asks: "attached"
            }  # fmt: skip
        if moment == "consented":  # the other one has attached, and does not know of the consent yet
            self.other.ask("s.sendall(b'x')")
            assert self.one.ask("s.recv(1)") == b"x"


@pytest.mark.parametrize("asks", ENDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_bytes_come_with_a_stamp(sidestep: Sidestep, moment: str, asks: str) -> None:
    stage = Stage(sidestep, asks)
    stage.reach(moment)
    stage.one.ask(f"s.setsockopt(socket.SOL_SOCKET, {SO_TIMESTAMPNS}, 1)")
    for _ in range(5):
        stage.other.ask("s.sendall(b'x')")
        told = stage.one.ask("[(data, [kind for _, kind, _ in stamps]) for data, stamps, *_ in [s.recvmsg(1, 256)]]")
        assert told == [(b"x", [SO_TIMESTAMPNS])]
        stage.one.ask("s.sendall(b'x')")


def test_a_stamp_of_what_was_sent_is_no_reset(sidestep: Sidestep) -> None:
    """It waits in the error queue, which poll tells by POLLERR alone."""
    stage = Stage(sidestep, "active")
    stage.reach("promoted")
    stage.one.ask(f"s.setsockopt(socket.SOL_SOCKET, {SO_TIMESTAMPING}, {TX_SOFTWARE | SOFTWARE})")
    stage.one.ask("s.sendall(b'x')")
    assert stage.one.ask("[told for _, told in waited('select.poll', 0, 20)]") == [select.POLLERR]
    assert stage.one.ask("[told for _, told in waited('select.epoll', 0, 20)]") == [select.EPOLLERR]
    stage.other.ask("s.sendall(b'y')")
    assert stage.one.ask("s.recv(1)") == b"y"
