"""Settings of a user, and places of files: values checked once, at the edge.

The environment of the shim is written here and nowhere else, so that `sidestep run` and the tests agree.

`sidestep run` reads this before each program, so it imports at the top only modules that load quickly: no dataclasses.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import struct
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from sidestep import limits
from sidestep.errors import Misuse, Unavailable
from sidestep.gain import ALWAYS, BY_GAIN, Profile, Profiles
from sidestep.installation import native_library
from sidestep.native import layout
from sidestep.native.layout import Welcome

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

ENV_SOCKET: Final = "SIDESTEP_SOCKET"  # path of the provider's socket
ENV_PROMOTE_AFTER: Final = "SIDESTEP_PROMOTE_AFTER"  # `CALLS[:BYTES]` until promotion (else :65536); `0`: at once
ENV_RING_SIZE: Final = "SIDESTEP_RING_SIZE"  # bytes of a channel in each direction, a power of two
ENV_SPIN_US: Final = "SIDESTEP_SPIN_US"  # microseconds that a wait may spin before it sleeps; `0`: never
ENV_STAY: Final = "SIDESTEP_STAY"  # `1`: no thread is moved to another CPU
ENV_DISABLE: Final = "SIDESTEP_DISABLE"  # `1`: the shim does nothing
ENV_CARRY: Final = "SIDESTEP_CARRY"  # `0`: a program that is given an environment without these names is left out
ENV_POLICY: Final = "SIDESTEP_POLICY"  # policy file instead of the user's own, when a provider starts
ENV_FROM_ROOT: Final = "SIDESTEP_FROM_ROOT"  # `1`: root ran `sidestep run`; gives no rights, see provider/users.py
ENV_LOG: Final = "SIDESTEP_LOG"  # file to which the shim appends diagnostics

SYSTEM_POLICY: Final = Path("/etc/sidestep/policy.conf")
SYSTEM_SOCKET: Final = Path(layout.SYSTEM_SOCKET)  # directory of the system-wide provider
SYSTEM_USER: Final = "sidestep"  # user as which it runs
SYSTEM_RUNTIME: Final = Path("/run/sidestep-provider")  # XDG_RUNTIME_DIR of that provider, whose /tmp is its own

# Directories in which all users can make files. In a container whose root is read-only the second is still writable.
SHARED_PLACES: Final = (Path("/tmp"), Path("/dev/shm"))  # noqa: S108 - see shared_place

_UCRED: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SUN_PATH_MAX: Final = 107  # bytes of a socket's path that fit struct sockaddr_un with its final zero


class Proof(Enum):
    """Way for the provider to make sure that a client holds the connection it names."""

    LOOKUP = "lookup"  # the kernel answers; clients in another network namespace bring a duplicate of the socket
    POSSESSION = "possession"  # all clients bring one: both ends in one namespace, whichever
    PATH = "path"  # and a UDP socket: the ends may be in different namespaces


class PromoteAfter(NamedTuple):
    """Bounds of which a connection reaches one before it is promoted; 0 calls: at once."""

    calls: int = layout.PROMOTE_AFTER_CALLS  # reads and writes
    payload_len: int = layout.PROMOTE_AFTER_BYTES  # bytes

    @classmethod
    def parse(cls, text: str) -> Self:
        """`CALLS` or `CALLS:BYTES`, as the shim reads it (native/shim.c::promote_after_read); raises Misuse."""
        calls, colon, payload_len = text.partition(":")
        if (
            not calls.isascii()
            or not calls.isdigit()
            or (colon and not (payload_len.isascii() and payload_len.isdigit()))
        ):
            raise Misuse(f"{text!r} is not CALLS or CALLS:BYTES", remedy="for example 8, 8:65536, or 0 for at once")
        value = cls(int(calls), int(payload_len)) if colon else cls(int(calls))
        calls_max, payload_max = layout.PROMOTE_AFTER_CALLS_MAX, layout.PROMOTE_AFTER_BYTES_MAX
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


def runtime_dir() -> Path:
    """The per-user directory of the provider's socket, not yet made: in the first place that nobody else can change.

    That is the rule, and this its one source: shims get the path, and check what is there. None of the places needs a
    login session, a home, or a writable root file system.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    for place in (*([Path(given)] if given else []), Path(f"/run/user/{os.getuid()}")):
        if _is_mine(place, but_for=0o022):  # sudo and su leave another user's in the environment
            return place / "sidestep"
    return shared_place(next((place for place in SHARED_PLACES if os.access(place, os.W_OK)), SHARED_PLACES[0]))


def shared_place(shared: Path) -> Path:
    """A place in a directory where all users can make files: the usual one, or if that is taken, another of ours.

    Other users can neither make a private directory of ours nor take a name that cannot be guessed.
    """
    usual = shared / f"sidestep-{os.getuid()}"
    if not os.path.lexists(usual) or _is_mine(usual):
        return usual
    import secrets

    mine = sorted(path for path in shared.glob(f"{usual.name}-*") if _is_mine(path))
    return mine[0] if mine else usual.with_name(f"{usual.name}-{secrets.token_hex(8)}")


def _is_mine(path: Path, *, but_for: int = 0o077) -> bool:
    """True if `path` is a directory of this user, with no such rights for others. A link to one is not."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & but_for


def rdma_dir() -> Path:
    """Directory of the sockets at which this user's processes with RDMA devices answer questions, not yet made."""
    return runtime_dir() / "rdma"


def peer(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a UNIX socket, as they were when it listened or connected."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


class NotBelieved(Unavailable):
    """A program that may belong to another user listens in the place of a provider."""


def check_listener(sock: socket.socket, path: Path) -> None:
    """Makes sure that the program that listens at `path`, to which `sock` is connected, may pair our connections.

    A program that pairs them can read and change their bytes. So only our own user and root are believed, in a
    directory that nobody else can change. At SYSTEM_SOCKET another user may be believed. Only root can make a directory
    in /run, so the owner of that directory is the system-wide provider's user. The shim does the same: believed() in
    shim_rpc.c.

    Raises:
        NotBelieved: The listener belongs to another user, or may have.
    """
    believed = {0, os.geteuid()}
    _, listener = peer(sock)
    directory = path.parent.stat()
    if path == SYSTEM_SOCKET:
        believed.add(directory.st_uid)
    what = f"{path} is not believed to be a provider's: "
    remedy = "end it, or give a place of your own with --socket"
    if listener not in believed:
        raise NotBelieved(f"{what}uid {listener} listens there, neither you nor root", remedy=remedy)
    if directory.st_uid not in believed or directory.st_mode & 0o022:
        raise NotBelieved(f"{what}others than you and root can change {path.parent}", remedy=remedy)


def connect(path: Path) -> socket.socket:
    """A connection to the provider at `path`; raises Unavailable if there is none, or none that is believed."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.connect(os.fspath(path))
        check_listener(sock, path)
    except NotBelieved:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        why = "none runs there" if isinstance(error, FileNotFoundError) else error.strerror
        raise Unavailable(
            f"no provider answers at {path}: {why}",
            remedy="start one with 'sidestep provider start'; 'sidestep run -- PROGRAM' does that as well",
        ) from error
    return sock


def answers(path: Path) -> bool:
    """True if a provider listens at `path`; raises NotBelieved if that could be anybody's."""
    try:
        connect(path).close()
    except NotBelieved:
        raise
    except Unavailable:
        return False
    return True


def system_socket() -> Path | None:
    """The socket of the system-wide provider; None if no program listens there, or only one that is not believed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(SYSTEM_SOCKET))
            check_listener(probe, SYSTEM_SOCKET)
        except (OSError, NotBelieved):
            return None
    return SYSTEM_SOCKET


def socket_path(given: str | os.PathLike[str] | None = None) -> Path:
    """The provider's socket: as given, else from the environment, else the system's, else in the user's own directory.

    Raises:
        Misuse: The path is too long for a socket.
    """
    chosen = given or os.environ.get(ENV_SOCKET)
    path = Path(chosen).absolute() if chosen else system_socket() or runtime_dir() / "provider"
    if len(os.fsencode(path)) > _SUN_PATH_MAX:
        raise Misuse(f"{path} is too long for a socket", remedy=f"give a path of at most {_SUN_PATH_MAX} bytes")
    return path


def make_private_dir(path: Path) -> None:
    """Makes `path` a directory that only this user can enter.

    Raises:
        Unavailable: It cannot be made, belongs to another user, or is open to others.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot make {path}: {error.strerror}", remedy="give another place with --socket") from error
    if not _is_mine(path):
        raise Unavailable(
            f"{path} is not a directory of mode 0700 owned by uid {os.getuid()}",
            remedy="put the socket into one of its own, which is made if missing: --socket DIRECTORY/provider",
        )


def check_public_dir(path: Path) -> None:
    """Makes `path` a directory that all users can enter and only this one, or root, can change.

    Raises:
        Unavailable: It cannot be made, or others could put their own socket there.
    """
    try:
        path.mkdir(mode=0o755, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise Unavailable(f"cannot make {path}: {error.strerror}", remedy="give another place with --socket") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise Unavailable(
            f"{path} is not a directory that only root or uid {os.geteuid()} can change",
            remedy=f"chown it and 'chmod 755 {path}', or give another place with --socket",
        )


def log_file(environment: Mapping[str, str]) -> Path | None:
    """The file that the shim is asked to log to; None if there is to be none. Makes nothing.

    Raises:
        Unavailable: It cannot be written, and the shim would say nothing of it.
    """
    if not (name := environment.get(ENV_LOG)):
        return None
    path = Path(name)
    try:
        if not path.exists():
            os.close(os.open(path.parent, os.O_DIRECTORY | os.O_CLOEXEC))
        if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
            raise PermissionError(errno.EACCES, "it is a directory" if path.is_dir() else os.strerror(errno.EACCES))
    except OSError as error:
        raise Unavailable(
            f"{ENV_LOG}={name} cannot be written: {error.strerror}",
            remedy="name a file that the programs' user can write, in a directory that is there",
        ) from error
    return path


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


class ShimSettings(NamedTuple):
    """Settings that `sidestep run` gives the shim; None leaves the provider's default."""

    socket: Path
    promote_after: PromoteAfter | None = None
    ring_size: int | None = None  # bytes a direction
    spin_us: int | None = None  # 0: never spin
    carry: bool = True  # programs that are given an environment of their caller's making are under the shim, too

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with the shim preloaded, and its settings; other preloaded libraries come before it."""
        library = str(native_library())
        preloaded = [entry for entry in base.get("LD_PRELOAD", "").replace(":", " ").split() if entry != library]
        env = dict(base) | {"LD_PRELOAD": " ".join([*preloaded, library]), ENV_SOCKET: str(self.socket)}
        if os.geteuid() == 0:
            env[ENV_FROM_ROOT] = "1"
        if self.promote_after is not None:
            env[ENV_PROMOTE_AFTER] = str(self.promote_after)
        if self.ring_size is not None:
            env[ENV_RING_SIZE] = str(self.ring_size)
        if self.spin_us is not None:
            env[ENV_SPIN_US] = str(self.spin_us)
        if not self.carry:
            env[ENV_CARRY] = "0"
        return env


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
