"""The live connections under sidestep, as `sidestep ss` shows them.

The provider hands out a read-only descriptor of each arena; everything else is read and decoded here, so a look costs
the provider nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import AF_INET, AF_INET6, inet_ntop
from typing import Any, Final

from sidestep.native.layout import REASON_TEXT, Reason, Role, State
from sidestep.provider.arena import slots
from sidestep.provider.control import ControlConnection

_ROLES: Final = {Role.ACTIVE: "active", Role.PASSIVE: "passive"}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went one way, by path."""

    tcp_bytes: int
    tcp_msgs: int
    ring_bytes: int
    ring_msgs: int


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a TCP connection."""

    pid: int
    program: str | None  # None: the process has gone
    fd: int
    local: str  # "addr:port", IPv6 as "[addr]:port"
    remote: str
    role: str  # active, passive, unknown
    state: str  # native, offered, attached, promoted, pinned
    reason: str | None  # name in layout.Reason
    why: str  # the reason as a sentence
    segment: str | None  # the same in both ends
    tx: Traffic
    rx: Traffic
    doorbells: int  # rung for the other end
    sleeps: int  # waits that ended in the kernel
    spins_won: int
    spins_lost: int
    age_s: float
    promoted_s: float | None  # seconds since it was promoted

    @property
    def promoted(self) -> bool:
        """Whether both directions use shared memory."""
        return self.state == "promoted"

    def as_json(self) -> dict[str, Any]:
        """The connection as `sidestep ss --json` shows it."""
        return asdict(self)


def connections(socket_path: Path) -> Iterator[Connection]:
    """All connections of all programs at this provider; raises Unavailable if none answers."""
    programs: dict[int, str | None] = {}
    with ControlConnection(socket_path) as control:
        for fd in control.arena_fds():
            now_ns = time.monotonic_ns()
            for slot in slots(fd):
                if (found := _decode(slot, now_ns, programs)) is not None:
                    yield found


def _decode(slot: dict[str, Any], now_ns: int, programs: dict[int, str | None]) -> Connection | None:
    """The connection in a slot; None if it is free or makes no sense."""
    try:
        state, reason = State(slot["state"]), Reason(slot["reason"])
    except ValueError:
        return None
    if state is State.FREE:
        return None
    pid = slot["pid"]
    if pid not in programs:
        programs[pid] = _program(pid)
    return Connection(
        pid=pid,
        program=programs[pid],
        fd=slot["fd"],
        local=_endpoint(slot["family"], slot["local_addr"], slot["local_port"]),
        remote=_endpoint(slot["family"], slot["remote_addr"], slot["remote_port"]),
        role=_ROLES.get(slot["role"], "unknown"),
        state=state.name.lower(),
        reason=reason.name if reason is not Reason.NONE else None,
        why=REASON_TEXT[reason],
        segment=slot["segment_id"].hex() if any(slot["segment_id"]) else None,
        tx=Traffic(slot["tx_tcp_bytes"], slot["tx_tcp_msgs"], slot["tx_ring_bytes"], slot["tx_ring_msgs"]),
        rx=Traffic(slot["rx_tcp_bytes"], slot["rx_tcp_msgs"], slot["rx_ring_bytes"], slot["rx_ring_msgs"]),
        doorbells=slot["doorbells_sent"],
        sleeps=slot["sleeps"] + slot["tx_sleeps"],
        spins_won=slot["spins_won"],
        spins_lost=slot["spins_lost"],
        age_s=round(max(0, now_ns - slot["born_ns"]) / 1e9, 3),
        promoted_s=round(max(0, now_ns - slot["promoted_ns"]) / 1e9, 3) if slot["promoted_ns"] else None,
    )


def _program(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return None


def _endpoint(family: int, addr: bytes, port: int) -> str:
    if family == AF_INET:
        return f"{inet_ntop(AF_INET, addr[12:])}:{port}"
    return f"[{inet_ntop(AF_INET6, addr)}]:{port}"
