"""Where the bytes of a buffer lie: what a registration is found by, and how a test sees that nothing was copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.errors import Unavailable

if TYPE_CHECKING:
    from typing_extensions import Buffer

try:
    from sidestep.native._channel import buffer_address
except ImportError:  # built without Python's headers

    def buffer_address(buffer: Buffer, /) -> int:
        """Raises Unavailable."""
        raise Unavailable("the native extension is missing", remedy="install python3-dev and run 'make build'")


__all__ = ["buffer_address"]
