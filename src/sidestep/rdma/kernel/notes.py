"""What comes out of rdma_cm's event channel, and addresses as it has them."""

from __future__ import annotations

import socket
import sys
from ctypes import Structure, c_void_p, cast, string_at
from dataclasses import dataclass
from ipaddress import ip_address
from struct import Struct
from typing import Any, Final

from sidestep.rdma.kernel.abi import RdmaCmEvent

_IN: Final = Struct("=H2s4s8x")  # struct sockaddr_in: port and address in network order
_IN6: Final = Struct("=H2s4x16sI")  # struct sockaddr_in6
_WITH_PARAMETERS: Final = (
    RdmaCmEvent.CONNECT_REQUEST, RdmaCmEvent.CONNECT_RESPONSE, RdmaCmEvent.ESTABLISHED, RdmaCmEvent.REJECTED,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CmNote:
    """An event of the channel, copied."""

    kind: int  # RdmaCmEvent
    status: int
    id: int  # address of the rdma_cm_id
    listen_id: int
    private_data: bytes
    responder_resources: int  # RDMA Reads this end is asked to take
    initiator_depth: int  # and may make


def sockaddr(address: str, port: int) -> bytes:
    host, _, scope = address.partition("%")
    found = ip_address(host)
    number = port.to_bytes(2, "big")
    if found.version == 4:
        return _IN.pack(socket.AF_INET, number, found.packed)
    return _IN6.pack(socket.AF_INET6, number, found.packed, socket.if_nametoindex(scope) if scope else 0)


def address_in(storage: Any) -> tuple[str, int]:
    """Address and port in a sockaddr."""
    raw = bytes(storage)
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET6:
        _, port, packed, _ = _IN6.unpack_from(raw)
    else:
        _, port, packed = _IN.unpack_from(raw)
    return str(ip_address(packed)), int.from_bytes(port, "big")


def address_of(identifier: Any) -> int:
    return cast(identifier, c_void_p).value or 0


def copied(event: Structure) -> CmNote:
    conn = event.param.conn
    data = b""
    if event.event in _WITH_PARAMETERS and conn.private_data and conn.private_data_len:
        data = string_at(conn.private_data, conn.private_data_len)
    return CmNote(
        event.event, event.status, event.id or 0, event.listen_id or 0, data,
        conn.responder_resources, conn.initiator_depth,
    )  # fmt: skip
