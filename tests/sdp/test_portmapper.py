"""The port mapper's message (docs/wire/sdp.md §23.4)."""

from __future__ import annotations

import math
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sdp_vectors import vectors
from strategies import U8, U16, U32, U64

from sidestep.errors import Misuse, PeerViolation
from sidestep.sdp.portmapper import RULES, PortMap, PortMapKind

V = vectors()
REQUEST = PortMap(
    PortMapKind.REQUEST, 5001, 40000, 0x0123456789ABCDEF, IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2")
)  # fmt: skip
V4 = st.builds(IPv4Address, U32)
V6 = st.builds(IPv6Address, st.integers(0, (1 << 128) - 1))
ADDRESSES = st.one_of(st.tuples(V4, V4), st.tuples(V6, V6))


def test_the_vectors() -> None:
    assert PortMap.decode(V["V53"].view) == REQUEST
    assert REQUEST.encode() == V["V53"].message
    accept = replace(REQUEST, kind=PortMapKind.ACCEPT, ap_port=50000)
    assert PortMap.decode(V["V54"].view) == accept
    assert accept.encode() == V["V54"].message
    assert accept.lifetime_s == 0


@given(st.sampled_from(PortMapKind), U16, U16, U64, ADDRESSES, U8)
def test_there_and_back(
    kind: PortMapKind, ap_port: int, cp_port: int, handle: int, ends: tuple[IPv4Address, IPv4Address], pm_time: int
) -> None:
    made = PortMap(kind, ap_port, cp_port, handle, *ends, pm_time=pm_time)
    whole = made.encode()
    assert len(whole) == 48
    assert PortMap.decode(memoryview(whole)) == made


@given(st.binary(min_size=40, max_size=70))
def test_garbage_is_refused_or_read(datagram: bytes) -> None:
    try:
        found = PortMap.decode(memoryview(datagram))
    except PeerViolation:
        return
    assert found.encode()[:1] == datagram[:1]
    assert found.encode()[4:16] == datagram[4:16]


def test_rules() -> None:
    good = V["V53"].message
    for rule, wrong in (
        ("pm_length", good[:47]), ("pm_length", good + b"x"), ("pm_length", V["V54"].message + bytes(16)),
        ("pm_version", b"\x44" + good[1:]), ("pm_ip_version", b"\x05" + good[1:]),
    ):  # fmt: skip
        with pytest.raises(PeerViolation) as caught:
            PortMap.decode(memoryview(wrong))
        assert caught.value.rule == rule
        assert RULES[rule] in caught.value.message


def test_a_request_of_the_linux_daemon() -> None:
    longer = V["V53"].message + bytes([10, 0, 0, 9]) + bytes(12)
    longer = longer[:2] + (50001).to_bytes(2) + longer[4:]
    assert PortMap.decode(memoryview(longer)) == replace(REQUEST, mapped_cp=(IPv4Address("10.0.0.9"), 50001))


@pytest.mark.parametrize(
    ("pm_time", "seconds"), [(0, 0), (1, 0.25), (127, 31.75), (128, 128), (254, 254), (255, math.inf)]
)
def test_lifetimes(pm_time: int, seconds: float) -> None:
    assert replace(REQUEST, pm_time=pm_time).lifetime_s == seconds


def test_what_does_not_fit_is_misuse() -> None:
    for wrong in (replace(REQUEST, ap_port=65536), replace(REQUEST, ap_ip=IPv6Address("::1"))):
        with pytest.raises(Misuse):
            wrong.encode()
