"""Orders to send live connections back to TCP, and to let them be promoted again, for `sidestep demote` and `promote`.

The provider passes the orders on. The connections themselves show whether they were followed, so nothing counts as done
that has not been seen.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from sidestep import limits
from sidestep.native.layout import Reason
from sidestep.observe.connections import Connection, Key, connections
from sidestep.provider.commands import Passed
from sidestep.provider.control import ControlConnection

_POLL_S: Final = 0.005
_UNTIL_ASKED: Final = frozenset({Reason.DEMOTED, Reason.PEER_LEFT, Reason.UNHEARD})  # a promotion undoes these


class Order(StrEnum):
    """Order to a connection; the name of the control request."""

    DEMOTE = "demote"
    PROMOTE = "promote"


class Result(StrEnum):
    """Result of an order."""

    TCP = "tcp"  # both directions are on TCP, and stay there
    PROMOTED = "promoted"  # both directions use the rings
    ALLOWED = "allowed"  # never promoted; it may be once it has shown that it lives
    ENDED = "ended"  # the connection has ended meanwhile
    STAYS = "stays"  # a connection on TCP: the reason does not go away
    PENDING = "pending"  # an order that is not done yet, when the time was up
    GONE = "gone"  # the process is not connected to this provider
    FOREIGN = "foreign"  # another user's


_DONE: Final = frozenset({Result.TCP, Result.PROMOTED, Result.ALLOWED, Result.ENDED})
TEXT: Final = {
    Result.TCP: "is on TCP",
    Result.PROMOTED: "is promoted",
    Result.ALLOWED: "may be promoted",
    Result.ENDED: "has ended",
    Result.STAYS: "stays on TCP",
    Result.PENDING: "is on its way: its program, or the one at the other end, has not made a call since",
    Result.GONE: "got no order: its process is not connected to this provider",
    Result.FOREIGN: "belongs to another user",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One connection, as it was last seen, and what became of the order."""

    connection: Connection
    result: Result

    @property
    def done(self) -> bool:
        """True if the connection is as it was asked to be."""
        return self.result in _DONE

    def as_json(self) -> dict[str, Any]:
        return {"result": self.result, "done": self.done, "connection": self.connection.as_json()}


def order(
    socket_path: Path, what: Order, wanted: Callable[[Connection], bool], timeout_s: float = limits.ORDER_TIMEOUT_S
) -> list[Outcome]:
    """Gives an order to all connections that are `wanted` now, and waits until it has been followed or the time is up.

    Raises:
        Unavailable: No provider answers.
    """
    deadline = time.monotonic() + timeout_s
    asked = {found.key: found for found in connections(socket_path) if found.key and wanted(found)}
    outcomes: dict[Key, Outcome] = {}
    unsent = set(asked)
    while True:
        for key, passed in _pass_on(socket_path, what, unsent):
            if passed is Passed.SENT:
                unsent.discard(key)
            elif passed is not Passed.BUSY:
                unsent.discard(key)
                outcomes[key] = Outcome(asked[key], Result(passed))
        seen = {found.key: found for found in connections(socket_path) if found.key in asked}
        for key in asked.keys() - outcomes.keys():
            asked[key] = seen.get(key, asked[key])
            result = _judge(what, asked[key]) if key in seen else Result.ENDED
            if result is not Result.PENDING and key not in unsent:
                outcomes[key] = Outcome(asked[key], result)
        if len(outcomes) == len(asked) or time.monotonic() > deadline:
            return [outcomes.get(key, Outcome(found, Result.PENDING)) for key, found in asked.items()]
        time.sleep(_POLL_S)


def _pass_on(socket_path: Path, what: Order, keys: set[Key]) -> Iterator[tuple[Key, Passed]]:
    if not keys:
        return
    families: dict[str, list[Key]] = defaultdict(list)
    for key in keys:
        families[key.arena].append(key)
    with ControlConnection(socket_path) as control:
        for arena, members in families.items():
            for first in range(0, len(members), limits.ORDERS_PER_REQUEST):
                some = members[first : first + limits.ORDERS_PER_REQUEST]
                slots = [(key.slot, key.generation) for key in some]
                reply = control.document(what, arena=arena, slots=slots)
                sent, passed = reply["told"], Passed(reply["passed"])
                yield from ((key, Passed.SENT if at < sent else passed) for at, key in enumerate(some))


def _judge(what: Order, found: Connection) -> Result:
    if what is Order.PROMOTE:
        if found.promoted:
            return Result.PROMOTED
        if found.state == "native":
            return Result.ALLOWED
        pinned = found.state == "pinned" and found.reason is not None
        stays = pinned and (found.relay_over or Reason[str(found.reason)] not in _UNTIL_ASKED)
        return Result.STAYS if stays else Result.PENDING
    on_tcp = found.tx.path == found.rx.path == "tcp"
    return Result.TCP if on_tcp and found.state in ("native", "pinned") else Result.PENDING
