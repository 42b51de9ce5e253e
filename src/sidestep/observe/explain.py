"""Reasons why connections are where they are, in words.

An explanation names either the carrier, the first byte that it carried, and the savings. Or it gives the reason why the
connection stays on TCP, and the one command or line that would change that.

Three sources are asked, in this order and only as far as needed. These are the slots that the shims keep
(`connections`), the provider (its policy's decision), and the kernel's list of sockets with their processes
(`sockets`). Looking changes nothing, and each source may be missing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

from sidestep.errors import Misuse, Unavailable, counted
from sidestep.native.layout import REASON_TEXT, Reason
from sidestep.native.reasons import REMEDY, remedy
from sidestep.observe import other_users
from sidestep.observe.connections import Connection, Traffic, connections
from sidestep.observe.processes import Pace, Processes
from sidestep.observe.sockets import (
    HostSocket,
    Judgement,
    Outside,
    Process,
    addresses,
    endpoint,
    in_one_network,
    is_here,
    tcp_sockets,
)  # fmt: skip
from sidestep.provider.arena import inode_of, layout_of
from sidestep.provider.control import RESTART, ControlConnection, layouts
from sidestep.provider.proof.lookup import netns_cookie
from sidestep.routing import Address
from sidestep.switch.protocol import Endpoint

# Reasons where the other end decides: its state and its reason explain more than the reason of this end.
_ABOUT_THE_PEER: Final = frozenset(
    {"YOUNG", "WAITING_FOR_PEER", "PEER_ABSENT", "PEER_LEFT", "REFUSED_BY_PROVIDER", None}
)
_DECIDED: Final = frozenset({"POLICY", "NO_PROTOCOL", "REFUSED_BY_PROVIDER"})  # the provider can say more than the shim
_PORT_DIGITS_MAX: Final = 5
_MADE_S: Final = 0.3  # seconds that a program may take from a socket to its slot
_Ends: TypeAlias = tuple[Endpoint, Endpoint | None]  # the other end; None: it listens
_LOCAL: Final = "local"  # the protocol by which two programs of one host share a channel


class Verdict(Enum):
    """State of a connection."""

    CARRIED = "is carried by"
    MOVING = "is moving to a channel"
    TCP = "stays on tcp"
    LISTENS = "listens under sidestep"
    UNKNOWN = "is under sidestep"
    UNSEEN = "cannot be judged from here"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One connection, or one listening socket, in words."""

    subject: str  # the program and the socket
    verdict: Verdict
    carrier: str  # "tcp", the name of an offload protocol, or "" for a listener and where it is not known
    reason: str | None  # name in layout.Reason or sockets.Outside
    cause: str
    hint: str
    facts: tuple[tuple[str, str], ...]  # heading and text
    calls_saved: int  # system calls that were not made
    connection: Connection | None  # the state; None: not under sidestep
    local: str = ""  # ADDRESS:PORT
    remote: str | None = None  # the other end; None: it listens

    @property
    def headline(self) -> str:
        if self.verdict is not Verdict.CARRIED:
            return f"{self.subject} {self.verdict.value}"
        how = "shared memory" if self.carrier == _LOCAL else "through the provider"
        if self.connection is not None and (link := self.connection.link) is not None:
            how = f"over {link['device']} to {link['peer']}"
        return f"{self.subject} {self.verdict.value} {self.carrier} ({how})"

    def as_json(self) -> dict[str, Any]:
        """The explanation as `sidestep explain --json` shows it."""
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        connection = self.connection.as_json() if self.connection else None
        return document | {"verdict": self.verdict.name.lower(), "facts": dict(self.facts), "connection": connection}


@dataclass(frozen=True, slots=True)
class Query:
    """Question of a user; with no field set, everything under sidestep."""

    pid: int | None = None
    fd: int | None = None
    addresses: frozenset[Address] = frozenset()  # addresses of a name; empty: any
    port: int | None = None
    program: str | None = None

    @classmethod
    def parse(cls, text: str | None) -> Query:
        """`PID`, `PID/FD`, `HOST:PORT`, `:PORT` or a program's name; raises Misuse."""
        if not text:
            return cls()
        pid, slash, fd = text.partition("/")
        if pid.isascii() and pid.isdigit() and len(pid) < 10 and (not slash or (fd.isascii() and fd.isdigit())):
            return cls(pid=int(pid), fd=int(fd) if slash else None)
        host, colon, port = text.rpartition(":")
        if not colon:
            return cls(program=text)
        if not (port.isascii() and port.isdigit()):
            raise Misuse(f"{text!r} has no port after its colon", remedy="for example 127.0.0.1:6379, [::1]:80 or :80")
        if len(port) > _PORT_DIGITS_MAX or int(port) > 65535:
            raise Misuse(f"{port} is no port", remedy="the largest is 65535; a process is named by its number alone")
        if not host:
            return cls(port=int(port))
        return cls(addresses=frozenset(addresses(host.removeprefix("[").removesuffix("]"))), port=int(port))

    @property
    def everything(self) -> bool:
        return self == Query()

    def matches(self, pid: int | None, fd: int, program: str | None, ends: tuple[Endpoint | None, ...]) -> bool:
        return (
            (self.pid is None or self.pid == pid)
            and (self.fd is None or self.fd == fd)
            and (self.program is None or self.program == program)
            and (self.port is None or any(end is not None and self._is_end(end) for end in ends))
        )

    def _is_end(self, end: Endpoint) -> bool:
        return end.port == self.port and (not self.addresses or end.address in self.addresses)


class Explainer:
    """One look at this host; all its explanations are of about the same moment."""

    def __init__(self, socket_path: Path) -> None:
        """Asks the provider; without one, `provider_missing` has the error and the kernel's view is left."""
        self._socket_path = socket_path
        self.provider_missing: Unavailable | None = None
        try:
            self._tracked = list(connections(socket_path))
        except Unavailable as error:
            self._tracked, self.provider_missing = [], error
        self._processes: dict[int, Process] = {}

    def explain(self, wanted: Query) -> Iterator[Explanation]:
        """Explains all that is meant: tracked connections first, then the others that the kernel has.

        Raises:
            Unavailable: Nothing in particular was asked for, and no provider answers.
        """
        if wanted.everything and self.provider_missing:
            raise self.provider_missing
        doubtful = dict[_Ends, int]()
        for ends, doubted, found in self._at_once(wanted):
            if doubted is None:
                yield found
            else:
                doubtful[ends] = doubted
        if doubtful:
            yield from self._look_again(wanted, doubtful)

    def _at_once(self, wanted: Query) -> Iterator[tuple[_Ends, int | None, Explanation]]:
        """Explanations with their ends, and the process whose shim does not know its socket, if that is the cause."""
        explained = set[_Ends]()
        for one in self._tracked:
            ends = self._ends(one)
            if ends is not None and wanted.matches(one.pid, one.fd, one.program, ends):
                explained.add(ends)
                found = replace(self._tracked_connection(one, ends), local=str(ends[0]), remote=str(ends[1]))
                other = self._other_end(ends) if found.reason == Outside.UNKNOWN_SOCKET.name else None
                yield ends, other.pid if other is not None else None, found
        if wanted.everything:
            return
        for held in self._host_sockets if wanted.pid is None else tcp_sockets(wanted.pid):
            program = self._process(held.pid).name if held.pid is not None else None
            seen = (held.local, held.remote)
            if seen in explained or not wanted.matches(held.pid, held.fd, program, seen):
                continue
            if held.pid is None and (held.remote, held.local) in explained:
                continue  # the explanation of its peer says all that is known of it
            remote = str(held.remote) if held.remote is not None else None
            found = replace(self._of_a_socket(held), local=str(held.local), remote=remote)
            yield seen, held.pid if found.reason == Outside.UNKNOWN_SOCKET.name else None, found

    def _of_a_socket(self, held: HostSocket) -> Explanation:
        """Explanation of a socket in the kernel's list; its slot may name another process: the one that accepted it."""
        if held.pid is not None and held.remote is not None:
            ends = (held.local, held.remote)
            if (one := self._by_ends.get(ends)) is not None and in_one_network(one.pid, held.pid):
                program = self._process(held.pid).name
                return self._tracked_connection(one._replace(pid=held.pid, fd=held.fd, program=program), ends)
        return self._untracked(held)

    def _look_again(self, wanted: Query, doubtful: dict[_Ends, int]) -> Iterator[Explanation]:
        """The slots were read before the sockets: some may have been made since, or have ended.

        Between a socket and its slot a program may have to wait for a processor; nothing is known before it has run.
        """
        paces = {pid: Pace(pid) for pid in doubtful.values()}
        until = time.monotonic() + _MADE_S
        while doubtful:
            last = time.monotonic() >= until
            moved_on = {pid: last and pace.moved_on() for pid, pace in paces.items()}
            still = dict[_Ends, int]()
            for ends, doubted, found in Explainer(self._socket_path)._at_once(wanted):
                if ends not in doubtful:
                    continue
                if doubted is None or moved_on.get(doubted):
                    yield found
                elif last:
                    yield _held_up(found)
                else:
                    still[ends] = doubted
            if doubtful := still:
                time.sleep(_MADE_S / 10)  # pause between two looks, as no event shows that a slot is made

    # ---- tracked ----

    def _tracked_connection(self, one: Connection, ends: tuple[Endpoint, Endpoint]) -> Explanation:
        subject = f"{one.who}[{one.pid}] fd {one.fd}, {ends[0]} {one.arrow} {ends[1]},"
        peer = self._by_ends.get((ends[1], ends[0]))
        facts = [*_link_facts(one), *_traffic_facts(one)]
        if peer is not None:
            facts.append(("peer", f"{peer.who}[{peer.pid}] fd {peer.fd}, {peer.state}"))
        if one.promoted:
            carrier = self._carrier(one, ends, peer)
            return Explanation(
                subject, Verdict.CARRIED, carrier, None, "", "", tuple(_carried_facts(one) + facts), saved(one), one
            )
        if one.reason == Reason.BY_SDP.name:  # SDP from its first byte: there is no channel, and nothing to promote
            return Explanation(subject, Verdict.CARRIED, "sdp", one.reason, one.why, "", tuple(facts), 0, one)
        reason, cause, hint = self._why_tcp(one, ends, peer)
        moving = one.state == "attached" and reason not in Outside.__members__  # the other end has left it
        verdict = Verdict.MOVING if moving else Verdict.TCP
        return Explanation(subject, verdict, "tcp", reason, cause, hint, tuple(facts), saved(one), one)

    def _why_tcp(
        self, one: Connection, ends: tuple[Endpoint, Endpoint], peer: Connection | None
    ) -> tuple[str | None, str, str]:
        cause, hint = one.why, self._remedy(one)
        if failed := self._failed(one, ends) or self._of_another_user(one, peer):
            return failed
        if one.reason == Reason.LATENCY.name:
            decision = next((found for found in self._decisions_of(one, ends) if found["protocol"] is None), None)
            figures = f": {str(decision['why']).rpartition(': ')[2]}" if decision else ""
            return one.reason, cause + figures, hint
        about_the_peer = one.reason in _ABOUT_THE_PEER
        if one.reason == Reason.REMOTE.name and (found := self._of_another_namespace(peer)):
            return found
        if not about_the_peer and one.reason not in _DECIDED:
            return one.reason, cause, hint
        # A shim pins connections to other hosts once the provider has answered; the addresses are known at once.
        if about_the_peer and (peer is None or not self._pairs_namespaces) and not is_here(ends[1].address, one.pid):
            if one.reason == Reason.PEER_LEFT.name:
                return one.reason, *self._sent_back(one, ends)
            if any(decision["protocol"] not in (None, _LOCAL) for decision in self._decisions_of(one, ends)):
                return one.reason, cause, hint  # the connection is on its way to that host
            return self._of_another_namespace(peer) or (
                Reason.REMOTE.name,
                REASON_TEXT[Reason.REMOTE],
                REMEDY[Reason.REMOTE],
            )
        # Both ends wait for one another while they are young; any other reason of the other end is news.
        if peer is not None and peer.reason is not None and peer.reason not in _ABOUT_THE_PEER | _DECIDED:
            return peer.reason, f"at the other end, {peer.why}", self._remedy(peer)
        if decided := self._decided(one, ends, peer):  # a refused offer is made again, and looks as if it waited
            return decided
        if not about_the_peer:
            return one.reason, cause, hint
        if peer is not None:
            if one.reason == Reason.YOUNG.name and (after := self._status.get("promote_after")):
                cause += f" (the provider's default is {after} calls:bytes)"
            if one.reason == Reason.PEER_ABSENT.name:  # the shim cannot know better
                cause = "the other end is under sidestep, and has not joined in yet"
                hint = "nothing to do: it is promoted when both ends are in use"
            return one.reason, cause, hint
        held = self._other_end(ends)
        if held is None or held.pid is None:
            judgement, name = self._unseen(ends[1], ends[0]), "the process at the other end"
        else:
            judgement, name = self._judge(self._process(held.pid)), f"the other end, {self._process(held.pid)},"
        return judgement.code.name, f"{name} {judgement.text}", judgement.remedy

    def _of_another_user(self, one: Connection, peer: Connection | None) -> tuple[str, str, str] | None:
        """An end whose program has changed its user, and finds no provider since."""
        for end, name in ((one, "this end,"), (peer, "the other end,")):
            if end is not None and end.reason == Reason.NO_PROVIDER.name:
                process = self._process(end.pid)
                judgement = process.outside(self._socket_path)
                if judgement is not None and judgement.code is Outside.OTHER_USER:
                    return judgement.code.name, f"{name} {process}, {judgement.text}", judgement.remedy
        return None

    def _of_another_namespace(self, peer: Connection | None) -> tuple[str, str, str] | None:
        """A peer that is on this host, as its shim is seen, though its address is not one of this namespace."""
        if peer is None or self._pairs_namespaces:
            return None
        judgement = Judgement.of(Outside.OTHER_NETNS, remedy=other_users.remedy())
        return judgement.code.name, f"the other end, {peer.who}[{peer.pid}], {judgement.text}", judgement.remedy

    def _sent_back(self, one: Connection, ends: tuple[Endpoint, Endpoint]) -> tuple[str, str]:
        """Cause why a connection that was carried to another host is on TCP again, and what would change it.

        The provider does not remember over which transport a connection went.
        """
        remote = ends[1]
        there = f"'sidestep explain {remote}' on {remote.address} says more"
        sent_back = f"it was promoted; then its program or the provider on {remote.address} sent it back to TCP"
        if not one.relay_over:
            return sent_back, there
        anew = "this connection stays on TCP, a new one can be promoted"
        if (one.promoted_s or 0) > self._status.get("uptime_s", math.inf):
            return "it was promoted; then the provider on this host was started anew", anew
        if not (stopped := self._stopped_transports):
            return sent_back, f"{anew}; {there}"
        names = " and ".join(stopped)
        cause = f"it was promoted, and sent back to TCP; on this host the provider has lost the transport {names}"
        if gone := [name for name, back in stopped.items() if not back]:
            anew = "; ".join(f"'sidestep provider add --transport {name}'" for name in gone) + f"; {anew}"
        else:
            cause += " meanwhile"
        return cause, f"{anew}; if it went over another transport, {there}"

    @staticmethod
    def _remedy(one: Connection) -> str:
        """Remedy of its reason, with its own address where one is wanted."""
        hint = remedy(Reason[one.reason], one.program or "") if one.reason else ""
        return hint.replace("ADDRESS:PORT", one.local)

    def _decided(
        self, one: Connection, ends: tuple[Endpoint, Endpoint], peer: Connection | None
    ) -> tuple[str, str, str] | None:
        """The reason by the provider's policy and protocols, its cause, and the line that would change it.

        None if the provider cannot be asked, or would now decide otherwise. Either end's rule may keep a connection on
        TCP.
        """
        passive = one.role == "passive"
        sides = [(one, "listen" if passive else "connect")]
        if peer is not None:
            sides.append((peer, "connect" if passive else "listen"))
        listener = ends[0] if passive else ends[1]
        for side, role in sides:
            decision = self._decide(side, role, listener)
            if decision is None or decision["protocol"] is not None:
                continue
            cause = str(decision["why"]).removeprefix("it stays on TCP: ")
            if rule := decision["rule"]:
                prefix_len = 128 if listener.address.version == 6 else 32
                host = f"[{listener.address}]" if prefix_len == 128 else str(listener.address)
                line = f'use both {role} "{side.program or "*"}" {host}/{prefix_len}:{listener.port}'
                return Reason.POLICY.name, cause, f"put this line before line {rule['line']} of {rule['file']}: {line}"
            return Reason.NO_PROTOCOL.name, cause, REMEDY[Reason.NO_PROTOCOL]
        return None

    def _failed(self, one: Connection, ends: tuple[Endpoint, Endpoint]) -> tuple[str, str, str] | None:
        """Reason why the connection did not go to another host, by the provider's last record of it."""
        full = one.reason == Reason.NO_RESOURCES.name
        if one.role == "passive" or not (full or one.reason in _ABOUT_THE_PEER | _DECIDED):
            return None
        for decision in self._decisions_of(one, ends):
            _, colon, why = str(decision["why"]).removeprefix("it stays on TCP: ").partition(": ")
            cause, found, hint = why.rpartition(": ")  # a carrier's words end with the remedy
            if decision["failed"] and colon and found:
                return str(one.reason) if full else Reason.NO_PROTOCOL.name, cause, hint
        return None

    def _decisions_of(self, one: Connection, ends: tuple[Endpoint, Endpoint]) -> Iterator[dict[str, Any]]:
        """Records of the provider about such a connection, the last first."""
        wanted = ("connect", one.program, str(ends[1]))
        for decision in reversed(self._decided_before):
            if (decision["role"], decision["program"], decision["endpoint"]) == wanted:
                yield decision

    def _decide(self, one: Connection, role: str, listener: Endpoint) -> dict[str, Any] | None:
        """The provider's dry run of a connection; None if it cannot be asked, or the program has gone."""
        try:
            uid, gid = Process(one.pid).effective_ids()
            with ControlConnection(self._socket_path) as control:
                return control.document(
                    "decide", role=role, program=one.program or "", uid=uid, gids=[gid],
                    address=str(listener.address), port=listener.port,
                )  # fmt: skip
        except (Unavailable, OSError):
            return None

    def _carrier(self, one: Connection, ends: tuple[Endpoint, Endpoint], peer: Connection | None) -> str:
        if one.link is not None:
            return str(one.link["protocol"])
        if peer is not None and peer.segment == one.segment:
            return _LOCAL  # the two share one channel, and no provider stands in between
        # The end that connects chooses; rules for the other one can only forbid.
        opener, destination = (peer, ends[0]) if one.role == "passive" else (one, ends[1])
        decision = self._decide(opener, "connect", destination) if opener is not None else None
        name = str(decision["protocol"]) if decision and decision["protocol"] else _LOCAL
        return name if peer is None or name != _LOCAL else "offload protocol"

    # ---- what no shim tracks ----

    def _untracked(self, held: HostSocket) -> Explanation:
        ends = f"{held.local} -- {held.remote}" if held.remote else str(held.local)
        if held.pid is None:
            unseen = self._unseen(held.local, held.remote)
            verdict = Verdict.UNSEEN if unseen.code is Outside.UNSEEN else Verdict.TCP
            return _plain(f"{ends},", verdict, unseen.code.name, f"its process {unseen.text}", unseen.remedy)
        process = self._process(held.pid)
        subject = f"{process} fd {held.fd}, {ends},"
        judgement = self._judge(process)
        if judgement.code not in (Outside.UNKNOWN_SOCKET, Outside.NO_PROVIDER, Outside.NOT_SHOWN):
            return _plain(subject, Verdict.TCP, judgement.code.name, f"{process} {judgement.text}", judgement.remedy)
        if held.remote is None:
            return _plain(subject, Verdict.LISTENS, None, "connections that it accepts can be promoted", "")
        if judgement.code is not Outside.NOT_SHOWN and not is_here(held.remote.address, held.pid):
            remote = Reason.REMOTE
            return _plain(subject, Verdict.TCP, remote.name, REASON_TEXT[remote], REMEDY[remote])
        verdict = Verdict.TCP if judgement.code is Outside.UNKNOWN_SOCKET else Verdict.UNKNOWN
        return _plain(subject, verdict, judgement.code.name, f"{process} {judgement.text}", judgement.remedy)

    def _judge(self, process: Process) -> Judgement:
        """Reason why a process does not track a socket that it holds."""
        judgement = process.outside(self._socket_path)
        if judgement and not (judgement.code is Outside.OTHER_USER and self._has_met(process.pid)):
            return judgement
        if self.provider_missing:
            return Judgement(Outside.NO_PROVIDER, Outside.NO_PROVIDER.text, self.provider_missing.remedy)
        if os.geteuid() == 0 and self._status.get("netns_cookie", 0) != netns_cookie():
            return Judgement.of(Outside.NOT_SHOWN)
        version, served = layout_of(process.pid), layouts(self._status)
        if version is None or version in served:
            return Judgement.of(Outside.UNKNOWN_SOCKET)
        known = " and ".join(map(str, served))
        text = f"{version}; the provider, of sidestep {self._status['version']}, serves {known}"
        remedy = f"restart {process.command}" if version < served.start else RESTART
        return Judgement.of(Outside.OTHER_LAYOUT, text, remedy)

    def _unseen(self, local: Endpoint, remote: Endpoint | None) -> Judgement:
        """Judgement on a process that holds that socket and cannot be seen; the kernel shows only its user."""
        uid = next(
            (uid for *ends, _, uid in other_users.sockets() if ends[0] == local and remote in (None, ends[1])), None
        )
        left_out = Judgement.of_user(uid, self._socket_path) if uid is not None else None
        return left_out or Judgement.of_unseen()

    # ---- sources ----

    @cached_property
    def _host_sockets(self) -> list[HostSocket]:
        return tcp_sockets()

    def _other_end(self, ends: tuple[Endpoint, Endpoint]) -> HostSocket | None:
        return next((held for held in self._host_sockets if (held.local, held.remote) == (ends[1], ends[0])), None)

    def _has_met(self, pid: int) -> bool:
        """True if the process introduced itself to the provider, as it does before it changes its user."""
        return (pid, inode_of(pid)) in self._first_ones

    @cached_property
    def _first_ones(self) -> set[tuple[int, int]]:
        """The first process of each family, which introduced it, and the inode of the arena."""
        processes = Processes()
        try:
            with ControlConnection(self._socket_path) as control:
                return {(processes.here(*first), os.fstat(fd).st_ino) for _, fd, first in control.arenas()}
        except Unavailable:
            return set()

    @cached_property
    def _by_ends(self) -> dict[tuple[Endpoint, Endpoint], Connection]:
        return {ends: one for one in self._tracked if (ends := self._ends(one))}

    @cached_property
    def _by_descriptor(self) -> dict[tuple[int | None, int], HostSocket]:
        return {(held.pid, held.fd): held for held in self._host_sockets}

    def _ends(self, one: Connection) -> tuple[Endpoint, Endpoint] | None:
        local, remote = endpoint(one.local), endpoint(one.remote)
        if local.port and remote.port:
            return local, remote
        # A connection so young, or so soon pinned, that its shim has not written its addresses down.
        held = self._by_descriptor.get((one.pid, one.fd))
        return (held.local, held.remote) if held is not None and held.remote is not None else None

    def _process(self, pid: int) -> Process:
        if pid not in self._processes:
            self._processes[pid] = Process(pid)
        return self._processes[pid]

    @cached_property
    def _decided_before(self) -> list[dict[str, Any]]:
        """The provider's decisions, as far as it remembers them, the oldest first."""
        found: list[dict[str, Any]] = []
        try:
            with ControlConnection(self._socket_path) as control:
                after = 0
                while page := (reply := control.document("trace", after=after))["decisions"]:
                    found += page
                    after = reply["next"]
        except Unavailable:
            pass  # the lookup finds nothing then
        return found

    @cached_property
    def _stopped_transports(self) -> dict[str, bool]:
        """Transports that were removed or have failed, by name; True: it is back."""
        try:
            with ControlConnection(self._socket_path) as control:
                found = control.document("modules")["modules"]
        except Unavailable:
            return {}
        transports = (one for one in found if one["kind"] == "transport")
        return {one["name"]: one["state"] == "started" for one in transports if one["state"] == "removed" or one["why"]}

    @property
    def _pairs_namespaces(self) -> bool:
        """True if the two ends of a connection may be in different network namespaces, or if that is not known."""
        return bool(self._status.get("proves_paths", True))

    @cached_property
    def _status(self) -> dict[str, Any]:
        """The provider's; empty if it has gone."""
        try:
            with ControlConnection(self._socket_path) as control:
                return control.status()
        except Unavailable:
            return {}


def _plain(subject: str, verdict: Verdict, reason: str | None, cause: str, hint: str) -> Explanation:
    return Explanation(subject, verdict, "tcp" if verdict is Verdict.TCP else "", reason, cause, hint, (), 0, None)


def _held_up(found: Explanation) -> Explanation:
    """The explanation for a socket that its shim should know and does not."""
    judgement = Judgement.of(Outside.HELD_UP)
    cause = found.cause.replace(Outside.UNKNOWN_SOCKET.text, judgement.text)
    return replace(found, reason=judgement.code.name, cause=cause, hint=judgement.remedy)


def saved(one: Connection) -> int:
    """System calls that a connection has not made: one a message by ring, less those of the shim's own."""
    return max(0, one.tx.ring_msgs + one.rx.ring_msgs - one.doorbells - one.sleeps - one.calls)


def _carried_facts(one: Connection) -> list[tuple[str, str]]:
    sent, received = f"{one.tx.ring_from or 0:,}", f"{one.rx.ring_from or 0:,}"
    if one.promotions > 1:  # the offsets count bytes by TCP, and some went by ring before
        text = f"it has sent {sent} and received {received} bytes by tcp ({_ago(one)}); promoted {one.promotions} times"
    else:
        text = f"byte {sent} sent, byte {received} received ({_ago(one)})"
    return [("since", text)]


def _link_facts(one: Connection) -> Iterator[tuple[str, str]]:
    if (link := one.link) is None:
        return
    if "engine" in link:  # a provider without an engine has no such field
        yield "carried by", _carrier(link)
    yield "sending", f"{link['send_mechanism']}, {link['send_mode']} mode, {link['held']:,} bytes not read there yet"
    yield "receiving", f"{link['receive_mechanism']}, {link['receive_mode']} mode"
    credit = f"{link['credit']} messages may go, {link['remote_credit']} may come"
    credit += f" ({link['receives_posted']} receives posted)"
    yield "credit", f"{credit}; advertised: {link['adverts']} here, {link['remote_adverts']} there"
    yield from _queue_pair_facts(link.get("queue_pair", {}))
    yield "over it", f"{_moved(link, 'sent', link['sent'])}; {_moved(link, 'received', link['arrived'])}"


def _queue_pair_facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts of a link's queue pair, as far as the device gives them."""
    if "number" not in found:
        return
    text = f"{found['number']}"
    if "remote_number" in found:
        text += f", there {found['remote_number']}"
    if "mtu" in found:
        text += f"; path MTU {found['mtu']}"
    yield "queue pair", text
    if "packets_sent" in found:
        again, times = found.get("packets_resent", 0), found.get("resent", 0)
        text = f"{found['packets_sent']:,} sent, {found['packets_received']:,} received"
        yield "packets", f"{text}; {again:,} sent again in {times:,} times of going back"
        yield "NAKs", f"{found['naks_sent']:,} sent, {found['naks_received']:,} received"


def _carrier(link: dict[str, Any]) -> str:
    """Carrier of its bytes, and the reasons why the engine has returned it."""
    times = sum(link["given_back"].values())
    why = ", ".join(f"{name} {count:,}" for name, count in sorted(link["given_back"].items()))
    carrier = "the engine" if link["engine"] else "Python, for now"
    return f"{carrier}; returned to Python {counted(times, 'time')} ({why})" if times else carrier


def _moved(link: dict[str, Any], way: str, count: int) -> str:
    """The bytes of one direction, and how many of them without a copy by the providers."""
    read, written = link[f"read_zcopy_{way}"], link[f"write_zcopy_{way}"]
    return f"{count:,} bytes {way}, {read:,} by Read Zcopy and {written:,} by Write Zcopy"


def _ago(one: Connection) -> str:
    return f"{one.promoted_s:,.1f} s ago" if one.promoted_s is not None else "just now"


def _traffic_facts(one: Connection) -> Iterator[tuple[str, str]]:
    for heading, traffic in (("sent", one.tx), ("received", one.rx)):
        if text := _traffic(traffic):
            yield heading, text
    if by_ring := one.tx.ring_msgs + one.rx.ring_msgs:
        text = f"{saved(one):,} system calls: {by_ring:,} messages by ring made none, {one.sleeps:,} sleeps"
        yield "saved", f"{text}, {one.doorbells:,} doorbells and {one.calls:,} calls around them did"


def _traffic(traffic: Traffic) -> str:
    paths = ((traffic.ring_bytes, traffic.ring_msgs, "ring"), (traffic.tcp_bytes, traffic.tcp_msgs, "tcp"))
    return ", ".join(f"{size:,} bytes in {msgs:,} messages by {path}" for size, msgs, path in paths if msgs or size)
