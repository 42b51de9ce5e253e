"""Netlink messages that lie, and what real ones say."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address

import pytest
from common import PATIENCE_S

from sidestep.provider.network import netlink
from sidestep.provider.network.netlink import Frame, Malformed
from sidestep.routing import NoRoute, Obstacle, Route

_HEADER = struct.Struct("=IHHII")


def _real(request: bytes) -> Iterator[Frame]:
    """What this machine's kernel answers."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(PATIENCE_S)
        sock.send(request)
        while True:
            for frame in netlink.split(sock.recv(1 << 16)):
                if frame.kind == 3:
                    return
                yield frame
                if not frame.flags & 2:  # not of several
                    return


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    dumps = (netlink.LINKS, netlink.ADDRESSES, netlink.ROUTES_4, netlink.ROUTES_6)
    found = [frame for what in dumps for frame in _real(netlink.dump_request(what, 1))]
    assert {frame.kind for frame in found} >= {16, 20, 24}
    return found


def _lookup() -> Frame:
    (frame,) = _real(netlink.lookup_request(ip_address("127.0.0.1"), None, None, 0, 0, 7))
    assert frame.sequence == 7
    return frame


def test_a_lookup_is_answered_by_the_kernel() -> None:
    loopback = ip_address("127.0.0.1")
    expected = Route(loopback, "", 1, loopback, None, local=True)
    assert netlink.route_of(_lookup(), loopback, None) == expected


@pytest.mark.parametrize(
    "datagram",
    [
        b"\1",
        bytes(15),
        _HEADER.pack(0, 24, 0, 0, 0),
        _HEADER.pack(15, 24, 0, 0, 0),
        _HEADER.pack(17, 24, 0, 0, 0),
        _HEADER.pack(2**32 - 1, 24, 0, 0, 0),
        _HEADER.pack(20, 24, 0, 0, 0) + bytes(4) + b"\1",
    ],
)
def test_a_length_that_cannot_be_is_found(datagram: bytes) -> None:
    with pytest.raises(Malformed):
        list(netlink.split(datagram))


@pytest.mark.parametrize(("kind", "body_len"), [(16, 16), (17, 16), (20, 8), (21, 8), (24, 12), (25, 12)])
def test_a_message_that_ends_within_its_head_is_found(kind: int, body_len: int) -> None:
    for length in range(body_len):
        frame = Frame(kind, 0, 1, _HEADER.pack(16 + length, kind, 0, 1, 0) + bytes(length))
        with pytest.raises(Malformed):
            netlink.record_of(frame)


def test_an_address_that_cannot_be_is_found(frames: list[Frame]) -> None:
    real = next(frame for frame in frames if frame.kind == 20)
    assert netlink.record_of(real) is not None
    for offset, value in ((1, b"\x81"), (4, b"\0\0\0\0"), (4, b"\xff\xff\xff\xff")):  # its prefix, its interface
        data = bytearray(real.data)
        data[16 + offset : 16 + offset + len(value)] = value
        with pytest.raises(Malformed):
            netlink.record_of(Frame(20, 0, 1, bytes(data)))


def test_kinds_that_nobody_asked_for_say_nothing() -> None:
    for kind in (0, 1, 2, 28, 36, 80, 200, 65535):
        assert netlink.record_of(Frame(kind, 0, 1, _HEADER.pack(16, kind, 0, 1, 0))) is None


def test_an_error_without_a_number_is_found() -> None:
    frame = Frame(2, 0, 1, _HEADER.pack(16, 2, 0, 1, 0))
    with pytest.raises(Malformed):
        netlink.route_of(frame, ip_address("10.0.0.1"), None)


@pytest.mark.parametrize(
    ("number", "obstacle"), [(101, Obstacle.UNREACHABLE), (13, Obstacle.PROHIBITED), (95, Obstacle.OTHER)]
)
def test_a_refusal_says_why(number: int, obstacle: Obstacle) -> None:
    frame = Frame(2, 0, 1, _HEADER.pack(36, 2, 0, 1, 0) + struct.pack("=i", -number) + bytes(16))
    with pytest.raises(NoRoute) as caught:
        netlink.route_of(frame, ip_address("10.0.0.1"), None)
    assert (caught.value.errno, caught.value.obstacle) == (number, obstacle)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_mangled_messages_are_records_or_malformed_and_nothing_else(frames: list[Frame], seed: int) -> None:
    rng = random.Random(seed)
    loopback = ip_address("127.0.0.1")
    lookup = _lookup()
    outcomes = set()
    for _ in range(3000):
        frame = rng.choice([*frames, lookup])
        body = bytearray(frame.data[16:])
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(len(body))] = rng.choice([0, 1, 2, 4, 255, rng.randrange(256)])
        data = frame.data[:16] + bytes(body[: rng.choice([len(body), rng.randrange(len(body) + 1)])])
        mangled = Frame(frame.kind, frame.flags, frame.sequence, data)
        try:
            netlink.record_of(mangled)
            netlink.route_of(mangled, loopback, None)
            outcomes.add("decoded")
        except Malformed:
            outcomes.add("malformed")
        except NoRoute:
            outcomes.add("no route")
    assert {"decoded", "malformed"} <= outcomes
