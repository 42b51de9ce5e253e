"""Looks at all connections, one after the other, and the changes in between.

The shims only ever count up, each connection for itself. So a rate is the difference of two looks, and the caller keeps
totals over a longer time (`Totals`). A connection that has ended is seen until its place is used again, or the provider
has forgotten it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestep.observe.connections import Connection, Ended, connections
from sidestep.observe.connections import Key as Identity
from sidestep.observe.device_totals import DeviceActivity, activities, of_provider
from sidestep.observe.links import Link, LinkTotals
from sidestep.observe.rdma import ProcessView
from sidestep.provider.control import ControlConnection

Key = tuple[int, int]  # pid, and the moment at which the connection was made: it stays the same, and no other has it


@dataclass(frozen=True, slots=True)
class Sample:
    """One look."""

    at_s: float  # monotonic
    connections: Mapping[Key, Connection]
    status: Mapping[str, Any]  # start of the provider
    devices: Sequence[ProcessView] = ()  # RDMA devices of the provider and its workers

    @property
    def links(self) -> list[Link]:
        return [one.link for one in self.connections.values() if one.link is not None]


def take_sample(socket_path: Path) -> Sample:
    """Looks now; raises Unavailable without a provider."""
    with ControlConnection(socket_path) as control:
        status = control.status()
    found = {(one.pid, one.born_ns): one for one in connections(socket_path)}
    return Sample(time.monotonic(), found, status, of_provider(status))


def counts(one: Connection) -> Counter[str]:
    """Counts of a connection, by name; each only ever grows."""
    return Counter(
        sent_ring_bytes=one.tx.ring_bytes, sent_tcp_bytes=one.tx.tcp_bytes, received_ring_bytes=one.rx.ring_bytes,
        received_tcp_bytes=one.rx.tcp_bytes, sent_ring_messages=one.tx.ring_msgs, sent_tcp_messages=one.tx.tcp_msgs,
        received_ring_messages=one.rx.ring_msgs, received_tcp_messages=one.rx.tcp_msgs, doorbells=one.doorbells,
        sleeps=one.sleeps, spins_won=one.spins_won, spins_lost=one.spins_lost,
    )  # fmt: skip


def grown(after: Connection, before: Connection | None) -> Counter[str]:
    """Growth of the counts between two looks at a connection; all of them if there was no first one.

    A socket that is used for a second connection starts over: then, too, all is new.
    """
    now = counts(after)
    if before is None:
        return now
    then = counts(before)
    if any(now[name] < count for name, count in then.items()):
        return now
    now.subtract(then)
    return now


@dataclass(frozen=True, slots=True)
class Rate:
    """Activity per second, of one connection or of several."""

    messages: float  # both ways, both paths
    payload_len: float  # bytes
    ring_share: float | None  # part of the bytes, 0 to 1; None: there were none
    doorbells: float
    sleeps_per_message: float | None  # number of those by ring; None: there were none
    spins_per_message: float | None

    @classmethod
    def of(cls, growth: Mapping[str, int], seconds: float) -> Rate:
        """Rate from the growth in a time, which is not zero."""
        by_ring = growth["sent_ring_bytes"] + growth["received_ring_bytes"]
        payload_len = by_ring + growth["sent_tcp_bytes"] + growth["received_tcp_bytes"]
        ring_msgs = growth["sent_ring_messages"] + growth["received_ring_messages"]
        messages = ring_msgs + growth["sent_tcp_messages"] + growth["received_tcp_messages"]
        spins = growth["spins_won"] + growth["spins_lost"]
        return cls(
            messages / seconds,
            payload_len / seconds,
            by_ring / payload_len if payload_len else None,
            growth["doorbells"] / seconds,
            growth["sleeps"] / ring_msgs if ring_msgs else None,
            spins / ring_msgs if ring_msgs else None,
        )


@dataclass(frozen=True, slots=True)
class Activity:
    """A connection, and what goes on there."""

    connection: Connection
    rate: Rate


@dataclass(frozen=True, slots=True)
class View:
    """Activity of everything, between two looks."""

    seconds: float
    activities: tuple[Activity, ...]
    total: Rate
    states: Mapping[str, int]  # connections by state
    reasons: Mapping[str, int]  # and by reason, of those that have one and are not carried
    devices: tuple[DeviceActivity, ...]
    after: Sample  # the second look


def compare(before: Sample, after: Sample) -> View:
    """Activity between two looks; connections that ended in between are left out."""
    seconds = max(after.at_s - before.at_s, 1e-6)
    total: Counter[str] = Counter()
    rows = []
    for key, one in after.connections.items():
        first = before.connections.get(key)
        if first is None and one.age_s > seconds:  # an old connection, not seen before: its past is not of this time
            first = one
        growth = grown(one, first)
        total.update(growth)
        rows.append(Activity(one, Rate.of(growth, seconds)))
    found = after.connections.values()
    return View(
        seconds, tuple(rows), Rate.of(total, seconds), Counter(one.state for one in found),
        Counter(one.reason for one in found if one.reason and one.link is None),
        activities(before.devices, after.devices, seconds), after,
    )  # fmt: skip


class Totals:
    """Counts over all connections that were ever looked at, live or ended: they never go down when one ends."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.connections = 0  # connections that were seen
        self.promoted = 0  # promoted ones of these
        self.ended: Counter[tuple[str, str]] = Counter()  # ends that were seen, by state and reason
        self.links = LinkTotals()
        self._last: dict[Identity | None, Connection] = {}
        self._over: set[Identity | None] = set()  # time of the last look

    def handle(self, live: Iterable[Connection], over: Iterable[Ended]) -> None:
        ended = {one.connection.key: one.connection for one in over}
        self.ended.update((one.state, one.reason or "") for key, one in ended.items() if key not in self._over)
        self._over = set(ended)
        now = {one.key: one for one in live} | ended
        for key, one in now.items():
            before = self._last.get(key)
            self.counts.update(grown(one, before))
            self.connections += before is None
            self.promoted += one.promoted_s is not None and (before is None or before.promoted_s is None)
        self._last = now
        self.links.handle(one.link for one in now.values() if one.link is not None)
