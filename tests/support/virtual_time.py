"""The Python API over a loopback fabric, in virtual time: both ends in one process, and nobody sleeps.

For sockets `VirtualTime` is the driver: time is the fabric's, and goes on while all programs wait. Several programs run
as threads that take turns, one at a time and in a fixed order (`together`), so a run with two blocking ends depends on
the fabric's seed and on nothing else. When all wait and nothing is left to happen, they are told so.

For asyncio a `LoopbackPump` drives the fabric from the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sidestep.api.driver import Driver, Found, Hosts
from sidestep.errors import Misuse
from sidestep.sdp.errnos import os_error

if TYPE_CHECKING:
    from sidestep.rdma.loopback import Fabric
    from sidestep.sdp.hello import IpAddress
    from sidestep.sdp.host import Host
    from sidestep.switch.protocol import Endpoint

_T = TypeVar("_T")
_PATIENCE: Final = 50  # turns of the event loop without news until virtual time goes on


class OneHost(Hosts):
    """One host of the fabric, whose services are at the ports of their own numbers."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def at(self, address: IpAddress) -> Host:
        if not self.host.serves(address):
            raise os_error(errno.EADDRNOTAVAIL, str(address))
        return self.host

    def towards(self, remote: IpAddress, local: IpAddress | None) -> Host:
        del remote
        return self.host if local is None else self.at(local)

    def free_port(self, address: IpAddress) -> int:
        del address
        return self.host.free_port()

    def find(self, host: Host, remote: Endpoint, found: Found) -> None:
        del host
        found(remote.port)


class VirtualTime(Driver):
    """Runs a loopback fabric as far as it takes, in no time at all."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._programs: list[_Program] = []  # of `together`, in their order
        self._running: _Program | None = None

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
            self.fabric.call_at(until, lambda: None)  # time stops there
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


class LoopbackPump:
    """Drives a loopback fabric from the event loop, in virtual time.

    Time goes on only when the tasks have nothing to do: each event of the fabric gets a turn of the loop, and before
    the fabric's clock jumps to a timer the tasks get some more.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._patience = _PATIENCE
        self._closed = False

    def kick(self) -> None:
        """Something was asked of a stack: what `Host` is given as `kick`."""
        self._patience = _PATIENCE
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def close(self) -> None:
        self._closed = True

    def _turn(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        if not self.fabric.idle:
            self.kick()
            self.fabric.step()
        elif self.fabric.next_at is not None:
            patience = self._patience - 1
            self.kick()
            if patience < 0:
                self.fabric.step()
            else:
                self._patience = patience
