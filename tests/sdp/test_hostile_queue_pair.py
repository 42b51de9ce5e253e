"""A peer that has a queue pair and no manners, against a real stack over the loopback device."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address
from random import Random

import pytest

from sidestep.errors import PeerViolation
from sidestep.rdma.cm import REJECT_CONSUMER, ConnectionEvent, ConnectionRequest, Established, Rejected
from sidestep.rdma.cm import Connection as CmConnection
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.rdma.work import Completion, Opcode, RdmaRead, RdmaWrite, Receive, RKey, Send, Status
from sidestep.sdp.connection import SdpCause
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.stack import Stack
from sidestep.sdp.states import SdpState
from sidestep.sdp.strategy import Strategy
from sidestep.sdp.wire import (
    BSDH,
    BSDH_LEN,
    Data,
    Decoded,
    Header,
    Hello,
    HelloAck,
    Mid,
    Mode,
    ModeChange,
    SendSm,
    SinkAvail,
    SrcAvail,
    decode,
    service_id,
)

HERE, THERE = IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2")
PORT = 5001
BUFFER = 4096
SETTINGS = SdpSettings(
    receive_size=BUFFER,
    receive_count=8,
    close_s=5.0,
    strategy=lambda: Strategy(bcopy_max=64, read_min=1, sink_min=1, payload=8),
)


class Victim:
    """A stack that listens, and the users of its streams."""

    def __init__(self, fabric: Fabric, *, checked: bool) -> None:
        self.fabric = fabric
        device = fabric.device("victim", DeviceAttributes(checks_local_memory=checked))
        self.stack = Stack(device, lambda: fabric.now, SETTINGS)
        self.streams: list[SdpStream] = []
        self.told: list[StreamEvent] = []
        self.stack.listen(PORT, self._accepted)

    def _accepted(self, stream: SdpStream) -> None:
        stream.tell = lambda _, event: self.told.append(event)
        self.streams.append(stream)

    def pass_time(self, seconds: float) -> None:
        """Timers fire, and everything arrives."""
        until = self.fabric.now + seconds
        self.fabric.run()
        while (at := self.stack.next_deadline()) is not None and at <= until:
            self.fabric.run_until(max(at, self.fabric.now))
            self.stack.handle_timeouts()
            self.fabric.run()
        self.fabric.run_until(max(until, self.fabric.now))

    def is_clean(self) -> None:
        """Asserts that nothing is left of any connection."""
        assert not self.stack.streams
        assert self.stack.buffers.lent == 0
        assert self.stack.next_deadline() is None
        for stream in self.streams:
            assert stream.connection.state is SdpState.CLOSED
        closed = [event for event in self.told if isinstance(event, SdpEvent) and event.kind is SdpEventKind.CLOSED]
        assert len(closed) == len(self.streams)


class Attacker:
    """A queue pair whose every request is written by hand."""

    def __init__(self, fabric: Fabric, name: str = "attacker") -> None:
        self.fabric = fabric
        self.device = fabric.device(name, DeviceAttributes(checks_local_memory=False))
        domain = self.device.alloc_pd()
        self.domain = domain
        cq = self.device.create_cq(1024, self._completed)
        self.qp = domain.create_qp(cq, cq)
        self.cm: CmConnection | None = None
        self.events: list[ConnectionEvent] = []
        self.heard: list[Decoded] = []
        self.failed: list[Completion] = []
        self.tx_mseq = self.rx_mseq = 0
        self._buffers: dict[int, bytearray] = {}
        for number in range(32):
            self._post(number)

    def _post(self, number: int) -> None:
        self._buffers[number] = bytearray(BUFFER)
        self.qp.post_recv(Receive(number, (memoryview(self._buffers[number]),)))

    def _completed(self, completions: list[Completion]) -> None:
        for completion in completions:
            if completion.opcode is Opcode.RECEIVE and completion.ok:
                message = decode(memoryview(bytes(self._buffers[completion.wr_id][: completion.byte_len])))
                self.rx_mseq = message.bsdh.mseq
                self.heard.append(message)
                self._post(completion.wr_id)
            elif not completion.ok and completion.status is not Status.FLUSHED:
                self.failed.append(completion)

    def connect(self, hello: bytes | None = None) -> Attacker:
        """Asks the victim for a connection."""
        if hello is None:
            header = Hello(16, BUFFER, BUFFER, 40000, HERE, THERE)
            hello = BSDH.pack(Mid.HELLO, 0, 32, BSDH_LEN + header.LENGTH, 0, 0) + header.encode()
        self.cm = self.device.cm.connect(
            "victim", service_id(PORT), self.qp, hello, lambda _, event: self.events.append(event)
        )
        self.fabric.run()
        return self

    def say(self, header: Header, payload: bytes = b"", *, length: int | None = None) -> None:
        """A message, with numbers as they should be."""
        self.tx_mseq += 1
        extended = header.encode()
        length = BSDH_LEN + len(extended) + len(payload) if length is None else length
        self.raw(BSDH.pack(header.MID, 0, 32, length, self.tx_mseq, self.rx_mseq) + extended + payload)

    def raw(self, message: bytes) -> None:
        """Bytes, whatever they mean."""
        self.qp.post_send(Send(1, (memoryview(message),)))
        self.fabric.run()

    def write(self, rkey: int, va: int, data: bytes) -> None:
        """An RDMA Write."""
        self.qp.post_send(RdmaWrite(2, (data,), va, RKey(rkey)))
        self.fabric.run()

    def read(self, rkey: int, va: int, length: int) -> bytes:
        """An RDMA Read; zeros if it fails."""
        room = bytearray(length)
        self.qp.post_send(RdmaRead(3, (memoryview(room),), va, RKey(rkey)))
        self.fabric.run()
        return bytes(room)


Scene = tuple[Fabric, Victim, Attacker]


@pytest.fixture(params=[False, True], ids=["unchecked", "checked"])
def scene(request: pytest.FixtureRequest) -> Scene:
    """A victim, and an attacker that is connected to it; the device checks local memory, or not."""
    fabric = Fabric(Random(7))
    victim = Victim(fabric, checked=request.param)
    attacker = Attacker(fabric).connect()
    assert isinstance(attacker.events[0], Established)
    attacker.say(Data())
    return fabric, victim, attacker


def _broken(victim: Victim, rule: str) -> None:
    (stream,) = victim.streams
    error = stream.connection.error
    assert isinstance(error, PeerViolation), error
    assert error.rule == rule
    assert stream.connection.cause is SdpCause.VIOLATION
    victim.is_clean()


def test_a_write_to_memory_that_nobody_has_shown_ends_the_connection(scene: Scene) -> None:
    _, victim, attacker = scene
    receive = victim.streams[0].receive(memoryview(bytearray(100)))
    attacker.write(0xBAD, 0, b"x")
    _broken(victim, "rdma_access")
    assert receive.done
    assert receive.error is not None


def test_a_message_that_does_not_fit_ends_the_connection(scene: Scene) -> None:
    _, victim, attacker = scene
    send = victim.streams[0].send(memoryview(bytes(500)))
    attacker.raw(bytes(BUFFER + 1))
    _broken(victim, "message_size")
    assert send.done


def test_a_receive_that_has_ended_is_out_of_reach(scene: Scene) -> None:
    fabric, victim, attacker = scene
    attacker.say(ModeChange(False, Mode.PIPELINED))
    room = bytearray(2 * BUFFER)
    receive = victim.streams[0].receive(memoryview(room))
    fabric.run()
    (shown,) = [message.header for message in attacker.heard if isinstance(message.header, SinkAvail)]
    attacker.write(shown.rkey, shown.va, b"early")
    assert room[:5] == b"early"
    attacker.say(Data(), b"payload")
    assert receive.done
    room[:] = bytes(len(room))
    attacker.write(shown.rkey, shown.va, b"late")
    assert not any(room)
    _broken(victim, "rdma_access")


def test_a_send_that_has_ended_is_out_of_reach(scene: Scene) -> None:
    fabric, victim, attacker = scene
    secret = bytearray(b"secret" * 100)
    send = victim.streams[0].send(memoryview(secret))
    fabric.run()
    (shown,) = [message.header for message in attacker.heard if isinstance(message.header, SrcAvail)]
    assert attacker.read(shown.rkey, shown.va, 6) == b"secret"
    victim.pass_time(1.5)  # not reported: withdrawn
    attacker.say(SendSm())
    assert send.done
    assert not any(attacker.read(shown.rkey, shown.va, 6))
    _broken(victim, "rdma_access")


def test_nothing_beyond_what_was_shown_can_be_read(scene: Scene) -> None:
    fabric, victim, attacker = scene
    memory = bytearray(b"public" * 100 + b"secret" * 100)
    victim.streams[0].send(memoryview(memory)[:600])
    fabric.run()
    (shown,) = [message.header for message in attacker.heard if isinstance(message.header, SrcAvail)]
    assert not any(attacker.read(shown.rkey, shown.va + 594, 12))
    _broken(victim, "rdma_access")


def test_who_is_silent_for_ever_does_not_keep_who_closes(scene: Scene) -> None:
    _, victim, _ = scene
    stream = victim.streams[0]
    send = stream.send(memoryview(bytes(500)))
    receive = stream.receive(memoryview(bytearray(100)))
    stream.close(1.0)
    victim.pass_time(100)
    assert stream.connection.cause is SdpCause.TIMEOUT
    assert send.done
    assert receive.done
    victim.is_clean()


def test_who_hangs_up_in_the_middle_leaves_nothing(scene: Scene) -> None:
    _, victim, attacker = scene
    stream = victim.streams[0]
    send = stream.send(memoryview(bytes(500)))
    assert attacker.cm is not None
    attacker.cm.disconnect()
    victim.pass_time(1)
    assert stream.connection.cause is SdpCause.RESET
    assert send.error is stream.connection.error
    victim.is_clean()


@pytest.mark.parametrize("hello", [b"", b"\0", bytes(92), b"\xff" * 92, b"\0\0\0\x20\0\0\0\x5c" + bytes(84)])
def test_garbage_instead_of_a_hello_is_refused(hello: bytes) -> None:
    fabric = Fabric(Random(7))
    victim = Victim(fabric, checked=False)
    attacker = Attacker(fabric).connect(hello)
    (refused,) = attacker.events
    assert isinstance(refused, Rejected)
    assert refused.reason == REJECT_CONSUMER
    assert not any(refused.private_data)
    assert not victim.streams
    assert not victim.stack.streams
    assert victim.stack.buffers.lent == 0


@pytest.mark.parametrize("answer", [b"", bytes(196), b"\xff" * 196, b"\1" + bytes(195)])
def test_garbage_instead_of_a_hello_ack_ends_the_attempt(answer: bytes) -> None:
    fabric = Fabric(Random(7))
    victim = Victim(fabric, checked=False)
    attacker = Attacker(fabric)

    def requested(request: ConnectionRequest) -> None:
        request.accept(attacker.qp, answer, lambda _, event: attacker.events.append(event))

    attacker.device.cm.listen(service_id(PORT), requested)
    stream = victim.stack.connect(
        "attacker", Addresses(HERE, 1, THERE, PORT), lambda _, event: victim.told.append(event)
    )
    victim.streams.append(stream)
    fabric.run()
    assert stream.connection.cause is SdpCause.VIOLATION
    victim.pass_time(10)
    victim.is_clean()


def test_neighbours_of_an_attack_do_not_feel_it() -> None:
    """Other streams of the same stack, with completions in the same batches."""
    fabric = Fabric(Random(7))
    victim = Victim(fabric, checked=True)
    friend = Attacker(fabric, "friend").connect()
    attacks: list[Callable[[Attacker], None]] = [
        lambda one: one.raw(b"\xff"),
        lambda one: one.raw(bytes(BUFFER + 1)),
        lambda one: one.write(1, 1, b"x"),
        lambda one: one.say(HelloAck(1, 4096)),
        lambda one: one.say(Data(), length=5),
    ]
    for number, attack in enumerate(attacks):
        attacker = Attacker(fabric, f"attacker {number}").connect()
        attacker.say(Data())
        friend.qp.post_send(Send(9, (_data(friend, b"before"),)))
        attack(attacker)
        friend.say(Data(), b"after")
        stream = victim.streams[0]
        room = bytearray(11)
        receive = stream.receive(memoryview(room), waitall=True)
        assert receive.done
        assert room == b"beforeafter"
        assert victim.streams[-1].connection.state is SdpState.CLOSED
        assert stream.connection.error is None
    assert len(victim.stack.streams) == 1


def _data(peer: Attacker, payload: bytes) -> bytes:
    peer.tx_mseq += 1
    return BSDH.pack(Mid.DATA, 0, 32, BSDH_LEN + len(payload), peer.tx_mseq, peer.rx_mseq) + payload
