"""Checks of unreliable datagrams, on devices that have them; on the others, that they say so.

A wire may lose a datagram or bring it twice: what is to arrive is sent again until it has, each time to a new receive.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sidestep.errors import Misuse, SidestepError
from sidestep.rdma import grh
from sidestep.rdma.conformance.harness import LOCAL, Side, check
from sidestep.rdma.conformance.needs import DATAGRAMS, IMMEDIATE, LOCAL_CHECKS, NO_DATAGRAMS, SHARED_QUEUES
from sidestep.rdma.verbs import EventKind, QpCapabilities, QpState, QpType
from sidestep.rdma.work import GRH_LEN, QKEY_CONTROLLED, LocalInvalidate, Opcode, Receive, RKey, Send, Status, UdSend

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench
    from sidestep.rdma.verbs import AddressHandle, Device, SharedReceiveQueue
    from sidestep.rdma.work import Completion

QKEY: Final = 0x1357_9BDF
_TRIES: Final = 30  # of a datagram that is to arrive
_ROOM: Final = GRH_LEN + 64


class _Talk:
    """Ends for datagrams on both devices, as a check wants them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._handles: dict[tuple[int, str], AddressHandle] = {}
        self._number = 0
        self.rooms: dict[int, memoryview] = {}  # of receives, by their numbers

    def end(
        self, device: Device, *, qkey: int = QKEY, srq: SharedReceiveQueue | None = None,
        capabilities: QpCapabilities | None = None,
    ) -> Side:  # fmt: skip
        domain = device.alloc_pd() if srq is None else srq.domain
        send_cq, recv_cq = device.create_cq(256), device.create_cq(256)
        events: list[Any] = []
        qp = domain.create_ud_qp(send_cq, recv_cq, qkey, capabilities, srq=srq, on_event=events.append)
        return Side(device, domain, send_cq, recv_cq, qp, events=events)

    def ends(self) -> tuple[Side, Side]:
        return self.end(self.bench.active), self.end(self.bench.passive)

    def handle(self, sender: Side, receiver: Side) -> AddressHandle:
        key = id(sender), receiver.device.address
        if key not in self._handles:
            self._handles[key] = sender.domain.create_ah(receiver.device.address)
        return self._handles[key]

    def room(self, receiver: Side, size: int = _ROOM) -> int:
        """Posts a receive; its number."""
        self._number += 1
        self.rooms[self._number] = receiver.post_recv(self._number, size).view
        return self._number

    def say(self, sender: Side, receiver: Side, content: bytes, **fields: Any) -> None:
        """Sends one, and lets it arrive or not."""
        gather = (sender.memory(content).view,) if content else ()
        given: dict[str, Any] = {
            "ah": self.handle(sender, receiver),
            "remote_qpn": receiver.qp.number,
            "remote_qkey": QKEY,
        } | fields
        sender.qp.post_send(UdSend(wr_id=0, gather=gather, **given))
        self.bench.dut.run()

    def arrives(self, sender: Side, receiver: Side, content: bytes, **fields: Any) -> Completion:
        """Sends it until it is there."""
        for _ in range(_TRIES):
            if not receiver.qp.receives_posted:
                self.room(receiver, GRH_LEN + len(content))
            self.say(sender, receiver, content, **fields)
            for each in receiver.received:
                if each.ok and self.rooms[each.wr_id][GRH_LEN : each.byte_len] == content:
                    return each
        self.bench.expect(False, f"a datagram of {len(content)} bytes arrives, if it is sent often enough")
        raise AssertionError

    def is_dropped(self, receiver: Side, rule: str) -> None:
        """Nothing of the last one is here, and nothing has changed."""
        self.bench.equal(receiver.completions(), [], f"{rule}: no receive is completed")
        self.bench.equal(receiver.qp.state, QpState.RTS, f"{rule}: the queue pair goes on")


@check("IBTA 9.8.3, 11.4.1.2", needs=(DATAGRAMS,))
def datagram_delivers_its_bytes(bench: Bench) -> None:
    """A datagram arrives behind the 40 bytes of a routing header, which count; the completion names who sent it."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    bench.equal((active.qp.qp_type, active.qp.state), (QpType.UD, QpState.RTS), "such a queue pair is ready")
    for content in (b"x", b"abc", b"", b"of any length"):
        got = talk.arrives(active, passive, content)
        told = got.byte_len, got.source_qpn, got.opcode, got.qp_number, got.immediate
        wanted = GRH_LEN + len(content), active.qp.number, Opcode.RECEIVE, passive.qp.number, None
        bench.equal(told, wanted, "the completion tells length, source and kind")
    bench.all_ok(active, "a datagram that has left has succeeded")
    bench.equal({each.opcode for each in active.sent}, {Opcode.SEND}, "it is a Send")


@check("IBTA 11.4.1.2, annex A17", needs=(DATAGRAMS,))
def datagram_can_be_answered(bench: Bench) -> None:
    """The routing header tells the address of who sent a datagram, and with the number it can be answered."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    got = talk.arrives(active, passive, b"question")
    source = grh.source_of(talk.rooms[got.wr_id])
    bench.equal(source, active.device.address, "the header tells who sent it")
    ah = passive.domain.create_ah(source)
    bench.equal(ah.address, source, "a handle tells where it leads")
    bench.expect(got.source_qpn is not None, "the number is told")
    answer = talk.arrives(passive, active, b"answer", ah=ah, remote_qpn=got.source_qpn)
    bench.equal(answer.source_qpn, passive.qp.number, "the answer comes from who was asked")


@check("IBTA 9.2.6, 9.8.3", needs=(DATAGRAMS, IMMEDIATE))
def datagram_tells_immediate_data(bench: Bench) -> None:
    """Immediate data of a datagram arrives beside it."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    for content in (b"", b"with bytes"):
        got = talk.arrives(active, passive, content, immediate=b"\1\2\3\4")
        bench.equal((got.byte_len, got.immediate), (GRH_LEN + len(content), b"\1\2\3\4"), "both arrive")
    bench.refused(Misuse, lambda: talk.say(active, passive, b"", immediate=b"five!"), "it has four bytes")


@check("IBTA 9.8.3, 11.4.1.1", needs=(DATAGRAMS,))
def datagram_has_the_size_of_a_packet(bench: Bench) -> None:
    """A datagram as long as the handle says arrives whole; a longer one is refused at the call."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    most = talk.handle(active, passive).mtu
    bench.expect(most >= 256, "the smallest path MTU is 256", most)
    content = bytes(at * 7 % 251 for at in range(most))
    got = talk.arrives(active, passive, content)
    bench.equal(got.byte_len, GRH_LEN + most, "all of it is here")
    before = len(active.completions())
    bench.refused(Misuse, lambda: talk.say(active, passive, bytes(most + 1)), "what is longer is refused")
    bench.equal((len(active.completions()), active.qp.state), (before, QpState.RTS), "and nothing has happened")


@check("IBTA 10.2.5, 9.6.1", needs=(DATAGRAMS,))
def datagram_needs_the_key(bench: Bench) -> None:
    """A datagram with another Q_Key is dropped, takes no receive and ends nothing."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    talk.room(passive)
    for qkey in (QKEY ^ 1, 0, QKEY ^ 1 << 30):
        talk.say(active, passive, b"wrong", remote_qkey=qkey)
        talk.is_dropped(passive, "a wrong Q_Key")
    bench.equal(passive.qp.receives_posted, 1, "the receive is left")
    bench.expect(talk.arrives(active, passive, b"right").ok, "with the right one it arrives")


@check("IBTA 10.2.5", needs=(DATAGRAMS,))
def datagram_with_a_controlled_key_has_its_own(bench: Bench) -> None:
    """Where the highest bit of a request's Q_Key is set its queue pair's is sent; no Q_Key of a program has the bit."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    other = talk.end(bench.active, qkey=7)
    bench.expect(talk.arrives(active, passive, b"own", remote_qkey=QKEY_CONTROLLED | 5).ok, "the own one is the right")
    before = len(passive.received)
    talk.room(passive)
    talk.say(other, passive, b"forged", remote_qkey=QKEY_CONTROLLED | QKEY)
    bench.equal(len(passive.received), before, "and of another queue pair a wrong one")
    bench.refused(
        Misuse, lambda: talk.end(bench.active, qkey=QKEY_CONTROLLED), "no queue pair of a program's has the bit"
    )


@check("IBTA 9.8.3", needs=(DATAGRAMS,))
def datagram_without_a_receive_is_dropped(bench: Bench) -> None:
    """A datagram for which no receive is posted is lost, and the next one finds its receive."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    talk.say(active, passive, b"early")
    talk.is_dropped(passive, "no receive")
    number = talk.room(passive)
    bench.dut.run()
    bench.equal(passive.completions(), [], "it is not kept")
    bench.equal(talk.arrives(active, passive, b"in time").wr_id, number, "the next one arrives")
    bench.all_ok(active, "who sends is not told")


@check("IBTA 9.8.3", needs=(DATAGRAMS,))
def datagram_too_long_for_its_receive_is_dropped(bench: Bench) -> None:
    """A datagram that does not fit behind the routing header is dropped; the receive waits for one that does."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    number = talk.room(passive, GRH_LEN + 8)
    talk.say(active, passive, b"nine byte")
    talk.is_dropped(passive, "a receive that is too short")
    bench.equal(passive.qp.receives_posted, 1, "the receive is left")
    got = talk.arrives(active, passive, b"it fits!")
    bench.equal((got.wr_id, got.byte_len), (number, GRH_LEN + 8), "what fits takes it")


@check("IBTA 9.8.3, 10.2.2", needs=(DATAGRAMS,))
def datagram_queue_pair_hears_many(bench: Bench) -> None:
    """A queue pair takes datagrams of several others, of its own device too, and sends to each."""
    talk = _Talk(bench)
    passive = talk.end(bench.passive)
    others = [talk.end(bench.active), talk.end(bench.active), talk.end(bench.passive)]
    for number, other in enumerate(others):
        got = talk.arrives(other, passive, b"from %d" % number)
        bench.equal(got.source_qpn, other.qp.number, "the completion names who sent it")
        talk.arrives(passive, other, b"to %d" % number)
    bench.equal(len({other.qp.number for other in others} | {passive.qp.number}), 4, "numbers differ")


@check("IBTA 10.2.9, 9.8.3", needs=(DATAGRAMS, SHARED_QUEUES))
def datagrams_use_shared_receives(bench: Bench) -> None:
    """Queue pairs for datagrams take their receives from a shared queue, too."""
    talk = _Talk(bench)
    domain = bench.passive.alloc_pd()
    srq = domain.create_srq(8)
    active = talk.end(bench.active)
    rooms = [domain.register(bytearray(_ROOM), LOCAL) for _ in range(2 * _TRIES)]
    posted = 0
    for number in range(2):
        passive = talk.end(bench.passive, srq=srq)
        content = b"shared %d" % number
        for _ in range(_TRIES):
            if not srq.receives_posted:
                srq.post_recv(Receive(posted, (rooms[posted].view,)))
                posted += 1
            talk.say(active, passive, content)
            if passive.received:
                break
        bench.equal([each.status for each in passive.received[:1]], [Status.SUCCESS], "the datagram takes one")
        room = rooms[passive.received[0].wr_id]
        bench.equal(bytes(room.view[GRH_LEN : GRH_LEN + len(content)]), content, "and is in it")
        bench.refused(Misuse, partial(passive.post_recv, 1, 64), "it has none of its own")


@check("IBTA 11.4.1.1; sidestep.rdma.verbs", needs=(DATAGRAMS,))
def types_of_queue_pairs_keep_to_themselves(bench: Bench) -> None:
    """A queue pair for datagrams sends nothing else and is not connected; a connected one sends no datagrams."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    bench.refused(Misuse, lambda: active.qp.post_send(Send(1, (b"x",))), "no message without a way")
    bench.refused(Misuse, lambda: active.qp.post_send(LocalInvalidate(1, RKey(1))), "nor what is about keys")
    bench.refused(Misuse, lambda: bench.connect(active), "it is not connected")
    one, _ = bench.pair()
    bench.equal(one.qp.qp_type, QpType.RC, "a connection is of another type")
    ah = one.domain.create_ah(passive.device.address)
    request = UdSend(wr_id=1, gather=(b"x",), ah=ah, remote_qpn=passive.qp.number, remote_qkey=QKEY)
    bench.refused(Misuse, lambda: one.qp.post_send(request), "and sends no datagrams")
    bench.equal(one.qp.state, QpState.RTS, "it goes on")


@check("IBTA 11.2.2, 11.4.1.1", needs=(DATAGRAMS,))
def address_handles_are_looked_at(bench: Bench) -> None:
    """A handle is good in its domain until it is destroyed; addresses and numbers that are none are refused."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    ah = active.domain.create_ah(passive.device.address)
    foreign = active.device.alloc_pd().create_ah(passive.device.address)
    bench.refused(Misuse, lambda: talk.say(active, passive, b"x", ah=foreign), "a handle of another domain is refused")
    bench.expect(talk.arrives(active, passive, b"good", ah=ah).ok, "one of the own is good")
    foreign.destroy()
    foreign.destroy()
    ah.destroy()
    bench.refused(Misuse, lambda: talk.say(active, passive, b"x", ah=ah), "and no more once it is destroyed")
    for number in (0, 0xFF_FFFF, 1 << 24, -1):
        wrong = partial(talk.say, active, passive, b"x", remote_qpn=number)
        bench.refused(Misuse, wrong, "that is no number of a queue pair")
    for qkey in (-1, 1 << 32):
        bench.refused(Misuse, partial(talk.say, active, passive, b"x", remote_qkey=qkey), "that is no Q_Key")
    for nonsense in ("nobody", "", "224.0.0.1", "ff02::1", "0.0.0.0"):  # noqa: S104 - an address to refuse
        bench.refused(Misuse, partial(active.domain.create_ah, nonsense), "that is not the address of one host")
    domain = bench.active.alloc_pd()
    kept = domain.create_ah(passive.device.address)
    bench.refused(Misuse, domain.deallocate, "a domain with a handle is in use")
    kept.destroy()
    domain.deallocate()


@check("IBTA 10.3.1, 10.8.5", needs=(DATAGRAMS,))
def error_flushes_a_datagram_queue_pair(bench: Bench) -> None:
    """In error a queue pair for datagrams flushes what is posted, and takes no datagram any more."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    talk.arrives(active, passive, b"before")
    talk.room(passive)
    number = talk.room(passive)
    passive.qp.modify_to_error()
    bench.eventually(lambda: any(each.wr_id == number for each in passive.received), "its receives come back")
    bench.equal(passive.received[-1].status, Status.FLUSHED, "flushed")
    count = len(passive.received)
    talk.say(active, passive, b"after")
    bench.equal((len(passive.received), passive.qp.state), (count, QpState.ERROR), "nothing arrives any more")
    talk.say(passive, active, b"sent in error")
    bench.eventually(lambda: bool(passive.sent), "what is posted then is completed")
    bench.equal([each.status for each in passive.sent], [Status.FLUSHED], "flushed, too")
    bench.equal(active.received, [], "and does not leave")
    passive.qp.destroy()
    talk.say(active, passive, b"to nobody")
    bench.all_ok(active, "who sends is not told")


@check("IBTA 10.6.3, 9.8.3", needs=(DATAGRAMS, LOCAL_CHECKS))
def datagram_memory_is_registered(bench: Bench) -> None:
    """A datagram is read from registered memory and written to such; else its own end has the error."""
    talk = _Talk(bench)
    active, passive = talk.ends()
    stray = memoryview(bytearray(b"nobody's"))
    ah = talk.handle(active, passive)
    active.qp.post_send(UdSend(wr_id=5, gather=(stray,), ah=ah, remote_qpn=passive.qp.number, remote_qkey=QKEY))
    bench.eventually(lambda: bool(active.sent), "it is told")
    bench.equal(active.sent[0].status, Status.LOCAL_PROTECTION_ERROR, "memory of no region is not sent")
    bench.equal(active.qp.state, QpState.ERROR, "which ends the queue pair")
    sender, memory = talk.end(bench.active), memoryview(bytearray(_ROOM))
    passive.qp.post_recv(Receive(6, (memory,)))
    for _ in range(_TRIES):
        talk.say(sender, passive, b"astray")
        if passive.received:
            break
    bench.equal([each.status for each in passive.received], [Status.LOCAL_PROTECTION_ERROR], "nor is such filled")
    bench.equal((bytes(memory), passive.qp.state), (bytes(_ROOM), QpState.ERROR), "nothing is placed")
    kinds = [each.kind for each in passive.events]
    bench.expect(EventKind.QP_REQUEST_ERROR not in kinds, "and the other end is not to blame", kinds)


@check("IBTA 10.8.1, 10.8.5", needs=(DATAGRAMS,))
def datagrams_are_bounded_and_signaled(bench: Bench) -> None:
    """A full send queue refuses at the call; unsignaled datagrams count until a signaled one is completed."""
    talk = _Talk(bench)
    active = talk.end(bench.active, capabilities=QpCapabilities(max_send_wr=4, max_recv_wr=4))
    passive = talk.end(bench.passive)
    for number in range(4):
        talk.say(active, passive, b"%d" % number, signaled=number == 3)
    bench.eventually(lambda: bool(active.sent), "the signaled one is completed")
    bench.equal((len(active.sent), active.qp.sends_outstanding), (1, 0), "and it alone; the queue is empty")
    for _ in range(4):
        talk.say(active, passive, b"quiet", signaled=False)
    bench.refused(SidestepError, lambda: talk.say(active, passive, b"too many"), "the send queue has a bound")
    for number in range(4):
        talk.room(active)
        bench.equal(active.qp.receives_posted, number + 1, "receives are counted")
    bench.refused(SidestepError, lambda: talk.room(active), "and so has the receive queue")


@check("sidestep.rdma.verbs", needs=(NO_DATAGRAMS,))
def devices_without_datagrams_say_so(bench: Bench) -> None:
    """A device without datagrams refuses their queue pairs and handles at the call."""
    device = bench.active
    domain, queue = device.alloc_pd(), device.create_cq(8)
    bench.refused(Misuse, lambda: domain.create_ud_qp(queue, queue, QKEY), "no queue pair for datagrams")
    bench.refused(Misuse, lambda: domain.create_ah(bench.passive.address), "no address handle")
    domain.deallocate()
