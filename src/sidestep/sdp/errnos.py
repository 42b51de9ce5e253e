"""What a program is told of the end of a connection: the errno of each cause, and when.

A connection that broke says why once, as a TCP socket does: what was outstanding then, or the next call, fails with the
errno of the cause. After that, reading finds the end of the stream and writing EPIPE.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from sidestep.errors import InternalError, LimitReached, Misuse, PeerViolation, SidestepError, Unavailable
from sidestep.sdp.connection import SdpCause

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection

BY_CAUSE: Final = {
    SdpCause.REFUSED: errno.ECONNREFUSED,
    SdpCause.VIOLATION: errno.ECONNRESET,  # docs/wire/sdp.md §19
    SdpCause.RESET: errno.ECONNRESET,
    SdpCause.TRANSPORT: errno.ECONNRESET,
    SdpCause.TIMEOUT: errno.ETIMEDOUT,
    SdpCause.ABORTED: errno.ECONNABORTED,
    SdpCause.RESOURCES: errno.ENOBUFS,
}

# Of what a call raises before there is a connection that could break.
BY_ERROR: Final[dict[type[SidestepError], int]] = {
    Misuse: errno.EINVAL,
    LimitReached: errno.ENOBUFS,
    Unavailable: errno.ENETUNREACH,
    PeerViolation: errno.ECONNRESET,
    InternalError: errno.EIO,
}


def os_error(number: int, why: str = "") -> OSError:
    """The exception of an errno: ConnectionResetError and its like where there is one."""
    text = os.strerror(number)
    return OSError(number, f"{text}: {why}" if why else text)


def error_of(error: SidestepError) -> OSError:
    """The exception for what a call has raised: that of the system call beneath, if it was one that failed."""
    beneath = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
    number = beneath or next(BY_ERROR[kind] for kind in type(error).__mro__ if kind in BY_ERROR)
    raised = os_error(number, str(error))
    raised.__cause__ = error
    return raised


class Reports:
    """Of one connection: what its program is told of its end."""

    __slots__ = ("_connection", "_told")

    def __init__(self, connection: SdpConnection) -> None:
        self._connection = connection
        self._told = False

    @property
    def pending(self) -> bool:
        """Whether there is something that was not told yet."""
        return self._connection.error is not None and not self._told

    def take(self) -> OSError | None:
        """What was not told yet."""
        return self.why() if self.pending else None

    def why(self) -> OSError:
        """The error that the connection ended by; for whatever was outstanding then."""
        connection = self._connection
        assert connection.error is not None
        assert connection.cause is not None
        self._told = True
        raised = os_error(BY_CAUSE[connection.cause], str(connection.error))
        raised.__cause__ = connection.error
        return raised

    def for_writing(self) -> OSError | None:
        """What a send that cannot be made fails with; None if it can."""
        if self._connection.error is None:
            return None
        return self.take() or os_error(errno.EPIPE)
