"""The provider as a process: in the background, gone without a trace however it ends."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sidestep.errors import Unavailable
from sidestep.provider.log import to_file, to_stderr
from sidestep.provider.rundir import BUSY, READY, AlreadyRunning, RunDir, log_path, passed_listener
from sidestep.provider.server import Provider
from sidestep.settings import ProviderSettings

_LOG_MODE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def serve(
    settings: ProviderSettings,
    *,
    ready_fd: int | None = None,
    background: bool = False,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Runs a provider until it stops; returns in the process that served.

    `ready_fd` is written `READY`, `BUSY`, or the text of an error, and closed. With `background` the caller's process
    exits at once and a grandchild without a terminal serves. `on_ready` is called once it listens.

    Raises:
        Unavailable: The place is taken or cannot be used (`ready_fd` gets the error as well).
    """
    _raise_descriptor_limit()
    try:
        listener = passed_listener() if settings.system else None
        place = RunDir.inherit(listener) if listener else RunDir.take(settings.socket, public=settings.system)
        if background:
            _detach(log_path(settings.socket), keep={place.lock_fd, place.listener.fileno(), ready_fd})
        provider = Provider(settings, place.listener, write_log=to_file if background else to_stderr)
    except AlreadyRunning:
        _tell(ready_fd, BUSY)
        raise
    except Unavailable as error:
        _tell(ready_fd, str(error).encode())
        raise
    try:
        _tell(ready_fd, READY)
        on_ready()
        provider.run()
    finally:
        place.leave()


def _tell(ready_fd: int | None, text: bytes) -> None:
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, text)
    except BrokenPipeError:  # the process that started us has gone; we serve the others
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
