"""What the devices of a provider and its workers count, summed up for metrics.

A worker that ends takes its device with it, and another one begins at zero: totals by device keep what was counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sidestep.observe.links import grown
from sidestep.observe.rdma import ProcessView, processes
from sidestep.rdma.iwarp.counting import PRESENT

_NAME: Final = re.compile(r"(\w+)(?:\{(.*)\})?")


def of_provider(status: Mapping[str, Any]) -> list[ProcessView]:
    """Those of a provider, whose status this is, and of its workers, as far as they answer."""
    return processes({int(status["pid"]), *(int(worker["pid"]) for worker in status.get("workers", ()))})


class DeviceTotals:
    """Counts over all looks, which never go down, and what there was at the last one."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()  # by device, counter and reason
        self.present: Counter[tuple[str, str]] = Counter()  # by device and kind
        self._last: dict[tuple[int, str], Mapping[str, int]] = {}  # by process and device

    def handle(self, found: Iterable[ProcessView]) -> None:
        self.present.clear()
        now: dict[tuple[int, str], Mapping[str, int]] = {}
        for process in found:
            for device in process.devices:
                key = process.pid, device.name
                before, now[key] = self._last.get(key, {}), device.counters
                for full_name in device.counters:
                    named = _NAME.fullmatch(full_name)
                    if named is None:
                        continue
                    name, reason = named[1], named[2] or ""
                    if name in PRESENT:
                        self.present[device.name, name] += device.counters[full_name]
                    else:
                        self.counts[device.name, name, reason] += grown(device.counters, before, full_name)
        self._last = now
