"""Checks of the connection manager: who is told what, how often, in which order, and with which private data."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sidestep.errors import Misuse
from sidestep.rdma.cm import (
    REJECT_CONSUMER,
    REJECT_INVALID_SERVICE_ID,
    CmState,
    ConnectionRequest,
    Disconnected,
    Established,
    PrivateDataMatch,
    Rejected,
    TimewaitExit,
    Unreachable,
)
from sidestep.rdma.conformance.harness import check, refusals
from sidestep.rdma.conformance.needs import NOWHERE
from sidestep.rdma.verbs import EventKind, QpCapabilities, QpState
from sidestep.rdma.work import Status

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench, Side

_SDP_HELLO = 92  # bytes: what an SDP request has to carry (docs/wire/sdp.md §5.1)


def _kinds(side: Side) -> list[type]:
    return [type(event) for event in side.cm_events]


@check("IBTA 12.6; docs/wire/sdp.md §2.2")
def private_data_arrives_exactly(bench: Bench) -> None:
    """Private data of request and reply arrive byte for byte, up to the sizes that the device declares."""
    attributes = bench.passive.attributes
    bench.expect(attributes.request_private_data_max >= 76, "a request carries at least the 76 bytes that SDP asks for")
    sizes = ((0, 0), (1, 5), (attributes.request_private_data_max, attributes.reply_private_data_max))
    for asked, answered in sizes:
        hello = bytes((index * 5 + 1) % 256 for index in range(asked))
        reply = bytes((index * 3 + 2) % 256 for index in range(answered))
        requests: list[ConnectionRequest] = []
        passive, active = bench.side(bench.passive), bench.side(bench.active)

        def on_request(
            request: ConnectionRequest,
            requests: list[ConnectionRequest] = requests,
            passive: Side = passive,
            reply: bytes = reply,
        ) -> None:
            requests.append(request)
            request.accept(passive.qp, reply, passive.on_cm)

        listener = bench.passive.cm.listen(bench.SERVICE, on_request)
        bench.connect(active, hello)
        bench.eventually(lambda side=active: bool(side.cm_events), "the connection is made")  # type: ignore[misc]
        wanted = bench.padded(hello, attributes.request_private_data_max)
        bench.equal(requests[0].private_data, wanted, "the request's private data")
        bench.equal(requests[0].service_id, bench.SERVICE, "the request names the service")
        event = active.cm_events[0]
        wanted = bench.padded(reply, attributes.reply_private_data_max)
        bench.equal(event, Established(wanted), "the reply's private data")
        listener.close()


@check("IBTA 12.6")
def too_much_private_data_is_misuse(bench: Bench) -> None:
    """Private data beyond the declared sizes is refused at the call, and changes nothing."""
    attributes = bench.active.attributes
    active, passive = bench.side(bench.active), bench.side(bench.passive)
    hello = bytes(attributes.request_private_data_max + 1)
    bench.refused(Misuse, lambda: bench.connect(active, hello), "a request has a bound")
    requests: list[ConnectionRequest] = []
    bench.passive.cm.listen(bench.SERVICE, requests.append)
    bench.connect(active)
    bench.eventually(lambda: bool(requests), "the request arrives")
    reply = bytes(bench.passive.attributes.reply_private_data_max + 1)
    bench.refused(Misuse, lambda: requests[0].accept(passive.qp, reply, passive.on_cm), "a reply has a bound")
    no = bytes(bench.passive.attributes.reject_private_data_max + 1)
    bench.refused(Misuse, lambda: requests[0].reject(private_data=no), "a rejection has a bound")
    requests[0].accept(passive.qp, b"", passive.on_cm)
    bench.eventually(lambda: bool(active.cm_events), "the request can still be answered")
    bench.equal(_kinds(active), [Established], "and is accepted")


@check("IBTA 12.6.7")
def rejection_tells_reason_and_private_data(bench: Bench) -> None:
    """Who is rejected is told the reason and the private data; the queue pair is in ERROR, and nothing else follows."""
    most = bench.passive.attributes.reject_private_data_max
    for why in (b"", b"full", bytes(index % 251 for index in range(most))):
        active = bench.side(bench.active)
        active.post_recv(1, 8)
        listener = bench.passive.cm.listen(
            bench.SERVICE,
            lambda request, data=why: request.reject(private_data=data),  # type: ignore[misc]
        )
        bench.connect(active)
        bench.eventually(lambda side=active: bool(side.cm_events), "the rejection is told")  # type: ignore[misc]
        bench.dut.run()
        wanted = Rejected(REJECT_CONSUMER, bench.padded(why, most))
        bench.equal(active.cm_events, [wanted], "reason 28 and the private data, once")
        bench.equal(active.qp.state, QpState.ERROR, "the queue pair is of no use any more")
        bench.equal([each.status for each in active.received], [Status.FLUSHED], "its receives come back")
        listener.close()


@check("IBTA 12.6.7.2")
def nobody_listens(bench: Bench) -> None:
    """A request for a service id on which nobody listens, or no longer, is rejected with reason 8."""
    active = bench.side(bench.active)
    bench.connect(active)
    bench.eventually(lambda: bool(active.cm_events), "the rejection is told")
    bench.equal(refusals(active.cm_events), [REJECT_INVALID_SERVICE_ID], "nobody ever listened")
    seen: list[ConnectionRequest] = []
    listener = bench.passive.cm.listen(bench.SERVICE, seen.append)
    listener.close()
    listener.close()
    again = bench.side(bench.active)
    bench.connect(again)
    bench.eventually(lambda: bool(again.cm_events), "the rejection is told")
    bench.equal((refusals(again.cm_events), seen), ([REJECT_INVALID_SERVICE_ID], []), "nobody listens any more")


@check("docs/wire/sdp.md §2.3; IBTA 12.9.8.3")
def listeners_are_told_apart_by_private_data(bench: Bench) -> None:
    """Of the listeners of a service id the one whose match fits gets the request, else the one without a match."""
    got: list[str] = []

    def taker(name: str) -> None:
        def take(request: ConnectionRequest) -> None:
            got.append(name)
            request.reject()

        matches = {
            "any": None,
            "address 2": PrivateDataMatch(48, b"\xc0\x00\x02\x02"),
            "address 3": PrivateDataMatch(48, b"\xc0\x00\x02\x03"),
            "network": PrivateDataMatch(48, b"\x0a\x00\x00\x00", b"\xff\x00\x00\x00"),
        }
        bench.passive.cm.listen(bench.SERVICE, take, match=matches[name])

    for name in ("any", "address 2", "network", "address 3"):
        taker(name)
    for address in ("c0000203", "0a123456", "c0000202", "c0000204"):
        active = bench.side(bench.active)
        bench.connect(active, bytes(48) + bytes.fromhex(address) + b"more")
        bench.eventually(lambda side=active: bool(side.cm_events), "the request is answered")  # type: ignore[misc]
    bench.equal(got, ["address 3", "network", "address 2", "any"], "each request finds its listener")


@check("docs/wire/sdp.md §2.3, §2.4")
def no_match_is_a_rejection(bench: Bench) -> None:
    """Where all listeners look for something else a request is rejected with reason 28; short data counts as zeros."""
    got: list[ConnectionRequest] = []
    bench.passive.cm.listen(bench.SERVICE, got.append, match=PrivateDataMatch(2, b"yes"))
    active = bench.side(bench.active)
    bench.connect(active, b"--no-")
    bench.eventually(lambda: bool(active.cm_events), "the rejection is told")
    bench.equal((refusals(active.cm_events), got), ([REJECT_CONSUMER], []), "nobody wants it")
    bench.passive.cm.listen(bench.SERVICE + 1, lambda request: request.reject(99), match=PrivateDataMatch(1, b"\0\0"))
    again = bench.side(bench.active)
    bench.connect(again, b"x", service_id=bench.SERVICE + 1)
    bench.eventually(lambda: bool(again.cm_events), "the request is answered")
    wanted = 99 if bench.passive.attributes.reject_reasons else REJECT_CONSUMER
    bench.equal(refusals(again.cm_events), [wanted], "data too short for the match counts as zeros")


@check("sidestep.rdma.cm")
def one_listener_for_each_match(bench: Bench) -> None:
    """Two listeners with the same service id and the same match, or both without, are refused at the call."""
    manager = bench.passive.cm
    match = PrivateDataMatch(0, b"a")
    first = manager.listen(bench.SERVICE, lambda request: None)
    manager.listen(bench.SERVICE, lambda request: None, match=match)
    manager.listen(bench.SERVICE + 1, lambda request: None)
    bench.refused(Misuse, lambda: manager.listen(bench.SERVICE, lambda request: None), "two without a match")
    same = PrivateDataMatch(0, b"a")
    bench.refused(Misuse, lambda: manager.listen(bench.SERVICE, lambda request: None, match=same), "two of a match")
    first.close()
    manager.listen(bench.SERVICE, lambda request: None)


@check("docs/wire/sdp.md §2.4")
def backlog_is_bounded(bench: Bench) -> None:
    """Requests beyond the backlog are rejected with reason 28; an answer makes room for another one."""
    pending: list[ConnectionRequest] = []
    listener = bench.passive.cm.listen(bench.SERVICE, pending.append, backlog=2)
    sides = [bench.side(bench.active) for _ in range(4)]
    for side in sides[:3]:
        bench.connect(side)
        bench.dut.run()
    bench.equal((len(pending), listener.pending), (2, 2), "as many as the backlog are handed over")
    bench.eventually(lambda: bool(sides[2].cm_events), "the next one is answered")
    bench.equal(refusals(sides[2].cm_events), [REJECT_CONSUMER], "the next one is rejected")
    pending[0].reject()
    bench.equal(listener.pending, 1, "an answer makes room")
    bench.connect(sides[3])
    bench.eventually(lambda: len(pending) == 3, "another one is handed over")
    passive = bench.side(bench.passive)
    pending[2].accept(passive.qp, b"", passive.on_cm)
    bench.eventually(lambda: bool(sides[3].cm_events), "and can be accepted")
    bench.equal((_kinds(sides[3]), listener.pending), ([Established], 1), "a request that is answered is not pending")


@check("sidestep.rdma.cm")
def a_request_is_answered_once(bench: Bench) -> None:
    """A second answer to a request is refused at the call, whatever the first one was."""
    requests: list[ConnectionRequest] = []
    bench.passive.cm.listen(bench.SERVICE, requests.append)
    for accept in (False, True):
        active, passive = bench.side(bench.active), bench.side(bench.passive)
        bench.connect(active)
        bench.eventually(lambda: bool(requests), "the request arrives")
        request = requests.pop()
        if accept:
            request.accept(passive.qp, b"", passive.on_cm)
        else:
            request.reject()
        bench.refused(Misuse, request.reject, "it is not rejected after an answer")
        other = bench.side(bench.passive)
        accept_again = partial(request.accept, other.qp, b"", other.on_cm)
        bench.refused(Misuse, accept_again, "it is not accepted after an answer")
        bench.eventually(lambda side=active: bool(side.cm_events), "the first answer counts")  # type: ignore[misc]
        bench.equal(_kinds(active), [Established if accept else Rejected], "the first answer counts")


@check("sidestep.rdma.cm")
def a_queue_pair_is_connected_once(bench: Bench) -> None:
    """A queue pair that is connected, was connected, or belongs to another device, is refused at the call."""
    active, passive = bench.pair()
    bench.refused(Misuse, lambda: bench.connect(active), "a connected queue pair")
    active.disconnect()
    bench.dut.run()
    bench.refused(Misuse, lambda: bench.connect(active), "a queue pair that was connected")
    foreign = bench.side(bench.passive)
    connect = bench.active.cm.connect
    call = lambda: connect(bench.passive.address, 1, foreign.qp, b"", foreign.on_cm)  # noqa: E731
    bench.refused(Misuse, call, "a queue pair of another device")
    bench.equal(passive.qp.receives_posted, 0, "nothing else happens")


@check("IBTA 12.9.7; docs/wire/sdp.md §7.1")
def states_follow_the_handshake(bench: Bench) -> None:
    """The accepting queue pair is in RTR until Established is told, the asking one in INIT; then both are in RTS."""
    active, passive = bench.side(bench.active), bench.side(bench.passive)
    seen: list[object] = []

    def on_request(request: ConnectionRequest) -> None:
        seen.append(passive.qp.state)
        passive.connection = request.accept(passive.qp, b"", passive.on_cm)
        seen.append((passive.qp.state, passive.connection.state, passive.cm_events[:]))

    bench.passive.cm.listen(bench.SERVICE, on_request)
    connection = bench.connect(active)
    bench.equal((active.qp.state, connection.state), (QpState.INIT, CmState.REQUEST_SENT), "nothing is sent yet")
    bench.equal(connection.remote_address, bench.passive.address, "the connection knows whom it asks")
    bench.eventually(lambda: bool(active.cm_events and passive.cm_events), "the connection is made")
    bench.equal(seen, [QpState.INIT, (QpState.RTR, CmState.REPLY_SENT, [])], "accepted is not established")
    for side in (active, passive):
        assert side.connection is not None
        bench.equal((_kinds(side), side.qp.state), ([Established], QpState.RTS), "Established means RTS")
        bench.equal(side.connection.state, CmState.ESTABLISHED, "and the connection says so")


@check("docs/wire/sdp.md §7.1; IBTA 12.6.7")
def reply_can_be_refused(bench: Bench) -> None:
    """Who asked sees the reply before there is a connection, and may refuse it: both ends are told, with reason 28."""
    active, passive = bench.side(bench.active), bench.side(bench.passive)
    replies: list[bytes] = []

    def look(private_data: bytes) -> bool:
        replies.append(private_data)
        return False

    bench.listen(passive, b"not what you want")
    bench.connect(active, check_reply=look)
    bench.eventually(lambda: bool(active.cm_events and passive.cm_events), "both are told")
    bench.dut.run()
    wanted = bench.padded(b"not what you want", bench.passive.attributes.reply_private_data_max)
    bench.equal(replies, [wanted], "the reply is looked at once")
    for side in (active, passive):
        bench.equal((_kinds(side), side.qp.state), ([Rejected], QpState.ERROR), "there is no connection")
        bench.equal(refusals(side.cm_events), [REJECT_CONSUMER], "with the consumer's reason")
    good = bench.side(bench.active)
    bench.listen(bench.side(bench.passive), service_id=1)
    bench.connect(good, service_id=1, check_reply=lambda reply: True)
    bench.eventually(lambda: bool(good.cm_events), "a reply that is liked is accepted")
    bench.equal(_kinds(good), [Established], "a reply that is liked is accepted")


@check("IBTA 12.9.6; docs/wire/sdp.md §7.1")
def first_message_is_as_good_as_the_last_word(bench: Bench) -> None:
    """A message that comes before the handshake's last word is delivered, behind Established, which is told once."""
    for _ in range(10):
        active = bench.side(bench.active, handled=True)
        passive = bench.side(bench.passive, handled=True)
        passive.post_recv(1, 8)
        listener = bench.listen(passive)
        events = active.cm_events

        def send_at_once(side: Side = active) -> None:
            side.send(1, b"at once")

        active.connection = bench.active.cm.connect(
            bench.passive.address,
            bench.SERVICE,
            active.qp,
            b"",
            lambda connection, event, events=events, send=send_at_once: (events.append(event), send())[0],  # type: ignore[misc]
        )
        bench.eventually(lambda side=passive: bool(side.received), "the message is delivered")  # type: ignore[misc]
        bench.dut.run()
        bench.equal(_kinds(passive), [Established], "Established is told once")
        bench.expect(isinstance(passive.log[0], Established), "Established comes before the message", passive.log)
        bench.equal(passive.received[0].byte_len, 7, "the message is whole")
        kinds = {each.kind for each in passive.events}
        bench.expect(kinds <= {EventKind.COMMUNICATION_ESTABLISHED}, "no event but one of communication", kinds)
        listener.close()


@check("IBTA 12.9.7, 12.7.5")
def read_depth_is_agreed(bench: Bench) -> None:
    """Each end makes as many RDMA Reads as it wants and the other end takes; the request says what is wanted."""
    active = bench.side(bench.active, QpCapabilities(initiator_depth=3, responder_resources=1))
    passive = bench.side(bench.passive, QpCapabilities(initiator_depth=4, responder_resources=2))
    seen: list[tuple[int, int]] = []

    def on_request(request: ConnectionRequest) -> None:
        seen.append((request.initiator_depth, request.responder_resources))
        request.accept(passive.qp, b"", passive.on_cm)

    bench.passive.cm.listen(bench.SERVICE, on_request)
    bench.connect(active)
    bench.eventually(lambda: bool(active.cm_events and passive.cm_events), "the connection is made")
    bench.equal(seen, [(3, 1)], "the request says what the other end wants and takes")
    bench.equal((active.qp.initiator_depth, passive.qp.initiator_depth), (2, 1), "the smaller number counts")


@check("IBTA 12.6.8, 12.9.7")
def disconnect_is_told_to_both_ends(bench: Bench) -> None:
    """After `disconnect` each end gets Disconnected once and TimewaitExit last; receives are flushed before that."""
    for from_active in (True, False):
        active, passive = bench.pair(handled=True)
        for side in (active, passive):
            side.post_recv(1, 8)
        first, second = (active, passive) if from_active else (passive, active)
        first.disconnect()
        first.disconnect()
        bench.equal(first.qp.state, QpState.ERROR, "this end is in ERROR at once")
        bench.equal(_kinds(first), [Established], "nobody is called from inside the call")
        bench.eventually(
            lambda sides=(first, second): all(TimewaitExit() in side.cm_events for side in sides),  # type: ignore[misc]
            "the end is told",
        )
        bench.equal(_kinds(first), [Established, Disconnected, TimewaitExit], "each event once, in this order")
        bench.equal(_kinds(second), [Established, Disconnected, TimewaitExit], "at the other end too")
        bench.equal(first.cm_events[1], Disconnected(by_remote=False), "this end asked for it")
        bench.equal(second.cm_events[1], Disconnected(by_remote=True), "the other end did not")
        for side in (first, second):
            bench.equal([each.status for each in side.received], [Status.FLUSHED], "the receive comes back")
            flushed = next(index for index, entry in enumerate(side.log) if isinstance(entry, list))
            told = next(index for index, entry in enumerate(side.log) if isinstance(entry, Disconnected))
            bench.expect(flushed < told, "what is flushed comes before Disconnected", side.log)


@check("IBTA 12.9.7")
def crossing_disconnects_are_normal(bench: Bench) -> None:
    """Where both ends disconnect at the same time, each gets Disconnected once, and TimewaitExit."""
    for _ in range(10):
        active, passive = bench.pair()
        for side in (active, passive):
            side.disconnect()
        bench.eventually(
            lambda sides=(active, passive): all(TimewaitExit() in side.cm_events for side in sides),  # type: ignore[misc]
            "the end is told",
        )
        for side in (active, passive):
            bench.equal(_kinds(side), [Established, Disconnected, TimewaitExit], "each event once, in this order")


@check("IBTA 12.6.7, 12.9.7")
def an_attempt_can_be_given_up(bench: Bench) -> None:
    """Who disconnects before Established hears nothing more, and the other end gets no connection that stays."""
    for answered in (False, True):
        active, passive = bench.side(bench.active), bench.side(bench.passive)
        requests: list[ConnectionRequest] = []
        listener = bench.passive.cm.listen(bench.SERVICE, requests.append)
        connection = bench.connect(active)
        bench.eventually(lambda found=requests: bool(found), "the request arrives")  # type: ignore[misc]
        if answered:
            requests[0].accept(passive.qp, b"", passive.on_cm)
        connection.disconnect()
        bench.equal(active.qp.state, QpState.ERROR, "the queue pair is in ERROR")
        bench.dut.run()
        if not answered:
            requests[0].accept(passive.qp, b"", passive.on_cm)
        bench.eventually(lambda side=passive: bool(side.cm_events), "the other end is told")  # type: ignore[misc]
        bench.dut.run()
        bench.equal((active.cm_events, connection.state), ([], CmState.CLOSED), "who gave up hears nothing more")
        bench.expect(
            _kinds(passive)[-1] is not Established, "the other end knows that there is none", passive.cm_events
        )
        bench.equal((passive.qp.state, listener.pending), (QpState.ERROR, 0), "and nothing is left of it")
        listener.close()


@check("IBTA 12.9.8")
def an_acceptance_can_be_given_up(bench: Bench) -> None:
    """Who accepts and disconnects before Established hears nothing more; the other end is left without a connection."""
    active, passive = bench.side(bench.active), bench.side(bench.passive)

    def on_request(request: ConnectionRequest) -> None:
        connection = request.accept(passive.qp, b"", passive.on_cm)
        connection.disconnect()

    bench.passive.cm.listen(bench.SERVICE, on_request)
    bench.connect(active)
    bench.eventually(lambda: active.qp.state is QpState.ERROR, "the other end is told")
    bench.dut.run()
    bench.equal((passive.cm_events, passive.qp.state), ([], QpState.ERROR), "who gave up hears nothing more")
    bench.expect(_kinds(active)[0] in (Rejected, Established), "the other end is told", active.cm_events)
    if _kinds(active)[0] is Established:
        bench.equal(_kinds(active)[1], Disconnected, "and that it is over")


@check("IBTA 12.9.8.7", needs=(NOWHERE,))
def nobody_answers(bench: Bench) -> None:
    """A request that nobody answers ends in Unreachable, told once, with the queue pair in ERROR."""
    active = bench.side(bench.active)
    active.post_recv(1, 8)
    connection = bench.connect(active, address=bench.dut.nowhere)
    bench.eventually(lambda: bool(active.cm_events), "it ends")
    bench.dut.run()
    bench.equal(active.cm_events, [Unreachable()], "it is told once")
    bench.equal((active.qp.state, connection.state), (QpState.ERROR, CmState.CLOSED), "nothing is left of it")
    bench.equal([each.status for each in active.received], [Status.FLUSHED], "receives come back")
    connection.disconnect()


@check("sidestep.rdma.cm")
def many_connections_are_kept_apart(bench: Bench) -> None:
    """Connections made at the same time get their own private data, events and messages, and no others."""
    count = 12
    passives: dict[int, Side] = {}

    def on_request(request: ConnectionRequest) -> None:
        number = request.private_data[0]
        side = passives[number] = bench.side(bench.passive)
        side.post_recv(number, 8)
        request.accept(side.qp, bytes([number, 99]), side.on_cm)

    bench.passive.cm.listen(bench.SERVICE, on_request)
    actives = [bench.side(bench.active) for _ in range(count)]
    for number, side in enumerate(actives):
        bench.connect(side, bytes([number]))
    bench.eventually(lambda: all(side.cm_events for side in actives), "all are made")
    for number, side in enumerate(actives):
        event = side.cm_events[0]
        bench.expect(isinstance(event, Established) and event.private_data[:2] == bytes([number, 99]), "its own reply")
        side.send(number, b"m%d" % number)
    bench.eventually(lambda: all(side.received for side in passives.values()), "all messages arrive")
    for number, side in passives.items():
        got = side.received[0]
        bench.equal((got.wr_id, got.byte_len), (number, len(b"m%d" % number)), "each gets its own message")
    for side in actives[::2]:
        side.disconnect()
    bench.eventually(lambda: all(len(passives[n].cm_events) > 1 for n in range(0, count, 2)), "the ends are told")
    bench.dut.run()
    kept = {n: passives[n].qp.state for n in range(1, count, 2)}
    bench.equal(set(kept.values()), {QpState.RTS}, "an end of one connection is not one of another")


@check("sidestep.rdma.verbs")
def close_ends_connections(bench: Bench) -> None:
    """A device that is closed leaves no connection behind: the other end is told."""
    active, passive = bench.pair()
    pending = bench.side(bench.active)
    bench.passive.cm.listen(bench.SERVICE, lambda request: None)
    bench.connect(pending)
    bench.dut.run()
    bench.passive.close()
    bench.passive.close()
    bench.eventually(lambda: len(active.cm_events) >= 2, "the other end is told")
    bench.equal(_kinds(active)[:2], [Established, Disconnected], "the connection is over")
    bench.eventually(lambda: bool(pending.cm_events), "requests that waited are answered")
    bench.expect(_kinds(pending)[0] in (Rejected, Unreachable), "and not accepted", pending.cm_events)
    bench.refused(Misuse, bench.passive.alloc_pd, "a closed device is of no use")
    bench.equal(passive.qp.state, QpState.RESET, "its queue pairs are gone")
