"""Listeners at addresses of this host, and whether the policy lets an offload protocol come in there.

A listener that is not under the shim has no client that would name it. The kernel finds the socket that would accept,
and its user. /proc shows a process that holds it, and so the program. Only root can see that of another user's process.
If it cannot be seen no connection comes in, as a rule of the policy may be about that very program.

A program under the shim asks for the peer's address, and gets the true one; it is known by the arena that it holds. Any
other program sees an address of this host, and might trust it: there a rule has to say that others may come in. Where
several processes hold the listener the oldest stands for all, as a server's parent does.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sidestep import limits
from sidestep.counters import Counters
from sidestep.errors import Unavailable
from sidestep.policy import Subject
from sidestep.provider.arena import layout_of
from sidestep.provider.decisions import Decisions, names_of
from sidestep.provider.proof.lookup import SocketProver
from sidestep.provider.users import ROOT
from sidestep.switch.protocol import Endpoint, ListenerLease, OffloadProtocol

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class _Listener:
    """Owner of a listening socket."""

    pid: int  # pid of a process that holds it
    subject: Subject


class Listeners:
    """The listening sockets of this network namespace."""

    def __init__(self, decisions: Decisions, counters: Counters, prover: SocketProver) -> None:
        self._decisions = decisions
        self._counters = counters
        self._prover = prover
        self.leases = 0  # connections of other hosts that go to listeners of this one
        self._known: OrderedDict[int, _Listener] = OrderedDict()  # listeners by inode

    def check(self, carrier: OffloadProtocol, transport: str, local: Endpoint) -> ListenerLease:
        """Returns if a program listens there and these may reach it; the decision is remembered.

        Raises:
            Unavailable: No program listens, it cannot be seen, or the policy keeps it on TCP.
        """
        found = self._prover.listener(str(local.address), local.port)
        if found is None:
            raise Unavailable(f"nobody listens at {local}")
        listener = self._look_up(*found, local)
        named = _under_the_shim(listener.pid)
        verdict = self._decisions.listen(listener.subject, local, carrier, transport)
        if verdict.refusal is not None:
            raise Unavailable(verdict.why)
        if verdict.ruling.rule is None and not named:  # the listener sees this host's own address, and may trust it
            raise Unavailable(
                f"no rule lets other hosts in at {local}, whose program is not under sidestep",
                remedy=f"use {carrier.name} listen PROGRAM {local}, for one",
            )
        return ListenerLease(listener.subject.uid, named, self._leave)

    def lease(self, carrier: OffloadProtocol, transport: str, local: Endpoint) -> ListenerLease:
        """One connection wants in. Raises as `check` does."""
        try:
            lease = self.check(carrier, transport, local)
        except Unavailable:
            self._counters.add("visit_refused", carrier.name)
            raise
        self._counters.add("visit_accepted", carrier.name)
        self.leases += 1
        return lease

    def _leave(self) -> None:
        self.leases -= 1

    def _look_up(self, inode: int, uid: int, local: Endpoint) -> _Listener:
        known = self._known.get(inode)
        if known is None or known.subject.uid != uid or not _holds(known.pid, _socket_name(inode)):
            pid = _holder(inode)
            if pid is None:
                raise Unavailable(f"which program listens at {local} cannot be seen", remedy="run the provider as root")
            if pid == os.getpid():
                raise Unavailable(f"{local} is this provider's own")
            near = uid in (ROOT, os.geteuid())
            known = _Listener(pid, Subject(names_of(pid, near=near), uid, frozenset(_groups(pid))))
            self._known[inode] = known
            while len(self._known) > limits.LISTENERS_KNOWN_MAX:
                self._known.popitem(last=False)
        return known


def _holder(inode: int) -> int | None:
    """A process that holds the socket of that inode: of several the oldest number, as a server's parent has."""
    wanted = _socket_name(inode)
    return next((pid for pid in _processes() if _holds(pid, wanted)), None)


def _socket_name(inode: int) -> str:
    """Name of a socket as /proc shows it."""
    return f"socket:[{inode}]"


def _under_the_shim(pid: int) -> bool:
    return layout_of(pid) is not None


def _processes() -> Iterator[int]:
    yield from sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _holds(pid: int, wanted: str) -> bool:
    try:
        return any(_link(entry) == wanted for entry in (_PROC / str(pid) / "fd").iterdir())
    except OSError:  # the process has gone, or may not be looked into
        return False


def _link(entry: Path) -> str:
    try:
        return os.readlink(entry)  # noqa: PTH115 - what is there is a name, not a path
    except OSError:  # closed meanwhile
        return ""


def _groups(pid: int) -> Iterator[int]:
    """The effective group of a process, and the others that it is in; none if it has gone."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        name, _, values = line.partition(":")
        numbers = values.split()
        if name == "Gid" and len(numbers) > 1:
            yield int(numbers[1])
        elif name == "Groups":
            yield from map(int, numbers)
