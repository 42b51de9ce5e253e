"""Taking in the connections that wait at a listening socket, as many as one turn of a loop may."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any, Final

PAUSE_S: Final = 0.1  # after `Exhausted`: until then the listener would be ready all the time
_PER_TURN: Final = 64
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Exhausted(Exception):
    """The kernel has no descriptor or no memory for another connection; its text says which."""


def accepted(listener: socket.socket) -> Iterator[tuple[socket.socket, Any]]:
    """Each connection that waits, with its address; who takes one may close the listener. Raises Exhausted."""
    for _ in range(_PER_TURN):
        if listener.fileno() < 0:
            return
        try:
            found = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _EXHAUSTED:
                raise Exhausted(error.strerror) from error
            continue  # accept(2): an error of the connection that was to be accepted; the next one may be good
        yield found
