"""Ending a connection, well or badly (docs/wire/sdp.md §16).

Well: each end closes its direction by DisConn once everything before it has been delivered; then the end that sent
first takes the transport connection down, and the other does so if that takes too long. Badly: `break_off` takes it
down at once, after an AbortConn where a DisConn has gone before. Either way the end is complete only when the transport
says that nothing can reach the user's memory any more (`disconnected`); the user's requests end then, and CLOSED
is the last thing told. The first error is kept.

An attempt that comes to nothing ends here as well (`refuse`); what the other end is told of it is `handshake`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.errors import PeerViolation, SidestepError, Unavailable
from sidestep.sdp.header import ge
from sidestep.sdp.requests import Disconnect, SdpCause, SdpEventKind
from sidestep.sdp.settings import Carrier
from sidestep.sdp.states import NO_PAYLOAD, OPEN, OPENING, SdpState, Stimulus
from sidestep.sdp.wire import AbortConn, DisConn

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection


class Teardown:
    """Of one connection."""

    __slots__ = (
        "_end_mseq", "_end_told", "_flow", "_halves", "_handshake", "_host", "_release_wanted", "_settings", "_timers",
        "_write_told", "left", "reader_closed",
    )  # fmt: skip

    def __init__(self, host: SdpConnection) -> None:
        self._host = host
        self._flow, self._halves, self._handshake = host._flow, host._halves, host._handshake
        self._settings, self._timers = host._settings, host.timers
        self.reader_closed = False  # the user receives nothing more
        self.left = False  # the transport connection of a stream that goes on over another one is gone
        self._end_told = False
        self._write_told = False
        self._end_mseq = 0  # of our DisConn
        self._release_wanted = False  # DisConn's completion is awaited, to disconnect

    # --- the user's wish ---

    def shutdown_read(self) -> None:
        self.reader_closed = True
        self._halves.cancel_receives()
        self._halves.sink.closed = True
        self._halves.sink.serve()

    def close(self, linger_s: float | None) -> None:
        """Ends both directions; unread bytes make it a reset, and so does a linger of 0."""
        flow, sink, state = self._flow, self._halves.sink, self._host.state
        if state is SdpState.SUSPENDED:
            flow.disconnect()
        if state is SdpState.CLOSED or flow.down:
            self.reader_closed = True
            sink.drain()
            return
        if linger_s == 0 or sink.ready or sink.adverts or (state in OPENING and not self._handshake.resuming):
            self.abort()
            return
        self.reader_closed = True
        self._halves.source.ending = True
        self._halves.cancel_receives()
        close_s = self._settings.close_s
        self._arm("close", close_s if linger_s is None else min(linger_s, close_s))

    def abort(self) -> None:
        self.reader_closed = True
        state = self._host.state
        if state is SdpState.SUSPENDED:  # the stream is elsewhere
            self._flow.disconnect()
        elif self._flow.gone:
            self._halves.sink.drain()
        elif state in OPENING:
            self._handshake.withdraw(Unavailable("given up before it was established"), SdpCause.ABORTED)
        else:
            self.break_off(Unavailable("reset by this end"), SdpCause.ABORTED)

    # --- badly ---

    def refuse(self, error: SidestepError, cause: SdpCause) -> None:
        self._tell_broken(error, cause)
        if self._host.state is not SdpState.CLOSED:
            self._host.move(Stimulus.REFUSED)
        self._flow.shut()
        self._finish()

    def break_off(self, error: SidestepError, cause: SdpCause, *, transport_ended: bool = False) -> None:
        """Ends the connection at once (§16.2). The first error is kept."""
        host, flow = self._host, self._flow
        if host.state in (SdpState.CLOSED, SdpState.ABORTING):
            return
        if host.error is None:
            self._tell_broken(error, cause)
        told = host.state in (SdpState.FIN_WAIT, SdpState.LAST_ACK) and not transport_ended
        resuming = host.state is SdpState.RESUMING
        host.move(Stimulus.RESET)
        host.forget()
        if resuming:  # between two transport connections: the order to disconnect the first was given
            flow.shut()
            if self.left:
                host.move(Stimulus.DISCONNECTED)
                self._finish()
        elif told and flow.may_send_bare():  # who has sent DisConn has to say that it is a reset
            flow.send_header(AbortConn(), then=flow.disconnect)
            self._arm("abort", self._settings.last_ack_s)
        else:
            flow.disconnect()

    def hang_up(self) -> None:
        """The queue pair is in error. If that is not the connection manager's doing, nobody but us will end it."""
        flow = self._flow
        if flow.down or self._host.state is SdpState.RESUMING:
            return
        flow.work.append(Disconnect())
        if self._host.state in OPENING:  # nothing is told of an attempt that is given up
            self._handshake.refuse(Unavailable("the queue pair is in error"), SdpCause.TRANSPORT)
        flow.shut()

    def failed(self, error: SidestepError, cause: SdpCause) -> None:
        """The transport connection has failed and no completion tells of it, or what it needs is not to be had."""
        state = self._host.state
        if state in OPENING:
            self._handshake.withdraw(error, cause)
        elif state in (SdpState.TIME_WAIT, SdpState.ABORTING, SdpState.SUSPENDED):
            self._flow.disconnect()  # it is over, well or badly, whatever comes of the transport
        else:
            self.break_off(error, cause, transport_ended=True)

    def handle_abort(self) -> None:
        """AbortConn."""
        if self._host.state not in NO_PAYLOAD:
            raise PeerViolation("AbortConn without DisConn", rule="abort_early")
        self.break_off(Unavailable("reset by the other end"), SdpCause.RESET, transport_ended=True)

    # --- well ---

    def handle_end(self) -> None:
        """DisConn of the other end."""
        self._halves.sink.end()
        if not self._end_told:
            self._end_told = True
            self._host.tell(SdpEventKind.END_OF_STREAM)
        self._host.move(Stimulus.END_RECEIVED)
        if self._host.state is SdpState.TIME_WAIT and not self._release_wanted:
            self._leave()

    def send_end(self) -> None:
        """Our DisConn: everything queued has been delivered."""
        self._release_wanted = True
        self._halves.source.end()
        self._end_mseq = self._flow.send_header(DisConn(), then=self._end_sent)
        self._host.move(Stimulus.END_SENT)

    def _end_sent(self) -> None:
        self._release_wanted = False
        self._tell_write_closed()
        if self._host.state is SdpState.LAST_ACK:
            self._arm("last_ack", self._leave_s)
        elif self._host.state is SdpState.TIME_WAIT:
            self._leave()

    @property
    def _leave_s(self) -> float:
        """How long the other end may take to disconnect: over iWARP our DisConn may still be on its way meanwhile."""
        settings = self._settings
        return settings.close_s if settings.carrier is Carrier.IWARP else settings.last_ack_s

    def _leave(self) -> None:
        """Both directions have ended and this end was the first: it takes the transport connection down.

        But not what is still on its way: over iWARP a completed Send has not arrived yet. If both DisConn have crossed
        there is nothing more that would acknowledge ours, and the other end waits as well: for as long as a message may
        be on its way, not as long as a program may take to close.
        """
        if self._settings.carrier is Carrier.IWARP and not ge(self._flow.peer_ack, self._end_mseq):
            self._arm("last_ack", self._settings.last_ack_s)
        else:
            self._flow.disconnect()

    def _tell_write_closed(self) -> None:
        if not self._write_told:
            self._write_told = True
            self._host.tell(SdpEventKind.WRITE_CLOSED)

    # --- the transport connection is gone ---

    def disconnected(self) -> None:
        """All messages were delivered, all work requests are flushed."""
        host, state = self._host, self._host.state
        if state is SdpState.CLOSED:
            self._finish()
            return
        if state is SdpState.RESUMING:
            self.left = True
            return
        if host.error is None:
            if state in (SdpState.ESTABLISHED, SdpState.FIN_WAIT, SdpState.CLOSE_WAIT):
                self._tell_broken(Unavailable("reset by the other end"), SdpCause.RESET)
            elif state in OPENING:
                self._tell_broken(Unavailable("the transport connection was refused"), SdpCause.REFUSED)
            elif state in (SdpState.LAST_ACK, SdpState.TIME_WAIT):
                self._tell_write_closed()  # it disconnects because it has our DisConn: no need to see the answer
        self._flow.disconnect()  # our half of it
        host.move(Stimulus.DISCONNECTED)
        self._finish()

    def _tell_broken(self, error: SidestepError, cause: SdpCause) -> None:
        self._host.error, self._host.cause = error, cause
        self._host.tell(SdpEventKind.BROKEN, error)

    def _finish(self) -> None:
        """Nothing is outstanding: whatever the user asked for ends."""
        if self._flow.gone:
            return
        self._flow.gone = True
        self._host.forget()
        self._handshake.return_early()
        self._halves.end_all()
        if self.reader_closed:
            self._halves.sink.drain()  # nobody will read it
        self._host.tell(SdpEventKind.CLOSED)

    # --- time ---

    def _arm(self, name: str, wait_s: float) -> None:
        self._timers[name] = self._host.now + wait_s

    def close_timeout(self) -> None:
        """The other end takes too long after `close`."""
        state, error = self._host.state, Unavailable("the other end does not close")
        if state in OPEN or state is SdpState.RESUMING:
            self.break_off(error, SdpCause.TIMEOUT)
        elif state in OPENING:  # the stream was to go on
            self._handshake.withdraw(error, SdpCause.TIMEOUT)

    def last_ack_timeout(self) -> None:
        """The first closer does not disconnect."""
        if self._host.state is SdpState.LAST_ACK:
            self._host.move(Stimulus.TIMER)
            self._flow.disconnect()
        elif self._host.state is SdpState.TIME_WAIT:
            self._flow.disconnect()

    def abort_timeout(self) -> None:
        """Nobody disconnects."""
        if self._host.state is SdpState.RESUMING:
            self._flow.work.append(Disconnect())
        else:
            self._flow.disconnect()
