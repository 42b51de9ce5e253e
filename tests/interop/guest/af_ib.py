"""Runs in the guest: what rdma_cm makes of AF_IB addresses on the device that has an IP address; one object of JSON.

SDP of annex A4 wants the service id 0x1_PORT and 92 bytes of private data, which rdma_cm leaves to AF_IB alone.

usage: af_ib.py ADDRESS OTHER
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
from ctypes import POINTER, Structure, byref, c_int, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from ipaddress import ip_address

PS_SDP, PS_IB = 0x0001, 0x013F
AF_IB = 27
SDP_SERVICE, IB_SERVICE = 0x0001_0000, 0x013F_0000
PORT = 0x1389
ALL = (1 << 64) - 1
RESOLVE_MS = 2000


class Address(ctypes.BigEndianStructure):
    """struct sockaddr_ib of librdmacm, but for its family and scope, which are the machine's way round and 0."""

    _fields_ = [
        ("family", c_uint8 * 2), ("pkey", c_uint16), ("flowinfo", c_uint32), ("gid", c_uint8 * 16), ("sid", c_uint64),
        ("sid_mask", c_uint64), ("scope", c_uint64),
    ]  # fmt: skip


class EventHead(Structure):
    """The beginning of struct rdma_cm_event."""

    _fields_ = [("id", c_void_p), ("listen_id", c_void_p), ("event", c_int), ("status", c_int)]


cm = ctypes.CDLL("librdmacm.so.1", use_errno=True)
cm.rdma_create_event_channel.restype = c_void_p


def address(ip: str | None, sid: int) -> Address:
    """The GID of an IP address, or any, and a service id of which all bits count."""
    gid = bytes(16)
    if ip is not None:
        found = ip_address(ip)
        gid = found.packed if found.version == 6 else bytes(10) + b"\xff\xff" + found.packed
    return Address((c_uint8 * 2)(AF_IB, 0), 0xFFFF, 0, (c_uint8 * 16)(*gid), sid, ALL, 0)


class Id:
    """A new rdma_cm_id, and how each call on it ends: OK, or the name of its errno."""

    def __init__(self, space: int) -> None:
        self._channel = c_void_p(cm.rdma_create_event_channel())
        self._id = c_void_p()
        self.created = self._how(cm.rdma_create_id(self._channel, byref(self._id), None, space))

    def bind(self, at: Address) -> str:
        return self._how(cm.rdma_bind_addr(self._id, byref(at)))

    def listen(self) -> str:
        return self._how(cm.rdma_listen(self._id, 1))

    def resolve_address(self, to: Address, at: Address | None = None) -> str:
        """The event that comes, if the call is taken."""
        where = None if at is None else byref(at)
        how = self._how(cm.rdma_resolve_addr(self._id, where, byref(to), RESOLVE_MS))
        return self._event() if how == "OK" else how

    def resolve_route(self) -> str:
        how = self._how(cm.rdma_resolve_route(self._id, RESOLVE_MS))
        return self._event() if how == "OK" else how

    def _event(self) -> str:
        event = POINTER(EventHead)()
        how = self._how(cm.rdma_get_cm_event(self._channel, byref(event)))
        if how != "OK":
            return how
        told = event.contents
        name = ctypes.c_char_p(cm.rdma_event_str(told.event)).value or b""
        cm.rdma_ack_cm_event(event)
        return f"{name.decode()} {told.status}"

    @staticmethod
    def _how(result: int) -> str:
        return "OK" if result == 0 else errno.errorcode.get(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main() -> None:
    own, other = sys.argv[1:]
    cm.rdma_event_str.restype = c_void_p
    passive, asks, bound = Id(PS_IB), Id(PS_IB), Id(PS_IB)
    found = {
        "the port space of SDP": Id(PS_SDP).created,
        "bind to the GID": passive.bind(address(own, SDP_SERVICE + PORT)),
        "bind to any GID, service id of SDP": Id(PS_IB).bind(address(None, SDP_SERVICE + PORT)),
        "bind to any GID, service id of RDMA_PS_IB": bound.bind(address(None, IB_SERVICE + PORT)),
        "listen there": bound.listen(),
        "resolve from the GID": Id(PS_IB).resolve_address(address(other, SDP_SERVICE + PORT), address(own, 0)),
        "resolve from any GID": asks.resolve_address(address(other, SDP_SERVICE + PORT)),
        "resolve the route": asks.resolve_route(),
    }
    print(json.dumps(found))


main()
