"""Last contents of the arenas of process families that have ended, for later questions.

A row is the connection slot as it was: keeping it costs a copy, and the reader decodes it. An arena keeps only the last
connection of each of its places, so a family has no more than these.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sidestep import limits
from sidestep.provider import arena as arenas
from sidestep.provider.clients import Arena, Client


@dataclass(frozen=True, slots=True)
class EndedRow:
    """A connection of a family that has ended."""

    sequence: int
    arena_id: bytes
    place: int  # number of its slot
    uid: int
    pid: int  # pid of the family's first process, as the provider sees it
    program: str  # program of its last one
    pid_namespace: int  # namespace in which the numbers in the slot count
    ended_at: float  # monotonic seconds
    slot: bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "arena": self.arena_id.hex(), "place": self.place, "pid": self.pid, "program": self.program,
            "pid_namespace": self.pid_namespace, "ended_at": self.ended_at,
            "slot": base64.b64encode(self.slot).decode("ascii"),
        }  # fmt: skip


class History:
    """The last rows of all families that have ended; see `limits.ENDED_MAX`."""

    def __init__(self, *, rows_max: int = limits.ENDED_MAX) -> None:
        self._rows: deque[EndedRow] = deque(maxlen=rows_max)
        self._sequence = 0

    def keep(self, arena: Arena, last: Client, now: float) -> None:
        """Keeps the arena of a family that has just ended, given its last client."""
        namespace = arenas.pid_namespace(arena.fd)
        program = next(iter(last.subject.programs), "")[: limits.ENDED_NAME_MAX]
        for place, raw in islice(arenas.used_slots(arena.fd), limits.ENDED_PER_FAMILY_MAX):
            self._sequence += 1
            self._rows.append(
                EndedRow(
                    self._sequence, arena.arena_id, place, arena.uid, arena.pid, program, namespace, now, bytes(raw)
                )
            )

    def forget(self, arena_id: bytes) -> None:
        """Forgets a family that had only lost its connection to the provider, as its arena has returned."""
        if any(row.arena_id == arena_id for row in self._rows):
            kept = [row for row in self._rows if row.arena_id != arena_id]
            self._rows.clear()
            self._rows.extend(kept)

    def page(self, after: int, shown: Callable[[int], bool]) -> dict[str, Any]:
        """Returns rows behind the one of sequence `after`, as many as fit a reply, of users that may be `shown`."""
        later = (row for row in self._rows if row.sequence > after and shown(row.uid))
        rows = list(islice(later, limits.ENDED_PER_REPLY))
        more = len(rows) == limits.ENDED_PER_REPLY
        return {"ended": [row.as_json() for row in rows], "next": rows[-1].sequence if more else None}
