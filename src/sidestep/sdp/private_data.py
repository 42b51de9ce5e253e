"""Hello and HelloAck as private data of the connection manager: how long they are there, and what a listener looks for.

Devices differ in how much private data they carry, and in whether it arrives as long as it was sent. Both messages end
in reserved zeros, so a device that carries all that is defined (68 and 24 bytes) is enough: what is cut off here is put
back at the other end, for Len says how long the message was.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import Final

from sidestep.errors import Unavailable
from sidestep.rdma.cm import PrivateDataMatch
from sidestep.sdp.header import BSDH_LEN, Bsdh
from sidestep.sdp.hello import HelloAck
from sidestep.sdp.settings import Carrier

# Bytes of a Hello and a HelloAck up to the last field that means anything (docs/wire/sdp.md §5.1, §5.2, §23.2).
_DEFINED: Final = {Carrier.INFINIBAND: (68, 24), Carrier.IWARP: (32, 28)}
_LENGTH_MAX: Final = BSDH_LEN + HelloAck.LENGTH  # bytes of the longest of the four

# Offsets in a Hello (docs/wire/sdp.md §2.3).
_FAMILY: Final = 17  # IP version, in the high half
_DST_IP: Final = 48
_END: Final = 64


def check_room(request_max: int, reply_max: int, carrier: Carrier) -> None:
    """Raises Unavailable if there are too few bytes for private data."""
    hello, hello_ack = _DEFINED[carrier]
    if request_max < hello or reply_max < hello_ack:
        raise Unavailable(
            f"the device carries {request_max} and {reply_max} bytes of private data; SDP needs {hello} and {hello_ack}"
        )


def fitted(message: bytes, size_max: int) -> bytes:
    """As much of it as the device carries; only zeros are cut off."""
    if any(message[size_max:]):
        raise Unavailable(f"{len(message)} bytes of private data; the device carries {size_max}")
    return message[:size_max]


def whole(private_data: bytes) -> bytes:
    """The message as it was before a device has cut zeros off, or put some behind it; its own Len says so."""
    if len(private_data) < BSDH_LEN:
        return private_data
    length = Bsdh.decode(memoryview(private_data)).length
    if not BSDH_LEN <= length <= _LENGTH_MAX or any(private_data[length:]):
        return private_data  # it is none, and will be refused
    return private_data[:length].ljust(length, b"\0")


def match_address(local: IPv4Address | IPv6Address) -> PrivateDataMatch:
    """What a Hello says that asks for this address."""
    value, mask = bytearray(_END - _FAMILY), bytearray(_END - _FAMILY)
    value[0], mask[0] = local.version << 4, 0xF0
    value[_DST_IP - _FAMILY :] = local.packed.rjust(16, b"\0")
    mask[_DST_IP - _FAMILY :] = b"\xff" * 16
    return PrivateDataMatch(_FAMILY, bytes(value), bytes(mask))


def family_of(private_data: bytes) -> int:
    """The IP version that a Hello names; 0 if it is too short to have one."""
    return private_data[_FAMILY] >> 4 if len(private_data) > _FAMILY else 0
