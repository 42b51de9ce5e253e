"""Places of files and the environment of the shim, for `sidestep run`, which reads this before each program.

Paths are str, and every module that takes long to load is left out: pathlib, typing, dataclasses and `socket` among
them. config.py has the same for all other code, with paths as `Path`. The environment of the shim is written here and
nowhere else, so that `sidestep run` and the tests agree.
"""

from __future__ import annotations

import _socket
import errno
import os
import stat
import struct

from sidestep.errors import Misuse, Unavailable
from sidestep.native import defaults

TYPE_CHECKING = False  # the name of typing, which takes longer to load than all of this
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final

    from sidestep.settings import PromoteAfter

ENV_SOCKET: Final = "SIDESTEP_SOCKET"  # path of the provider's socket
ENV_PROMOTE_AFTER: Final = "SIDESTEP_PROMOTE_AFTER"  # `CALLS[:BYTES]` until promotion (else :2097152); `0`: at once
ENV_RING_SIZE: Final = "SIDESTEP_RING_SIZE"  # bytes of a channel in each direction, a power of two
ENV_SPIN_US: Final = "SIDESTEP_SPIN_US"  # microseconds that a wait may spin before it sleeps; `0`: never
ENV_STAY: Final = "SIDESTEP_STAY"  # `1`: no thread is moved to another CPU
ENV_DISABLE: Final = "SIDESTEP_DISABLE"  # `1`: the shim does nothing
ENV_CARRY: Final = "SIDESTEP_CARRY"  # `0`: a program that is given an environment without these names is left out
ENV_POLICY: Final = "SIDESTEP_POLICY"  # policy file instead of the user's own, when a provider starts
ENV_FROM_ROOT: Final = "SIDESTEP_FROM_ROOT"  # `1`: root ran `sidestep run`; gives no rights, see provider/users.py
ENV_LOG: Final = "SIDESTEP_LOG"  # file to which the shim appends diagnostics

# Directories in which all users can make files. In a container whose root is read-only the second is still writable.
SHARED_PLACES: Final = ("/tmp", "/dev/shm")  # noqa: S108 - see shared_place
NATIVE: Final = os.path.join(os.path.dirname(__file__), "native")

_SUN_PATH_MAX: Final = 107  # bytes of a socket's path that fit struct sockaddr_un with its final zero
_UCRED: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid


def runtime_dir() -> str:
    """The per-user directory of the provider's socket, not yet made: in the first place that nobody else can change.

    That is the rule, and this its one source: shims get the path, and check what is there. None of the places needs a
    login session, a home, or a writable root file system.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    for place in (*([given] if given else []), f"/run/user/{os.getuid()}"):
        if is_mine(place, but_for=0o022):  # sudo and su leave another user's in the environment
            return os.path.join(place, "sidestep")
    return shared_place(next((place for place in SHARED_PLACES if os.access(place, os.W_OK)), SHARED_PLACES[0]))


def shared_place(shared: str) -> str:
    """A place in a directory where all users can make files: the usual one, or if that is taken, another of ours.

    Other users can neither make a private directory of ours nor take a name that cannot be guessed.
    """
    usual = os.path.join(shared, f"sidestep-{os.getuid()}")
    if not os.path.lexists(usual) or is_mine(usual):
        return usual
    import secrets

    try:
        names = os.listdir(shared)
    except OSError:  # a directory that can be entered, and not read
        names = []
    mine = sorted(
        path for name in names if (path := os.path.join(shared, name)).startswith(f"{usual}-") and is_mine(path)
    )
    return mine[0] if mine else f"{usual}-{secrets.token_hex(8)}"


def is_mine(path: str | os.PathLike[str], *, but_for: int = 0o077) -> bool:
    """True if `path` is a directory of this user, with no such rights for others. A link to one is not."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & but_for


def native_library() -> str:
    """Path of ``libsidestep.so``, the library that ``sidestep run`` preloads.

    Raises:
        Unavailable: The library was not built for this installation.
    """
    path = os.path.join(NATIVE, "libsidestep.so")
    if not os.path.isfile(path):
        raise Unavailable(f"{path} is missing", remedy="install sidestep with pip, or run 'make build' in a checkout")
    return path


def loader() -> str | None:
    """Path of the program that starts static programs, and those of another C library; None where there is none."""
    path = os.path.join(NATIVE, "sidestep-loader")
    return path if os.path.isfile(path) else None


def peer(sock: _socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a UNIX socket, as they were when it listened or connected."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


class NotBelieved(Unavailable):
    """A program that may belong to another user listens in the place of a provider."""


def check_listener(sock: _socket.socket, path: str) -> None:
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
    parent = os.path.dirname(path) or "."
    directory = os.stat(parent)
    if path == defaults.SYSTEM_SOCKET:
        believed.add(directory.st_uid)
    what = f"{path} is not believed to be a provider's: "
    remedy = "end it, or give a place of your own with --socket"
    if listener not in believed:
        raise NotBelieved(f"{what}uid {listener} listens there, neither you nor root", remedy=remedy)
    if directory.st_uid not in believed or directory.st_mode & 0o022:
        raise NotBelieved(f"{what}others than you and root can change {parent}", remedy=remedy)


def connect(sock: _socket.socket, path: str) -> None:
    """Connects `sock` to the provider at `path`; closes it where that raises.

    Raises:
        NotBelieved: As `check_listener`.
        Unavailable: None is there.
    """
    try:
        sock.connect(path)
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


def answers(path: str) -> bool:
    """True if a provider listens at `path`; raises NotBelieved if that could be anybody's."""
    probe = _unix_socket()
    try:
        connect(probe, path)
    except NotBelieved:
        raise
    except Unavailable:
        return False
    probe.close()
    return True


def system_socket() -> str | None:
    """The socket of the system-wide provider; None if no program listens there, or only one that is not believed."""
    probe = _unix_socket()
    try:
        probe.setblocking(False)
        probe.connect(defaults.SYSTEM_SOCKET)
        check_listener(probe, defaults.SYSTEM_SOCKET)
    except (OSError, NotBelieved):
        return None
    finally:
        probe.close()
    return defaults.SYSTEM_SOCKET


def _unix_socket() -> _socket.socket:
    return _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)


def socket_path(given: str | os.PathLike[str] | None = None) -> str:
    """The provider's socket: as given, else from the environment, else the system's, else in the user's own directory.

    Raises:
        Misuse: The path is too long for a socket.
    """
    chosen = given or os.environ.get(ENV_SOCKET)
    if chosen:
        chosen = os.fspath(chosen)
        words = (chosen if chosen.startswith("/") else f"{os.getcwd()}/{chosen}").split("/")
        path = "/" + "/".join(word for word in words if word not in ("", "."))  # the way of pathlib: `..` stays
    else:
        path = system_socket() or os.path.join(runtime_dir(), "provider")
    if len(os.fsencode(path)) > _SUN_PATH_MAX:
        raise Misuse(f"{path} is too long for a socket", remedy=f"give a path of at most {_SUN_PATH_MAX} bytes")
    return path


def log_file(environment: Mapping[str, str]) -> str | None:
    """The file that the shim is asked to log to; None if there is to be none. Makes nothing.

    Raises:
        Unavailable: It cannot be written, and the shim would say nothing of it.
    """
    if not (path := environment.get(ENV_LOG)):
        return None
    place = os.path.dirname(path) or "."
    try:
        if not os.path.exists(path):
            os.close(os.open(place, os.O_DIRECTORY | os.O_CLOEXEC))
        if not os.access(path if os.path.exists(path) else place, os.W_OK) or os.path.isdir(path):
            is_directory = os.path.isdir(path)
            raise PermissionError(errno.EACCES, "it is a directory" if is_directory else os.strerror(errno.EACCES))
    except OSError as error:
        raise Unavailable(
            f"{ENV_LOG}={path} cannot be written: {error.strerror}",
            remedy="name a file that the programs' user can write, in a directory that is there",
        ) from error
    return path


class ShimSettings:
    """Settings that `sidestep run` gives the shim; None leaves the provider's default.

    Args:
        socket: The provider's.
        promote_after: How much life a connection must show.
        ring_size: Bytes of a channel in each direction.
        spin_us: Microseconds that a wait may spin; 0: never.
        carry: Programs that are given an environment of their caller's making are under the shim, too.
    """

    __slots__ = ("carry", "promote_after", "ring_size", "socket", "spin_us")

    def __init__(
        self,
        socket: str | os.PathLike[str],
        promote_after: PromoteAfter | None = None,
        ring_size: int | None = None,
        spin_us: int | None = None,
        *,
        carry: bool = True,
    ) -> None:
        self.socket = os.fspath(socket)
        self.promote_after = promote_after
        self.ring_size = ring_size
        self.spin_us = spin_us
        self.carry = carry

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with the shim preloaded, and its settings; other preloaded libraries come before it."""
        library = native_library()
        preloaded = [entry for entry in base.get("LD_PRELOAD", "").replace(":", " ").split() if entry != library]
        env = dict(base) | {"LD_PRELOAD": " ".join([*preloaded, library]), ENV_SOCKET: self.socket}
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
