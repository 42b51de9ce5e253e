"""The software HCA on sockets of the loopback interface."""

from __future__ import annotations

import gc
import socket
from dataclasses import replace

import pytest
from conformance_items import applying, left_out
from loop_dut import addresses
from udp_dut import QUICK, UdpUnderTest

from sidestep.errors import Misuse, Unavailable
from sidestep.loop import Loop
from sidestep.rdma.cm import Disconnected
from sidestep.rdma.conformance import Bench, Check, run
from sidestep.rdma.roce.device import ATTRIBUTES
from sidestep.rdma.roce.packet import UDP_PORT
from sidestep.rdma.roce.udp_link import UdpRoceDevice
from sidestep.rdma.work import Access, RdmaRead

MODES = {"udp": UdpUnderTest}


def _taken() -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((addresses()[0], UDP_PORT))
    except OSError:
        return True
    return False


# A kernel with rdma_rxe has the port everywhere, and no other port will do (RoCEv2 is UDP 4791).
pytestmark = pytest.mark.skipif(_taken(), reason="UDP port 4791 is taken at all addresses: is rdma_rxe loaded?")


@pytest.mark.parametrize(("check", "mode"), applying(MODES, ATTRIBUTES))
def test_the_hca_keeps_the_rule_over_udp(check: Check, mode: str) -> None:
    assert run(check, MODES[mode]) is None


def test_nothing_else_is_left_out() -> None:
    assert left_out(UdpUnderTest(), ATTRIBUTES) == {"no datagrams"}


def test_a_device_leaves_nothing_behind() -> None:
    dut = UdpUnderTest()
    bench = Bench(dut)
    asks, asked = bench.pair()
    asked.post_recv(1, 8)
    asks.send(1, b"word")
    dut.active.close()
    bench.eventually(lambda: any(isinstance(each, Disconnected) for each in asked.cm_events), "told")
    dut.passive.close()
    dut.loop.notices.clear()
    gc.collect()
    assert dut.loop.idle
    dut.close()


def test_the_port_is_taken() -> None:
    one, _, _ = addresses()
    loop = Loop()
    first = UdpRoceDevice(one, loop, QUICK)
    with pytest.raises(Unavailable, match="4791"):
        UdpRoceDevice(one, loop, QUICK)
    first.close()
    UdpRoceDevice(one, loop, QUICK).close()
    assert loop.idle
    loop.close()


def test_a_small_receive_buffer_makes_a_small_window() -> None:
    """Else sockets drop what the other end sends at once."""
    one, _, _ = addresses()
    for asked, window in ((1 << 16, range(1, 33)), (1 << 18, range(33, 129))):
        device = UdpRoceDevice(one, settings=replace(QUICK, receive_buffer=asked, mtu=4096))
        assert device.window in window
        device.close()


@pytest.mark.parametrize("address", ["localhost", "", "127.0.0.1:1"])
def test_a_device_without_an_address(address: str) -> None:
    with pytest.raises(Misuse):
        UdpRoceDevice(address)


def test_a_device_of_its_own_loop() -> None:
    one, two, _ = addresses()
    left, right = UdpRoceDevice(one), UdpRoceDevice(two)
    left.close()
    left.close()
    assert left.loop.closed
    right.close()


@pytest.mark.slow
def test_a_burst_is_not_lost_for_good() -> None:
    """More than a socket holds: what is dropped is asked for again."""
    dut = UdpUnderTest()
    bench = Bench(dut)
    pairs = [bench.pair(service_id=number) for number in range(1, 9)]
    size = 400_000
    content = bytes(index * 7 % 251 for index in range(size))
    sinks = []
    for asks, asked in pairs:
        far = asked.memory(content, Access.REMOTE_READ)
        sink = asks.memory(size)
        sinks.append(sink)
        asks.qp.post_send(RdmaRead(1, (sink.view,), far.va, far.rkey))
    bench.eventually(lambda: all(asks.sent for asks, _ in pairs), "all are done")
    assert all(asks.sent[0].ok for asks, _ in pairs)
    assert all(sink.view == content for sink in sinks)
    dut.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.bind(("::1", UDP_PORT))
    except OSError:
        return False
    return True


# Containers often have no IPv6 at all; what is here is tried over IPv4, too.
@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 on the loopback interface, or its port 4791 is taken")
def test_a_device_talks_to_itself_over_ipv6() -> None:
    device = UdpRoceDevice("::1", settings=QUICK)

    class Both:
        """The harness wants two."""

        active = passive = device
        nowhere = None

        def run(self) -> None:
            """Not used."""

        def run_until(self, condition: object) -> bool:
            assert callable(condition)
            return device.loop.run_until(condition, 20.0)

        def close(self) -> None:
            """Not used."""

    bench = Bench(Both())  # type: ignore[arg-type]
    asks, asked = bench.side(device), bench.side(device)
    room = asked.post_recv(1, 16)
    bench.listen(asked)
    bench.connect(asks)
    bench.eventually(lambda: bool(asks.cm_events and asked.cm_events), "connected")
    asks.send(1, b"to myself")
    bench.eventually(lambda: bool(asked.received), "there")
    assert bytes(room.view[:9]) == b"to myself"
    device.close()
