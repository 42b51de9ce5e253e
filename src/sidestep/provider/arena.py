"""Reading the arenas in which shims keep their connection slots.

The writer is a stranger. Sizes come from the sealed file, never from its content. It is read with pread, which neither
faults nor fills holes with pages.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.native import layout
from sidestep.native.layout import State
from sidestep.provider import memory

ARENA_NAME: Final = (
    "/memfd:sidestep-arena"  # beginning of the name of a file that each program under the shim has open (shim_arena.c)
)
_CHUNK_SLOTS: Final = 128
_SLOT: Final = layout.offsets("conn_slot")
_CHANNEL_STATES: Final = frozenset({State.ATTACHED, State.PROMOTED})


def layout_of(pid: int) -> int | None:
    """The layout version of a program's shim; None: it has none, has gone, or may not be looked into."""
    with contextlib.suppress(OSError):  # closed meanwhile, or gone
        if entry := _entry(pid):
            with entry.open("rb") as file:
                return header["version"] if (header := _header(file.fileno())) else None
    return None


def inode_of(pid: int) -> int | None:
    """The inode of a program's arena; None as above."""
    with contextlib.suppress(OSError):
        if entry := _entry(pid):
            return entry.stat().st_ino
    return None


def _entry(pid: int) -> Path | None:
    """The arena among the files that a program has open."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    return next((entry for entry in files if str(entry.readlink()).startswith(ARENA_NAME)), None)


def check_arena(fd: int) -> None:
    """Raises PeerViolation unless `fd` can be an arena: a sealed memfd of a possible size."""
    size = memory.sealed_size(fd, "arena")
    if not layout.ARENA_SLOTS_OFFSET <= size <= limits.ARENA_SIZE_MAX:
        raise PeerViolation(f"an arena of {size} bytes", rule="descriptor")


def raw_slots(fd: int) -> Iterator[memoryview]:
    """The slots of an arena that have been used, each CONN_SLOT_SIZE bytes; none if the header makes no sense."""
    slots_max = (os.fstat(fd).st_size - layout.ARENA_SLOTS_OFFSET) // layout.CONN_SLOT_SIZE
    header = _header(fd)
    if header is None or header["slot_size"] != layout.CONN_SLOT_SIZE or header["version"] not in layout.LAYOUTS:
        return
    count = min(header["slots_used"], slots_max, layout.ARENA_SLOTS_MAX)
    for first in range(0, count, _CHUNK_SLOTS):
        wanted = min(_CHUNK_SLOTS, count - first) * layout.CONN_SLOT_SIZE
        chunk = memoryview(os.pread(fd, wanted, layout.ARENA_SLOTS_OFFSET + first * layout.CONN_SLOT_SIZE))
        for at in range(0, len(chunk) - layout.CONN_SLOT_SIZE + 1, layout.CONN_SLOT_SIZE):
            yield chunk[at : at + layout.CONN_SLOT_SIZE]


def pid_namespace(fd: int) -> int:
    """The inode of the pid namespace in which the numbers of an arena's processes count; 0: not known."""
    return header["pid_namespace"] if (header := _header(fd)) else 0


def pid_namespace_of(process: Path) -> int:
    """The inode of that of a process, by its directory in /proc; 0: it has gone, or may not be looked at."""
    try:
        return (process / "ns/pid").stat().st_ino
    except OSError:
        return 0


def _header(fd: int) -> dict[str, Any] | None:
    head = os.pread(fd, layout.size("arena_header"), 0)
    if len(head) < layout.size("arena_header"):
        return None
    header = layout.unpack("arena_header", head)
    return header if header["magic"] == layout.ARENA_MAGIC else None


def numbered_slots(fd: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The slots in use, decoded, each with its number."""
    for number, raw in enumerate(raw_slots(fd)):
        if raw[_SLOT["generation"]] & 1:  # odd while in use; the lowest byte comes first on the machines we know
            yield number, layout.unpack("conn_slot", raw)


def used_slots(fd: int) -> Iterator[tuple[int, memoryview]]:
    """The slots that have a connection or, if they are free, had one: as they are, each with its number.

    Some were of a socket that never was connected, or only listened: these are left out.
    """
    remote = slice(_SLOT["remote_port"], _SLOT["remote_port"] + 2)
    carried = [slice(_SLOT[name], _SLOT[name] + 8) for name in ("tx_tcp_msgs", "rx_tcp_msgs")]
    for number, raw in enumerate(raw_slots(fd)):
        if any(raw[remote]) or any(any(raw[place]) for place in carried):
            yield number, raw


def segments_in_use(fd: int) -> Iterator[tuple[bytes | None, int]]:
    """Yields for each slot that was ever used the id of its channel segment, or None, and the bytes it has spilled."""
    state_at, segment_at, spilled_at = _SLOT["state"], _SLOT["segment_id"], _SLOT["tx_spilled"]
    for raw in raw_slots(fd):
        state = int.from_bytes(raw[state_at : state_at + 4], sys.byteorder)
        in_use = raw[_SLOT["generation"]] & 1 and state in _CHANNEL_STATES
        spilled = int.from_bytes(raw[spilled_at : spilled_at + 8], sys.byteorder)
        yield bytes(raw[segment_at : segment_at + 16]) if in_use else None, min(spilled, layout.CHANNEL_SPILL)
