"""Settings of the shim, and places of files, as all code has them but `sidestep run`: see places.py.

The settings of a provider are in settings.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sidestep import places
from sidestep.errors import Unavailable
from sidestep.native import defaults
from sidestep.places import (
    ENV_CARRY,
    ENV_DISABLE,
    ENV_FROM_ROOT,
    ENV_LOG,
    ENV_POLICY,
    ENV_PROMOTE_AFTER,
    ENV_RING_SIZE,
    ENV_SOCKET,
    ENV_SPIN_US,
    ENV_STAY,
    NotBelieved,
    ShimSettings,
    peer,
)

if TYPE_CHECKING:
    import socket

__all__ = [
    "ENV_CARRY", "ENV_DISABLE", "ENV_FROM_ROOT", "ENV_LOG", "ENV_POLICY", "ENV_PROMOTE_AFTER", "ENV_RING_SIZE",
    "ENV_SOCKET", "ENV_SPIN_US", "ENV_STAY", "SHARED_PLACES", "SYSTEM_POLICY", "SYSTEM_RUNTIME", "SYSTEM_SOCKET",
    "SYSTEM_USER", "NotBelieved", "ShimSettings", "answers", "check_public_dir", "connect", "log_file",
    "make_private_dir", "peer", "rdma_dir", "runtime_dir", "shared_place", "socket_path",
]  # fmt: skip

SYSTEM_POLICY: Final = Path("/etc/sidestep/policy.conf")
SYSTEM_SOCKET: Final = Path(defaults.SYSTEM_SOCKET)  # directory of the system-wide provider
SYSTEM_USER: Final = "sidestep"  # user as which it runs
SYSTEM_RUNTIME: Final = Path("/run/sidestep-provider")  # XDG_RUNTIME_DIR of that provider, whose /tmp is its own
SHARED_PLACES: Final = tuple(map(Path, places.SHARED_PLACES))


def runtime_dir() -> Path:
    """The per-user directory of the provider's socket, not yet made; see `places.runtime_dir`."""
    return Path(places.runtime_dir())


def shared_place(shared: Path) -> Path:
    """A place of this user's in a directory where all users can make files; see `places.shared_place`."""
    return Path(places.shared_place(os.fspath(shared)))


def rdma_dir() -> Path:
    """Directory of the sockets at which this user's processes with RDMA devices answer questions, not yet made."""
    return runtime_dir() / "rdma"


def connect(path: Path) -> socket.socket:
    """A connection to the provider at `path`; raises Unavailable if there is none, or none that is believed."""
    import socket

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    places.connect(sock, os.fspath(path))
    return sock


def answers(path: Path) -> bool:
    """True if a provider listens at `path`; raises NotBelieved if that could be anybody's."""
    return places.answers(os.fspath(path))


def socket_path(given: str | os.PathLike[str] | None = None) -> Path:
    """The provider's socket: as given, else from the environment, else the system's, else in the user's own directory.

    Raises:
        Misuse: The path is too long for a socket.
    """
    return Path(places.socket_path(given))


def make_private_dir(path: Path) -> None:
    """Makes `path` a directory that only this user can enter.

    Raises:
        Unavailable: It cannot be made, belongs to another user, or is open to others.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot make {path}: {error.strerror}", remedy="give another place with --socket") from error
    if not places.is_mine(path):
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
    return Path(found) if (found := places.log_file(environment)) else None
