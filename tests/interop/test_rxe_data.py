"""Our software HCA and the kernel's rxe move bytes, in both roles, on links that lose and disorder packets, too."""

from __future__ import annotations

import sys

import moves
import pytest
from guest_verbs import RxeBench, pattern
from moves import COUNT

from sidestep.rdma.verbs import EventKind, QpCapabilities, QpState
from sidestep.rdma.work import CompareSwap, FetchAdd, RdmaRead, RdmaWrite, RKey, Send, Status

SIZES = [1, 1024, 1025, 300_001]
ASKS = ["ours", "rxe"]
_PORTS = 7310


@pytest.mark.spec("IBTA 9.7")
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("size", SIZES)
def test_sends(rxe_bench: RxeBench, asks: str, size: int) -> None:
    moves.sends(rxe_bench, asks, size)


@pytest.mark.spec("IBTA 9.4.3, 9.4.4")
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("link")
def test_writes_and_reads(rxe_bench: RxeBench, asks: str, size: int) -> None:
    moves.writes_and_reads(rxe_bench, asks, size)


@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.usefixtures("link")
def test_many_at_a_time(rxe_bench: RxeBench, asks: str) -> None:
    moves.many_at_a_time(rxe_bench, asks)


@pytest.mark.parametrize("asks", ASKS)
def test_messages_without_bytes(rxe_bench: RxeBench, asks: str) -> None:
    moves.messages_without_bytes(rxe_bench, asks)


@pytest.mark.spec("IBTA 9.7.5.2.8")
@pytest.mark.parametrize("asks", ASKS)
def test_a_receive_that_comes_late(rxe_bench: RxeBench, asks: str) -> None:
    """Who sends is told that there is no receive, waits, and comes again; rxe asks for 0.66 s."""
    ours, guest = rxe_bench.pair(asks)
    theirs = rxe_bench.remote(guest, 64)
    ours.send(b"early")
    guest.call("receive", region=theirs.region, length=64)
    assert ours.sent(1) == [Status.SUCCESS]
    assert guest.call("received")["completions"] == [["SUCCESS", 5]]
    guest.call("send", region=theirs.region, length=5)
    room = ours.room(8)
    (completion,) = ours.received(1)
    assert (completion.status, bytes(room.view[:5])) == (Status.SUCCESS, b"early")
    assert guest.call("sent")["completions"][0][0] == "SUCCESS"


@pytest.mark.spec("IBTA 9.7.5.2.8")
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("verb", ["write", "read"])
def test_what_rxe_may_not(rxe_bench: RxeBench, asks: str, verb: str) -> None:
    """It is told so, and both queue pairs are in error."""
    ours, guest = rxe_bench.pair(asks)
    memory, theirs = ours.memory(b"." * 64), rxe_bench.remote(guest, 64, seed=8)
    guest.call(verb, region=theirs.region, length=8, address=memory.va, key=memory.rkey ^ 0x100)
    assert guest.call("sent")["completions"][0][0] == "REM_ACCESS_ERR"
    ours.until(lambda: ours.qp.state is QpState.ERROR, "in error")
    assert [each.kind for each in ours.events] == [EventKind.QP_ACCESS_ERROR]
    assert bytes(memory.view) == b"." * 64


@pytest.mark.parametrize("asks", ASKS)
def test_what_we_may_not(rxe_bench: RxeBench, asks: str) -> None:
    kinds: tuple[type[RdmaWrite | RdmaRead], ...] = (RdmaWrite, RdmaRead)
    for port, kind in enumerate(kinds, _PORTS):
        ours, guest = rxe_bench.pair(asks, port=port)
        theirs, memory = rxe_bench.remote(guest, 64), ours.memory(8)
        ours.qp.post_send(kind(1, (memory.view,), theirs.address, RKey(theirs.key ^ 0x10)))
        assert ours.sent(1) == [Status.REMOTE_ACCESS_ERROR]
        assert ours.qp.state is QpState.ERROR


@pytest.mark.spec("IBTA 9.7.4.1.6")
@pytest.mark.parametrize("asks", ASKS)
def test_a_message_that_is_too_long(rxe_bench: RxeBench, asks: str) -> None:
    ours, guest = rxe_bench.pair(asks)
    theirs = rxe_bench.remote(guest, 64)
    guest.call("receive", region=theirs.region, length=4)
    ours.qp.post_send(Send(1, (b"too long",)))
    # IBTA would have it be an invalid request; rxe of Linux 6.1 says that it could not copy.
    assert ours.sent(1)[0] in (Status.REMOTE_INVALID_REQUEST, Status.REMOTE_OPERATION_ERROR)
    ours, guest = rxe_bench.pair(asks, port=_PORTS)
    ours.room(4)
    guest.call("send", region=rxe_bench.remote(guest, 64).region, length=8)
    assert guest.call("sent")["completions"][0][0] == "REM_INV_REQ_ERR"
    (completion,) = ours.received(1)
    assert completion.status is Status.LOCAL_LENGTH_ERROR


@pytest.mark.spec("IBTA 9.4.5, 9.7.5.1.6")
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.usefixtures("link")
def test_atomic_operations(rxe_bench: RxeBench, asks: str) -> None:
    """rxe carries each out once, and we get the number before it, however many packets are lost."""
    ours, guest = rxe_bench.pair(asks, QpCapabilities(initiator_depth=4, responder_resources=4))
    theirs = rxe_bench.remote(guest, 64, rights="all")
    where = theirs.address + 8, theirs.key
    sinks = [ours.memory(8) for _ in range(COUNT)]
    for number, sink in enumerate(sinks):
        ours.qp.post_send(FetchAdd(0, (sink.view,), *where, add=number))
    assert ours.sent(COUNT) == [Status.SUCCESS] * COUNT
    wanted = [number * (number - 1) // 2 for number in range(COUNT + 1)]
    assert [int.from_bytes(sink.view, sys.byteorder) for sink in sinks] == wanted[:-1]
    assert guest.call("number", region=theirs.region, offset=8)["number"] == wanted[-1]
    for swap, compare in ((1 << 63, 5), (1 << 62 | 1, wanted[-1])):
        ours.qp.post_send(CompareSwap(0, (sinks[0].view,), *where, compare=compare, swap=swap))
        assert ours.sent(1) == [Status.SUCCESS]
        assert int.from_bytes(sinks[0].view, sys.byteorder) == wanted[-1]
    assert guest.call("number", region=theirs.region, offset=8)["number"] == 1 << 62 | 1
    assert guest.call("number", region=theirs.region, offset=16)["number"] == 0


@pytest.mark.spec("IBTA 9.4.5, 9.7.5.2.8")
@pytest.mark.parametrize("what", ["alignment", "right"])
def test_an_atomic_operation_that_rxe_refuses(rxe_bench: RxeBench, what: str) -> None:
    ours, guest = rxe_bench.pair("ours")
    theirs = rxe_bench.remote(guest, 64, rights="all" if what == "alignment" else "both")
    sink, va = ours.memory(8), theirs.address + (4 if what == "alignment" else 0)
    ours.qp.post_send(FetchAdd(0, (sink.view,), va, theirs.key, add=1))
    wanted = Status.REMOTE_INVALID_REQUEST if what == "alignment" else Status.REMOTE_ACCESS_ERROR
    assert ours.sent(1) == [wanted]
    assert guest.call("number", region=theirs.region)["number"] == 0


@pytest.mark.spec("IBTA 9.4.1, 9.4.3")
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("size", SIZES)
def test_immediate_data(rxe_bench: RxeBench, asks: str, size: int) -> None:
    """Of Sends and Writes of ours, of one packet and of many."""
    ours, guest = rxe_bench.pair(asks)
    inbox, target = rxe_bench.remote(guest, size), rxe_bench.remote(guest, size)
    guest.call("receive", region=inbox.region, length=size, count=2)
    content = ours.memory(pattern(8, size))
    ours.qp.post_send(RdmaWrite(0, (content.view,), target.address, target.key, immediate=b"\1\2\3\4"))
    ours.qp.post_send(Send(0, (content.view,), immediate=b"\xff\0\0\7"))
    assert ours.sent(2) == [Status.SUCCESS] * 2
    told = guest.call("immediate", count=2)["completions"]
    assert told == [["SUCCESS", size, "01020304"], ["SUCCESS", size, "ff000007"]]
    for region in (inbox.region, target.region):
        assert guest.call("holds", region=region, seed=8, length=size)["holds"]
