"""Named counters with a reason: `offer_refused{TOO_MANY}`. Everything that is refused or dropped adds one to one."""

from __future__ import annotations

from collections import Counter
from typing import Final

NAMES: Final = {
    "client_accepted": "connections taken in",
    "client_dropped": "connections closed by the provider, by reason",
    "offer_accepted": "offers taken in",
    "offer_refused": "offers refused, by reason",
    "offer_withdrawn": "offers taken back by their client, or lost with it",
    "claim_matched": "claims that found their offer; both ends were told",
    "claim_refused": "claims refused, by reason",
    "internal_error": "faults of the provider itself, by place; see its log",
}


class Counters:
    """The counters of one provider."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, reason: str = "") -> None:
        """Adds one; KeyError for a name that is not in `NAMES`."""
        if name not in NAMES:
            raise KeyError(name)
        self._values[name, reason] += 1

    def get(self, name: str, reason: str = "") -> int:
        """The value of one counter."""
        return self._values[name, reason]

    def as_json(self) -> dict[str, int]:
        """All counters that are not zero, as `name` or `name{reason}`."""
        return {f"{name}{{{reason}}}" if reason else name: n for (name, reason), n in sorted(self._values.items())}
