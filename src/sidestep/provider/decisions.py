"""Decisions of the switch about connections, and their reasons: policy, route and protocol put together.

The same answer serves the offer of a live connection, an explicit socket, and a dry run. The last decisions are kept
for `sidestep policy trace`.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from sidestep import limits
from sidestep.errors import Unavailable
from sidestep.gain import Profile
from sidestep.native.layout import Refusal
from sidestep.native.reasons import REFUSAL_TEXT
from sidestep.policy import BOTH, TCP, Decision, Policy, Role, Subject
from sidestep.routing import Address, Route, plain_address
from sidestep.settings import RemoteSettings
from sidestep.switch.modules import Protocols
from sidestep.switch.protocol import Endpoint, OffloadProtocol, Request

_SO_PEERGROUPS: Final = 59
_GID: Final = struct.Struct("I")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision about one end of a connection."""

    ruling: Decision
    protocol: OffloadProtocol | None  # protocol; None: it stays on TCP
    refusal: Refusal | None  # the reason in that case
    route: Route | None  # protocols as far as they were asked for
    why: str  # one sentence
    request: Request | None = None  # request as the protocol has been asked
    leaves: bool = False  # the other end is on another host
    failed: bool = False  # the protocol has tried

    def as_json(self) -> dict[str, Any]:
        return self.ruling.as_json() | {
            "route": self.route.as_json() if self.route else None,
            "protocol": self.protocol.name if self.protocol else None,
            "why": self.why[: limits.WHY_MAX],
            "failed": self.failed,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Remembered:
    """A decision that was taken."""

    sequence: int
    time: float  # seconds since the epoch
    role: Role
    subject: Subject
    endpoint: Endpoint  # the destination, or where it was accepted
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        return {
            "sequence": self.sequence,
            "time": self.time,
            "role": self.role.value,
            "program": self.subject.programs[0][: limits.POLICY_NAME_MAX] if self.subject.programs else None,
            "uid": self.subject.uid,
            "endpoint": str(self.endpoint),
            **self.verdict.as_json(),
        }


@dataclass(slots=True, eq=False)
class Decisions:
    """The switch's judgement, and its memory of it."""

    _protocols: Protocols
    _policy: Callable[[], Policy]  # gives the one in force
    _route: Callable[..., Route]  # the kernel's way: see `Network.route`
    _wall_clock: Callable[[], float]
    _remote: RemoteSettings | None = None  # other hosts with which connections are carried
    _trace: deque[Remembered] = field(default_factory=lambda: deque(maxlen=limits.TRACE_DECISIONS_MAX))
    _sequence: int = 0

    def connect(
        self, subject: Subject, request: Request, *, dry: bool = False, ip_protocol: int = 0, elsewhere: bool = False
    ) -> Verdict:
        """Decides which protocol carries a connection from the end that opened it.

        `ip_protocol`: the protocol on which an explicit socket insists. `elsewhere`: it is in another network
        namespace, which has routes of its own.
        """
        ruling = self._policy().decide(Role.CONNECT, subject, request.remote.address, request.remote.port)
        verdict = self._choose(ruling, request, subject, Role.CONNECT, ip_protocol, elsewhere=elsewhere)
        if not dry:
            self._remember(Role.CONNECT, subject, request.remote, verdict)
        return verdict

    def profile(self, verdict: Verdict) -> Profile | None:
        """Figures by which a connection of that verdict must gain to be carried; None: it need not."""
        assert verdict.protocol is not None
        assert verdict.request is not None
        try:
            return verdict.protocol.profile(verdict.request)
        except Exception as error:  # a stranger's code
            self._protocols.fail(verdict.protocol.name, error)
            return None

    def listen(self, subject: Subject, local: Endpoint, carrier: OffloadProtocol, transport: str = "") -> Verdict:
        """Decides whether the end that accepted may be carried by the protocol that the other end has chosen."""
        ruling = self._policy().decide(Role.LISTEN, subject, local.address, local.port)
        if ruling.target not in (BOTH, carrier.name) or ruling.over not in ("", transport):
            verdict = self._refused(ruling, Refusal.POLICY, self._kept_by(ruling))
        elif not carrier.capabilities.accept:
            verdict = self._refused(ruling, Refusal.NO_PROTOCOL, f"{carrier.name} carries no accepted connections")
        else:
            verdict = Verdict(ruling, carrier, None, None, f"{carrier.name} carries it")
        self._remember(Role.LISTEN, subject, local, verdict)
        return verdict

    def refuse(self, opener: Subject, acceptor: Subject, listener: Endpoint, refusal: Refusal) -> None:
        """Remembers for both ends that the two are not paired, although protocols could carry them."""
        for role, subject in ((Role.CONNECT, opener), (Role.LISTEN, acceptor)):
            ruling = self._policy().decide(role, subject, listener.address, listener.port)
            self._remember(role, subject, listener, self._refused(ruling, refusal, REFUSAL_TEXT[refusal]))

    def fail(
        self, opener: Subject, destination: Endpoint, carrier: str, why: str, refusal: Refusal = Refusal.NO_PROTOCOL
    ) -> None:
        """Remembers that what was to carry a connection to another host could not."""
        ruling = self._policy().decide(Role.CONNECT, opener, destination.address, destination.port)
        refused = self._refused(ruling, refusal, f"{carrier}: {why}")
        verdict = replace(refused, failed=refusal is not Refusal.LATENCY)
        self._remember(Role.CONNECT, opener, destination, verdict)

    def would_listen(self, subject: Subject, local: Endpoint, *, ip_protocol: int = 0) -> Verdict:
        """The dry run of a listener: what could carry the connections that it accepts."""
        ruling = self._policy().decide(Role.LISTEN, subject, local.address, local.port)
        return self._choose(ruling, Request(local, local, None), subject, Role.LISTEN, ip_protocol)

    def trace(self, after: int, *, shown: Callable[[int], bool] = lambda _uid: True) -> dict[str, Any]:
        """The decisions after number `after`: as many as are kept and fit a reply; `next` asks for later ones.

        `shown` selects the users whose decisions are given.
        """
        found: list[dict[str, Any]] = []
        room = limits.TRACE_BYTES_PER_REPLY
        for one in self._trace:
            if one.sequence <= after or not shown(one.subject.uid):
                continue
            entry = one.as_json()
            room -= len(json.dumps(entry))
            if found and (room < 0 or len(found) == limits.TRACE_DECISIONS_PER_REPLY):
                break
            found.append(entry)
        return {"decisions": found, "next": found[-1]["sequence"] if found else self._sequence}

    # ---- choosing ----

    def _choose(
        self, ruling: Decision, request: Request, subject: Subject, role: Role, ip_protocol: int,
        *, elsewhere: bool = False,
    ) -> Verdict:  # fmt: skip
        if ruling.target == TCP:
            return self._refused(ruling, Refusal.POLICY, self._kept_by(ruling))
        route: Route | None = None
        reasons = []
        near = role is Role.LISTEN or (ip_protocol and self._is_here(plain_address(request.remote.address)))
        numbers = self._meant(ip_protocol) if near else {ip_protocol}
        named = ruling.target != BOTH and self._protocols.get(ruling.target)
        if named and ip_protocol and 0 in numbers and named.ip_protocol == ip_protocol:
            ruling = replace(ruling, target=BOTH)  # the rule and the program mean the same
        for protocol in self._candidates(ruling, numbers):
            if not protocol.capabilities.self_routing and elsewhere:
                reasons.append(
                    f"{protocol.name}: it needs a route, and those of another network namespace are not known"
                )
                continue
            if not protocol.capabilities.self_routing and route is None:
                try:
                    source = request.local.address if request.local else None
                    route = self._route(request.remote.address, source=source, uid=subject.uid)
                except Unavailable as error:
                    reasons.append(f"{protocol.name}: {error.message}")
                    continue
            given = replace(request, over=ruling.over) if ruling.over else request
            if not protocol.capabilities.self_routing:
                given = replace(given, route=route)
            if why := self._unfit(protocol, given, role):
                reasons.append(f"{protocol.name}: {why}")
                continue
            leaves = role is Role.CONNECT and self._leaves(plain_address(request.remote.address))
            return Verdict(ruling, protocol, None, route, f"{protocol.name} carries it", given, leaves)
        if reasons:
            return self._refused(ruling, Refusal.NO_PROTOCOL, "; ".join(reasons), route)
        wanted = f"{ruling.target} is not installed or does not work" if ruling.target != BOTH else "none is installed"
        return self._refused(ruling, Refusal.NO_PROTOCOL, f"no offload protocol can carry it: {wanted}")

    def _meant(self, ip_protocol: int) -> set[int]:
        """Numbers of protocols for a socket that insists on one, on this host: any, if that is for other hosts only."""
        named = [each for each in self._protocols.each() if ip_protocol and each.ip_protocol == ip_protocol]
        far = bool(self._remote and named) and not any(each.capabilities.local for each in named)
        return {0, ip_protocol} if far else {ip_protocol}

    def _candidates(self, ruling: Decision, numbers: set[int]) -> Iterator[OffloadProtocol]:
        named = ruling.target != BOTH
        for protocol in self._named(ruling.target) if named else self._protocols.each():
            if not (named or protocol.capabilities.local or self._remote):
                continue  # a protocol for other hosts, of which there are none
            if 0 in numbers or protocol.ip_protocol in numbers:
                yield protocol

    def _named(self, name: str) -> Iterator[OffloadProtocol]:
        if (found := self._protocols.get(name)) is not None:
            yield found

    def _unfit(self, protocol: OffloadProtocol, request: Request, role: Role) -> str | None:
        """Reason why a protocol cannot carry this, or None."""
        able = protocol.capabilities
        if not (able.connect if role is Role.CONNECT else able.accept):
            return f"it does not carry the end that {role.value}s"
        if role is Role.CONNECT and (why := self._wrong_place(protocol, plain_address(request.remote.address))):
            return why
        if (version := plain_address(request.remote.address).version) not in able.families:  # address as on the wire
            return f"it does not carry IPv{version}"
        try:
            return protocol.refusal(request)
        except Exception as error:  # a stranger's code
            self._protocols.fail(protocol.name, error)
            return "it failed"

    def _wrong_place(self, protocol: OffloadProtocol, destination: Address) -> str | None:
        """Reason why a protocol does not reach as far, or as near, or None."""
        able = protocol.capabilities
        if able.local and able.remote:
            return None
        leaves = self._leaves(destination)
        if leaves and not able.remote:
            return "the other end is on another host"
        if not leaves and not able.local:
            if self._remote is None:
                return "no other hosts were given: see --remote"
            if not self._is_here(destination):
                return f"{destination} is none of the hosts given with --remote: name it there, on both hosts"
            return "the other end is on this host"
        return None

    def _leaves(self, destination: Address) -> bool:
        """True if it is one of the other hosts with which connections are carried."""
        return self._remote is not None and self._remote.trusts(destination) and not self._is_here(destination)

    def _is_here(self, destination: Address) -> bool:
        """True if it is an address of this host."""
        if destination.is_loopback:
            return True
        try:
            return self._route(destination).local
        except Unavailable:
            return False

    def _refused(self, ruling: Decision, refusal: Refusal, why: str, route: Route | None = None) -> Verdict:
        return Verdict(ruling, None, refusal, route, f"it stays on TCP: {why}")

    def _kept_by(self, ruling: Decision) -> str:
        if (rule := ruling.rule) is None:
            return f"the policy says {ruling.target}"
        return f"{rule.origin.file}, line {rule.origin.line} says so: {rule.text}"

    def _remember(self, role: Role, subject: Subject, endpoint: Endpoint, verdict: Verdict) -> None:
        self._sequence += 1
        self._trace.append(Remembered(self._sequence, self._wall_clock(), role, subject, endpoint, verdict))


def subject_of(sock: socket.socket, pid: int, uid: int, *, near: bool = True) -> Subject:
    """The process at the other end of a UNIX socket. It chooses its own names; they prove nothing.

    `near`: it can only be our own user's, or root's. A stranger's command line is not read: it lies in memory that the
    stranger may have put where reading it never ends.
    """
    return Subject(names_of(pid, near=near), uid, frozenset(_groups(sock)))


def names_of(pid: int, *, near: bool) -> tuple[str, ...]:
    """The names that a process goes by, as far as they can be read; `near` as with `subject_of`."""
    names = []
    process = Path(f"/proc/{pid}")
    for read in (_command_name, _comm, _executable) if near else (_comm, _executable):
        try:
            name = read(process)
        except OSError:  # the process has gone, or its user hides it from us
            continue
        if name and name not in names:
            names.append(name)
    return tuple(names)


def _command_name(process: Path) -> str:
    with open(process / "cmdline", "rb") as file:
        first = file.read(limits.COMMAND_NAME_MAX).split(b"\0", 1)[0]
    return os.fsdecode(first).rpartition("/")[2]


def _comm(process: Path) -> str:
    return os.fsdecode((process / "comm").read_bytes()).rstrip("\n")


def _executable(process: Path) -> str:
    return os.readlink(process / "exe").rpartition("/")[2]  # noqa: PTH115 - the name, not a path


def _groups(sock: socket.socket) -> Iterator[int]:
    """The groups of the process that connected, the effective one among them."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    yield _GID.unpack_from(credentials, 8)[0]
    try:
        groups = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, limits.PEER_GROUPS_MAX * _GID.size)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return
    for (gid,) in _GID.iter_unpack(groups):
        yield gid
