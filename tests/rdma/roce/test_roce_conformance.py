"""The software HCA passes the conformance suite: on a perfect wire, and on some that lose, double and delay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conformance_items import applying, left_out
from wire_dut import WireUnderTest

from sidestep.rdma.conformance import Check, DeviceUnderTest, run
from sidestep.rdma.roce.device import ATTRIBUTES
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import WireFaults


def rough() -> WireFaults:
    return WireFaults(loss=0.01, duplicate=0.02, late=0.02)


MODES: dict[str, Callable[[], DeviceUnderTest]] = {
    "perfect": lambda: WireUnderTest(1),
    "small": lambda: WireUnderTest(2, settings=RoceSettings(mtu=256, window=8)),
    "lossy": lambda: WireUnderTest(3, WireFaults(loss=0.01)),
    "rough": lambda: WireUnderTest(4, rough(), RoceSettings(mtu=256)),
}


@pytest.mark.parametrize(("check", "mode"), applying(MODES, ATTRIBUTES))
def test_the_hca_keeps_the_rule(check: Check, mode: str) -> None:
    assert run(check, MODES[mode]) is None


def test_nothing_else_is_left_out() -> None:
    assert {frozenset(left_out(make(), ATTRIBUTES)) for make in MODES.values()} == {frozenset({"no datagrams"})}
