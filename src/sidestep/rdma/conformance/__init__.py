"""One suite that every device must pass: rules of `verbs`, `cm` and `pools`, each as a small check.

    for check in CHECKS:
        outcome = run(check, make_devices)   # None, or why the check does not apply; Violation if a rule is broken

The suite needs no test framework. `check.why_not(Offer(attributes, attributes))` tells before a run whether a check
applies, so that pytest need not collect what it would skip: `tests/support/conformance_items.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from sidestep.errors import SidestepError
from sidestep.rdma.conformance import (
    completion,
    connection,
    data,
    datagrams,
    ending,
    memory,
    operations,
    pooling,
    sharing,
    windows,
)
from sidestep.rdma.conformance.harness import CHECKS, Bench, Check, DeviceUnderTest, Violation
from sidestep.rdma.conformance.needs import Need, Offer

__all__ = ["CHECKS", "Bench", "Check", "DeviceUnderTest", "Need", "Offer", "Violation", "run"]

_MODULES = (
    data,
    operations,
    datagrams,
    memory,
    windows,
    ending,
    completion,
    sharing,
    connection,
    pooling,
)  # importing them fills CHECKS


def run(check: Check, make: Callable[[], DeviceUnderTest]) -> str | None:
    """Runs one check on two new devices.

    Returns:
        None if the rule is kept, else why the check does not apply to this device.

    Raises:
        Violation: The rule is broken.
    """
    dut = make()
    try:
        if (why_not := check.why_not(Offer.of(dut))) is not None:
            return why_not
        check.body(Bench(dut))
    except SidestepError as error:
        raise Violation(f"{check.rule} {type(error).__name__} was raised: {error}") from error
    finally:
        dut.close()
    return None
