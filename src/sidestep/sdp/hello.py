"""Hello and HelloAck: how two ends introduce themselves, and what is refused.

Over InfiniBand they are the whole private data of the CM's REQ and REP, and carry addresses and port. Over iWARP they
are shorter and carry read depths instead, for the addresses are those of the TCP connection
(draft-pinkerton-iwarp-sdp). Fields keep the names of the specification.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final, NamedTuple, Self, TypeAlias

from sidestep.errors import Misuse
from sidestep.sdp.header import BUFFER_SIZE_MIN, LENGTH_MAX, Bsdh, Header, Mid

IpAddress: TypeAlias = IPv4Address | IPv6Address

BUFS_MIN: Final = 3  # receive buffers that each end has posted at the start
EXTENDED_MAX_ADVERTS: Final = 2  # Cap: ExtMaxAdverts is valid

_SERVICE_PREFIX: Final = 0x0000_0000_0001_0000


def service_id(port: int) -> int:
    """The InfiniBand service ID of an SDP port."""
    if not 0 <= port <= 0xFFFF:
        raise Misuse(f"{port} is not a port")
    return _SERVICE_PREFIX | port


def port_of(service: int) -> int | None:
    """The port of an SDP service ID; None if the ID is not one of SDP's."""
    return service & 0xFFFF if service & ~0xFFFF == _SERVICE_PREFIX else None


class Version(NamedTuple):
    """The version of the protocol that an end speaks."""

    major: int
    minor: int

    @property
    def byte(self) -> int:
        """As it is sent: major in the high half."""
        return self.major << 4 | self.minor

    @classmethod
    def of_byte(cls, value: int) -> Self:
        """From what was received."""
        return cls(value >> 4, value & 0xF)


VERSION_2_2: Final = Version(2, 2)  # A4 1.2; what OFED sends, and the only major that the Linux CM takes
VERSION_1_1: Final = Version(1, 1)  # A4 1.0.a and 1.1, and iWARP


def agreed(local: Version, remote: Version) -> Version:
    """The version of a connection: of two minors the lower applies. Majors that differ are refused before."""
    return Version(local.major, min(local.minor, remote.minor))


class _Introduction(Header):
    """What they have in common; the version goes first, whatever stands behind it."""

    max_adverts: int  # adverts that the other end may have outstanding
    version: Version

    def encode(self) -> bytes:
        names: tuple[str, ...] = self.__slots__
        *others, version = (getattr(self, name) for name in names)
        return self._LAYOUT.pack(version.byte, *others)

    @classmethod
    def decode(cls, message: memoryview) -> Self:
        """Reads it from the whole message; the values are judged by `hello_refusal` and `hello_ack_refusal`."""
        version, *others = cls._unpack(message)
        return cls(*others, Version.of_byte(version))  # type: ignore[call-arg]

    @property
    def adverts_max(self) -> int:
        """Adverts that the other end may have outstanding, whichever field says so."""
        return self.max_adverts


@dataclass(frozen=True, slots=True)
class Hello(_Introduction, mid=Mid.HELLO, layout="BBBBIIHH16s16s2xH24x"):
    """The client's first message over InfiniBand: 92 bytes, the private data of a REQ."""

    max_adverts: int  # adverts that the other end may have outstanding
    des_rem_rcv_sz: int  # bytes that the other end's Private Buffers had better have
    local_rcv_sz: int  # bytes of this end's Private Buffers, headers included
    local_port: int
    src_ip: IpAddress
    dst_ip: IpAddress
    version: Version = VERSION_2_2
    ip_version: int = 4  # if neither 4 nor 6, the addresses are shown as if it were 6
    cap: int = 0
    ext_max_adverts: int = 0

    def encode(self) -> bytes:
        return self._LAYOUT.pack(
            self.version.byte,
            self.ip_version << 4 | self.cap,
            0,
            self.max_adverts,
            self.des_rem_rcv_sz,
            self.local_rcv_sz,
            self.local_port,
            0,
            _address_bytes(self.src_ip),
            _address_bytes(self.dst_ip),
            self.ext_max_adverts,
        )

    @classmethod
    def decode(cls, message: memoryview) -> Self:
        fields = cls._unpack(message)
        version, family, _, max_adverts, des_rem_rcv_sz, local_rcv_sz, port, _, src, dst, extended = fields
        ip_version = family >> 4
        return cls(
            max_adverts=max_adverts,
            des_rem_rcv_sz=des_rem_rcv_sz,
            local_rcv_sz=local_rcv_sz,
            local_port=port,
            src_ip=_address(ip_version, src),
            dst_ip=_address(ip_version, dst),
            version=Version.of_byte(version),
            ip_version=ip_version,
            cap=family & 0xF,
            ext_max_adverts=extended,
        )

    @property
    def adverts_max(self) -> int:
        return self.ext_max_adverts if self.cap & EXTENDED_MAX_ADVERTS else self.max_adverts


@dataclass(frozen=True, slots=True)
class HelloAck(_Introduction, mid=Mid.HELLO_ACK, layout="B2xBI172x"):
    """The server's answer over InfiniBand: 196 bytes, the private data of a REP."""

    max_adverts: int
    act_rcv_sz: int  # bytes of the server's Private Buffers, headers included
    version: Version = VERSION_2_2


@dataclass(frozen=True, slots=True)
class IwarpHello(_Introduction, mid=Mid.HELLO, layout="BxHIIHH"):
    """The client's first message over iWARP: 32 bytes."""

    max_adverts: int
    des_rem_rcv_sz: int
    local_rcv_sz: int
    loc_ord: int  # RDMA Reads that this end may have under way
    loc_ird: int  # RDMA Reads of the other end that this end can serve at a time
    version: Version = VERSION_1_1


@dataclass(frozen=True, slots=True)
class IwarpHelloAck(_Introduction, mid=Mid.HELLO_ACK, layout="BxHIHH", solicited=True):
    """The server's answer over iWARP: 28 bytes."""

    max_adverts: int
    act_rcv_sz: int
    loc_ord: int
    loc_ird: int
    version: Version = VERSION_1_1


AnyHello: TypeAlias = Hello | IwarpHello
AnyHelloAck: TypeAlias = HelloAck | IwarpHelloAck


class Refusal(StrEnum):
    """Why a Hello or a HelloAck is answered by a reject (InfiniBand: REJ 28; iWARP: close)."""

    WRONG_MESSAGE = "wrong_message"  # not the Hello or HelloAck of this kind of transport
    VERSION = "version"
    MAX_ADVERTS = "max_adverts"
    IP_VERSION = "ip_version"
    BUFFER_SIZE = "buffer_size"
    BUFS = "bufs"
    READ_DEPTH = "read_depth"


# What a refused Hello or HelloAck breaks, by the name that its error has.
RULES: Final = {
    f"hello_{Refusal.WRONG_MESSAGE.value}": "a connection begins with the Hello and HelloAck of its kind of transport",
    f"hello_{Refusal.VERSION.value}": "both ends speak the same major version",
    f"hello_{Refusal.MAX_ADVERTS.value}": "MaxAdverts is at least 1",
    f"hello_{Refusal.IP_VERSION.value}": "addresses are of IPv4 or IPv6",
    f"hello_{Refusal.BUFFER_SIZE.value}": "private buffers of 37 to 2^31 bytes are announced",
    f"hello_{Refusal.BUFS.value}": "at least three private buffers are posted before Hello and HelloAck",
    f"hello_{Refusal.READ_DEPTH.value}": "each end can have an RDMA Read under way (iWARP)",
}


def hello_refusal(
    bsdh: Bsdh,
    hello: Header,
    *,
    iwarp: bool = False,
    majors: Set[int] = frozenset({2}),
    ip_versions: Set[int] = frozenset({4, 6}),
) -> Refusal | None:
    """What the server must refuse a client's message for, if anything: the checks that its form has not settled.

    `majors` are the versions this end accepts ({2}, with 1 for old peers; {1} over iWARP), `ip_versions` what its
    listener serves. A minor that differs is no reason: see `agreed`.
    """
    if not isinstance(hello, Hello | IwarpHello) or isinstance(hello, IwarpHello) is not iwarp:
        return Refusal.WRONG_MESSAGE
    if hello.version.major not in majors:
        return Refusal.VERSION
    if isinstance(hello, Hello) and hello.ip_version not in ip_versions:
        return Refusal.IP_VERSION
    return _window_refusal(bsdh, hello, hello.local_rcv_sz)


def hello_ack_refusal(bsdh: Bsdh, ack: Header, *, iwarp: bool = False, major: int = 2) -> Refusal | None:
    """What the client must drop the attempt for, if anything; `major` is that of the Hello it has sent."""
    if not isinstance(ack, HelloAck | IwarpHelloAck) or isinstance(ack, IwarpHelloAck) is not iwarp:
        return Refusal.WRONG_MESSAGE
    if ack.version.major != major:
        return Refusal.VERSION
    return _window_refusal(bsdh, ack, ack.act_rcv_sz)


def _window_refusal(bsdh: Bsdh, header: AnyHello | AnyHelloAck, buffer_size: int) -> Refusal | None:
    if header.adverts_max == 0:
        return Refusal.MAX_ADVERTS
    if not BUFFER_SIZE_MIN <= buffer_size <= LENGTH_MAX:
        return Refusal.BUFFER_SIZE
    if bsdh.bufs < BUFS_MIN:
        return Refusal.BUFS
    if isinstance(header, IwarpHello | IwarpHelloAck) and 0 in (header.loc_ord, header.loc_ird):
        return Refusal.READ_DEPTH
    return None


def _address(ip_version: int, wire: bytes) -> IpAddress:
    return IPv4Address(wire[12:]) if ip_version == 4 else IPv6Address(wire)


def _address_bytes(address: IpAddress) -> bytes:
    return address.packed.rjust(16, b"\0")  # IPv4 in the last four bytes
