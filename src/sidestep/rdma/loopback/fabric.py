"""The fabric: virtual time, what is on its way, and the devices that are plugged in.

Nothing here reads a clock. Time goes on when `step`, `run` or `run_until` take the next event; equal seeds and equal
calls give equal runs. Events of the same moment happen in the order in which they were caused.

Every message takes its seeded time. Order is kept within a queue pair as InfiniBand's reliable connection keeps it;
between queue pairs, between data and the connection manager, and between an RDMA Read's answer and later Sends there is
none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from sidestep import limits
from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.loopback.device import LoopbackDevice
from sidestep.rdma.loopback.settings import Faults, Timing
from sidestep.rdma.verbs import DeviceAttributes

if TYPE_CHECKING:
    from random import Random

    from sidestep.rdma.loopback.observer import Observer
    from sidestep.rdma.loopback.qp import LoopbackQueuePair
    from sidestep.rdma.loopback.settings import Span


class Timer:
    """Something that happens later, unless it is cancelled."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """It does not happen; calling this again, or too late, does nothing."""
        self.callback = None


class Fabric:
    """Devices of one process, joined to each other, and their time.

    Args:
        rng: Decides delays and chances; nothing else is random.
        timing: How long things take.
        faults: What goes wrong; nothing unless given.
        observer: Sees every message and every placement.
        run_limit: Events in one `run` or `run_until`; beyond it LimitReached: two ends that never come to rest.
    """

    def __init__(
        self,
        rng: Random,
        *,
        timing: Timing | None = None,
        faults: Faults | None = None,
        observer: Observer | None = None,
        run_limit: int = limits.FABRIC_EVENTS_PER_RUN,
    ) -> None:
        self.rng = rng
        self.key_rng = copy(rng)  # keys are another matter: how many are made changes nothing else of a run
        self.timing = timing or Timing()
        self.faults = faults
        self.observer = observer
        self.now = 0.0  # seconds
        self.notices: deque[Callable[[], object]] = deque()  # calls to users, in the order of their causes
        self.queue_pairs: dict[int, LoopbackQueuePair] = {}
        self.devices: dict[str, LoopbackDevice] = {}
        self._run_limit = run_limit
        self._events: list[tuple[float, int, Timer | None, Callable[..., None], tuple[Any, ...]]] = []
        self._event_number = 0
        self._on_the_way = 0  # events that are not timers
        self._qp_number = 0x10  # 0 and 1 are special (IBTA 3.9.4), and Linux begins at 17 as well
        self._comm_id = 0

    # Devices.

    def device(self, name: str, attributes: DeviceAttributes | None = None) -> LoopbackDevice:
        """Plugs in a new device; its name is its address.

        Raises:
            Misuse: The name is taken.
        """
        if name in self.devices:
            raise Misuse(f"the fabric has a device {name} already")
        device = LoopbackDevice(self, name, attributes or DeviceAttributes())
        self.devices[name] = device
        return device

    def cut(self, qp: LoopbackQueuePair) -> None:
        """Breaks the connection of a queue pair without a word: all that is on its way and all that follows is lost.

        Each end finds out when it sends (RETRY_EXCEEDED); one that only waits never does.
        """
        qp.link.cut = True
        for end in qp.link.ends:
            end.expect_silence()

    def reset(self, qp: LoopbackQueuePair) -> None:
        """Breaks the connection of a queue pair so that both ends are told at once, as a TCP reset does with iWARP."""
        qp.link.cut = True
        for end in qp.link.ends:
            end.connection_reset()

    def fail(self, device: LoopbackDevice) -> None:
        """The device dies: DEVICE_FATAL, all its queue pairs are in error, and nobody hears of it any more."""
        device.die()

    def unplug(self, device: LoopbackDevice) -> None:
        """Takes the cable out: all that the device sends or should receive is lost. PORT_ERROR."""
        device.set_port(active=False)

    def plug(self, device: LoopbackDevice) -> None:
        """Puts the cable in again. PORT_ACTIVE; connections that missed something are broken all the same."""
        device.set_port(active=True)

    # Time.

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Calls at a moment of virtual time, or as soon as possible if that is past."""
        timer = Timer(callback)
        self._event_number += 1
        heappush(self._events, (max(when, self.now), self._event_number, timer, _nothing, ()))
        return timer

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        return self.call_at(self.now + delay_s, callback)

    @property
    def event_count(self) -> int:
        """Arrivals and timers caused up to now: how much a run had to do."""
        return self._event_number

    @property
    def idle(self) -> bool:
        """Nothing is on its way and nobody is to be called; timers may be pending."""
        return not self._on_the_way and not self.notices

    @property
    def next_at(self) -> float | None:
        """When something happens next, timers included; None if nothing will."""
        if self.notices:
            return self.now
        return self._events[0][0] if self._events else None

    def step(self) -> bool:
        """Takes the next event: a call to a user, an arrival or a timer. False if there is none."""
        if self.notices:
            self.notices.popleft()()
            return True
        while self._events:
            when, _, timer, function, arguments = heappop(self._events)
            if timer is None:
                self._on_the_way -= 1
                self.now = when
                function(*arguments)
                return True
            if timer.callback is not None:
                self.now = when
                callback, timer.callback = timer.callback, None
                callback()
                return True
        return False

    def run(self) -> None:
        """Runs until nothing is on its way and all users were called. Timers that come due meanwhile happen.

        Raises:
            LimitReached: It does not come to rest.
        """
        notices = self.notices
        left = self._run_limit
        while notices or self._on_the_way:
            if notices:
                notices.popleft()()
            else:
                self.step()
            left -= 1
            if left < 0:
                raise LimitReached(f"no rest after {self._run_limit} events")

    def run_until(self, condition: float | Callable[[], bool], *, limit_s: float = 3600.0) -> bool:
        """Runs up to a moment of virtual time, timers included, or until something is so.

        Returns:
            Whether it is so. False if nothing is left to happen, or `limit_s` virtual seconds have passed.

        Raises:
            LimitReached: Too many events on the way.
        """
        left = self._run_limit
        until = self.now + limit_s if callable(condition) else condition
        while not (callable(condition) and condition()):
            if not self.notices and (not self._events or self._events[0][0] > until):
                if callable(condition):
                    return False
                self.now = max(self.now, until)
                return True
            self.step()
            left -= 1
            if left < 0:
                raise LimitReached(f"no rest after {self._run_limit} events")
        return True

    # For the devices.

    def arrive(self, when: float, function: Callable[..., None], *arguments: Any) -> None:
        self._event_number += 1
        self._on_the_way += 1
        heappush(self._events, (when, self._event_number, None, function, arguments))

    def draw(self, span: Span) -> float:
        """A delay; nothing is drawn where there is no choice."""
        least, most = span
        return least if least == most else self.rng.uniform(least, most)

    def chance(self, probability: float) -> bool:
        """Whether it happens; nothing is drawn where it cannot."""
        return probability > 0 and self.rng.random() < probability

    def next_qp_number(self) -> int:
        """A number that no queue pair of this fabric had."""
        self._qp_number += 1
        return self._qp_number

    def next_comm_id(self) -> int:
        """A communication id that was not used before."""
        self._comm_id += 1
        return self._comm_id


def _nothing() -> None:
    pass
