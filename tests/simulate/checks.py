"""Rules of a conversation: whenever all is quiet, and when it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep import limits
from sidestep.rdma.soft.memory import Domain
from sidestep.sdp.requests import SdpEventKind
from sidestep.sdp.simulate.conversation import Surprise
from sidestep.sdp.simulate.plan import PlanKind
from sidestep.sdp.states import OPEN, SdpState
from simulate.user import CheckedUser

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection
    from sidestep.sdp.endpoint import SdpStream
    from simulate.conversation import CheckedConversation


def _need(truth: bool, what: str) -> None:
    if not truth:
        raise Surprise(what)


# --- when all is quiet ---


def at_rest(conversation: CheckedConversation) -> None:
    """Nothing is on its way: what the two ends know of each other must agree."""
    left, right = conversation.users
    if not (left.joined and right.joined):
        return
    if left.connection.state not in OPEN or right.connection.state not in OPEN:
        return
    if left.connection.error is not None or right.connection.error is not None:
        return
    if left.connection._flow.down or right.connection._flow.down or _is_broken(left) or _is_broken(right):
        return
    for user, other in ((left, right), (right, left)):
        _check_buffers(user)
        _check_credit(user.name, user.connection, other.connection)
        _check_direction(user.name, user.connection, other.connection)
        _check_progress(user, other)


def _is_broken(user: CheckedUser) -> bool:
    qp = user.stream.qp
    return qp is None or qp.state.name != "RTS" or qp.link.cut  # type: ignore[attr-defined]


def _check_buffers(user: CheckedUser) -> None:
    connection, stream, name = user.connection, user.stream, user.name
    flow, resize = connection._flow, connection._resize
    assert stream.qp is not None
    _need(flow.posted == len(stream.posted), f"{name} counts {flow.posted} posted buffers of {len(stream.posted)}")
    _need(
        stream.qp.receives_posted == flow.posted,
        f"{name} counts {flow.posted} posted buffers, the device {stream.qp.receives_posted}",
    )
    held = held_buffers(connection)
    if not resize.busy:
        _need(
            flow.posted + held == flow.receive_count,
            f"{name}: {flow.posted} buffers posted, {held} held, {flow.receive_count} in all",
        )
    for in_flight in flow.in_flight:
        _need(in_flight[2] is None, f"{name} waits for a completion, and nothing is on its way")


def held_buffers(connection: SdpConnection) -> int:
    """Private buffers that hold bytes nobody has read."""
    return len({id(buffer) for _, buffer, _ in connection._sink.ready if buffer is not None})


def _check_credit(name: str, sender: SdpConnection, receiver: SdpConnection) -> None:
    credit, thought = sender._flow.credit, receiver._flow.remote_credit()
    _need(sender._flow.tx_mseq == receiver._flow.rx_mseq, f"a message of {name} is lost")
    if receiver._flow.held_ack is None:
        _need(credit == max(thought, 0), f"{name} has a credit of {credit}, the other end thinks {thought}")
    _need(credit <= receiver._flow.posted, f"{name} has a credit of {credit}, {receiver._flow.posted} are posted")


def _check_direction(name: str, sender: SdpConnection, receiver: SdpConnection) -> None:
    source, sink = sender._source, receiver._sink
    _need(
        source.mode is sink.mode or bool(receiver._control),
        f"{name} sends {source.mode.name}, the other end takes {sink.mode.name}",
    )
    _need(source.pnd == sink.nd, f"{name}: PND {source.pnd}, ND {sink.nd}")
    if not source.ended:
        _need(
            len(source.sinks) == len(sink.shown),
            f"{name} knows {len(source.sinks)} SinkAvails, {len(sink.shown)} are out",
        )
    if source.cancel_mseq is None and not receiver._control:
        _need(
            len(source.adverts) == len(sink.adverts),
            f"{name} has {len(source.adverts)} SrcAvails out, {len(sink.adverts)} are known",
        )
        owed = sum(end - start for _, start, end in source.forced)
        _need(owed == sink.due, f"{name} owes {owed} bytes by Data, the other end expects {sink.due}")


def _check_progress(user: CheckedUser, reader: CheckedUser) -> None:
    """Who waits for bytes that are there must get them without the help of a timer."""
    connection = user.connection
    source, sink = connection._source, reader.connection._sink
    if not reader.waits_for_bytes or not sink.receives:
        return
    tiny = min(connection._flow.receive_count, reader.connection._flow.receive_count) < limits.SDP_BUFFERS_MIN
    if tiny and ("refresh" in connection.timers or "probe" in connection.timers):
        return  # credit is short, and what there is comes late: another implementation's pool
    _need(not sink.ready_bytes, f"{reader.name} holds bytes and a receive")
    _need(not sink.adverts or sink.due > 0, f"{reader.name} has a SrcAvail and a receive, and does not read")
    _need(
        not (source.queue or source.forced or source.adverts),
        f"{user.name} has bytes and {reader.name} a receive, and nothing happens",
    )


# --- when it has ended ---


def at_end(conversation: CheckedConversation) -> None:
    """Both ends are done: the books agree, and nothing is left behind."""
    left, right = conversation.users
    gentle = conversation.plan.kind is PlanKind.CLEAN
    for stream in conversation.streams:
        _check_leftovers(stream)
    for user in (left, right):
        if not user.events:
            continue
        _check_memory(user)
        _need(not user.receives, f"{user.name}: {len(user.receives)} receives never ended")
        _check_events(user, gentle=gentle, moved=bool(conversation.plan.moves))
    if all(user.met for user in conversation.users):
        inline = [end.settings.urgent_inline for end in conversation.plan.ends]
        if gentle and not conversation.plan.moves:
            _check_announced(left, right)
            _check_announced(right, left)
        _check_stream(left, right, inline=inline[1], whole=gentle)
        _check_stream(right, left, inline=inline[0], whole=gentle)


def nothing_left(conversation: CheckedConversation) -> None:
    """Neither device has anything that belonged to a connection."""
    _need(not conversation.fabric.queue_pairs, f"queue pairs are left: {conversation.fabric.queue_pairs}")
    for stack in conversation.stacks:
        domain = stack.domain
        assert isinstance(domain, Domain)
        _need(not stack.buffers.lent, f"{stack.device.name}: {stack.buffers.lent} private buffers are left")
        _need(
            stack.regions.regions == len(stack.regions._idle),
            f"{stack.device.name}: {stack.regions.regions} regions are left",
        )
        stack.close()
        _need(not domain.regions, f"{stack.device.name}: {len(domain.regions)} regions stay")
        _need(not stack.streams, f"{stack.device.name}: streams are left")
        _need(stack.next_deadline() is None, f"{stack.device.name}: a deadline is left")


def _check_leftovers(stream: SdpStream) -> None:
    connection = stream.connection
    _need(connection.state is SdpState.CLOSED, f"the state is {connection.state}")
    _need(connection.next_deadline() is None, "a closed connection has a timer")
    _need(connection.poll_work() is None, "a closed connection has work")
    _need(not connection._flow.in_flight, "a closed connection has work requests in flight")
    for request in (*connection._source.queue, *connection._sink.receives):
        raise Surprise(f"a closed connection has {request}")


def _check_memory(user: CheckedUser) -> None:
    for received in user.records:
        _need(bytes(received.memory) == received.content, f"{user.name}: a receive changed after it had ended")
    for request, _ in user.sent:
        _need(request.done, f"{user.name}: a send never ended")
        _need(request.region is None, f"{user.name}: the region of a send is left")


def _check_events(user: CheckedUser, *, gentle: bool, moved: bool) -> None:
    events, name = user.events, user.name
    for kind in (
        SdpEventKind.ESTABLISHED,
        SdpEventKind.WRITE_CLOSED,
        SdpEventKind.END_OF_STREAM,
        SdpEventKind.BROKEN,
        SdpEventKind.CLOSED,
    ):
        if moved and kind in (SdpEventKind.ESTABLISHED, SdpEventKind.END_OF_STREAM):
            continue  # told by each process
        _need(events.count(kind) <= 1, f"{name} is told {kind} {events.count(kind)} times")
        if gentle and kind is not SdpEventKind.BROKEN:
            _need(events.count(kind) == 1, f"{name} is never told {kind}")
    _need(events.count(SdpEventKind.CLOSED) == 1, f"{name} is never told the last word")


def _check_stream(sender: CheckedUser, reader: CheckedUser, *, inline: bool, whole: bool) -> None:
    """The bytes that were received are those that were sent, each once, in order; all of them if `whole`."""
    got, name = reader.received, f"{sender.name} to {reader.name}"
    if whole:
        expected, marks = _expected(sender, inline=inline)
        if bytes(got) != expected:
            same = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), -1)
            raise Surprise(f"{name}: {len(got)} bytes of {len(expected)}, the first difference at {same}")
    else:
        expected = _expected_prefix(sender, bytes(got), inline=inline, name=name)
        marks = None
    for offset, peeked in reader.peeked:
        seen = bytes(got[offset : offset + len(peeked)])
        _need(peeked.startswith(seen), f"{name}: peeked {peeked!r} at {offset}, then came {seen!r}")
    if marks is not None:
        _check_marks(reader, marks, name, inline=inline)


def _expected(sender: CheckedUser, *, inline: bool) -> tuple[bytes, dict[int, list[int]]]:
    """The stream as it must arrive, and urgent bytes by offset: their own if `inline`, else that of what follows."""
    stream = bytearray()
    marks: dict[int, list[int]] = {}
    for request, content in sender.sent:
        part = content[: request.passed]
        if request.urgent and request.passed == request.length:
            marks.setdefault(len(stream) + len(part) - 1, []).append(part[-1])
            if not inline:
                part = part[:-1]
        stream += part
    return bytes(stream), marks


def _check_marks(reader: CheckedUser, marks: dict[int, list[int]], name: str, *, inline: bool) -> None:
    for received in reader.records:
        end = received.start + received.length
        if inline:
            end -= 1  # the byte may come as the last one of a receive that was advertised
        inside = [at for at in marks if received.start < at < end]
        _need(not inside, f"{name}: a receive of {received.start} + {received.length} goes over the mark at {inside}")
    for offset, byte in reader.marks:
        _need(offset in marks, f"{name}: a mark at {offset}, the urgent bytes are at {marks}")
        had = byte is None or any(byte in bytes_there for bytes_there in marks.values())
        _need(had, f"{name}: an urgent byte {byte}, sent were {marks}")


def _check_announced(sender: CheckedUser, reader: CheckedUser) -> None:
    """Each urgent byte once, and perhaps some that were cancelled."""
    announced = reader.events.count(SdpEventKind.URGENT)
    urgent = [request for request, _ in sender.sent if request.urgent]
    passed = sum(request.passed == request.length for request in urgent)
    _need(
        passed <= announced <= len(urgent),
        f"{sender.name}: {announced} urgent bytes announced, {passed} of {len(urgent)} were sent",
    )


def _expected_prefix(sender: CheckedUser, got: bytes, *, inline: bool, name: str) -> bytes:
    """What may have arrived where the connection broke: sends that ended well exactly, others up to some byte."""
    ends = {0}  # offsets of `got` up to which it is explained
    for request, content in sender.sent:
        least = request.passed
        most = request.passed if request.error is None else request.length
        nexts: set[int] = set()
        for at in ends:
            if at == len(got):
                return got
            for taken in [least] if most == least else [*range(least, most + 1)]:
                part = content[:taken]
                if request.urgent and taken == request.length and not inline:
                    part = part[:-1]
                rest = got[at:]
                if len(rest) <= len(part):
                    if part.startswith(rest):
                        return got
                elif rest.startswith(part) and (taken == most or request.cancelled):
                    nexts.add(at + len(part))
        ends = nexts
        if not ends:
            break
    if len(got) in ends:
        return got
    raise Surprise(f"{name}: {len(got)} bytes arrived that were not sent so; explained up to {sorted(ends)}")


# --- for people ---


def describe(conversation: CheckedConversation, index: int) -> str:
    user = conversation.users[index]
    if not user.joined:
        return f"{user.name}: no connection"
    connection = user.connection
    flow, source, sink = connection._flow, connection._source, connection._sink
    forced = sum(end - start for _, start, end in source.forced)
    return "\n".join(
        (
            f"{user.name}: {connection.state.value}, error {connection.error!r}, timers {connection.timers}",
            f"  credit {flow.credit}, posted {flow.posted}, held {held_buffers(connection)} of {flow.receive_count}, "
            f"the other end thinks {flow.remote_credit()}, in flight {len(flow.in_flight)} of {flow.send_queue}",
            f"  sends: {len(source.queue)} queued, {len(source.adverts)} advertised, {forced} bytes demanded, "
            f"{len(source.sinks)} SinkAvails, mode {source.mode.name}, PND {source.pnd}, "
            f"ending {source.ending}, ended {source.ended}, cancel {source.cancel_mseq}, wanted {source.mode_wanted}",
            f"  receives: {len(sink.receives)} queued, {len(sink.shown)} shown, {len(sink.ready)} pieces ready, "
            f"{len(sink.adverts)} SrcAvails, {sink.due} due, mode {sink.mode.name}, ND {sink.nd}, ended {sink.ended}, "
            f"withdrawing {sink.withdrawing}, reads {sink.reads}, control {len(connection._control)}",
            f"  user: {len(user.received)} bytes received, {len(user.sent)} sends, {len(user.events)} events",
        )
    )
