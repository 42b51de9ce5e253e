"""The software RNIC passes the conformance suite over real TCP, in each way in which two ends can agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conformance_items import applying, left_out
from iwarp_dut import IwarpUnderTest

from sidestep.rdma.conformance import Check, run
from sidestep.rdma.iwarp.device import ATTRIBUTES, IwarpSettings
from sidestep.rdma.iwarp.startup.frame import Rtr
from sidestep.rdma.iwarp.startup.terms import MpaSettings

# Less than its 10 s, for the check of an address that is silent; and more than a busy machine needs for a Reply.
_STARTUP = MpaSettings(peer_to_peer=True, reply_s=4.0)
MODES = {
    "peers": _STARTUP,
    "markers": replace(_STARTUP, markers=True),
    "no-crc": replace(_STARTUP, crc=False),
    "read-rtr": replace(_STARTUP, rtr=Rtr.READ),
}
WITHOUT = frozenset({"read_with_a_depth_of_zero_fails-read-rtr"})  # a Read tells that an end is ready: no depth is zero


@pytest.mark.parametrize(("check", "mode"), applying(MODES, ATTRIBUTES, WITHOUT))
def test_iwarp_keeps_the_rule(check: Check, mode: str) -> None:
    assert run(check, lambda: IwarpUnderTest(IwarpSettings(startup=MODES[mode]))) is None


def test_nothing_else_is_left_out() -> None:
    assert left_out(IwarpUnderTest(IwarpSettings()), ATTRIBUTES) == {
        "acknowledged", "atomics", "datagrams", "immediate", "read scatter",
    }  # fmt: skip
