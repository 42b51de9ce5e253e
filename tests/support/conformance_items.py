"""Items of the conformance suite for pytest: the checks that apply to a device, decided from what it declares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest
from selection import rotate

from sidestep.rdma.conformance import CHECKS, DeviceUnderTest, Offer
from sidestep.rdma.verbs import DeviceAttributes

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet


def applying(
    modes: Iterable[object], attributes: DeviceAttributes, without: frozenset[str] = frozenset()
) -> list[ParameterSet]:
    """Pairs of a check and a mode, for devices that all have these attributes, but for some by their ids.

    A run takes each check in one mode, and in two of them in the set ci; the row decides in which.
    """
    offer, modes = Offer(attributes, attributes), tuple(modes)
    checks = [check for check in CHECKS if check.why_not(offer) is None]
    pairs = {f"{check}-{mode}": (check, mode) for at, check in enumerate(checks) for mode in rotate(modes, at, ci=2)}
    return [pytest.param(*pair, id=name) for name, pair in pairs.items() if name not in without]


def left_out(dut: DeviceUnderTest, attributes: DeviceAttributes) -> set[str]:
    """Needs of checks that two devices do not meet; they promise what the items were collected by."""
    offer = Offer.of(dut)
    dut.close()
    assert offer == Offer(attributes, attributes)
    return {need.name for check in CHECKS for need in check.needs if not need.met_by(offer)}
