"""A stream goes on over another transport connection, at another process of one end (docs/wire/sdp.md §15).

The end whose socket moves sends SuspComm with the port of its new place (`begin`). The other end answers by
SuspCommAck when nothing is in process, sends nothing more, and connects anew to that port (`resume`). The moving end,
when it has the answer and no memory is in use, hands over what was not read and not sent (`_hand_over`), and the new
process takes it (`take_over`). In between nothing may come but updates of credit.

Both ends may wish to move at the same time: the connecting end answers, and asks again in the new connection (`again`).

The endpoint's part, the new place that waits for the other end, is in `moving`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.errors import Misuse, PeerViolation, Unavailable
from sidestep.sdp.requests import Disconnect, Release, SdpCause, SdpEventKind, Suspended
from sidestep.sdp.settings import Addresses, Carrier
from sidestep.sdp.states import SdpState, Stimulus
from sidestep.sdp.wire import SuspComm, SuspCommAck, port_of, service_id

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection


class Suspend:
    """Either side of it."""

    __slots__ = (
        "_again", "_flow", "_halves", "_handshake", "_host", "_resize", "_settings", "_teardown", "_timers",
        "answered", "confirmed", "port", "sent",
    )  # fmt: skip

    def __init__(self, host: SdpConnection) -> None:
        self._host = host
        self._flow, self._halves, self._resize = host._flow, host._halves, host._resize
        self._handshake, self._teardown = host._handshake, host._teardown
        self._settings, self._timers = host._settings, host.timers
        self._again: int | None = None  # our own wish, for after a move of the other end
        self._reset()

    def _reset(self) -> None:
        self.port: int | None = None  # where our socket moves to, or the other end's
        self.answered = False  # it is the other end's: SuspComm has come
        self.sent = False  # SuspComm or SuspCommAck has gone: nothing may follow
        self.confirmed = False  # SuspCommAck has come

    def begin(self, port: int) -> None:
        """The user wishes to move to this port."""
        if self._host.state is not SdpState.ESTABLISHED:
            raise Misuse("only an established connection can move")
        if self.answered:  # the other end's socket moves first
            self._again = port
            return
        if self.port is not None:
            raise Misuse("the connection moves already")
        self._begin(port)

    def _begin(self, port: int) -> None:
        self.port = port
        self._timers["suspend"] = self._host.now + self._settings.suspend_s

    def established(self) -> None:
        """A new transport connection: what had to give way is asked for now."""
        if self._again is not None:
            port, self._again = self._again, None
            self._begin(port)

    # --- the two messages ---

    def handle_request(self, service: int) -> None:
        """SuspComm."""
        if self.port is not None:
            if self._host.accepting and self.sent:
                return  # both moved: the connecting end answers, and asks again in the new connection (§15)
            self._again = self.port
            self.sent = False
        self.port = port_of(service)
        self.answered = True

    def handle_answer(self) -> None:
        """SuspCommAck; `go_on` sees when no memory is in use here any more."""
        if not self.sent:
            raise PeerViolation("SuspCommAck without SuspComm", rule="suspend_unasked")
        self.confirmed = True

    def send(self) -> bool:
        """SuspComm, or its answer, when nothing is in process; True if it went, and nothing may follow."""
        flow, source, sink = self._flow, self._halves.source, self._halves.sink
        if sink.reads or sink.withdrawing or not flow.may_send_bare():
            return False
        if source.cancel_mseq is not None and not self.answered:  # who has sent SuspComm does not answer it
            return False
        if any(then is not None for _, _, then in flow.in_flight):
            return False
        assert self.port is not None
        self.sent = True
        sink.frozen = True
        if self.answered:
            flow.send_header(SuspCommAck(), then=self._leave)
        else:
            flow.send_header(SuspComm(service_id(self.port)))
        return True

    # --- at the end that moves ---

    def go_on(self) -> None:
        """Hands over, once the answer has come and nothing is in flight."""
        if self.confirmed and not self._flow.in_flight:
            self._hand_over()

    def left(self) -> None:
        """The transport connection is gone, or of no use any more."""
        moves = self.confirmed and self._flow.open
        if not moves and self._host.state is not SdpState.RESUMING:
            return
        # one end left before what was in flight from the other completed: that end has all of it
        in_flight = self._flow.in_flight
        while in_flight:
            _, send, _ = in_flight.popleft()
            if send is not None:
                send.pending -= 1
                self._halves.end_send(send)
        if moves:
            self._hand_over()

    def _hand_over(self) -> None:
        """The stream goes on elsewhere."""
        host, flow, source, sink = self._host, self._flow, self._halves.source, self._halves.sink
        assert host.addresses is not None
        source.take_all_back()
        unsent = list(source.queue)
        source.queue.clear()
        source.ending = True  # nothing can be sent here any more
        for send in unsent:
            send.registering = False
            if send.region is not None:  # it is of this device
                flow.work.append(Release(send.region))
                send.region = None
        unread = sink.drain()
        host.tell(SdpEventKind.SUSPENDED)
        sink.end_all()  # with what they hold: the stream goes on elsewhere
        host.readable_reported = True  # nor is there anything to read here
        host.suspended = Suspended(
            remote_port=host.addresses.remote_port,
            receive_size=self._resize.local,
            unread=unread,
            urgent_byte=sink.take_urgent(),
            unsent=unsent,
        )
        host.move(Stimulus.MOVED)
        self._timers.clear()
        if self._settings.carrier is Carrier.IWARP:
            flow.disconnect()
        else:
            self._timers["abort"] = host.now + self._settings.last_ack_s  # for the other end's disconnect

    # --- at its new place ---

    def take_over(self, suspended: Suspended) -> None:
        """Goes on with what another process has handed over."""
        for send in suspended.unsent:
            send.registering = False  # the answer would come to the connection that has asked
            self._halves.source.enqueue(send)
        self._halves.sink.take_over(suspended)
        self._handshake.resuming = True
        self._resize.local = self._resize.target = suspended.receive_size

    # --- at the other end ---

    def cut_off(self) -> None:
        """The queue pair is in error. Who has our SuspCommAck may leave before its completion has come here."""
        if self.answered and self.sent:
            self._leave(wait=True)

    def _leave(self, *, wait: bool = False) -> None:
        """Our SuspCommAck has gone: leave this transport connection, or `wait` for that, and ask for another."""
        host, settings, timers = self._host, self._settings, self._timers
        if not self._flow.open:
            return  # the connection has ended meanwhile
        host.move(Stimulus.MOVES)
        self._teardown.left = False
        host.tell(SdpEventKind.RESUMING)
        timers["suspend"] = host.now + settings.suspend_s
        if wait or settings.carrier is Carrier.IWARP:  # a completed Send has not arrived: the other end disconnects
            timers["abort"] = host.now + settings.last_ack_s
        else:
            self._flow.work.append(Disconnect())

    def resume(self) -> None:
        """There is a new queue pair: connect it to where the other end's socket is."""
        host, source, sink = self._host, self._halves.source, self._halves.sink
        old, port = host.addresses, self.port
        if host.state is not SdpState.RESUMING or old is None or port is None:
            raise Misuse("nothing to resume")
        sink.keep()
        source.take_all_back()
        source.ended = False  # a DisConn is sent again: the new connection knows nothing of it
        self._flow.reset()
        self._flow.posted = 0
        source.reset()
        sink.reset()
        self._resize.reset()
        close_at = self._timers.get("close")
        host.forget()
        if close_at is not None:
            self._timers["close"] = close_at  # what close() allows runs on, or who moves again and again never ends
        self._reset()
        host.accepting = False
        self._handshake.reconnect(Addresses(old.local, old.local_port, old.remote, port))

    def timeout(self) -> None:
        self._teardown.break_off(Unavailable("the socket did not get to its new place"), SdpCause.TIMEOUT)
