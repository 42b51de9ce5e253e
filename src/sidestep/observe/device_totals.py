"""Counters of the devices of a provider and its workers, summed up for metrics and for `sidestep top`.

A worker that ends takes its device with it, and another one begins at zero: totals by device keep what was counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sidestep.observe.links import grown, number
from sidestep.observe.rdma import ProcessView, processes
from sidestep.rdma.iwarp.counting import PRESENT

_NAME: Final = re.compile(r"(\w+)(?:\{(.*)\})?")


def of_provider(status: Mapping[str, Any]) -> list[ProcessView]:
    """Processes of the provider with this status, and of its workers, as far as they answer."""
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


@dataclass(slots=True)
class DeviceActivity:
    """Activity of a device, that of each worker included; its fields are names of `sidestep top --json`."""

    device: str
    objects: dict[str, int] = field(default_factory=dict)  # present objects, by kind
    rates: dict[str, float] = field(default_factory=dict)  # a second, by counter; all reasons together


def activities(
    before: Iterable[ProcessView], after: Iterable[ProcessView], seconds: float
) -> tuple[DeviceActivity, ...]:
    """Activities between two looks, by name; a new device shows no rates yet."""
    then = {(process.pid, device.name): device.counters for process in before for device in process.devices}
    found: dict[str, DeviceActivity] = {}
    for process in after:
        for device in process.devices:
            one = found.setdefault(device.name, DeviceActivity(device.name))
            first = then.get((process.pid, device.name), device.counters)
            for full_name in device.counters:
                name = full_name.partition("{")[0]
                if name in PRESENT:
                    one.objects[name] = one.objects.get(name, 0) + number(device.counters, full_name)
                else:
                    one.rates[name] = one.rates.get(name, 0.0) + grown(device.counters, first, full_name) / seconds
    return tuple(one for _, one in sorted(found.items()))
