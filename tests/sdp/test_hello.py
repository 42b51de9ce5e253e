"""Introductions: what is refused and why (docs/wire/sdp.md §5.4, §23.3), service IDs and versions."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from hypothesis import given
from sdp_vectors import vectors
from strategies import U64

from sidestep.errors import Misuse
from sidestep.sdp.hello import (
    VERSION_1_1,
    VERSION_2_2,
    Hello,
    HelloAck,
    IwarpHello,
    IwarpHelloAck,
    Refusal,
    Version,
    agreed,
    hello_ack_refusal,
    hello_refusal,
    port_of,
    service_id,
)
from sidestep.sdp.wire import Bsdh, decode

V = vectors()
HELLO = decode(V["V01"].view).header
ACK = decode(V["V02"].view).header
IWARP_HELLO = decode(V["V51"].view).header
IWARP_ACK = decode(V["V52"].view).header
BSDH = Bsdh(0, 0, 3, 92, 0, 0)  # as few buffers as there may be


def changed(header: Any, **fields: object) -> Any:
    """The header with other values."""
    return replace(header, **fields)


def test_the_vectors_are_welcome() -> None:
    assert hello_refusal(BSDH, HELLO) is None
    assert hello_ack_refusal(BSDH, ACK) is None
    assert hello_refusal(BSDH, IWARP_HELLO, iwarp=True, majors={1}) is None
    assert hello_ack_refusal(BSDH, IWARP_ACK, iwarp=True, major=1) is None


def test_hello_in_words_of_the_page() -> None:
    assert Hello(
        max_adverts=16, des_rem_rcv_sz=16400, local_rcv_sz=8208, local_port=40000,
        src_ip=IPv4Address("10.0.0.1"), dst_ip=IPv4Address("10.0.0.2"), version=VERSION_2_2,
    ) == HELLO  # fmt: skip
    assert HelloAck(16, 16400) == ACK
    assert IwarpHello(16, 16400, 8208, 4, 4) == IWARP_HELLO
    assert IwarpHelloAck(16, 16400, 4, 4) == IWARP_ACK
    version_6 = decode(V["V41"].view).header
    assert isinstance(version_6, Hello)
    assert (version_6.src_ip, version_6.ip_version) == (IPv6Address("fe80::1"), 6)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": Version(1, 1)}, Refusal.VERSION),
        ({"version": Version(3, 2)}, Refusal.VERSION),
        ({"max_adverts": 0}, Refusal.MAX_ADVERTS),
        ({"max_adverts": 9, "cap": 2, "ext_max_adverts": 0}, Refusal.MAX_ADVERTS),
        ({"max_adverts": 0, "cap": 2, "ext_max_adverts": 300}, None),
        ({"ip_version": 5}, Refusal.IP_VERSION),
        ({"ip_version": 0}, Refusal.IP_VERSION),
        ({"local_rcv_sz": 36}, Refusal.BUFFER_SIZE),
        ({"local_rcv_sz": 37}, None),
        ({"local_rcv_sz": (1 << 31) + 1}, Refusal.BUFFER_SIZE),
        ({"version": Version(2, 7)}, None),
        ({"des_rem_rcv_sz": 0}, None),
    ],
)
def test_a_hello_is_refused_for(fields: dict[str, object], reason: Refusal | None) -> None:
    assert hello_refusal(BSDH, changed(HELLO, **fields)) is reason


def test_too_few_buffers() -> None:
    assert hello_refusal(BSDH._replace(bufs=2), HELLO) is Refusal.BUFS
    assert hello_ack_refusal(BSDH._replace(bufs=2), ACK) is Refusal.BUFS


def test_a_family_that_the_listener_does_not_serve() -> None:
    version_6 = decode(V["V41"].view).header
    assert hello_refusal(BSDH, version_6, majors={1, 2}) is None
    assert hello_refusal(BSDH, version_6, majors={1, 2}, ip_versions={4}) is Refusal.IP_VERSION


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": Version(1, 1)}, Refusal.VERSION),
        ({"version": Version(2, 0)}, None),
        ({"max_adverts": 0}, Refusal.MAX_ADVERTS),
        ({"act_rcv_sz": 36}, Refusal.BUFFER_SIZE),
    ],
)
def test_a_hello_ack_is_refused_for(fields: dict[str, object], reason: Refusal | None) -> None:
    assert hello_ack_refusal(BSDH, changed(ACK, **fields)) is reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"loc_ord": 0}, Refusal.READ_DEPTH),
        ({"loc_ird": 0}, Refusal.READ_DEPTH),
        ({"max_adverts": 0}, Refusal.MAX_ADVERTS),
        ({"version": Version(2, 2)}, Refusal.VERSION),
        ({"version": Version(1, 0)}, None),
    ],
)
def test_iwarp_is_refused_for(fields: dict[str, object], reason: Refusal | None) -> None:
    assert hello_refusal(BSDH, changed(IWARP_HELLO, **fields), iwarp=True, majors={1}) is reason
    assert hello_ack_refusal(BSDH, changed(IWARP_ACK, **fields), iwarp=True, major=1) is reason


def test_another_message_is_no_introduction() -> None:
    for name in ("V02", "V03", "V33", "V51", "V52"):
        assert hello_refusal(BSDH, decode(V[name].view).header, majors={1, 2}) is Refusal.WRONG_MESSAGE
    for name in ("V01", "V03", "V51", "V52"):
        assert hello_ack_refusal(BSDH, decode(V[name].view).header) is Refusal.WRONG_MESSAGE
    assert hello_refusal(BSDH, HELLO, iwarp=True, majors={1, 2}) is Refusal.WRONG_MESSAGE
    assert hello_ack_refusal(BSDH, ACK, iwarp=True) is Refusal.WRONG_MESSAGE


def test_of_two_minors_the_lower_applies() -> None:
    assert agreed(VERSION_2_2, Version(2, 7)) == VERSION_2_2
    assert agreed(VERSION_2_2, Version(2, 0)) == (2, 0)
    assert agreed(VERSION_1_1, VERSION_1_1) == VERSION_1_1


def test_service_ids() -> None:
    assert service_id(80) == 0x10050
    assert service_id(5001) == 0x11389
    assert port_of(0x11389) == 5001
    for outside in (-1, 65536):
        with pytest.raises(Misuse):
            service_id(outside)


@given(U64)
def test_only_sdp_ids_have_a_port(service: int) -> None:
    port = port_of(service)
    assert port is None if service >> 16 != 1 else service_id(port or 0) == service
