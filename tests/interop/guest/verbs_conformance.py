"""Runs in the guest: the conformance suite on a device of its kernel; one line of JSON for each check.

    {"check": "send_delivers_its_bytes", "outcome": "kept"}       or "does not apply", "broken", "raised", with "why"

usage: verbs_conformance.py ADDRESS NOBODY [CHECK...]        NOBODY: an address of the same network without a host
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable

from sidestep.loop import Loop
from sidestep.rdma.conformance import CHECKS, Check, Violation, run
from sidestep.rdma.kernel.device import KernelDevice
from sidestep.rdma.kernel.settings import VerbsSettings
from sidestep.rdma.verbs import Device

QUIET_S = 0.04  # the machine is emulated: what is on its way may rest so long
QUIET_TURNS = 3
LOOK_S = 0.02  # a polled queue that is not armed wakes nobody
WAIT_S = 12.0


class KernelUnderTest:
    """Two devices, each with a context of its own, on the one that the kernel has."""

    def __init__(self, address: str, nobody: str) -> None:
        self.loop = Loop()
        settings = VerbsSettings(connect_s=4.0)
        self.active: Device = KernelDevice(address, self.loop, settings, name="active")
        self.passive: Device = KernelDevice(address, self.loop, settings, name="passive")
        self.nowhere: str | None = nobody

    def run(self) -> None:
        quiet = 0
        while quiet < QUIET_TURNS:
            quiet = 0 if self.loop.turn(QUIET_S) else quiet + 1

    def run_until(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end:
                return False
            self.loop.turn(LOOK_S)
        return True

    def close(self) -> None:
        self.active.close()
        self.passive.close()
        self.loop.close()


def outcome(check: Check, address: str, nobody: str) -> dict[str, str]:
    try:
        why_not = run(check, lambda: KernelUnderTest(address, nobody))
    except Violation as why:
        return {"outcome": "broken", "why": str(why)}
    except Exception:
        return {"outcome": "raised", "why": traceback.format_exc()[-1500:]}
    return {"outcome": "kept"} if why_not is None else {"outcome": "does not apply", "why": why_not}


def main() -> None:
    address, nobody, *names = sys.argv[1:]
    for check in CHECKS:
        if not names or check.name in names:
            began = time.monotonic()
            found = outcome(check, address, nobody)
            took = {"seconds": round(time.monotonic() - began, 2)}
            print(json.dumps({"check": check.name} | found | took), flush=True)


main()
