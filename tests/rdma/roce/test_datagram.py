"""Checksums of packets in datagrams, as a socket sees them: the identification is not known."""

from __future__ import annotations

import re
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.rdma.frames import IpAddress
from sidestep.rdma.roce.datagram import is_intact, known_address, seal

pytestmark = pytest.mark.spec("IBTA A17.3.4")

# Of others: an adapter's congestion notification with identification 0x718C, and a packet of UC by Scapy (0x0478).
FOREIGN = {
    "adapter": "45c2003c718c4000401191610a0011010a001201000012b7002800008100ffff40000118"
    "000000000000000000000000000000000000000082fd002a",
    "scapy": "45010040047840004011b4d5c0a80007c0a80007c00012b7002caca22460ffff000000d300cf17104630818be28935d90e9a9550"
    "5401be885e50000078f353f3",
}


@cache
def packets() -> dict[str, bytes]:
    """By name, from the IP header on."""
    text = (Path(__file__).parents[1] / "data" / "roce-packets.txt").read_text()
    blocks = re.findall(r"(?m)^(V\d+) .*\n((?:[0-9a-f]+\n)+)", text)
    return {name: bytes.fromhex(hexadecimal) for name, hexadecimal in blocks} | {
        name: bytes.fromhex(whole) for name, whole in FOREIGN.items()
    }


def parts(whole: bytes) -> tuple[bytes, IpAddress, IpAddress, int]:
    """What a socket tells of a packet: payload, addresses, and the source port."""
    if whole[0] >> 4 == 6:
        source, destination, udp = whole[8:24], whole[24:40], 40
    else:
        source, destination, udp = whole[12:16], whole[16:20], 20
    port = int.from_bytes(whole[udp : udp + 2])
    return whole[udp + 8 :], ip_address(source), ip_address(destination), port


@pytest.mark.parametrize("name", [f"V{number}" for number in range(1, 25)] + list(FOREIGN))
def test_packets_of_others_are_intact(name: str) -> None:
    payload, source, destination, port = parts(packets()[name])
    assert is_intact(payload, source, destination, port)
    assert is_intact(memoryview(payload), source, destination, port)


@pytest.mark.parametrize("name", ["V4", "V6", "V12", "V24"])
def test_what_we_send_is_what_others_send(name: str) -> None:
    """With identification 0, as they have."""
    payload, source, destination, port = parts(packets()[name])
    assert seal(payload[:-4], source, destination, port) == payload


def test_any_other_address_or_port_is_a_fault() -> None:
    payload, source, destination, port = parts(packets()["V4"])
    other = ip_address("192.0.2.3")
    assert not is_intact(payload, other, destination, port)
    assert not is_intact(payload, source, other, port)
    assert not is_intact(payload, source, destination, port + 1)


@given(content=st.binary(min_size=3, max_size=300), seed=st.integers(0, 1 << 30))
def test_damage_is_seen_over_ipv6(content: bytes, seed: int) -> None:
    one, two = ip_address("fd00::1"), ip_address("fd00::2")
    transport = bytes(12) + content[: len(content) // 4 * 4]
    whole = bytearray(seal(transport, one, two))
    assert is_intact(whole, one, two, 4791)
    bit = Random(seed).randrange(8 * len(whole))
    whole[bit // 8] ^= 1 << bit % 8
    assert is_intact(whole, one, two, 4791) == (bit // 8 == 4)  # that byte is not covered


def test_damage_is_seen_over_ipv4_but_once_in_65536_times() -> None:
    """Of all damages of two bytes to this packet, which a fixed seed draws."""
    payload, source, destination, port = parts(packets()["V6"])
    rng, passed = Random(1), 0
    for _ in range(20_000):
        whole = bytearray(payload)
        for at in rng.sample(range(12, len(whole)), 2):
            whole[at] ^= rng.randrange(1, 256)
        passed += is_intact(whole, source, destination, port)
    assert passed <= 2


def test_addresses() -> None:
    assert known_address("fe80::1%eth0") == ip_address("fe80::1")
    assert known_address("::ffff:192.0.2.1") == ip_address("192.0.2.1")
