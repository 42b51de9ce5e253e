"""What other programs use of the CPUs is seen, and what this one and its own use is not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from sidestep.demo.machine import BUSY_SHARE, CpuTime, Others, others_now


def test_programs_that_compute_are_others() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        used = others_now()
    finally:
        for program in busy:
            program.kill()
            program.wait()
    assert BUSY_SHARE < used <= 1
    assert Others(before=used).too_many
    assert Others(during=used).too_many
    assert not Others().too_many


def test_own_time_and_that_of_programs_that_were_waited_for_is_not_of_others() -> None:
    now = CpuTime.now()
    begun = replace(now, at=now.at - 1000, every=now.every - 500, own=now.own - 500)
    assert begun.others() < 0.01
    assert replace(begun, own=now.own).others() > 0.01

    before = CpuTime.now()
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
    assert CpuTime.now().own - before.own > 0.02
