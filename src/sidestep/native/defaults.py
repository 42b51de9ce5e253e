"""Defaults and bounds of settings that C and Python share, for commands that need no record of layout.py."""

from __future__ import annotations

TYPE_CHECKING = False  # see places.py
if TYPE_CHECKING:
    from typing import Final

SYSTEM_SOCKET: Final = "/run/sidestep/provider"  # the system-wide provider

# Bounds for promotion, of which a connection reaches one: small reads and writes, so that short ones are free; bytes.
# Those take TCP about as long as a promotion takes, a millisecond.
PROMOTE_AFTER_CALLS: Final = 8
PROMOTE_AFTER_BYTES: Final = 2 << 20
PROMOTE_AFTER_CALLS_MAX: Final = (1 << 22) - 1  # 32 bits hold 2^BACKOFF_MAX times as many
PROMOTE_AFTER_BYTES_MAX: Final = (1 << 63) - 1
SPIN_US_MAX: Final = 10_000  # that a wait may spin: longer than any wake-up; more would only burn a core
