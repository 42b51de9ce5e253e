"""Socket activation: the listening socket that a service manager passes to the provider (sd_listen_fds(3)).

The manager keeps the socket, so the first client can start the provider, and a restart never leaves a client without a
listener.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from typing import Final

from sidestep.errors import Unavailable

_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START


def listener(environment: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """The socket that was handed over, None if there is none; takes the variables away, which are for this process.

    Raises:
        Unavailable: What was handed over is not one listening AF_UNIX SOCK_SEQPACKET socket.
    """
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isascii() or not count.isdigit() or count == "0":
        return None
    if count != "1":
        raise Unavailable(f"{count} sockets were handed over, not one", remedy="see sidestep.socket")
    os.set_inheritable(_FIRST_FD, False)
    try:
        found = socket.socket(fileno=_FIRST_FD)
    except OSError as error:
        raise Unavailable(f"descriptor {_FIRST_FD} is not a socket: {error.strerror}") from error
    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if (found.family, found.type, listens) != (socket.AF_UNIX, socket.SOCK_SEQPACKET, 1):
        found.close()
        raise Unavailable(
            "the socket handed over does not listen for AF_UNIX SOCK_SEQPACKET connections",
            remedy="write ListenSequentialPacket= into sidestep.socket",
        )
    return found
