"""The conversation of docs/wire/sdp.md §24, V01 to V35, with the core as either end: byte for byte.

The other end says what the page says. What the core says, when its user does what the page tells of, must be what is
printed there; only keys and addresses are given to it.
"""

from __future__ import annotations

import pytest
from raw import CLIENT_PORT, PORT, RawPeer, Remote
from sdp_vectors import vectors

from sidestep.rdma.work import Access, Receive
from sidestep.sdp.requests import Accept, Connect, SdpEvent, SdpEventKind
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.states import SdpState
from sidestep.sdp.strategy import Strategy
from sidestep.sdp.wire import Hello, Mid, Mode, SinkAvail, SrcAvail, decode

V = {name: vector.message for name, vector in vectors().items()}


def header_of(name: str) -> object:
    return decode(memoryview(V[name])).header


class Player(RawPeer):
    """A real end and a script for the other one."""

    def __init__(self, settings: SdpSettings) -> None:
        super().__init__(settings, credit=8)
        self.lenient = True  # the page's other end posts more than it told at first
        self.said: list[bytes] = []

    def sent(self, message: bytes) -> None:
        self.said.append(message)
        super().sent(message)

    def plays(self, *names: str) -> None:
        """Asserts that the core has said exactly these, with the credit that the page tells of, since the last look."""
        said, self.said = self.said, []
        assert [Mid(message[0]).name for message in said] == [Mid(V[name][0]).name for name in names]
        for name, message in zip(names, said, strict=True):
            assert message.hex(" ") == V[name].hex(" "), name

    def hears(self, name: str) -> None:
        """The other end says this; a region that it names is there."""
        assert isinstance(self.remote, Remote)
        header = header_of(name)
        if isinstance(header, SrcAvail):
            memory = bytearray(bytes(range(256)) * (header.length // 256))
            self.remote.offer(header.rkey, header.va, memory, Access.REMOTE_READ)
        elif isinstance(header, SinkAvail):
            self.remote.offer(header.rkey, header.va, bytearray(header.length), Access.REMOTE_WRITE)
        self.deliver(V[name])

    def has_credit(self, name: str) -> None:
        """Asserts the credit before sending that the page tells of."""
        assert self.connection.credit == vectors()[name].credit, name

    def counts(self, nd: int, pnd: int) -> None:
        """Asserts NonDiscards and PotentialNonDiscards of the directions in which it receives and sends."""
        assert (self.connection._sink.nd, self.connection._source.pnd) == (nd, pnd)


def _addresses(local_port: int, remote_port: int) -> tuple[Addresses, Addresses]:
    hello = header_of("V01")
    assert isinstance(hello, Hello)
    return (
        Addresses(hello.src_ip, local_port, hello.dst_ip, remote_port),
        Addresses(hello.dst_ip, remote_port, hello.src_ip, local_port),
    )


CLIENT, SERVER = _addresses(CLIENT_PORT, PORT)


@pytest.mark.spec("docs/wire/sdp.md §24.1, the part of A")
def test_the_accepting_end() -> None:
    strategy = Strategy(bcopy_max=64, read_min=1, sink_min=1, pipelined=True)
    a = Player(SdpSettings(receive_size=16400, receive_count=8, strategy=lambda: strategy))
    core = a.connection
    assert core.accept(V["V01"], SERVER, a.now)
    a.run()
    assert a.ordered(Accept)[-1].private_data == V["V02"]
    assert core.addresses == SERVER
    assert (core.credit, core.remote_size) == (8, 8208)

    a.hears("V03")
    assert core.state is SdpState.ESTABLISHED  # by the first message
    a.counts(nd=1, pnd=0)
    a.has_credit("V04")
    a.send(b"OK")
    a.plays("V04")
    assert a.read() == b"GET /index\n"  # until now it was in its private buffer: Bufs 7
    a.buffers += 8
    core.handle_buffers([Receive(1000 + index, (memoryview(bytearray(16400)),)) for index in range(8)], a.now)
    core._flow.send_update()  # as it likes
    a.run()
    a.plays("V05")
    a.counts(nd=1, pnd=1)

    first, second = a.receive(16), a.receive(65536)
    a.hears("V06")
    assert bytes(first.view) == V["V06"][32:]
    assert second.filled == 65536 - 16
    a.plays("V07")
    a.counts(nd=2, pnd=1)
    a.hears("V08")
    assert core.receive_mode is Mode.PIPELINED
    third = a.receive(1000)
    a.plays()  # 1000 bytes are not more than a private buffer: not shown
    a.hears("V09")
    assert third.filled == 1000
    a.plays("V10")
    assert not core.peek(a.now)
    a.run()
    a.plays("V11")
    a.hears("V12")
    assert a.read(24) == b"last 24 bytes of buffer."
    a.counts(nd=3, pnd=1)

    a.keys.append((0xD4E5F6, 0x7FABCD000000))
    shown = a.receive(32768)
    a.plays("V13")
    a.hears("V14")
    assert shown.filled == 20480
    a.keys.append((0xD4E5F7, 0x7FABCD010000))
    a.hold_registrations = True
    answer = a.receive(32768)
    a.register(run=False)
    a.send(b"READ 7\n")  # before the receive could be shown by itself
    a.hold_registrations = False
    a.plays("V15")
    a.counts(nd=3, pnd=2)
    a.hears("V16")
    assert answer.filled == 32768

    a.keys.append((0xD4E5F8, 0x7FABCD020000))
    crossed = a.receive(32768)
    a.plays("V17")
    a.hears("V18")
    assert bytes(crossed.view[: crossed.filled]) == b"crossing"
    a.counts(nd=3, pnd=2)
    a.keys.append((0xD4E5F9, 0x7FABCD030000))
    cancelled = a.receive(32768)
    a.plays("V19")
    core.cancel_receive(cancelled, a.now)
    a.run()
    a.plays("V20")
    assert not cancelled.done
    a.hears("V21")
    assert cancelled.done
    assert cancelled.filled == 0

    a.hears("V22")
    a.hears("V23")
    a.plays("V24")
    a.kinds()
    a.hears("V25")
    assert SdpEventKind.URGENT in a.kinds()
    assert core.urgent_pending
    a.hears("V26")
    assert not core.urgent_pending
    assert a.read(100) == b"AAAAB"
    assert core.at_mark
    assert core.take_urgent() == ord("!")
    assert a.read(1) == b""  # past the mark, whose private buffer is free then
    a.counts(nd=5, pnd=2)
    a.hears("V27")
    a.plays("V28")
    assert core.local_size == 12304
    a.hears("V29")
    assert core.receive_mode is Mode.COMBINED
    core._flow.send_update()
    a.run()
    a.plays("V30")
    a.hears("V31")
    assert core.receive_mode is Mode.BUFFERED
    core.want_combined(a.now)
    a.run()
    a.plays("V32")
    assert core.receive_mode is Mode.COMBINED

    a.hears("V33")
    assert core.state is SdpState.CLOSE_WAIT
    a.has_credit("V34")
    a.send(b"bye")
    a.plays("V34")
    a.has_credit("V35")
    core.shutdown_write(a.now)
    a.run()
    a.plays("V35")
    a.is_in(SdpState.LAST_ACK)
    a.disconnected()
    a.is_in(SdpState.CLOSED)
    assert core.error is None


@pytest.mark.spec("docs/wire/sdp.md §24.1, the part of C")
def test_the_connecting_end() -> None:
    strategy = Strategy(bcopy_max=64, read_min=1, sink_min=1, payload=16, pipelined=False)
    c = Player(SdpSettings(receive_size=8208, receive_count=8, remote_size=16400, strategy=lambda: strategy))
    core = c.connection
    core.connect(CLIENT, c.now)
    c.run()
    order = c.ordered(Connect)[-1]
    assert (order.service_id, order.private_data) == (0x11389, V["V01"])
    core.handle_accepted(V["V02"], c.now)
    c.run()
    assert (core.state, core.credit, core.remote_size) == (SdpState.ESTABLISHED, 8, 16400)

    c.has_credit("V03")
    c.send(b"GET /index\n")
    c.plays("V03")
    c.counts(nd=0, pnd=1)
    reply = c.receive(2)
    c.hears("V04")
    assert bytes(reply.view) == b"OK"
    assert core.credit == 7
    c.hears("V05")
    assert core.credit == 16

    c.keys.append((0xA1B2C3, 0x7F1234560000))
    large = c.send(bytes(range(256)) * 256)
    c.plays("V06")
    c.counts(nd=1, pnd=2)
    c.hears("V07")
    assert large.done
    core.want_send_mode(Mode.PIPELINED, c.now)
    c.run()
    c.plays("V08")
    assert core.send_mode is Mode.PIPELINED
    c.keys.append((0xA1B2C4, 0x7F1234600001))
    refused = c.send(bytes(1000) + b"last 24 bytes of buffer.")
    c.plays("V09")
    c.hears("V10")
    assert refused.passed == 1000
    c.hears("V11")
    c.plays("V12")
    assert refused.done
    c.counts(nd=1, pnd=3)

    c.hears("V13")
    write = c.send(bytes(range(256)) * 80)
    c.plays("V14")
    assert write.done
    assert c.memory(0xD4E5F6)[:20480] == bytes(range(256)) * 80
    assert not any(c.memory(0xD4E5F6)[20480:])
    asked = c.receive(100)
    c.hears("V15")
    assert bytes(asked.view[: asked.filled]) == b"READ 7\n"
    c.counts(nd=2, pnd=3)
    c.send(bytes(32768))
    c.plays("V16")

    c.has_credit("V18")
    c.send(b"crossing")
    c.counts(nd=2, pnd=4)
    assert decode(memoryview(c.said[0])).bsdh.mseq_ack == 7  # V17 is on its way
    c.plays("V18")
    c.hears("V17")
    assert not core._source.sinks
    c.counts(nd=2, pnd=3)
    c.hears("V19")
    assert len(core._source.sinks) == 1
    c.hears("V20")
    c.plays("V21")
    assert not core._source.sinks

    c.keys.append((0xA1B2C5, 0x7F1234700000))
    withdrawn = c.send(bytes(131072))
    c.plays("V22")
    core.cancel_send(withdrawn, c.now)
    c.run()
    c.plays("V23")
    assert not withdrawn.done
    c.hears("V24")
    assert withdrawn.done
    assert withdrawn.passed == 0

    c.requests.append(core.send(memoryview(b"AAAA"), c.now))
    c.requests.append(core.send(memoryview(b"B!"), c.now, urgent=True))
    c.run()
    c.plays("V25", "V26")
    c.counts(nd=2, pnd=5)
    core.resize_remote(12304, c.now)
    c.run()
    c.plays("V27")
    assert core.remote_size == 12304
    c.hears("V28")
    core.want_send_mode(Mode.COMBINED, c.now)
    c.run()
    c.plays("V29")
    core.want_send_mode(Mode.BUFFERED, c.now)
    c.run()
    c.plays()  # not before the change is acknowledged
    c.hears("V30")
    c.plays("V31")
    c.hears("V32")
    assert core.send_mode is Mode.COMBINED
    core.shutdown_write(c.now)
    c.run()
    c.plays("V33")
    assert core.state is SdpState.FIN_WAIT
    last = c.receive(100)
    c.hears("V34")
    assert bytes(last.view[: last.filled]) == b"bye"
    c.hears("V35")
    c.is_in(SdpState.CLOSED)
    kinds = [event.kind for event in c.told if isinstance(event, SdpEvent)]
    assert SdpEventKind.BROKEN not in kinds
    assert kinds[-1] is SdpEventKind.CLOSED
