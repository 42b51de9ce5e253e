"""How the connections with other hosts are that one process carries."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from sidestep import limits
from sidestep.provider.carry.hub import Hub
from sidestep.provider.carry.remote_relay import RemoteRelay

_SPARE: Final = 256  # bytes of a reply around its links


def page(hub: Hub, after: int) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
    """Some of them from so many on, each with the user whose it is, and whether there are more behind.

    They fit into one reply of the provider's.
    """
    remote_relay = [one for one in hub if isinstance(one, RemoteRelay) and one.ends_here == 1]
    rows: list[tuple[int, dict[str, Any]]] = []
    left = limits.CONTROL_PIECE_MAX - _SPARE
    for relay in remote_relay[after : after + limits.LINKS_PER_REPLY]:
        details = relay.details() | {"process": os.getpid()}
        left -= len(json.dumps(details)) + 2  # a comma and a space
        if left < 0 and rows:
            break
        rows.append((relay.uid, details))
    return rows, after + len(rows) < len(remote_relay)
