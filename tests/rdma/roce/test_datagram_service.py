"""The datagram service on software HCAs: in virtual time on wires that do everything wrong, and on real sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hca_ends import LEFT, RIGHT
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_dut import addresses
from udp_dut import QUICK

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, Unavailable
from sidestep.loop import Loop
from sidestep.rdma.datagrams import DatagramService, Message
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.roce.datagram import seal
from sidestep.rdma.roce.packet import Bth, Deth, Op, Packet
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.ud import UdQueuePair
from sidestep.rdma.roce.udp_link import UdpRoceDevice
from sidestep.rdma.roce.wire import Wire, WireDevice, WireFaults
from sidestep.rdma.verbs import AsyncEvent, EventKind

QKEY = 0x0BAD_CAFE
SMALL = RoceSettings(mtu=256)


@dataclass
class End:
    """A service, and what it was told."""

    device: WireDevice
    service: DatagramService
    got: list[Message] = field(default_factory=list)

    @property
    def contents(self) -> list[bytes]:
        return [bytes(each.data) for each in self.got]


def end(wire: Wire, address: str, settings: RoceSettings | None = SMALL) -> End:
    device = wire.device(address, settings)
    got: list[Message] = []
    service = DatagramService(device, QKEY, got.append, lambda: wire.now, rng=Random(1))
    return End(device, service, got)


def world(faults: WireFaults | None = None, seed: int = 1) -> tuple[Wire, End, End]:
    """Over IPv6 where packets are damaged: there the checksum has its full strength."""
    wire = Wire(Random(seed), faults)
    one, other = ("10.0.0.1", "10.0.0.2") if faults is None else (LEFT, RIGHT)
    return wire, end(wire, one), end(wire, other)


def say(sender: End, receiver: End, message: bytes) -> None:
    sender.service.send(receiver.device.address, receiver.service.number, message)


@pytest.mark.parametrize("length", [0, 1, 240, 241, 65536])
def test_messages_arrive_both_ways(length: int) -> None:
    wire, one, other = world()
    message = Random(length).randbytes(length)
    say(one, other, message)
    wire.run()
    assert [(each.address, each.number, bytes(each.data)) for each in other.got] == [
        ("10.0.0.1", one.service.number, message)
    ]
    (got,) = other.got
    other.service.send(got.address, got.number, message[::-1])
    wire.run()
    assert one.contents == [message[::-1]]
    assert other.service.counters() == {"messages_delivered": 1, "messages_partial": 0, "messages_waiting": 0}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 32), st.sampled_from([0.0, 0.01, 0.2]), st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.05]),
)  # fmt: skip
def test_whole_or_not_at_all(seed: int, loss: float, duplicate: float, late: float, damage: float) -> None:
    wire, one, other = world(WireFaults(loss=loss, duplicate=duplicate, late=late, damage=damage), seed)
    rng = Random(seed)
    messages = [rng.randbytes(rng.choice([0, 1, 240, 241, 1000, 5000])) + bytes([at]) for at in range(20)]
    for at, message in enumerate(messages):
        sender, receiver = (one, other) if at % 2 else (other, one)
        say(sender, receiver, message)
        if rng.random() < 0.5:
            wire.run()
    wire.run()
    for receiver, sent in ((other, messages[1::2]), (one, messages[0::2])):
        assert len(set(receiver.contents)) == len(receiver.got), "none comes twice"
        assert set(receiver.contents) <= set(sent)
        if not loss and not damage:
            assert set(receiver.contents) == set(sent)
    for each in (one, other):
        each.service.handle_timeout(wire.now + limits.DATAGRAM_REASSEMBLY_S)
        assert each.service.counters()["messages_partial"] == 0
        assert each.service.next_deadline() is None
        each.service.close()


@pytest.mark.slow
def test_the_queue_of_messages_has_a_bound() -> None:
    wire, one, other = world()
    for _ in range(limits.DATAGRAM_SENDS_MAX):
        say(one, other, bytes(65536))  # more than there are buffers
    assert one.service.counters()["messages_waiting"] == limits.DATAGRAM_SENDS_MAX
    with pytest.raises(LimitReached):
        say(one, other, b"one more")
    wire.run()
    assert len(other.got) == limits.DATAGRAM_SENDS_MAX
    assert one.service.counters()["messages_waiting"] == 0
    say(one, other, b"one more")
    wire.run()
    assert other.contents[-1] == b"one more"


def test_what_cannot_be_sent_is_refused() -> None:
    _, one, other = world()
    with pytest.raises(Misuse):
        say(one, other, bytes(65537))
    for number in (0, 0xFF_FFFF, 1 << 24):
        with pytest.raises(Misuse):
            one.service.send(other.device.address, number, b"x")
    for address in ("nobody", "fd00::1", "224.0.0.1"):
        with pytest.raises(Misuse):
            one.service.send(address, 17, b"x")
    with pytest.raises(Misuse):
        DatagramService(Fabric(Random(1)).device("loopback"), QKEY, print, lambda: 0.0)


def test_addresses_have_a_bound_and_idle_ones_go() -> None:
    wire, one, other = world()
    for number in range(limits.DATAGRAM_WAYS_MAX):
        one.service.send(f"10.1.{number >> 8}.{number & 255}", 17, b"x")
        wire.run()
    assert one.device.counters()["address_handles"] == limits.DATAGRAM_WAYS_MAX
    say(one, other, b"there")
    wire.run()
    assert other.contents == [b"there"]
    assert one.device.counters()["address_handles"] == limits.DATAGRAM_WAYS_MAX


def test_addresses_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DATAGRAM_WAYS_MAX", 2)
    wire, one, other = world()
    say(one, other, b"first")
    one.service.send("10.0.0.7", 17, b"x")
    with pytest.raises(LimitReached):
        one.service.send("10.0.0.8", 17, b"x")
    wire.run()
    one.service.send("10.0.0.8", 17, b"x")
    wire.run()
    assert other.contents == [b"first"]


def test_a_closed_service_leaves_nothing_behind() -> None:
    wire, one, other = world()
    say(one, other, bytes(10_000))
    other.service.close()
    wire.run()
    one.service.close()
    one.service.close()
    wire.run()
    assert (one.got, other.got) == ([], [])
    for each in (one, other):
        counters = each.device.counters()
        assert {counters[name] for name in ("queue_pairs", "regions", "address_handles")} == {0}
        with pytest.raises(Unavailable):
            say(each, one, b"x")


def test_a_service_may_be_closed_by_what_it_hears() -> None:
    wire, one, other = world()
    other.service._received = lambda message: other.service.close()
    for _ in range(3):
        say(one, other, b"the end")
    wire.run()
    assert other.device.counters()["queue_pairs"] == 0


def test_an_error_is_told() -> None:
    wire, one, other = world()
    events: list[AsyncEvent] = []
    service = DatagramService(one.device, QKEY, print, lambda: wire.now, on_event=events.append)
    assert isinstance(service._qp, UdQueuePair)
    service._qp.break_off(EventKind.QP_FATAL, "broken")
    wire.run()
    assert len(events) == 1
    with pytest.raises(Unavailable):
        service.send(other.device.address, other.service.number, b"x")
    service.close()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=60), st.integers(0, 3)), max_size=20))
def test_whatever_comes(datagrams: list[tuple[bytes, int]]) -> None:
    """Datagrams of strangers that are no segments disturb nobody."""
    wire, one, other = world()
    source = one.device.ip
    for at, (payload, host) in enumerate(datagrams):
        bth = Bth(Op.UD_SEND_ONLY, other.service.number, at, pad=-len(payload) % 4)
        raw = Packet(bth, (Deth(QKEY, 17 + host),), payload).encode()
        wire.inject(str(source), other.device.address, seal(raw, source, other.device.ip))
    say(one, other, b"good" * 200)
    wire.run()
    assert other.contents[-1] == b"good" * 200


def test_messages_over_real_sockets() -> None:
    loop = Loop()
    one, two, _ = addresses()
    got: dict[str, list[Message]] = {one: [], two: []}
    devices = {each: UdpRoceDevice(each, loop, QUICK) for each in (one, two)}
    services = {
        each: DatagramService(device, QKEY, got[each].append, lambda: loop.now) for each, device in devices.items()
    }
    rng = Random(5)
    messages = [rng.randbytes(rng.choice([0, 1, 4080, 4081, 65536])) + bytes([at]) for at in range(40)]
    messages = [each[-65536:] for each in messages]
    try:
        for message in messages:
            for _ in range(20):  # a busy machine may lose one
                services[one].send(two, services[two].number, message)
                if loop.run_until(lambda: bool(got[two]), 2.0):
                    last = got[two].pop()
                    assert (last.address, last.number, bytes(last.data)) == (one, services[one].number, message)
                    services[two].send(last.address, last.number, bytes(last.data))
                    if loop.run_until(lambda: bool(got[one]), 2.0):
                        break
            assert bytes(got[one].pop().data) == message
    finally:
        for service in services.values():
            service.close()
        for device in devices.values():
            device.close()
        loop.close()
