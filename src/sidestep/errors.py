"""The errors of sidestep, by who must act.

Each carries what happened and, where there is one, the remedy; `errno_of` is the one table that maps them to errno.
"""

from __future__ import annotations

import errno
from typing import Final


class SidestepError(Exception):
    """Base of all errors of sidestep; `remedy` says what to do, or is empty."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class Misuse(SidestepError):
    """The caller must act: a wrong argument, or a call at the wrong time."""


class PeerViolation(SidestepError):
    """The other end broke a rule; `rule` names it for the counters."""

    def __init__(self, message: str, *, rule: str) -> None:
        super().__init__(message)
        self.rule = rule


class LimitReached(SidestepError):
    """A bound was met; `limit` is its name in `sidestep.limits`."""

    def __init__(self, message: str, *, limit: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.limit = limit


class Unavailable(SidestepError):
    """Something needed is not there; the next way, at worst plain TCP, may be tried."""


class InternalError(SidestepError):
    """A fault of sidestep itself."""


ERRNO: Final[dict[type[SidestepError], int]] = {
    Misuse: errno.EINVAL,
    PeerViolation: errno.EPROTO,
    LimitReached: errno.ENOBUFS,
    Unavailable: errno.EAGAIN,
    InternalError: errno.EIO,
}


def errno_of(error: SidestepError) -> int:
    """The errno that stands for `error` where only a number can be told."""
    return next(code for kind, code in ERRNO.items() if isinstance(error, kind))
