"""The numbers of explicit sockets, for Python programs; `include/sidestep/sidestep.h` has them for C.

`sidestep.socket` has them, and its class opens such sockets in any program. CPython's own `socket.socket` does so in
programs under sidestep, but can give them no address. A program that must use it takes the socket over as one of the
kernel's families:

    raw = socket.socket(AF_INET_OFFLOAD, socket.SOCK_STREAM, IPPROTO_OFFLOAD_ANY)
    sock = socket.socket(fileno=raw.detach())  # family AF_INET; still an explicit socket
"""

from __future__ import annotations

from typing import Final

from sidestep.native import layout

AF_INET_OFFLOAD: Final = layout.AF_INET_OFFLOAD  # TCP by any offload protocol
AF_INET6_OFFLOAD: Final = layout.AF_INET6_OFFLOAD
AF_INET_DIRECT: Final = layout.AF_INET_DIRECT  # TCP of the kernel, never offered
AF_INET6_DIRECT: Final = layout.AF_INET6_DIRECT
IPPROTO_SDP: Final = layout.IPPROTO_SDP  # the Sockets Direct Protocol, or nothing
IPPROTO_OFFLOAD_ANY: Final = layout.IPPROTO_OFFLOAD_ANY  # the wildcard: any, and TCP where there is none

__all__ = [
    "AF_INET6_DIRECT", "AF_INET6_OFFLOAD", "AF_INET_DIRECT", "AF_INET_OFFLOAD", "IPPROTO_OFFLOAD_ANY", "IPPROTO_SDP",
]  # fmt: skip
