"""The thread that serves the RDMA devices of a process, for programs whose calls block.

Theory of operation. One daemon thread drives the loop of all devices; it begins with the first socket. A call of a
socket holds the lock meanwhile. It does its work and lets the loop have a turn, so that the request goes out at once.
If the call has to wait, it releases the lock and registers its condition. The service thread checks after each turn
whose wait is over. So the other end's RDMA Reads, credits and closes are answered while the program does other work.

The main thread is where signal handlers run, and where KeyboardInterrupt can be raised between any two steps. Nothing
of the protocol may be left half done. So a companion thread makes the calls of the main thread, which waits for it. If
a signal handler raises meanwhile, the companion's wait ends: it takes the request back, as for a timeout. Only then the
exception goes on. No device writes into the caller's buffer after that.

After `fork` the child cannot use it: its calls fail.
"""

from __future__ import annotations

import atexit
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from sidestep import limits
from sidestep.api.driver import Driver
from sidestep.api.rnic import Rnics, log
from sidestep.errors import Misuse

if TYPE_CHECKING:
    from types import TracebackType

_T = TypeVar("_T")
_FOREVER_S: Final = 3600.0  # seconds that the thread sleeps at a time when nothing is due
_TURNS_MAX: Final = 32  # turns of a call that does not want to wait: more may always be coming
_YIELDS_MAX: Final = 100  # times that the thread lets others have the lock first


class _Interrupted(BaseException):
    """The main thread does not wait any more."""


class _Wait:
    """One call that waits."""

    __slots__ = ("changed", "error", "over", "ready")

    def __init__(self, ready: Callable[[], bool], lock: threading.RLock) -> None:
        self.ready = ready
        self.changed = threading.Condition(lock)
        self.over = False
        self.error: BaseException | None = None


class Service(Driver):
    """Serves all devices of this process; see `service`."""

    def __init__(self) -> None:
        self.rnics = Rnics(lambda: None)  # the holder of the lock lets the loop have its turn
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._entering: deque[None] = deque()  # an entry for each thread that wants the lock
        self._waits: list[_Wait] = []
        self._later: deque[Callable[[], object]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sleeps_until = 0.0  # time when the thread looks again by itself; 0: it is awake
        self._calls = threading.local()
        self._idle: list[_Companion] = []
        self._thread = threading.Thread(target=self._run, name="sidestep-sdp", daemon=True)
        self._thread.start()
        atexit.register(self._finish)

    # --- calls ---

    def call(self, function: Callable[[], _T]) -> _T:
        """Makes a call of a socket: here, or in the main thread's place."""
        if self._pid != os.getpid():
            raise Misuse("SDP sockets do not survive fork", remedy="open them in the child")
        if threading.current_thread() is not threading.main_thread():
            return super().call(function)
        try:
            companion = self._idle.pop()
        except IndexError:
            companion = _Companion(self, self._calls)
        made = _Call(function)
        try:
            companion.calls.put(made)
            made.done.acquire()
        except BaseException:
            while not made.finished:
                try:
                    self._interrupt(made)
                    companion.calls.put(made)  # perhaps it never was; it is made once
                    made.done.acquire()
                except BaseException:  # noqa: S112 - the first one goes on, once the buffer is free
                    continue
            raise
        finally:
            self._idle.append(companion)
        try:
            if made.error is not None:
                raise made.error
            return made.result  # type: ignore[no-any-return]
        finally:
            del made  # the error's traceback has this frame

    def later(self, function: Callable[[], object]) -> None:
        """See `Driver.later`: the thread calls it."""
        if self._pid == os.getpid():
            self._later.append(function)
            os.eventfd_write(self._wake_fd, 1)

    def _finish(self) -> None:
        """The process ends: does what the kernel does for TCP's sockets, so that what was sent arrives."""
        if self._pid != os.getpid():
            return
        with self:
            for stream in self.rnics.streams():
                stream.close()
            self.wait(lambda: not self.rnics.streams(), limits.API_EXIT_S)
            self.rnics.hide()

    def _interrupt(self, made: _Call) -> None:
        if made.interrupted is None:
            made.interrupted = True
        with self._lock:
            for wait in self._waits:
                wait.changed.notify()

    # --- Driver ---

    def __enter__(self) -> Self:
        self._entering.append(None)
        try:
            self._lock.acquire()
        finally:
            self._entering.pop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ring()
        self._lock.release()

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """See `Driver.wait`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in range(_TURNS_MAX if timeout_s == 0 else 1):
            if not self.rnics.turn():
                break
        if ready():
            self._tell()
            return True
        if timeout_s == 0:
            self._tell()
            return False
        wait = _Wait(ready, self._lock)
        self._waits.append(wait)
        try:
            self._tell()
            while not wait.over:
                self._check_interrupt()
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._ring()
                wait.changed.wait(left)
        finally:
            if wait in self._waits:
                self._waits.remove(wait)
        if wait.error is not None:
            raise wait.error
        return True

    def _check_interrupt(self) -> None:
        made: _Call | None = getattr(self._calls, "made", None)
        if made is not None and made.interrupted:
            made.interrupted = False  # taking the request back may wait
            raise _Interrupted

    # --- the thread ---

    def _run(self) -> None:
        loop = self.rnics.loop
        poller = select.poll()
        poller.register(loop.fileno(), select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        while True:
            with self._lock:
                self._sleeps_until = 0.0
                self._turn()
                due_s = loop.next_in_s
                if due_s is None or due_s > _FOREVER_S:
                    due_s = _FOREVER_S
                if due_s:
                    self._sleeps_until = loop.now + due_s
            if due_s:
                ready = poller.poll(due_s * 1000)
                if any(fd == self._wake_fd for fd, _ in ready):
                    os.eventfd_read(self._wake_fd)
            for _ in range(_YIELDS_MAX):
                if not self._entering:
                    break
                os.sched_yield()  # else this thread has the lock again before any other has woken up

    def _turn(self) -> None:
        """One turn, and what finalizers have asked for."""
        while self._later:
            try:
                self._later.popleft()()
            except Exception:
                log.exception("what a finalizer has asked for has failed")
        self.rnics.turn()
        self._tell()

    def _tell(self) -> None:
        """Ends the waits that are over."""
        for wait in list(self._waits):
            try:
                wait.over = bool(wait.ready())
            except BaseException as error:  # raised where it was waited for
                wait.error, wait.over = error, True
            if wait.over:
                self._waits.remove(wait)
                wait.changed.notify()

    def _ring(self) -> None:
        """Wakes the thread if it would sleep for longer than it may."""
        due_s = self.rnics.loop.next_in_s
        if self._sleeps_until and due_s is not None and self.rnics.loop.now + due_s < self._sleeps_until:
            self._sleeps_until = 0.0
            os.eventfd_write(self._wake_fd, 1)


class _Call:
    """One call that a companion makes."""

    __slots__ = ("done", "error", "finished", "function", "interrupted", "result")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Lock()
        self.done.acquire()
        self.finished = False
        self.interrupted: bool | None = None  # false if the call knows it already
        self.result: Any = None
        self.error: BaseException | None = None


class _Companion:
    """A thread that makes the main thread's calls, one at a time."""

    def __init__(self, service: Service, local: threading.local) -> None:
        self.calls: SimpleQueue[_Call] = SimpleQueue()
        threading.Thread(target=self._run, args=(service, local), name="sidestep-sdp-main", daemon=True).start()

    def _run(self, service: Service, local: threading.local) -> None:
        while True:
            made = self.calls.get()
            if made.finished:
                continue
            local.made = made
            try:
                with service:
                    made.result = made.function()
            except BaseException as error:  # raised by `call`
                made.error = error
            local.made = None
            made.finished = True
            made.done.release()
            del made  # or it would keep the buffer until the next one


_service: Service | None = None
_making: Final = threading.Lock()


def service() -> Service:
    """Service of this process."""
    global _service
    with _making:
        if _service is None or _service._pid != os.getpid():
            _service = Service()
        return _service
