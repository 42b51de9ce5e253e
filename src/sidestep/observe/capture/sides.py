"""The two ends of a connection."""

from __future__ import annotations

from enum import Enum


class Side(Enum):
    """Who sends."""

    CONNECTING = 0
    ACCEPTING = 1

    @property
    def other(self) -> Side:
        """Who receives."""
        return Side.ACCEPTING if self is Side.CONNECTING else Side.CONNECTING
