"""A program that `make lint` has mypy and pyright read: `sidestep.socket` is typed as the standard module, and ours.

An ignored error that is none is an error to both, so that each name which does not exist must be refused.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import assert_type

import sidestep
from sidestep import socket
from sidestep.socket import SdpSocket

assert_type(socket.gethostbyname("localhost"), str)
assert_type(socket.ntohs(1), int)
assert_type(socket.has_ipv6, bool)
assert_type(socket.SOL_SOCKET, int)
assert_type(socket.getdefaulttimeout(), float | None)
assert_type(socket.socket().peek(), memoryview)
assert_type(socket.create_connection(("localhost", "http")), socket.socket)
assert_type(socket.create_connection(("localhost", 1), protocol="sdp"), SdpSocket)
assert_type(socket.create_server(("localhost", 1)).accept()[0], socket.socket)
assert_type(sidestep.create_server(("localhost", 1)), socket.socket)
assert_type(socket.fromfd(0, socket.AF_INET, socket.SOCK_STREAM), socket.socket)
assert_type(socket.socketpair(), tuple[socket.socket, socket.socket])
assert_type(socket.gaierror().errno, int | None)


def ends(error: socket.timeout, flag: socket.MsgFlag) -> socket.AddressFamily:
    raise error


socket.gethostbynam("localhost")  # type: ignore[attr-defined]
socket.socket(socket.AF_INTE)  # type: ignore[attr-defined]
sidestep.sokcet.socket()  # type: ignore[attr-defined]
