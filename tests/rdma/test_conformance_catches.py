"""Each check of the conformance suite is seen to fail: against a device that breaks its rule."""

from __future__ import annotations

from random import Random

import pytest
from loopback_dut import LoopbackUnderTest
from rdma_mutants import MUTANTS

from sidestep.rdma.conformance import CHECKS, Violation, run
from sidestep.rdma.loopback import Fabric

BY_NAME = {check.name: check for check in CHECKS}
PAIRS = [(mutant, check) for mutant, (_, checks) in MUTANTS.items() for check in checks]


@pytest.mark.parametrize(("mutant", "check"), PAIRS)
def test_the_check_catches_the_mutant(mutant: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant][0](monkeypatch)
    with pytest.raises(Violation):
        run(BY_NAME[check], lambda: LoopbackUnderTest(Fabric(Random(1))))


def test_every_check_catches_something() -> None:
    """This device has no datagrams, and has to say so; the other checks of that group are seen in `roce`."""
    others = {check.name for check in CHECKS if check.group == "datagrams"} - {"devices_without_datagrams_say_so"}
    assert {check for _, check in PAIRS} == set(BY_NAME) - others
