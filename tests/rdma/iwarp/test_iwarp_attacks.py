"""What a hostile peer can do over TCP, and does in vain (RFC 5042): it ends its own connection and nothing else.

After each attack the connection next to it works, all memory outside of what the attacker may write is as it was, and
when everything is closed there is no descriptor, timer, registration or key left.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from iwarp_victim import LONG_S, OPEN, PORT, RTR, SETTINGS, SIZE, LoopSocket, Victim, loop_socket
from loop_dut import addresses
from raw_iwarp import Depths, Ended, RawPeer, depths_of, frame, reply, request

from sidestep.rdma.cm import Disconnected, Established, Rejected, Unreachable
from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.startup.frame import MpaRole
from sidestep.rdma.soft.memory import SoftRegion
from sidestep.rdma.verbs import EventKind, QpState
from sidestep.rdma.work import Access, BindWindow, Receive, Status


@pytest.fixture
def victim() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.close()


def write(stag: int, va: int, payload: bytes = b"attack") -> Segment:
    return Segment(RdmapOp.WRITE, True, payload, stag, va % 2**64)


def ask(stag: int, va: int, length: int = 8, msn: int = 1) -> Segment:
    wanted = ReadRequest(7, 0, length, stag, va % 2**64)
    return Segment(RdmapOp.READ_REQUEST, True, wanted.encode(), queue=1, msn=msn)


def voiding(stag: int) -> Segment:
    return Segment(RdmapOp.SEND_INV, True, b"attack", stag, msn=1)


def rekeyed(victim: Victim) -> int:
    region = victim.region()
    old = region.rkey
    region.rekey()
    return old


def gone(victim: Victim, *, deregistered: bool) -> tuple[int, int]:
    """What was a region a moment ago."""
    region = victim.region()
    assert isinstance(region, SoftRegion)
    key, va = region.rkey, region.va
    (region.deregister if deregistered else region.invalidate)()
    return key, va


def neighbour(victim: Victim) -> tuple[int, int]:
    """All of a key but for the consumer's 8 bits."""
    region = victim.region()
    return region.rkey ^ 1, region.va


def window(victim: Victim, *, own: bool) -> tuple[int, int]:
    """Its key, and the one of its region: on the attacker's queue pair, or on another one of the domain."""
    region = victim.region(OPEN | Access.WINDOW_BIND)
    made = victim.side.domain.alloc_window()
    side = victim.side
    if not own:
        victim.make_side = lambda: victim.bench.side(victim.device, domain=side.domain)
        victim.peer()
    request = BindWindow(
        wr_id=1, window=made, region=region, access=Access.REMOTE_WRITE | Access.REMOTE_READ, length=SIZE
    )
    victim.side.qp.post_send(request)
    victim.until(lambda: made.valid)
    return made.rkey, region.rkey


def at(victim: Victim, offset: int, access: Access = OPEN) -> tuple[int, int]:
    region = victim.region(access)
    return region.rkey, region.va + offset


def foreign(victim: Victim) -> tuple[int, int]:
    region = victim.region(domain=victim.device.alloc_pd())
    return region.rkey, region.va


MEMORY: dict[str, tuple[Callable[[Victim], Segment], str]] = {
    "no such STag": (lambda v: write(0xDEADBE00, 0), "1/1/00"),
    "STag 0": (lambda v: write(0, 0), "1/1/00"),
    "old key": (lambda v: write(rekeyed(v), v.qp.domain.device.next_va(1)), "1/1/00"),
    "voided": (lambda v: write(*gone(v, deregistered=False)), "1/1/00"),
    "deregistered": (lambda v: write(*gone(v, deregistered=True)), "1/1/00"),
    "nearly the key": (lambda v: write(*neighbour(v)), "1/1/00"),
    "other domain": (lambda v: write(*foreign(v)), "1/1/02"),
    "another's window": (lambda v: write(window(v, own=False)[0], 0), "1/1/02"),
    "before": (lambda v: write(*at(v, -1)), "1/1/01"),
    "behind": (lambda v: write(*at(v, SIZE - 5)), "1/1/01"),
    "wrap": (lambda v: write(at(v, 0)[0], 2**64 - 3), "1/1/03"),
    "read only": (lambda v: write(*at(v, 0, Access.REMOTE_READ)), "1/1/02"),
    "local only": (lambda v: write(*at(v, 0, Access.LOCAL_WRITE)), "1/1/02"),
    "Read, no such STag": (lambda v: ask(0xDEADBE00, 0), "0/1/00"),
    "Read, old key": (lambda v: ask(rekeyed(v), 0), "0/1/00"),
    "Read, voided": (lambda v: ask(*gone(v, deregistered=False)), "0/1/00"),
    "Read, deregistered": (lambda v: ask(*gone(v, deregistered=True)), "0/1/00"),
    "Read, nearly the key": (lambda v: ask(*neighbour(v)), "0/1/00"),
    "Read, other domain": (lambda v: ask(*foreign(v)), "0/1/03"),
    "Read, another's window": (lambda v: ask(window(v, own=False)[0], 0), "0/1/03"),
    "Read, before": (lambda v: ask(*at(v, -1)), "0/1/01"),
    "Read, behind": (lambda v: ask(*at(v, SIZE - 7)), "0/1/01"),
    "Read, 4 GiB": (lambda v: ask(*at(v, 0), 2**32 - 1), "0/1/01"),
    "Read, wrap": (lambda v: ask(at(v, 0)[0], 2**64 - 8), "0/1/04"),
    "Read, write only": (lambda v: ask(*at(v, 0, Access.LOCAL_WRITE | Access.REMOTE_WRITE)), "0/1/02"),
    "invalidate nothing": (lambda v: voiding(0xDEADBE00), "0/2/09"),
    "invalidate the local": (lambda v: voiding(at(v, 0, Access.LOCAL_WRITE)[0]), "0/1/09"),
    "invalidate another domain's": (lambda v: voiding(foreign(v)[0]), "0/1/09"),
    "invalidate another's window": (lambda v: voiding(window(v, own=False)[0]), "0/1/09"),
    "invalidate under a window": (lambda v: voiding(window(v, own=True)[1]), "0/1/09"),
}  # fmt: skip


@pytest.mark.spec("RFC 5042 6")
@pytest.mark.parametrize("name", MEMORY)
def test_memory_that_is_not_the_attackers(victim: Victim, name: str) -> None:
    make, code = MEMORY[name]
    attacker = victim.peer()
    side = victim.side
    receive = victim.region(Access.LOCAL_WRITE)
    side.qp.post_recv(Receive(1, (receive.view,)))
    segment = make(victim)
    before = victim.content()
    attacker.send(segment)
    terminate = attacker.terminated()
    assert str(terminate) == code
    assert victim.content()[1:] == before[1:]  # the receive is the attacker's
    assert side.qp.state is QpState.ERROR
    assert [each.kind for each in side.events][-1:] == [EventKind.QP_ACCESS_ERROR]
    victim.until(lambda: Disconnected(by_remote=False, confirmed=False) in side.cm_events)
    assert all(other.qp.state is QpState.RTS for other in victim.sides[1:])


# ---- resources ----


@pytest.mark.spec("RFC 5042 6.4.3.3")
def test_reads_ask_for_much_and_take_nothing(victim: Victim) -> None:
    """46 bytes ask for megabytes: what is made of it waits in the source, not in memory."""
    attacker = victim.peer(crc=False)
    region = victim.side.domain.register(bytearray(b"x" * (4 << 20)), OPEN)
    for msn in range(1, 5):
        attacker.send(ask(region.rkey, region.va, 4 << 20, msn))
    stream = victim.qp.stream
    assert stream is not None
    victim.dut.run()
    assert 0 < stream.unsent <= 1 << 20
    for number in range(4):
        first, payload = attacker.message()
        assert (first.op, len(payload), set(payload)) == (RdmapOp.READ_RESPONSE, 4 << 20, {ord("x")}), number
    victim.dut.run()
    assert stream.unsent == 0


def test_half_a_message_holds_no_memory_of_a_queue_pair_that_is_destroyed(victim: Victim) -> None:
    """At once, not some day: who has it back may change its size."""
    attacker = victim.peer()
    side = victim.side
    buffer = bytearray(SIZE)
    region = side.domain.register(buffer, Access.LOCAL_WRITE)
    side.qp.post_recv(Receive(1, (memoryview(buffer),)))
    attacker.send(Segment(RdmapOp.SEND, False, b"half", msn=1))
    victim.until(lambda: side.qp.receives_posted == 0)
    gc.disable()  # it would find the memory as well, sometime
    try:
        side.qp.destroy()
        region.deregister()
        del region
        buffer.append(0)
    finally:
        gc.enable()


def test_more_reads_than_agreed(victim: Victim) -> None:
    attacker = victim.peer()
    region = victim.region()
    attacker.socket.sendall(b"".join(frame(ask(region.rkey, region.va, 8, msn)) for msn in range(1, 200)))
    attacker.expect_terminate(1, 2, 3)
    assert victim.side.qp.state is QpState.ERROR


@pytest.mark.spec("RFC 5042 6.4.3.1")
def test_one_peer_drains_a_shared_receive_queue(victim: Victim) -> None:
    """The others get what is posted from then on."""
    domain = victim.device.alloc_pd()
    events: list[EventKind] = []
    srq = domain.create_srq(8, on_event=lambda event: events.append(event.kind))
    srq.arm(2)

    def shared_side() -> object:
        side = victim.bench.side(victim.device, domain=domain)
        side.qp.destroy()
        side.qp = domain.create_qp(side.send_cq, side.recv_cq, srq=srq, on_event=side.events.append)
        return side

    victim.make_side = shared_side  # type: ignore[assignment]
    attacker, honest = victim.peer(), victim.peer()
    for number in range(4):
        srq.post_recv(Receive(number, (victim.region(Access.LOCAL_WRITE, domain).view,)))
    for _ in range(5):
        attacker.send_message(RdmapOp.SEND, b"mine")
    attacker.expect_terminate(1, 2, 2)
    assert EventKind.SRQ_LIMIT_REACHED in events
    srq.post_recv(Receive(9, (victim.region(Access.LOCAL_WRITE, domain).view,)))
    honest.send_message(RdmapOp.SEND, b"yours")
    victim.until(lambda: bool(victim.side.received))
    assert [(each.wr_id, each.status) for each in victim.side.received] == [(9, Status.SUCCESS)]


@pytest.mark.spec("RFC 5042 6.4.3.2")
def test_a_completion_queue_that_overflows_takes_only_its_users(victim: Victim) -> None:
    victim.make_side = lambda: victim.bench.side(victim.device, capacity=4)
    attacker = victim.peer()
    for number in range(8):
        victim.side.qp.post_recv(Receive(number, ()))
    for _ in range(8):
        attacker.send_message(RdmapOp.SEND, b"")
    attacker.expect_terminate(0, 2, 7)
    assert victim.side.qp.state is QpState.ERROR
    assert EventKind.QP_FATAL in [each.kind for each in victim.side.events]


@pytest.mark.spec("RFC 5042 6.4.4")
def test_the_smallest_frames_do_not_keep_others_waiting(victim: Victim) -> None:
    """One turn of the loop looks at a bounded number of them."""
    attacker = victim.peer()
    taken = victim.qp.stream.receiver  # type: ignore[union-attr]
    flood = memoryview(frame(RTR) * 100_000)
    with suppress(BlockingIOError):
        while flood:
            flood = flood[socket.socket.send(attacker.socket, flood) :]
    before = taken.run_count
    victim.loop.turn(0)
    assert 0 < taken.run_count - before < 4096 + 16_400  # what is read at a time holds so many
    assert victim.side.qp.state is QpState.RTS


def test_a_byte_at_a_time(victim: Victim) -> None:
    attacker = victim.peer()
    region = victim.region()
    for byte in frame(write(region.rkey, region.va)) + frame(ask(region.rkey, region.va, 6)):
        attacker.socket.sendall(bytes([byte]))
        victim.loop.turn(0)
    assert attacker.expect(RdmapOp.READ_RESPONSE)[1] == b"attack"


# ---- the start-up ----


def ended(sock: LoopSocket) -> str:
    """How the other end leaves; what it says before is skipped."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return "RST"
    return "FIN"


def test_connections_that_say_nothing(victim: Victim) -> None:
    """Of too many the oldest goes; the rest when their time is over. Meanwhile others are served."""
    idle = [victim.connect() for _ in range(20)]
    victim.until(lambda: len(victim.device.cm.half_open) == SETTINGS.half_open_max)
    assert [ended(each) for each in idle[:12]] == ["RST"] * 12
    victim.peer().send_message(RdmapOp.WRITE, b"")
    victim.later()
    assert all(ended(each) for each in idle[12:])
    assert not victim.device.cm.half_open
    for each in idle:
        each.close()


def test_a_request_that_never_ends(victim: Victim) -> None:
    """The time is from the start, not from the last byte."""
    slow = victim.connect()
    whole = request(Depths(1, 1), b"x" * 200).encode()
    for byte in whole[:-1]:
        with suppress(ConnectionError):
            slow.sendall(bytes([byte]))
        victim.loop.leapt_s += LONG_S / len(whole)
        victim.loop.turn(0)
    assert ended(slow)
    assert not victim.device.cm.half_open
    assert not victim.requests
    slow.close()


def test_a_peer_that_says_nothing_after_the_reply(victim: Victim) -> None:
    attacker = victim.peer(begins=False)
    victim.later()
    with pytest.raises(Ended) as caught:
        attacker.read()
    assert caught.value.reset
    assert victim.side.qp.state is QpState.ERROR
    assert Established() not in victim.side.cm_events
    counted = victim.device.counters()
    assert "connection_broken" not in counted, "there was none"
    assert counted["connection_failed{reset}"] == 1


def big(size: int) -> bytes:
    """A Request that says that so much private data follows."""
    whole = request(Depths(1, 1)).encode()
    return whole[:18] + size.to_bytes(2) + bytes(size)


GARBAGE: dict[str, bytes] = {
    "oversized": big(513),
    "65535 bytes": big(65535),
    "no key": b"GET / HTTP/1.1\r\n\r\n",
    "a Reply": reply(Depths(1, 1)).encode(),
    "revision 9": request(Depths(1, 1)).encode()[:17] + b"\x09" + request(Depths(1, 1)).encode()[18:],
    "a frame behind it": request(Depths(1, 1)).encode() + frame(RTR),
    "zeros": bytes(4096),
}


@pytest.mark.spec("RFC 5044 7.1.2")
@pytest.mark.parametrize("name", GARBAGE)
def test_no_request(victim: Victim, name: str) -> None:
    victim.accepts = False
    attacker = victim.connect()
    attacker.sendall(GARBAGE[name])
    assert ended(attacker)
    assert not victim.device.cm.half_open
    attacker.close()


PHASES = ["nothing", "half a Request", "undecided", "Reply", "begun", "half a frame", "amid an answer"]


@pytest.mark.parametrize("how", ["RST", "FIN"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_peer_goes_at_any_time(victim: Victim, phase: str, how: str) -> None:
    victim.accepts = phase != "undecided"
    whole = request(Depths(1, 1, peer_to_peer=True, rtr_write=True)).encode()
    if phase in ("nothing", "half a Request", "undecided"):
        sock = victim.connect()
        sock.sendall({"nothing": b"", "half a Request": whole[:10], "undecided": whole}[phase])
        victim.until(lambda: bool(victim.requests if phase == "undecided" else victim.device.cm.half_open))
    else:
        peer = victim.peer(begins=phase != "Reply")
        assert isinstance(peer.socket, LoopSocket)
        sock = peer.socket
        region = victim.side.domain.register(bytearray(4 << 20), OPEN)
        if phase == "half a frame":
            sock.sendall(frame(write(region.rkey, region.va))[:9])
        elif phase == "amid an answer":
            peer.send(ask(region.rkey, region.va, 4 << 20))
            sock.recv(1000)
    victim.dut.run()
    if how == "RST":
        sock.reset()
    else:
        sock.shutdown(socket.SHUT_WR)
    manager = victim.device.cm
    if phase == "undecided":
        victim.dut.run()
        side = victim.bench.side(victim.device)
        victim.requests[0].accept(side.qp, b"", side.on_cm)
        victim.until(lambda: bool(side.cm_events))
        assert isinstance(side.cm_events[0], Rejected)
    elif victim.sides:
        victim.until(lambda: victim.side.qp.state is QpState.ERROR)
        victim.until(lambda: len(manager.device.streams) == 1 or (how == "FIN" and phase == "amid an answer"))
        orderly = how == "FIN" and phase in ("begun", "amid an answer")
        victim.dut.run()
        if phase != "Reply":
            assert Disconnected(by_remote=True, confirmed=orderly) in victim.side.cm_events
    victim.until(lambda: not manager.half_open)
    sock.close()


HALVES: dict[str, Callable[[Victim], list[Segment]]] = {
    "Write": lambda v: [replace(write(*at(v, 0)), last=False)],
    "Send": lambda v: [Segment(RdmapOp.SEND, False, b"half", msn=1)],
    "nothing of a Send": lambda v: [Segment(RdmapOp.SEND, False, msn=1)],
    "nothing of a Write": lambda v: [Segment(RdmapOp.WRITE, False)],
    "another Send behind a whole one": lambda v: [
        Segment(RdmapOp.SEND, True, b"whole", msn=1), Segment(RdmapOp.SEND, False, b"half", msn=2)
    ],
}  # fmt: skip


@pytest.mark.spec("RFC 5041 6.2.1")
@pytest.mark.parametrize("name", HALVES)
def test_the_peer_ends_between_two_segments_of_a_message(victim: Victim, name: str) -> None:
    """What was begun has to be finished first: this is no end in order, though every frame is whole."""
    attacker = victim.peer()
    side = victim.side
    for number in range(2):
        side.qp.post_recv(Receive(number, (victim.region(Access.LOCAL_WRITE).view,)))
    for segment in HALVES[name](victim):
        attacker.send(segment)
    attacker.socket.shutdown(socket.SHUT_WR)
    attacker.expect_terminate(0, 2, 7)
    assert Disconnected(by_remote=True, confirmed=False) in side.cm_events
    assert [each.kind for each in side.events] == [EventKind.QP_FATAL]
    whole = name.startswith("another")
    assert [each.status for each in side.received] == [Status.SUCCESS if whole else Status.FLUSHED, Status.FLUSHED]
    assert victim.device.counters()["connection_broken"] == 1


# ---- the end ----


def test_terminates_without_end(victim: Victim) -> None:
    attacker = victim.peer()
    attacker.socket.sendall(frame(Segment(RdmapOp.TERMINATE, True, bytes(4), queue=2, msn=1)) * 5000)
    attacker.expect_end()
    assert [each.kind for each in victim.side.events] == [EventKind.QP_FATAL]


def test_a_peer_names_no_counters(victim: Victim) -> None:
    """One for each code that there is, and one for all others."""
    for code in (0x3FFF, 0x4FFF, 0x0207):
        victim.peer().send(Segment(RdmapOp.TERMINATE, True, code.to_bytes(2) + bytes(2), queue=2, msn=1))
        victim.until(lambda: victim.side.qp.state is QpState.ERROR)
    counted = {name: count for name, count in victim.device.counters().items() if name.startswith("terminate_rec")}
    assert counted == {"terminate_received{unknown}": 2, "terminate_received{0x0207}": 1}


def test_a_terminate_is_counted_by_what_it_means(victim: Victim) -> None:
    """Also of Linux siw, whose bit fields stand the other way round; not by a code that is not there."""
    for payload in (bytes.fromhex("1001 0700"), b"", b"\1\1\0"):
        victim.peer().send(Segment(RdmapOp.TERMINATE, True, payload, queue=2, msn=1))
        victim.until(lambda: victim.side.qp.state is QpState.ERROR)
    counted = {name: count for name, count in victim.device.counters().items() if name.startswith("terminate_rec")}
    assert counted == {"terminate_received{unknown}": 2, "terminate_received{0x0101}": 1}


def test_what_comes_after_our_end_is_thrown_away(victim: Victim) -> None:
    attacker = victim.peer()
    region = victim.region()
    assert victim.side.connection is not None
    victim.side.connection.disconnect()
    attacker.expect_end()
    attacker.socket.sendall(frame(write(region.rkey, region.va)) * 1000)
    victim.dut.run()
    assert not any(region.view)
    victim.later()
    victim.until(lambda: len(victim.device.streams) == 1)  # it never ends its direction: RST
    assert Disconnected(by_remote=False, confirmed=False) in victim.side.cm_events


@pytest.mark.spec("RFC 5040 5.4")
def test_a_terminate_reaches_a_peer_though_the_queue_pair_is_destroyed_at_once(victim: Victim) -> None:
    """It waits behind what the peer has not read."""
    attacker = victim.peer(crc=False)
    region = victim.side.domain.register(bytearray(16 << 20), OPEN)
    attacker.send(ask(region.rkey, region.va, 16 << 20))
    victim.dut.run()
    attacker.send(write(0xDEADBE00, 0))
    victim.until(lambda: victim.side.qp.state is QpState.ERROR)
    victim.side.qp.destroy()
    attacker.expect_terminate(1, 1, 0)
    assert not attacker.was_reset


def test_a_peer_that_reads_nothing_holds_no_queue_pair(victim: Victim) -> None:
    attacker = victim.peer()
    region = victim.side.domain.register(bytearray(8 << 20), OPEN)
    attacker.send(ask(region.rkey, region.va, 8 << 20))
    victim.dut.run()
    assert victim.side.connection is not None
    victim.side.connection.disconnect()
    victim.later()
    victim.until(lambda: len(victim.device.streams) == 1)
    assert Disconnected(by_remote=False, confirmed=False) in victim.side.cm_events


# ---- the end that asks ----


def unexpected(frame_of_start: bytes) -> Callable[[LoopSocket], None]:
    return lambda sock: sock.sendall(frame_of_start)


ANSWERS: dict[str, Callable[[LoopSocket], None]] = {
    "oversized": unexpected(reply(Depths(1, 1)).encode()[:18] + (513).to_bytes(2) + bytes(513)),
    "a Request": unexpected(request(Depths(1, 1)).encode()),
    "no key": unexpected(b"220 mail.example ESMTP\r\n"),
    "nothing": lambda sock: None,
    "half": unexpected(reply(Depths(1, 1)).encode()[:19]),
    "FIN": lambda sock: sock.shutdown(socket.SHUT_WR),
    "RST": lambda sock: sock.reset(),
    "no common first message": unexpected(reply(Depths(1, 1)).encode()),
}


@pytest.mark.parametrize("before", [True, False], ids=["before it is asked", "asked"])
@pytest.mark.parametrize("name", ANSWERS)
def test_no_reply(victim: Victim, name: str, before: bool) -> None:
    host = addresses()[0]
    server = socket.create_server((host, PORT))
    side = victim.bench.side(victim.device)
    victim.device.cm.connect(host, PORT, side.qp, b"", side.on_cm)
    sock = loop_socket(server.accept()[0], victim.loop)
    if not before:
        RawPeer(sock).read_start(MpaRole.REQUEST)
    ANSWERS[name](sock)
    victim.dut.run()
    if not side.cm_events:
        victim.later()
    victim.until(lambda: bool(side.cm_events))
    assert isinstance(side.cm_events[0], Rejected | Unreachable)
    assert side.qp.state is QpState.ERROR
    sock.close()
    server.close()


def test_a_good_reply_and_then_garbage(victim: Victim) -> None:
    host = addresses()[0]
    server = socket.create_server((host, PORT))
    side = victim.bench.side(victim.device)
    victim.device.cm.connect(host, PORT, side.qp, b"", side.on_cm)
    peer = RawPeer(loop_socket(server.accept()[0], victim.loop))
    asked = peer.read_start(MpaRole.REQUEST)
    depths = replace(depths_of(asked), rtr_read=False, rtr_send=False)
    peer.crc = True
    peer.socket.sendall(reply(depths).encode() + bytes(100))
    peer.expect_terminate(2, 0, 2)
    victim.until(lambda: len(side.cm_events) >= 2)
    assert isinstance(side.cm_events[0], Established)
    assert isinstance(side.cm_events[1], Disconnected)
    peer.socket.close()
    server.close()
