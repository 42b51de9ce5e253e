"""Needs of checks: what two devices must promise before a check is run on them, each with why it is left out otherwise.

A need is decided from what devices declare, so that who runs the suite knows before it runs which checks apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from sidestep.rdma.verbs import DeviceAttributes

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import DeviceUnderTest


@dataclass(frozen=True, slots=True)
class Offer:
    """The promises of two devices under test."""

    active: DeviceAttributes
    passive: DeviceAttributes
    nowhere: bool = True  # there is an address where nobody answers

    @classmethod
    def of(cls, dut: DeviceUnderTest) -> Offer:
        return cls(dut.active.attributes, dut.passive.attributes, dut.nowhere is not None)


@dataclass(frozen=True, slots=True)
class Need:
    """One promise that not every device makes."""

    name: str
    why_not: str  # a check with this need does not apply
    met_by: Callable[[Offer], bool]

    def __str__(self) -> str:
        return self.name


_Attribute: TypeAlias = Callable[[DeviceAttributes], object]


def _both(name: str, why_not: str, promised: _Attribute) -> Need:
    """A need that each of the two devices meets."""
    return Need(name, why_not, lambda offer: bool(promised(offer.active) and promised(offer.passive)))


NOWHERE: Final = Need("nowhere", "there is no address where nobody answers", lambda offer: offer.nowhere)
ACKNOWLEDGED: Final = _both(
    "acknowledged", "requests complete before the other end has seen them", lambda each: each.acknowledged
)
ATOMICS: Final = _both("atomics", "no atomic operations", lambda each: each.atomics)
DATAGRAMS: Final = _both("datagrams", "no unreliable datagrams", lambda each: each.address_handles_max)
IMMEDIATE: Final = _both("immediate", "no immediate data is sent", lambda each: each.immediate)
KEY_PARTS: Final = _both("key parts", "the device chooses all of a key", lambda each: each.key_part_chosen)
LOCAL_CHECKS: Final = _both(
    "local checks", "the device needs no registration of local memory", lambda each: each.checks_local_memory
)
NO_DATAGRAMS: Final = _both(
    "no datagrams", "the device has unreliable datagrams", lambda each: not each.address_handles_max
)
READ_SCATTER: Final = _both("read scatter", "an RDMA Read has one entry", lambda each: each.read_scatter_max >= 2)
SCATTER: Final = _both("scatter", "a receive has fewer than three entries", lambda each: each.scatter_max >= 3)
SHARED_QUEUES: Final = _both(
    "shared queues", "the device has no shared receive queues", lambda each: each.shared_receive_queues_max
)
SOLICITED: Final = _both(
    "solicited", "completions do not say whether they were solicited", lambda each: each.solicited_reported
)
VOIDED_REGIONS: Final = _both(
    "voided regions", "no request voids the key of a region", lambda each: each.regions_voided
)
WINDOWS: Final = _both("windows", "the device has no memory windows", lambda each: each.windows_max)
ZERO_BASED: Final = _both("zero based", "the device has no zero-based memory", lambda each: each.zero_based)
