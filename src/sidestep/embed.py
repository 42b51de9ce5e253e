"""The shim in this process, where `sidestep run` did not start it.

`libsidestep.so` is loaded. Calls of the interpreter and its libraries into the C library are redirected to it, as the
dynamic linker does in a preloaded program (`shim_embed.c`). Then either every TCP socket made from now on is
tracked (`install`), or only those that were adopted: the sockets of `sidestep.socket`. All others are left alone. Under
`sidestep run` there is nothing to do.

Loading cannot be undone: other code may be inside a redirected call at any time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Final

from sidestep import config
from sidestep.config import ShimSettings
from sidestep.errors import Misuse, Unavailable
from sidestep.installation import native_library
from sidestep.native import defaults
from sidestep.settings import PromoteAfter, ProviderSettings, parse_ring_size, policy_places

__all__ = ["install", "installed", "uninstall"]


class _Settings(ctypes.Structure):
    """`struct sidestep_settings` of shim_embed.c; -1 leaves a number as it is."""

    _fields_ = (
        ("socket", ctypes.c_char_p),
        ("promote_after_calls", ctypes.c_int64),
        ("promote_after_bytes", ctypes.c_int64),
        ("ring_size", ctypes.c_int64),
        ("spin_us", ctypes.c_int64),
    )


_REFUSALS: Final = {  # result of sidestep_embed(): the fault, and the remedy
    errno.ENOENT: (
        "this interpreter makes no call that could be redirected: it is linked statically",
        "use one that is linked with the shared C library, such as the distribution's",
    ),
    errno.EPERM: ("this process may not redirect its calls", "start it with 'sidestep run' instead"),
}

_lock: Final = threading.RLock()
_shim: ctypes.CDLL | None = None  # true once calls are redirected, or if they were so from the start
_preloaded = False
_everything = False  # every TCP socket is tracked
_failure: Unavailable | None = None  # reason why the sockets of sidestep.socket stay on TCP


def install(
    *,
    every_socket: bool = True,
    socket: str | os.PathLike[str] | None = None,
    promote_after: PromoteAfter | str | int | None = None,
    ring_size: int | str | None = None,
    spin_us: int | None = None,
) -> bool:
    """Takes over the TCP sockets that this process makes from now on, as if `sidestep run` had started it.

    Sockets that exist stay on TCP; connections that an existing listener accepts are taken over. Call it before an
    event loop is made, or in a coroutine of asyncio's own loop. Waits of other existing loops are not seen, and their
    connections stay on TCP. Child processes are not affected.

    Under `sidestep run` this does nothing, and the settings given there hold. A provider is started if none runs.

    Args:
        every_socket: False: only `sidestep.socket` objects are taken over; the settings hold for them.
        socket: Path of the provider's socket; else $SIDESTEP_SOCKET, else the user's own provider.
        promote_after: Reads and writes until promotion, as `CALLS` or `CALLS:BYTES`; 0: at once.
        ring_size: Bytes of a channel in each direction, such as "256K": a power of two.
        spin_us: Microseconds that a wait may spin before it sleeps; 0: never.

    Returns:
        True if sockets are taken over; False where SIDESTEP_DISABLE keeps them on TCP.

    Raises:
        Misuse: A setting is wrong, or comes after the first sidestep socket of the process was made.
        Unavailable: The shim cannot work in this process, or no provider can be started. Everything stays on TCP.
    """
    global _everything
    settings = _settings(socket, promote_after, ring_size, spin_us)
    given = (socket, promote_after, ring_size, spin_us) != (None, None, None, None)
    with _lock:
        if _shim is not None and given and not _preloaded:
            raise Misuse(
                "sidestep has its settings already",
                remedy="call install() once, before the first socket of sidestep.socket is made",
            )
        shim = _shim or _load(settings)
        if shim is None:
            return False
        if every_socket:
            shim.sidestep_track_all(1)
            _everything = True
    _adopt_running_loop(shim)
    return True


def uninstall() -> None:
    """Ends what `install` began: sockets made from now on stay on TCP, unless they are `sidestep.socket` objects.

    Sockets that were taken over stay so. Under `sidestep run` this does nothing.
    """
    global _everything
    with _lock:
        if _shim is not None:
            _shim.sidestep_track_all(0)
        _everything = False


def installed() -> bool:
    """True if every TCP socket that this process makes is taken over, by `install` or by `sidestep run`."""
    with _lock:
        return _everything or (_preload() is not None and not _disabled())


def adopt(fd: int) -> None:
    """Lets the shim track the TCP socket `fd`, which has just been made, or what it accepts if it listens.

    Where the shim cannot work the socket stays on TCP, and the first time there is a RuntimeWarning that says why.
    """
    shim = _shim or _load_or_warn()
    if shim is not None:
        shim.sidestep_adopt(fd)


def load() -> None:
    """Makes sure that calls are redirected, if that can be; else there is a RuntimeWarning as of `adopt`."""
    if _shim is None:
        _load_or_warn()


def adopt_running_loop() -> None:
    """Lets the shim see the waits of the running asyncio loop, if that was made before the shim was loaded."""
    shim = _shim or _load_or_warn()
    if shim is not None:
        _adopt_running_loop(shim)


def loaded() -> ctypes.CDLL | None:
    """The shim as it is loaded; None where it is not."""
    return _shim


def _adopt_running_loop(shim: ctypes.CDLL) -> None:
    if "asyncio" not in sys.modules:
        return
    import asyncio

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    # A loop of another kind, such as uvloop's, waits in the kernel unseen, and its connections stay on TCP.
    selector = getattr(loop, "_selector", None)
    if selector is not None:
        shim.sidestep_adopt_set(selector.fileno())


def _settings(
    socket: str | os.PathLike[str] | None,
    promote_after: PromoteAfter | str | int | None,
    ring_size: int | str | None,
    spin_us: int | None,
) -> ShimSettings:
    after = PromoteAfter.parse(str(promote_after)) if isinstance(promote_after, str | int) else promote_after
    if spin_us is not None and not 0 <= spin_us <= defaults.SPIN_US_MAX:
        raise Misuse(f"{spin_us} is no time to spin", remedy=f"give microseconds from 0 to {defaults.SPIN_US_MAX}")
    size = None if ring_size is None else parse_ring_size(str(ring_size))
    return ShimSettings(config.socket_path(socket), after, size, spin_us)


def _disabled() -> bool:
    return os.environ.get(config.ENV_DISABLE, "0") not in ("", "0")


def _preload() -> ctypes.CDLL | None:
    """The shim, if this process was started with it."""
    everything = ctypes.CDLL(None)
    return everything if hasattr(everything, "sidestep_adopt") else None


def _load_or_warn() -> ctypes.CDLL | None:
    global _failure
    with _lock:
        if _shim is not None or _failure is not None:
            return _shim
        try:
            return _load(_settings(None, None, None, None))
        except Unavailable as error:
            _failure = error
    warnings.warn(f"sidestep: plain TCP: {_failure}", RuntimeWarning, stacklevel=4)
    return None


def _load(settings: ShimSettings) -> ctypes.CDLL | None:
    """Redirects the process's calls; None if the user wants none of it. The lock is held."""
    global _shim, _preloaded, _failure
    if (shim := _preload()) is not None:
        _shim, _preloaded = shim, True
        return shim
    if _disabled():
        return None
    from sidestep.provider import control  # only here: what merely imports sidestep has no use for it

    control.start(ProviderSettings(Path(settings.socket), policy=policy_places(os.environ)))
    try:
        shim = ctypes.CDLL(str(native_library()), mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_NODELETE)
    except OSError as error:
        remedy = "sidestep needs the GNU C library, on the machine that it was built for"
        if "static TLS" in str(error):
            remedy = "call sidestep.install() before other libraries are loaded, or use 'sidestep run'"
        raise Unavailable(f"the shim cannot be loaded: {error}", remedy=remedy) from error
    after, spin_us = settings.promote_after, settings.spin_us
    failed = shim.sidestep_embed(
        ctypes.byref(
            _Settings(
                os.fsencode(settings.socket),
                -1 if after is None else after.calls,
                -1 if after is None else after.payload_len,
                -1 if settings.ring_size is None else settings.ring_size,
                -1 if spin_us is None else spin_us,
            )
        )
    )
    if failed:
        why, remedy = _REFUSALS.get(-failed, (f"the shim refused to start: {os.strerror(-failed)}", ""))
        raise Unavailable(why, remedy=remedy)
    _shim, _failure = shim, None
    return shim
