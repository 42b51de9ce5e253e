"""Named counters with a reason: `offer_refused{TOO_MANY}`. Everything that is refused or dropped adds one to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

NAMES: Final = {
    "client_accepted": "connections taken in",
    "client_dropped": "connections closed by the provider, by reason",
    "offer_accepted": "offers taken in",
    "offer_refused": "offers refused, by reason",
    "offer_withdrawn": "offers taken back by their client, or lost with it",
    "claim_matched": "claims that found their offer; both ends got an answer",
    "claim_refused": "claims refused, by reason",
    "order_passed": "requests of 'sidestep demote' and 'promote' passed on, by how far they got",
    "order_refused": "requests of 'sidestep demote' and 'promote' that reached no process, by reason",
    "relay_opened": "connections that began to go through the provider",
    "relay_dropped": "relayed connections that stayed on TCP, by reason",
    "relay_left": "relayed connections that their protocol left, or that were taken from it: they went back to TCP",
    "relay_reset": "relayed connections that were reset, by reason",
    "engine_lent": "times that a connection with another host was lent to the engine",
    "engine_given_back": "times that the engine returned a connection, by reason",
    "remote_joined": "connections with another host whose two providers have a link, by what this end did",
    "pooled_queue_pair": "queue pairs joined with another host's in advance, by what became of them, or `missed`",
    "worker_started": "processes that carry connections with other hosts",
    "worker_ended": "processes that carry connections and ended without an order, by how",
    "visit_accepted": "connections of other hosts that may go to a listener of this one by TCP",
    "visit_refused": "connections of other hosts that may not, by reason",
    "reach_opened": "connections of programs here that begin with an offload protocol",
    "reach_refused": "connections of programs here that a protocol was to open and did not, by errno",
    "module_failed": "faults of an offload protocol or transport, by its name; it is stopped until it is added again",
    "network_resync": "snapshots of the network taken because changes may have been missed, by cause",
    "network_ignored": "netlink messages that were not understood, by what was wrong",
    "explicit_asked": "calls of explicit sockets that asked the provider, by call",
    "explicit_refused": "calls of explicit sockets that failed, by call and errno, or went on natively, by reason",
    "internal_error": "faults of the provider itself, by place; see its log",
}


class Counters:
    """The counters of one provider, or of something else that names its own."""

    def __init__(self, names: Mapping[str, str] = NAMES) -> None:
        self._names = names
        self._values: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, reason: str = "") -> None:
        """Adds one; KeyError for a name that is not known."""
        if name not in self._names:
            raise KeyError(name)
        self._values[name, reason] += 1

    def add_many(self, count: int, name: str, reason: str = "") -> None:
        """Adds `count`, of events that were counted elsewhere."""
        if name not in self._names:
            raise KeyError(name)
        if count:
            self._values[name, reason] += count

    def get(self, name: str, reason: str = "") -> int:
        return self._values[name, reason]

    def as_json(self) -> dict[str, int]:
        """All counters that are not zero, as `name` or `name{reason}`."""
        return {f"{name}{{{reason}}}" if reason else name: n for (name, reason), n in sorted(self._values.items())}
