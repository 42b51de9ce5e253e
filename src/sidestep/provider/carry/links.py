"""How the connections with other hosts are that one process carries."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from sidestep import limits
from sidestep.provider.carry.hub import Relays
from sidestep.provider.carry.remote_relay import Far

_SPARE: Final = 256  # bytes of a reply around its links


def page(hub: Relays, after: int) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
    """Some of them from so many on, each with the user whose it is, and whether there are more behind.

    They fit into one reply of the provider's.
    """
    fars = [one for one in hub if isinstance(one, Far) and one.ends_here == 1]
    rows: list[tuple[int, dict[str, Any]]] = []
    left = limits.CONTROL_PIECE_MAX - _SPARE
    for far in fars[after : after + limits.LINKS_PER_REPLY]:
        details = far.details() | {"process": os.getpid()}
        left -= len(json.dumps(details)) + 2  # a comma and a space
        if left < 0 and rows:
            break
        rows.append((far.uid, details))
    return rows, after + len(rows) < len(fars)
