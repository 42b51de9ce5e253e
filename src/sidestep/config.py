"""Settings of the shim, and places of files: values checked once, at the edge.

The environment of the shim is written here and nowhere else, so that `sidestep run` and the tests agree.

`sidestep run` reads this before each program, so it imports at the top only modules that load quickly: neither
dataclasses nor `socket`. The settings of a provider are in settings.py.
"""

from __future__ import annotations

import _socket
import errno
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from sidestep.errors import Misuse, Unavailable
from sidestep.installation import native_library
from sidestep.native import defaults

if TYPE_CHECKING:
    import socket

    from sidestep.settings import PromoteAfter

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
SYSTEM_SOCKET: Final = Path(defaults.SYSTEM_SOCKET)  # directory of the system-wide provider
SYSTEM_USER: Final = "sidestep"  # user as which it runs
SYSTEM_RUNTIME: Final = Path("/run/sidestep-provider")  # XDG_RUNTIME_DIR of that provider, whose /tmp is its own

# Directories in which all users can make files. In a container whose root is read-only the second is still writable.
SHARED_PLACES: Final = (Path("/tmp"), Path("/dev/shm"))  # noqa: S108 - see shared_place

_UCRED: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SUN_PATH_MAX: Final = 107  # bytes of a socket's path that fit struct sockaddr_un with its final zero


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


def peer(sock: _socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a UNIX socket, as they were when it listened or connected."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


class NotBelieved(Unavailable):
    """A program that may belong to another user listens in the place of a provider."""


def check_listener(sock: _socket.socket, path: Path) -> None:
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
    import socket

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _connect(sock, path)
    return sock


def _connect(sock: _socket.socket, path: Path) -> None:
    """Connects `sock` as `connect` says; closes it where that raises."""
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


def answers(path: Path) -> bool:
    """True if a provider listens at `path`; raises NotBelieved if that could be anybody's."""
    probe = _unix_socket()
    try:
        _connect(probe, path)
    except NotBelieved:
        raise
    except Unavailable:
        return False
    probe.close()
    return True


def system_socket() -> Path | None:
    """The socket of the system-wide provider; None if no program listens there, or only one that is not believed."""
    probe = _unix_socket()
    try:
        probe.setblocking(False)
        probe.connect(os.fspath(SYSTEM_SOCKET))
        check_listener(probe, SYSTEM_SOCKET)
    except (OSError, NotBelieved):
        return None
    finally:
        probe.close()
    return SYSTEM_SOCKET


def _unix_socket() -> _socket.socket:
    return _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)


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
