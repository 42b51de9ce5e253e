"""The live connections under sidestep, as `sidestep ss` shows them.

The provider hands out a read-only descriptor of each arena; everything else is read and decoded here, so a look costs
the provider nothing.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from socket import AF_INET, AF_INET6, inet_ntop
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sidestep.native import layout
from sidestep.native.layout import Reason, Role, Rx, State, Tx
from sidestep.native.reasons import why
from sidestep.observe.links import link_name
from sidestep.observe.processes import Processes
from sidestep.provider.arena import numbered_slots, pid_namespace, used_slots
from sidestep.provider.control import ControlConnection

if TYPE_CHECKING:
    from sidestep.switch.protocol import Endpoint

_ROLES: Final = {Role.ACTIVE: "active", Role.PASSIVE: "passive"}
_BY_RING: Final[dict[str, set[int]]] = {"tx": {Tx.RING, Tx.ENDED}, "rx": {Rx.RING}}
_RELAY_OVER: Final = "a provider, here or at the other host, has ended the link that carried it"
_ARROWS: Final = {"active": "->", "passive": "<-", "unknown": "--"}


class Traffic(NamedTuple):
    """Traffic of one direction, by path."""

    tcp_bytes: int
    tcp_msgs: int
    ring_bytes: int
    ring_msgs: int
    ring_from: int | None  # offset in the stream from which the ring has it; None: it has not moved

    @property
    def path(self) -> str:
        """Path of the next byte: tcp or ring."""
        return "tcp" if self.ring_from is None else "ring"


class Key(NamedTuple):
    """Names one end while it lives; the next user of the slot has another generation."""

    arena: str  # id of its process family
    slot: int
    generation: int


class Connection(NamedTuple):
    """One end of a TCP connection."""

    pid: int  # number as it is seen from here; 0: it is hidden
    program: str | None  # name; None: the process has gone, or is hidden from here
    fd: int
    local: str  # "addr:port", IPv6 as "[addr]:port"
    remote: str
    role: str  # active, passive, unknown
    state: str  # native, offered, attached, promoted, pinned
    reason: str | None  # name in layout.Reason
    why: str  # the reason as a sentence
    segment: str | None  # the same in both ends, unless a protocol stands in between
    tx: Traffic
    rx: Traffic
    doorbells: int  # rung for the other end
    sleeps: int  # waits that ended in the kernel
    calls: int  # other system calls that the shim made by itself around its waits
    spins_won: int
    spins_lost: int
    age_s: float
    promoted_s: float | None  # seconds since it was promoted
    born_ns: int  # CLOCK_MONOTONIC; no other connection of its process has it
    container: str | None = None  # id or name of its process's container, if known
    promotions: int = 0  # rounds of its sending direction on the ring
    ended_s: float | None = None  # seconds since its program ended; None: that lives
    key: Key | None = None
    relay_over: bool = False  # the provider between has left: only a new connection can be promoted
    link: dict[str, Any] | None = None  # a link to another host: protocol, device, modes, credit; see RemoteRelay

    @property
    def promoted(self) -> bool:
        """True if both directions use shared memory."""
        return self.state == "promoted"

    @property
    def who(self) -> str:
        """The program, and the container it is in."""
        name = self.program or ("(gone)" if self.pid else "(not seen from here)")
        return f"{name}@{self.container}" if self.container else name

    @property
    def arrow(self) -> str:
        """Arrow between the local and the remote end: leads from the one that connected."""
        return _ARROWS[self.role]

    def as_json(self) -> dict[str, Any]:
        document = self._asdict() | {"tx": self.tx._asdict(), "rx": self.rx._asdict()}
        del document["key"]
        return document


class Ended(NamedTuple):
    """A connection that is over."""

    connection: Connection
    family: int | None  # the first process of its family as the provider sees it; None: the family lives


def ended(socket_path: Path) -> list[Ended]:
    """Connections that have ended, the oldest first; raises Unavailable if no provider answers.

    Each place in the memory of a live program has its last one, if that is over. The provider remembers those of
    programs that have ended (`limits.ENDED_MAX`). Of these, too, each place has its last one.
    """
    processes, now_ns = Processes(), time.monotonic_ns()
    leftover = _Leftovers(processes)
    found: dict[Key, Ended] = {}
    with ControlConnection(socket_path) as control:
        for arena, fd, first in control.arenas():
            namespace = pid_namespace(fd)
            for number, raw in used_slots(fd):
                slot = layout.unpack("conn_slot", raw)
                if not slot["generation"] & 1 or leftover(slot, namespace):
                    slot["pid"] = processes.here(namespace, slot["pid"], first)
                    _add(found, _over(slot, now_ns, processes, arena, number), None)
        for row in control.ended():  # second: a program that ends in between comes twice, and is not left out
            slot = layout.unpack("conn_slot", base64.b64decode(row["slot"]))
            slot["pid"] = slot["pid"] if processes.counts_here(row["pid_namespace"]) else 0
            over = _over(slot, now_ns, processes, row["arena"], row["place"])
            seconds = round(max(0.0, now_ns / 1e9 - row["ended_at"]), 3)
            if over is not None:
                _add(found, over._replace(program=row["program"], container=None, ended_s=seconds), row["pid"])
    return sorted(found.values(), key=lambda one: one.connection.born_ns)


def _add(found: dict[Key, Ended], over: Connection | None, family: int | None) -> None:
    if over is not None and over.key is not None:
        found[over.key] = Ended(over, family)


def _over(slot: dict[str, Any], now_ns: int, processes: Processes, arena: str, number: int) -> Connection | None:
    """Decodes the slot of a connection that has ended: the state is lost when it is freed."""
    key = Key(arena, number, slot["generation"] - 1 | 1)  # the one that it had in its life
    if slot["state"] == State.FREE:
        slot["state"] = State.PROMOTED if slot["promoted_ns"] else State.NATIVE
    return _decode(slot, now_ns, processes, key)


def connections(socket_path: Path) -> Iterator[Connection]:
    """All connections of all programs at this provider; raises Unavailable if none answers."""
    processes = Processes()
    leftover = _Leftovers(processes)
    with ControlConnection(socket_path) as control:
        links = {link_name(link): link for link in control.links()}
        for arena, fd, first in control.arenas():
            now_ns, namespace = time.monotonic_ns(), pid_namespace(fd)
            for number, slot in numbered_slots(fd):
                if leftover(slot, namespace):
                    continue
                slot["pid"] = processes.here(namespace, slot["pid"], first)
                if (found := _decode(slot, now_ns, processes, Key(arena, number, slot["generation"]))) is not None:
                    link = links.get(found.segment or f"{found.local} {found.remote}")
                    yield found if link is None else found._replace(link=link)


class _Leftovers:
    """Slots in use whose connections have ended with a process that exited or was killed.

    Another process of the family frees them, but only when it needs a place.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def __call__(self, slot: dict[str, Any], namespace: int) -> bool:
        """True if no process holds the connection any more; False, too, if that is not known here."""
        pids = [pid & ~layout.HOLDER_STRANGER for pid in slot["holder_pids"] if pid]
        return (
            slot["holders"] <= len(pids)
            and all(self._processes.gone(namespace, pid) for pid in pids)
            and not self._held(slot)
        )

    def _held(self, slot: dict[str, Any]) -> bool:
        """True if a program without the shim has inherited the socket of such a process."""
        from sidestep.provider.proof.lookup import endpoint_of  # few looks come to a slot without a holder

        local, remote = ((slot[f"{end}_addr"], slot[f"{end}_port"]) for end in ("local", "remote"))
        return (endpoint_of(*local), endpoint_of(*remote)) in self._sockets

    @cached_property
    def _sockets(self) -> set[tuple[Endpoint, Endpoint]]:
        """Sockets of this network namespace."""
        from sidestep.observe.other_users import sockets

        return {(one.local, one.remote) for one in sockets()}


def _decode(slot: dict[str, Any], now_ns: int, processes: Processes, key: Key) -> Connection | None:
    """The connection in a slot; None if it is free or makes no sense."""
    try:
        state, reason = State(slot["state"]), Reason(slot["reason"])
    except ValueError:
        return None
    if state is State.FREE:
        return None
    pid, relay_over = slot["pid"], bool(slot["flags"] & layout.SLOT_RELAY_OVER)
    return Connection(
        pid=pid, program=processes.name(pid), container=processes.container(pid), fd=slot["fd"],
        local=_endpoint(slot["family"], slot["local_addr"], slot["local_port"]),
        remote=_endpoint(slot["family"], slot["remote_addr"], slot["remote_port"]),
        role=_ROLES.get(slot["role"], "unknown"), state=state.name.lower(),
        reason=reason.name if reason is not Reason.NONE else None,
        why=_RELAY_OVER if relay_over and reason is Reason.PEER_LEFT else why(
            reason, (slot["option_level"], slot["option_name"])
        ),
        segment=slot["segment_id"].hex() if any(slot["segment_id"]) else None, tx=_traffic(slot, "tx"),
        rx=_traffic(slot, "rx"), doorbells=slot["doorbells_sent"], sleeps=slot["sleeps"] + slot["tx_sleeps"],
        calls=slot["wait_calls"], spins_won=slot["spins_won"], spins_lost=slot["spins_lost"],
        age_s=round(max(0, now_ns - slot["born_ns"]) / 1e9, 3),
        promoted_s=round(max(0, now_ns - slot["promoted_ns"]) / 1e9, 3) if slot["promoted_ns"] else None,
        born_ns=slot["born_ns"], promotions=slot["tx_round"], key=key, relay_over=relay_over,
    )  # fmt: skip


def _traffic(slot: dict[str, Any], way: str) -> Traffic:
    return Traffic(
        slot[f"{way}_tcp_bytes"], slot[f"{way}_tcp_msgs"], slot[f"{way}_ring_bytes"], slot[f"{way}_ring_msgs"],
        slot[f"{way}_switch_offset"] if slot[f"{way}_state"] in _BY_RING[way] else None,
    )  # fmt: skip


def _endpoint(family: int, addr: bytes, port: int) -> str:
    if family == AF_INET:
        return f"{inet_ntop(AF_INET, addr[12:])}:{port}"
    return f"[{inet_ntop(AF_INET6, addr)}]:{port}"
