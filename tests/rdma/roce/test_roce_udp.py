"""The software HCA on sockets of the loopback interface."""

from __future__ import annotations

import pytest
from udp_dut import UdpUnderTest

from sidestep.rdma.conformance import CHECKS, Check, run


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_the_hca_keeps_the_rule_over_udp(check: Check) -> None:
    why_not = run(check, UdpUnderTest)
    if why_not is not None:
        pytest.skip(why_not)
