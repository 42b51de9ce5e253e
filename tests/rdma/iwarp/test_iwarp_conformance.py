"""The software RNIC passes the conformance suite over real TCP, in each way in which two ends can agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from iwarp_dut import IwarpUnderTest

from sidestep.rdma.conformance import CHECKS, Check, run
from sidestep.rdma.iwarp.settings import IwarpSettings
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_iwarp_keeps_the_rule(check: Check, mode: str) -> None:
    if mode == "read-rtr" and check.name == "read_with_a_depth_of_zero_fails":
        pytest.skip("what tells that an end is ready is a Read: no depth is zero")
    why_not = run(check, lambda: IwarpUnderTest(IwarpSettings(startup=MODES[mode])))
    if why_not is not None:
        pytest.skip(why_not)
