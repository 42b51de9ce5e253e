"""Who gives devices and timers their turn while a program of the blocking face waits.

A `Driver` is two things: a lock, held while a thread uses the stacks (`with driver:`), and `wait`, which lets time pass
until something is so. A device with a thread or a selector of its own needs a driver of some ten lines: `wait` waits on
a condition, which whoever serves the device notifies after each turn.

For the loopback fabric there are two:

- `VirtualTime`: nobody sleeps. Time is the fabric's, and goes on while all programs wait. Several programs run as
  threads that take turns, one at a time and in a fixed order (`together`), so a run with two blocking ends depends on
  the fabric's seed and on nothing else. When all wait and nothing is left to happen, they are told so.
- `RealTime`: the fabric's time is the clock's. Any number of threads may use it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from sidestep.errors import Misuse
from sidestep.sdp.stack import Stack

if TYPE_CHECKING:
    from types import TracebackType

    from sidestep.rdma.loopback import Fabric, Timer
    from sidestep.rdma.verbs import Device
    from sidestep.sdp.settings import Settings

_T = TypeVar("_T")
_FOREVER_S: Final = 3600.0  # seconds that a thread sleeps at a time when nothing is due


class Driver(ABC):
    """Drives the stacks that a program uses."""

    def __enter__(self) -> Self:
        """Holds the stacks: nothing happens to them but what this thread does, until it waits."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, error, traceback

    @abstractmethod
    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Lets things happen until `ready` is true, or for so many seconds; tells whether it is.

        To be called while the stacks are held. A timeout of 0 lets what is due happen.
        """


class VirtualTime(Driver):
    """Runs a loopback fabric as far as it takes, in no time at all."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._programs: list[_Program] = []  # of `together`, in their order
        self._running: _Program | None = None

    def stack(self, device: Device, settings: Settings | None = None, **options: Any) -> Stack:
        """A stack whose time is the fabric's; `options` go to `Stack`."""
        return stack_on(self.fabric, device, settings, **options)

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """See `Driver.wait`.

        Raises:
            Misuse: Nobody can go on, ever.
        """
        until = None
        if timeout_s == 0:
            self.fabric.run_until(self.fabric.now)
            return ready()
        if timeout_s is not None:
            until = self.fabric.now + timeout_s
            self.fabric.call_at(until, _nothing)  # time stops there
        program = self._running
        if program is None:
            while not self._is_over(ready, until):
                self._step()
            return ready()
        program.ready, program.until = ready, until
        try:
            self._pass_on(program)
        finally:
            program.ready = None  # it may hold memory that its owner wants free
        return ready()

    def together(self, *programs: Callable[[], _T]) -> list[_T]:
        """Runs programs at the same time, as threads that take turns when they wait; gives what they return.

        The first exception of one of them is raised when all have ended. One that waits for what can never happen gets
        Misuse.
        """
        assert self._running is None
        made = [_Program(self, program) for program in programs]
        self._programs = made
        for each in made:
            each.thread.start()
        self._pass_on(None)
        self._programs = []
        failed = [each.error for each in made if each.error is not None]
        if failed:
            raise min(failed, key=lambda error: isinstance(error, Misuse))  # who is stuck is not the one to blame
        return [each.result for each in made]

    def _is_over(self, ready: Callable[[], bool], until: float | None) -> bool:
        return ready() or (until is not None and self.fabric.now >= until)

    def _step(self) -> None:
        if not self.fabric.step():
            raise Misuse("everybody waits, and nothing is left to happen")

    def _pass_on(self, program: _Program | None) -> None:
        """Gives the turn to whoever can go on; comes back when it is this program's again."""
        following = self._next(program)
        if following is program:
            return
        self._running = following
        if following is not None:
            following.turn.release()
        if program is None:
            for each in self._programs:
                each.thread.join()
        elif not program.ended:
            program.turn.acquire()
            stuck, program.stuck = program.stuck, None
            if stuck is not None:
                raise stuck

    def _next(self, after: _Program | None) -> _Program | None:
        """Who can go on, looking at those behind `after` first; lets time go on until somebody can."""
        programs = self._programs
        start = programs.index(after) + 1 if after is not None else 0
        order = [*programs[start:], *programs[:start]]
        while any(not each.ended for each in order):
            for each in order:
                if not each.ended and (each.ready is None or self._is_over(each.ready, each.until)):  # None: not begun
                    return each
            try:
                self._step()
            except Misuse as stuck:
                first = next(each for each in order if not each.ended)
                if first is after:
                    raise
                first.stuck = stuck
                return first
        return None

    def ended(self, program: _Program) -> None:
        self._pass_on(program)


class _Program:
    """One thread of `VirtualTime.together`."""

    def __init__(self, driver: VirtualTime, function: Callable[[], Any]) -> None:
        self._driver = driver
        self._function = function
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, name=getattr(function, "__name__", "program"), daemon=True)
        self.ready: Callable[[], bool] | None = None  # what it waits for
        self.until: float | None = None
        self.ended = False
        self.stuck: Misuse | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def _run(self) -> None:
        self.turn.acquire()
        try:
            self.result = self._function()
        except BaseException as error:  # raised by `together`
            self.error = error
        self.ended = True
        self._driver.ended(self)


class RealTime(Driver):
    """Runs a loopback fabric by the clock, in whatever thread waits."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._changed = threading.Condition(threading.RLock())
        self._begun = time.monotonic() - fabric.now

    def stack(self, device: Device, settings: Settings | None = None, **options: Any) -> Stack:
        """A stack whose time is the fabric's; `options` go to `Stack`."""
        return stack_on(self.fabric, device, settings, **options)

    def __enter__(self) -> Self:
        self._changed.acquire()
        try:
            self._catch_up()
        except BaseException:
            self._changed.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._changed.notify_all()  # what was done may be what others wait for
        self._changed.release()

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        until = None if timeout_s is None else self._elapsed() + timeout_s
        while True:
            self._catch_up()
            if ready():
                self._changed.notify_all()
                return True
            now, due = self._elapsed(), self.fabric.next_at
            if until is not None and now >= until:
                return False
            wakes = [at for at in (until, due) if at is not None]
            sleep_s = min(wakes) - now if wakes else _FOREVER_S
            if sleep_s > 0:
                self._changed.notify_all()
                self._changed.wait(min(sleep_s, _FOREVER_S))

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _catch_up(self) -> None:
        self.fabric.run_until(self._elapsed())


def stack_on(fabric: Fabric, device: Device, settings: Settings | None = None, **options: Any) -> Stack:
    """A stack whose clock and timers are those of a fabric; `options` go to `Stack`."""
    timer: Timer | None = None

    def wake_at(at: float) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
        timer = fabric.call_at(at, stack.handle_timeouts)

    stack = Stack(device, lambda: fabric.now, settings, wake_at=wake_at, **options)
    return stack


def _nothing() -> None:
    pass
