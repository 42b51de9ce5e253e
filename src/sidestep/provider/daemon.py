"""The provider as a process: one per socket, in the background, gone without a trace however it ends.

A lock file beside the socket says who the provider is: the kernel drops the lock with its holder, so kill -9 leaves
nothing but a stale socket, which the next provider replaces. Two that start at once are told apart by the lock.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sidestep.config import ProviderSettings, make_private_dir
from sidestep.errors import Unavailable
from sidestep.provider.server import Provider

READY: Final = b"ready"
BUSY: Final = b"busy"  # another provider has the lock
_BACKLOG: Final = 1024  # shims connect without waiting; beyond it they try again later
_LOG_MODE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def lock_path(socket_path: Path) -> Path:
    """The lock file of the provider with this socket."""
    return socket_path.with_name(socket_path.name + ".lock")


def log_path(socket_path: Path) -> Path:
    """The log of the provider with this socket."""
    return socket_path.with_name(socket_path.name + ".log")


class AlreadyRunning(Unavailable):
    """Another provider serves this socket, or is about to."""


@dataclass(frozen=True, slots=True)
class Place:
    """A socket that this process serves, and the lock that makes it the only one."""

    path: Path
    listener: socket.socket
    lock_fd: int
    identity: tuple[int, int]  # device and inode of the socket's name

    @classmethod
    def take(cls, path: Path) -> Place:
        """Takes the lock and listens.

        Raises:
            AlreadyRunning: Another provider holds the lock.
            Unavailable: The place cannot be used.
        """
        make_private_dir(path.parent)
        try:
            lock_fd = os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable(f"cannot open {lock_path(path)}: {error.strerror}") from error
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)  # left by one that was killed: whoever has the lock owns the name
            listener.bind(os.fspath(path))
            path.chmod(0o600)
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
        """Stops listening and takes the name away, unless somebody else has put his own there."""
        try:
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self.identity:
                self.path.unlink()
        except FileNotFoundError:  # removed by hand; there is nothing left to take away
            pass
        self.listener.close()
        os.close(self.lock_fd)


def serve(settings: ProviderSettings, *, ready_fd: int | None, background: bool) -> None:
    """Runs a provider until it stops; returns in the process that served.

    `ready_fd` is written `READY`, `BUSY`, or the text of an error, and closed. With `background` the caller's process
    exits at once and a grandchild without a terminal serves.

    Raises:
        Unavailable: The place is taken or cannot be used (told through `ready_fd` as well).
    """
    _raise_descriptor_limit()
    try:
        place = Place.take(settings.socket)
        if background:
            _detach(log_path(settings.socket), keep={place.lock_fd, place.listener.fileno(), ready_fd})
        provider = Provider(settings, place.listener)
    except AlreadyRunning:
        _tell(ready_fd, BUSY)
        raise
    except Unavailable as error:
        _tell(ready_fd, str(error).encode())
        raise
    try:
        _tell(ready_fd, READY)
        provider.run()
    finally:
        place.leave()


def _tell(ready_fd: int | None, text: bytes) -> None:
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, text)
    except BrokenPipeError:  # who started us has gone; we serve the others
        pass
    finally:
        os.close(ready_fd)


def _raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _detach(log: Path, *, keep: set[int | None]) -> None:
    """Goes on as a grandchild in a session of its own, with nothing of the caller's but `keep`."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():  # only a session leader could ever get a terminal again
        os._exit(0)
    os.chdir("/")
    os.umask(0o077)
    null_fd = os.open(os.devnull, os.O_RDWR)
    log_fd = os.open(log, _LOG_MODE, 0o600)
    for source, target in ((null_fd, 0), (null_fd, 1), (log_fd, 2)):
        os.dup2(source, target)
    for number in (int(name) for name in os.listdir("/proc/self/fd")):  # noqa: PTH208 - of our own process
        if number > 2 and number not in keep:
            _close_if_open(number)


def _close_if_open(number: int) -> None:
    try:
        os.close(number)
    except OSError:  # the descriptor with which the directory itself was listed
        return
