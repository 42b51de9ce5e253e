"""Software HCAs on a wire in virtual time, for tests and simulation: datagrams are late, lost, doubled, out of order.

    wire = Wire(Random(seed), WireFaults(loss=0.01))
    left, right = wire.device("10.0.0.1"), wire.device("10.0.0.2")
    ...  # connect, post
    wire.run()

Nothing here reads a clock; equal seeds and equal calls give equal runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.roce.device import ATTRIBUTES, RoceDevice
from sidestep.rdma.roce.packet import UDP_PORT

if TYPE_CHECKING:
    from random import Random

    from sidestep.rdma.roce.settings import RoceSettings
    from sidestep.rdma.verbs import DeviceAttributes

_BIT: Final = 8


@dataclass(slots=True, kw_only=True)
class WireFaults:
    """What goes wrong, each by a chance of 0 to 1 for a datagram; may be changed at any time."""

    loss: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0  # comes behind those that were sent after it
    damage: float = 0.0  # a bit is turned
    lose: Callable[[str, bytes], bool] | None = None  # whether this one, to that address, is lost


class Wire:
    """What joins the devices, and their time.

    Args:
        rng: Decides delays and chances; nothing else is random.
        faults: What goes wrong; nothing unless given.
        settle_s: Virtual seconds that `run` goes on once nothing is on its way, for what was lost to be sent again.
    """

    def __init__(self, rng: Random, faults: WireFaults | None = None, *, settle_s: float = 0.0) -> None:
        self.rng = rng
        self.key_rng = copy(rng)
        self.faults = faults or WireFaults()
        self.settle_s = settle_s
        self.now = 0.0  # seconds
        self.devices: dict[str, WireDevice] = {}
        self.notices: deque[Callable[[], object]] = deque()
        self.senders: dict[WireDevice, None] = {}  # those that may have something to send
        self.sent_count = 0  # datagrams
        self._arrivals: list[tuple[float, int, str, str, bytes]] = []
        self._last_at: dict[tuple[str, str], float] = {}  # when the last one of a direction arrives

    def device(
        self, address: str, settings: RoceSettings | None = None, attributes: DeviceAttributes = ATTRIBUTES
    ) -> WireDevice:
        """Plugs in a new device; raises Misuse if the address is taken."""
        if address in self.devices:
            raise Misuse(f"the wire has a device {address} already")
        device = self.devices[address] = WireDevice(self, address, settings, attributes)
        return device

    def inject(self, source: str, target: str, payload: bytes) -> None:
        """Somebody puts a datagram on the wire; what goes wrong may happen to it as well."""
        faults, rng = self.faults, self.rng
        self.sent_count += 1
        if _chance(rng, faults.loss) or (faults.lose is not None and faults.lose(target, payload)):
            return
        if payload and _chance(rng, faults.damage):
            at = rng.randrange(len(payload) * _BIT)
            damaged = bytearray(payload)
            damaged[at // _BIT] ^= 1 << at % _BIT
            payload = bytes(damaged)
        for _ in range(2 if _chance(rng, faults.duplicate) else 1):
            when = max(self.now + rng.uniform(1e-6, 5e-6), self._last_at.get((source, target), 0.0))
            if _chance(rng, faults.late):
                when += rng.uniform(1e-6, 200e-6)
            else:
                self._last_at[source, target] = when
            heappush(self._arrivals, (when, self.sent_count, source, target, payload))

    def step(self, until: float = float("inf")) -> bool:
        """Takes the next event: a call to a user, something to send, an arrival or a timer; False if there is none."""
        if self.notices:
            self.notices.popleft()()
            return True
        if self.senders:
            device = next(iter(self.senders))
            del self.senders[device]
            device.pump(self.now)
            return True
        timers = [(at, address) for address, each in self.devices.items() if (at := each.next_deadline()) is not None]
        timer = min(timers, default=(float("inf"), ""))
        arrival_at = self._arrivals[0][0] if self._arrivals else float("inf")
        if min(timer[0], arrival_at) > until or timer[0] == arrival_at == float("inf"):
            return False
        if arrival_at <= timer[0]:
            self.now, _, source, target, payload = heappop(self._arrivals)
            if (receiver := self.devices.get(target)) is not None:
                receiver.handle_datagram(source, UDP_PORT, payload, self.now)
                receiver.pump(self.now)
            return True
        self.now = max(self.now, timer[0])
        device = self.devices[timer[1]]
        device.handle_timeout(self.now)
        device.pump(self.now)
        return True

    def run(self) -> None:
        """Until nothing is on its way and all users were called, and `settle_s` longer.

        Raises:
            LimitReached: It does not come to rest.
        """
        left = limits.FABRIC_EVENTS_PER_RUN
        while self.notices or self.senders or self._arrivals:
            self.step()
            left -= 1
            if left < 0:
                raise LimitReached(f"no rest after {limits.FABRIC_EVENTS_PER_RUN} events")
        if self.settle_s:
            until = self.now + self.settle_s
            while self.step(until):
                pass
            self.now = until

    def run_until(self, condition: Callable[[], bool], *, limit_s: float = 3600.0) -> bool:
        """Until something is so; False if nothing is left to happen, or so many virtual seconds have passed."""
        until = self.now + limit_s
        while not condition():
            if not self.step(until):
                return False
        return True


class WireDevice(RoceDevice):
    """A device of a wire. `Wire.device` makes it."""

    def __init__(self, wire: Wire, address: str, settings: RoceSettings | None, attributes: DeviceAttributes) -> None:
        self.wire = wire
        super().__init__(address, wire.notices, wire.key_rng, settings, name=address, attributes=attributes)

    def wake(self) -> None:
        self.wire.senders[self] = None

    def pump(self, now: float) -> None:
        """Sends what there is."""
        while (datagram := self.poll_datagram(now)) is not None:
            self.wire.inject(self.address, datagram.address, bytes(datagram.payload))

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.pump(self.wire.now)  # the last words
            self.wire.senders.pop(self, None)
            del self.wire.devices[self.address]


def _chance(rng: Random, probability: float) -> bool:
    return probability > 0 and rng.random() < probability
