"""Sums over connections to other hosts, for `sidestep top` and the metrics.

A single link is a document of the provider's control operation `links` (`RemoteRelay.details`, `SdpLink.details`, the
SDP connection's own). Another provider, or one of another version, may leave out fields that it does not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from sidestep import limits
from sidestep.errors import counted

Link: TypeAlias = Mapping[str, Any]

OTHERS: Final = "others"  # the name of all peers beyond `limits.LINK_PEERS_MAX`

# Counters of a link, by name, with its direction; each only ever grows.
_GROWING: Final = {
    ("bytes", "sent", ""): "sent", ("bytes", "received", ""): "arrived",
    ("zcopy_bytes", "sent", "read"): "read_zcopy_sent", ("zcopy_bytes", "sent", "write"): "write_zcopy_sent",
    ("zcopy_bytes", "received", "read"): "read_zcopy_received",
    ("zcopy_bytes", "received", "write"): "write_zcopy_received",
}  # fmt: skip


# The same of its queue pair, where the device's connections are packets: unit and direction.
_OF_QUEUE_PAIR: Final = {
    ("packets", "sent"): "packets_sent", ("packets", "received"): "packets_received",
    ("packets_resent", ""): "packets_resent",
    ("naks", "sent"): "naks_sent", ("naks", "received"): "naks_received",
}  # fmt: skip


class LinkRoute(NamedTuple):
    """Protocol, device and peer of a link."""

    protocol: str
    device: str
    peer: str  # the other host

    @classmethod
    def of(cls, link: Link) -> LinkRoute:
        return cls(str(link.get("protocol", "")), str(link.get("device", "")), str(link.get("peer", "")))


class Sum(NamedTuple):
    """All links of a way, at a moment."""

    links: int = 0
    credit: int = 0  # messages that may go
    remote_credit: int = 0  # credit for messages that may come
    receives_posted: int = 0
    adverts: int = 0  # messages of this end, outstanding
    remote_adverts: int = 0
    held: int = 0  # bytes that were sent, and not read there yet
    engine: int = 0  # that compiled code carries at this moment

    def plus(self, link: Link) -> Sum:
        """The sum with one link more; the other fields are numbers of links."""
        added = {name: getattr(self, name) + number(link, name) for name in self._fields[1:]}
        return Sum(self.links + 1, **added)


def link_name(link: Link) -> str:
    """Unique name of a link: the channel whose bytes it carries, or both ends if it began with SDP."""
    return str(link.get("segment") or f"{link.get('local')} {link.get('remote')}")


def number(link: Link, name: str) -> int:
    """Number in a link's document; 0 if there is none."""
    found = link.get(name)
    return found if isinstance(found, int) else 0


def grown(now: Link, before: Link, name: str) -> int:
    """Growth of a number; all of it where it has begun anew."""
    found, more = number(now, name), number(now, name) - number(before, name)
    return more if more >= 0 else found


def queue_pair(link: Link) -> Link:
    """Document of the link's queue pair; empty from a provider that has none."""
    found = link.get("queue_pair")
    return found if isinstance(found, dict) else {}


def sums(links: Iterable[Link], named: Callable[[LinkRoute], LinkRoute] = lambda way: way) -> dict[LinkRoute, Sum]:
    """Sums by route, as that is `named`."""
    found: dict[LinkRoute, Sum] = {}
    for link in links:
        way = named(LinkRoute.of(link))
        found[way] = found.get(way, Sum()).plus(link)
    return found


def modes(links: Iterable[Link]) -> Counter[tuple[str, str, str, str]]:
    """Number of links by protocol, direction, mode and mechanism."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    for link in links:
        for direction, prefix in (("sent", "send"), ("received", "receive")):
            mode, mechanism = str(link.get(f"{prefix}_mode", "")), str(link.get(f"{prefix}_mechanism", ""))
            found[str(link.get("protocol", "")), direction, mode, mechanism] += 1
    return found


def line(link: Link) -> str:
    by = " engine" if link.get("engine") else ""
    return f"{link.get('protocol')}{by} {link.get('credit')}cr {link.get('send_mechanism')}/{link.get('send_mode')}"


def summary(links: Iterable[Link]) -> str:
    """Sum of all links in a line; empty if there are none."""
    found = list(links)
    if not found:
        return ""
    ways = sums(found)
    how = Counter(f"{link.get('send_mechanism')}/{link.get('send_mode')}" for link in found)
    hosts = len({way.peer for way in ways})
    over = ", ".join(sorted({f"{way.protocol} over {way.device}" for way in ways}))
    whole = Sum()
    for link in found:
        whole = whole.plus(link)
    least = min(number(link, "credit") for link in found)
    sending = ", ".join(f"{name} {count:,}" for name, count in how.most_common())
    return (
        f"links: {len(found):,} to {counted(hosts, 'host')}, {whole.engine:,} by the engine, "
        f"{sending}; credit {whole.credit:,}, least {least}; adverts {whole.adverts:,} here, "
        f"{whole.remote_adverts:,} there; {over}"
    )


class LinkTotals:
    """Counts over all links that were ever looked at; they never go down when a link ends.

    Up to `limits.LINK_PEERS_MAX` hosts have names; all others count as one.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[LinkRoute, str, str, str]] = Counter()  # counts by way, unit, direction, mechanism
        self._last: dict[str, Link] = {}
        self._peers: set[str] = set()

    def handle(self, links: Iterable[Link]) -> None:
        now = {link_name(link): link for link in links}
        for which, link in now.items():
            way, before = self.named(LinkRoute.of(link)), self._last.get(which, {})
            for (unit, direction, mechanism), name in _GROWING.items():
                self.counts[way, unit, direction, mechanism] += grown(link, before, name)
            found, found_before = queue_pair(link), queue_pair(before)
            if "packets_sent" not in found:
                continue
            for (unit, direction), name in _OF_QUEUE_PAIR.items():
                self.counts[way, unit, direction, ""] += grown(found, found_before, name)
        self._last = now

    def named(self, way: LinkRoute) -> LinkRoute:
        """The way as it is counted."""
        if way.peer not in self._peers:
            if len(self._peers) >= limits.LINK_PEERS_MAX:
                return LinkRoute(way.protocol, way.device, OTHERS)
            self._peers.add(way.peer)
        return way
