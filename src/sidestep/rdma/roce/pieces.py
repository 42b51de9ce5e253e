"""Bytes out of the entries of a request, and into those of a receive, at an offset of the message."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidestep.rdma.work import Gather, Scatter


def piece_of(gather: Gather, offset: int, size: int) -> memoryview | bytes:
    """So many bytes of a message, or fewer where it ends."""
    if len(gather) == 1:
        return gather[0][offset : offset + size]
    parts: list[memoryview | bytes] = []
    for entry in gather:
        if size and offset < len(entry):
            part = entry[offset : offset + size]
            parts.append(part)
            size -= len(part)
        offset = max(0, offset - len(entry))
    return b"".join(parts)


def place(scatter: Scatter, offset: int, data: memoryview | bytes) -> bool:
    """Copies; False if the memory is not what the request says: read-only, not bytes, or released."""
    begun = 0
    try:
        for entry in scatter:
            if begun < len(data) and offset < len(entry):
                room = entry[offset : offset + len(data) - begun]
                room[:] = data[begun : begun + len(room)]
                begun += len(room)
            offset = max(0, offset - len(entry))
    except (TypeError, ValueError, BufferError):
        return False
    return begun == len(data)
