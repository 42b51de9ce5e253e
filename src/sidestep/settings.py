"""Settings of a provider, and what users give for them: values checked once, at the edge.

`sidestep run` needs them only where it starts a provider, so they do not stand in config.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from sidestep import limits
from sidestep.config import ENV_POLICY, SYSTEM_POLICY
from sidestep.errors import Misuse
from sidestep.gain import ALWAYS, BY_GAIN, Profile, Profiles
from sidestep.native import defaults
from sidestep.native.layout import Welcome

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network


class Proof(Enum):
    """Way for the provider to make sure that a client holds the connection it names."""

    LOOKUP = "lookup"  # the kernel answers; clients in another network namespace bring a duplicate of the socket
    POSSESSION = "possession"  # all clients bring one: both ends in one namespace, whichever
    PATH = "path"  # and a UDP socket: the ends may be in different namespaces


class PromoteAfter(NamedTuple):
    """Bounds of which a connection reaches one before it is promoted; 0 calls: at once."""

    calls: int = defaults.PROMOTE_AFTER_CALLS  # reads and writes
    payload_len: int = defaults.PROMOTE_AFTER_BYTES  # bytes

    @classmethod
    def parse(cls, text: str) -> Self:
        """`CALLS` or `CALLS:BYTES`, as the shim reads it (shim.c::promote_after_read); raises Misuse."""
        calls, colon, payload_len = text.partition(":")
        if (
            not calls.isascii()
            or not calls.isdigit()
            or (colon and not (payload_len.isascii() and payload_len.isdigit()))
        ):
            raise Misuse(f"{text!r} is not CALLS or CALLS:BYTES", remedy="for example 8, 8:65536, or 0 for at once")
        value = cls(int(calls), int(payload_len)) if colon else cls(int(calls))
        calls_max, payload_max = defaults.PROMOTE_AFTER_CALLS_MAX, defaults.PROMOTE_AFTER_BYTES_MAX
        if value.calls > calls_max or value.payload_len > payload_max:
            raise Misuse(f"{text!r} is out of range", remedy=f"give at most {calls_max} calls and {payload_max} bytes")
        return value

    def __str__(self) -> str:
        return f"{self.calls}:{self.payload_len}"


def parse_ring_size(text: str) -> int:
    """Bytes, with K or M as a suffix; a power of two within the limits; raises Misuse."""
    digits, scale = (
        (text[:-1], {"k": 1 << 10, "m": 1 << 20}[text[-1].lower()]) if text[-1:] in "kKmM" and text else (text, 1)
    )
    size = int(digits) * scale if digits.isascii() and digits.isdigit() else 0
    if not limits.RING_SIZE_MIN <= size <= limits.RING_SIZE_MAX or size & (size - 1):
        raise Misuse(
            f"{text!r} is not a ring size",
            remedy=f"give a power of two from {limits.RING_SIZE_MIN} to {limits.RING_SIZE_MAX >> 20}M, such as 256K",
        )
    return size


def parse_workers(text: str) -> int:
    """Number of processes that carry connections with other hosts; `auto`: one for each usable CPU; raises Misuse."""
    if text == "auto":
        return min(len(os.sched_getaffinity(0)), limits.WORKERS_MAX)
    if not (text.isascii() and text.isdigit()) or int(text) > limits.WORKERS_MAX:
        raise Misuse(
            f"{text!r} is not a number of workers", remedy=f"give 0 to {limits.WORKERS_MAX}, or auto: one for each CPU"
        )
    return int(text)


class PolicyPlace(NamedTuple):
    """A file that rules are read from."""

    path: Path
    required: bool = False  # a missing file is an error

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the form that `str` gives; raises Misuse."""
        kind, colon, path = text.partition(":")
        if not colon or kind not in ("must", "may"):
            raise Misuse(f"{text!r} is not a place", remedy="give must:FILE, or may:FILE for one that may be missing")
        return cls(Path(path), kind == "must")

    def __str__(self) -> str:
        return f"{'must' if self.required else 'may'}:{self.path}"


def policy_places(environment: Mapping[str, str]) -> tuple[PolicyPlace, ...]:
    """Files of a user's policy: the one that is asked for, else the user's own, and behind it the system's."""
    if chosen := environment.get(ENV_POLICY):
        mine = [PolicyPlace(Path(chosen).absolute(), required=True)]
    elif directory := environment.get("XDG_CONFIG_HOME") or _home(environment):
        mine = [PolicyPlace(Path(directory).absolute() / "sidestep/policy.conf")]
    else:
        mine = []
    return (*mine, PolicyPlace(SYSTEM_POLICY))


def _home(environment: Mapping[str, str]) -> str | None:
    """The user's `.config`, None for one without a home."""
    return f"{home}/.config" if (home := environment.get("HOME")) else None


def parse_cpus(text: str) -> tuple[int, ...]:
    """`CPU[,CPU...]`, of those that this process may use; raises Misuse."""
    allowed = os.sched_getaffinity(0)
    try:
        cpus = tuple(int(each) for each in text.split(","))
    except ValueError:
        raise Misuse(f"{text!r} are not CPUs", remedy="for example 2 or 2,3") from None
    if missing := set(cpus) - allowed:
        raise Misuse(f"there is no CPU {min(missing)} for this process", remedy=f"there are {sorted(allowed)}")
    return cpus


TRANSPORTS: Final = ("iwarp",)  # that connections go over unless others are named


class RemoteSettings(NamedTuple):
    """Hosts with which connections are carried, and the terms of that.

    A machine that may send from the address of a trusted host can take over connections between the two. So all its
    users are trusted, unless there is a key.
    """

    hosts: tuple[IPv4Network | IPv6Network, ...]
    key_file: Path | None = None  # a secret of the two providers
    engine: bool = True  # ordinary messages pass in compiled code
    engine_cpus: tuple[int, ...] = ()  # CPUs where that runs; none: anywhere
    promote: str | Profile = (
        ALWAYS  # BY_GAIN: connections have to gain by figures of their transport; a profile: by these
    )
    transports: tuple[str, ...] = TRANSPORTS  # the kinds of device that carry them, the first one first
    pinned_max: int = limits.REMOTE_PINNED_BYTES  # bytes that devices of the kernel pin for them
    connections_max: int = limits.RELAYS_MAX  # connections over one device; then idle ones go back to TCP

    def trusts(self, host: IPv4Address | IPv6Address) -> bool:
        """True if a host is among them."""
        return any(host in network for network in self.hosts if network.version == host.version)

    @classmethod
    def parse(
        cls, hosts: str, key_file: str | None = None, *, engine: bool = True, engine_cpus: tuple[int, ...] = (),
        promote: str = ALWAYS, transports: str = "", pinned_max: int = limits.REMOTE_PINNED_BYTES,
        connections_max: int = limits.RELAYS_MAX,
    ) -> Self:  # fmt: skip
        """`NETWORK[,NETWORK...]`; `promote`, `transports`: as the options say; raises Misuse."""
        from ipaddress import ip_network

        try:
            networks = tuple(ip_network(each.strip()) for each in hosts.split(","))
        except ValueError as error:
            raise Misuse(
                f"{hosts!r} are not networks: {error}", remedy="for example 192.0.2.0/24 or 192.0.2.7,2001:db8::/64"
            ) from error
        figures = promote if promote in (ALWAYS, BY_GAIN) else Profile.parse(promote)
        key = Path(key_file).absolute() if key_file else None
        order = tuple(transports.split(",")) if transports else TRANSPORTS
        for name in order:
            if not re.fullmatch("[a-z][a-z0-9-]{0,31}", name):
                raise Misuse(f"{name!r} is no name of a transport", remedy="give names with commas, as in verbs,iwarp")
        order += () if TRANSPORTS[-1] in order else TRANSPORTS[-1:]  # transport of the providers' own link
        return cls(networks, key, engine, engine_cpus, figures, order, pinned_max, connections_max)

    def profile(self, profiles: Profiles) -> Profile | None:
        """Figures by which connections must gain over a transport that has these; None: they need not."""
        if isinstance(self.promote, Profile):
            return self.promote
        if self.promote == ALWAYS:
            return None
        return profiles.engine if self.engine else profiles.python

    def arguments(self) -> list[str]:
        """Arguments that give a provider, or a worker of one, the same settings."""
        key = [f"--remote-key={self.key_file}"] if self.key_file else []
        cpus = [f"--engine-cpu={','.join(map(str, self.engine_cpus))}"] if self.engine_cpus else []
        engine = [] if self.engine else ["--engine=off"]
        return [
            f"--remote={self}", *key, *engine, *cpus, f"--remote-promote={self.promote}",
            f"--remote-transports={','.join(self.transports)}", f"--remote-pinned={self.pinned_max}",
            f"--remote-connections={self.connections_max}",
        ]  # fmt: skip

    def __str__(self) -> str:
        return ",".join(map(str, self.hosts))


class ProviderSettings(NamedTuple):
    """Settings of a provider."""

    socket: Path
    promote_after: PromoteAfter = PromoteAfter()
    ring_size: int = limits.RING_SIZE_DEFAULT
    offer_expiry_s: float = limits.OFFER_EXPIRY_S
    idle_exit_s: float = limits.IDLE_EXIT_S  # 0: never
    budget_bytes: int = 0  # bytes of all channels together; 0: the machine's memory
    policy: tuple[PolicyPlace, ...] = ()  # rules of an earlier one come first
    system: bool = False  # serves all users
    proof: Proof = Proof.LOOKUP  # a stricter one in a system-wide provider, see `wants`
    remote: RemoteSettings | None = None  # other hosts; None: connections with them stay on TCP
    workers: int = 0  # processes that carry these; 0: the provider itself

    @property
    def remote_ring_size(self) -> int:
        """Ring size of connections with other hosts."""
        return limits.RING_SIZE_REMOTE if self.ring_size == limits.RING_SIZE_DEFAULT else self.ring_size

    @property
    def wants(self) -> Welcome:
        """Messages and descriptors that shims are asked to bring along."""
        proof, wants = Proof.PATH if self.system else self.proof, Welcome(0)
        if proof is not Proof.LOOKUP:
            wants |= Welcome.POSSESSION
        if proof is Proof.PATH:
            wants |= Welcome.PATH
        return wants | Welcome.REMOTE if self.remote else wants

    @property
    def wants_elsewhere(self) -> Welcome:
        """The same of those in another network namespace: nothing can be looked up there, nor is the network ours."""
        return (self.wants | Welcome.POSSESSION) & ~Welcome.REMOTE

    def arguments(self) -> list[str]:
        """The command line of ``python -m sidestep.provider`` that says the same."""
        return [
            f"--socket={self.socket}",
            f"--promote-after={self.promote_after}",
            f"--ring-size={self.ring_size}",
            f"--offer-expiry={self.offer_expiry_s}",
            f"--idle-exit={self.idle_exit_s}",
            f"--budget={self.budget_bytes}",
            f"--proof={self.proof.value}",
            *(f"--policy={place}" for place in self.policy),
            *(["--system"] if self.system else []),
            *(self.remote.arguments() if self.remote else []),
            *([f"--workers={self.workers}"] if self.workers else []),
        ]
