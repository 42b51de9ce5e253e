"""Directory of a provider: its socket, its lock, its log, and the words of its answer when it starts.

A lock file beside the socket names the provider. The kernel drops the lock with its holder, so kill -9 leaves nothing
but a stale socket, which the next provider replaces. If two start at once the lock decides.

A service manager may pass the listening socket on (sd_listen_fds(3)). It keeps the socket, so the first client can
start the provider, and a restart never leaves a client without a listener.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final, NamedTuple

from sidestep.config import check_public_dir, make_private_dir
from sidestep.errors import Unavailable

READY: Final = b"ready"  # the provider listens
BUSY: Final = b"busy"  # another provider has the lock
_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START
_BACKLOG: Final = 1024  # shims connect without waiting; beyond it they try again later


def lock_path(socket_path: Path) -> Path:
    return socket_path.with_name(socket_path.name + ".lock")


def log_path(socket_path: Path) -> Path:
    return socket_path.with_name(socket_path.name + ".log")


class AlreadyRunning(Unavailable):
    """Another provider serves this socket, or is about to."""


class RunDir(NamedTuple):
    """A socket that this process serves, and the lock that makes it the only one."""

    path: Path
    listener: socket.socket
    lock_fd: int | None  # socket; None: the service manager made it, and keeps it
    identity: tuple[int, int]  # device and inode of the socket's name

    @classmethod
    def inherit(cls, listener: socket.socket) -> RunDir:
        """Takes the listener that the service manager has passed on."""
        return cls(Path(listener.getsockname()), listener, None, (0, 0))

    @classmethod
    def take(cls, path: Path, *, public: bool = False) -> RunDir:
        """Takes the lock and listens; `public`: for all users.

        Raises:
            AlreadyRunning: Another provider holds the lock.
            Unavailable: The place cannot be used.
        """
        if public:
            check_public_dir(path.parent)
        else:
            make_private_dir(path.parent)
        try:
            lock_fd = os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable(f"cannot open {lock_path(path)}: {error.strerror}") from error
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)  # left by one that was killed: the holder of the lock owns the name
            listener.bind(os.fspath(path))
            path.chmod(0o666 if public else 0o600)
            listener.listen(_BACKLOG)
            found = path.lstat()
        except OSError as error:
            listener.close()
            os.close(lock_fd)
            if isinstance(error, BlockingIOError):
                raise AlreadyRunning(f"a provider serves {path} already") from error
            raise Unavailable(f"cannot listen at {path}: {error.strerror}") from error
        return cls(path, listener, lock_fd, (found.st_dev, found.st_ino))

    def leave(self) -> None:
        """Stops listening and removes the name, unless it is another provider's."""
        if self.lock_fd is None:
            self.listener.close()
            return
        try:
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self.identity:
                self.path.unlink()
        except FileNotFoundError:  # removed by hand; there is nothing left to take away
            pass
        self.listener.close()
        os.close(self.lock_fd)


def passed_listener(environment: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """The socket that the service manager handed over, None if there is none; takes its variables away.

    They are for this process alone.

    Raises:
        Unavailable: What was handed over is not one listening AF_UNIX SOCK_SEQPACKET socket.
    """
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isascii() or not count.isdigit() or count == "0":
        return None
    if count != "1":
        raise Unavailable(f"{count} sockets were handed over, not one", remedy="see sidestep.socket")
    os.set_inheritable(_FIRST_FD, False)
    try:
        found = socket.socket(fileno=_FIRST_FD)
    except OSError as error:
        raise Unavailable(f"descriptor {_FIRST_FD} is not a socket: {error.strerror}") from error
    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if (found.family, found.type, listens) != (socket.AF_UNIX, socket.SOCK_SEQPACKET, 1):
        found.close()
        raise Unavailable(
            "the socket handed over does not listen for AF_UNIX SOCK_SEQPACKET connections",
            remedy="write ListenSequentialPacket= into sidestep.socket",
        )
    return found
