"""Runs in the guest: the conformance suite on a device of its kernel; one line of JSON for each check.

    {"check": "send_delivers_its_bytes", "outcome": "kept"}       or "does not apply", "broken", "raised", with "why"

usage: verbs_conformance.py HOW ADDRESS NOBODY [CHECK...]

HOW is `rdma_cm`, or `joined`: queue pairs are joined by number, as a control link has told it. NOBODY is an address of
the same network without a host.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

from control_pair import ControlPair

from sidestep.loop import Loop
from sidestep.rdma.conformance import CHECKS, Check, DeviceUnderTest, Violation, run
from sidestep.rdma.kernel.device import KernelDevice, VerbsSettings
from sidestep.rdma.kernel.finding import NoManager
from sidestep.rdma.kernel.manager import KernelManager
from sidestep.rdma.verbs import Device
from sidestep.remote.control_link import PRIVATE_DATA_MAX
from sidestep.remote.control_manager import ControlManager

QUIET_S = 0.04  # the machine is emulated: what is on its way may rest so long
QUIET_TURNS = 3
LOOK_S = 0.02  # a polled queue that is not armed wakes nobody
WAIT_S = 12.0


class KernelUnderTest:
    """Two devices, each with a context of its own, on the one that the kernel has."""

    kind: type[KernelDevice] = KernelDevice

    def __init__(self, address: str, nobody: str) -> None:
        self.loop = Loop()
        settings = VerbsSettings(connect_s=4.0)
        self.active: Device = self.kind(address, self.loop, settings, name="active")
        self.passive: Device = self.kind(address, self.loop, settings, name="passive")
        self.nowhere: str | None = nobody

    def run(self) -> None:
        quiet = 0
        while quiet < QUIET_TURNS:
            quiet = 0 if self.turn(QUIET_S) else quiet + 1

    def run_until(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end:
                return False
            self.turn(LOOK_S)
        return True

    def turn(self, wait_s: float) -> bool:
        return self.loop.turn(wait_s)

    def close(self) -> None:
        self.active.close()
        self.passive.close()
        self.loop.close()


class JoinedDevice(KernelDevice):
    """One whose queue pairs are joined by number."""

    rdma_cm: KernelManager | NoManager | None = None  # once another one has its place

    def use(self, manager: ControlManager) -> None:
        self.rdma_cm = self.cm
        self.cm = manager  # type: ignore[assignment]  # what users ask for is all the same
        self.attributes = replace(
            self.attributes, request_private_data_max=PRIVATE_DATA_MAX, reply_private_data_max=PRIVATE_DATA_MAX,
            reject_private_data_max=PRIVATE_DATA_MAX, reject_reasons=True, private_data_padded=False,
        )  # fmt: skip

    def close(self) -> None:
        if self.rdma_cm is not None:
            self.cm.close()
            self.cm, self.rdma_cm = self.rdma_cm, None
        super().close()


class JoinedUnderTest(KernelUnderTest):
    """Their queue pairs are joined by number; the control link that tells them goes between two more devices."""

    kind = JoinedDevice

    def __init__(self, address: str, nobody: str) -> None:
        super().__init__(address, nobody)
        self.pair = ControlPair(self.active, self.passive, self.loop)
        for device, manager in ((self.active, self.pair.active), (self.passive, self.pair.passive)):
            assert isinstance(device, JoinedDevice)
            device.use(manager)

    def turn(self, wait_s: float) -> bool:
        self.pair.fabric.run()
        done = self.loop.turn(wait_s)
        self.pair.fabric.run()
        return done

    def close(self) -> None:
        super().close()
        self.pair.close()


KINDS = {"rdma_cm": KernelUnderTest, "joined": JoinedUnderTest}


def outcome(check: Check, make: Callable[[], DeviceUnderTest]) -> dict[str, str]:
    try:
        why_not = run(check, make)
    except Violation as why:
        return {"outcome": "broken", "why": str(why)}
    except Exception:
        return {"outcome": "raised", "why": traceback.format_exc()[-1500:]}
    return {"outcome": "kept"} if why_not is None else {"outcome": "does not apply", "why": why_not}


def main() -> None:
    how, address, nobody, *names = sys.argv[1:]
    for check in CHECKS:
        if not names or check.name in names:
            began = time.monotonic()
            found = outcome(check, lambda: KINDS[how](address, nobody))
            took = {"seconds": round(time.monotonic() - began, 2)}
            print(json.dumps({"check": check.name} | found | took), flush=True)


main()
