"""The two halves of a connection, and what belongs to both of them.

Advertisements of both kinds count together, at either end: a SrcAvail of the send half and a SinkAvail of the receive
half are bounded by one number. A SinkAvail may ride on payload of the other half (Transaction). And the requests of the
user end here, whatever half they were given to: they are told of, and their regions are released before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidestep.sdp.requests import Region, Release, SdpEvent, SdpEventKind, StreamReceive, StreamSend
from sidestep.sdp.sink import Sink
from sidestep.sdp.source import Source
from sidestep.sdp.wire import Mode, SinkAvail

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection

_PIPELINED: Final = Mode.PIPELINED


class Halves:
    """Makes both, and is their host."""

    __slots__ = (
        "_events", "_flow", "_host", "_settings", "_strategy", "_timers", "control", "peer_max_adverts", "sink",
        "source", "withdraw_control",
    )  # fmt: skip

    def __init__(self, host: SdpConnection) -> None:
        self._host = host
        self._flow, self._settings, self._events, self._timers = host._flow, host._settings, host.events, host.timers
        self._strategy = strategy = self._settings.strategy()
        self.control, self.withdraw_control = host.control, host.withdraw_control  # messages without payload
        self.source = Source(self._flow, self._settings, strategy, self)
        self.sink = Sink(self._flow, host._resize, self._settings, strategy, self)
        self.peer_max_adverts = 0  # advertisements that the other end takes

    def remote_size_changed(self) -> None:
        self.source.payload_max = min(self._flow.remote_size, self._settings.message_max) - 16

    # --- advertisements ---

    def adverts_left(self) -> int:
        bound = min(self.peer_max_adverts, self._strategy.adverts_in_flight)
        return max(0, bound - len(self.source.adverts) - len(self.sink.shown))

    def adverts_of_peer(self) -> int:
        return len(self.source.sinks) + len(self.sink.adverts) + self.sink.untold

    def is_advertised(self, rkey: int) -> bool:
        """Whether the other end has been shown memory under this key."""
        regions = [advert.send.region for advert in self.source.adverts]
        regions += [receive.region for receive in self.sink.shown]
        return any(region is not None and region.rkey == rkey for region in regions)

    def holds_advert(self) -> bool:
        return bool(self.sink.adverts)

    def waits_for_reader(self) -> bool:
        return bool(self.source.adverts)

    def transaction(self) -> tuple[SinkAvail, StreamReceive] | None:
        sink = self.sink
        if sink.mode is not _PIPELINED or not sink.receives or not self._strategy.transactions:
            return None
        receive = sink.next_shown()
        return None if receive is None else (sink.offer(receive), receive)

    def advertised(self, receive: StreamReceive) -> None:
        self.sink.advertised(receive)

    def advert_timer(self, what: str | None) -> None:
        """Sets the clock for an answer to our advertisements."""
        timers = self._timers
        timers.pop("answer", None)
        timers.pop("cancel", None)
        if what == "answer":
            timers["answer"] = self._host.now + self._settings.advert_answer_s
        elif what == "cancel":
            timers["cancel"] = self._host.now + self._settings.cancel_answer_s

    # --- what else they ask for ---

    def mode_changed(self) -> None:
        self.source.transact = self.sink.mode is _PIPELINED and self._strategy.transactions
        self._events.append(SdpEvent(SdpEventKind.MODE_CHANGED))

    def tell_urgent(self) -> None:
        self._events.append(SdpEvent(SdpEventKind.URGENT))

    # --- memory of requests ---

    def registered(self, request: StreamSend | StreamReceive, region: Region) -> None:
        """The region that Register asked for."""
        if self._host.suspended is not None:  # the request is another connection's now, which asks anew
            self._flow.work.append(Release(region))
            return
        request.registering = False
        if request.done:
            self._flow.work.append(Release(region))
        else:
            request.region = region
            if isinstance(request, StreamReceive):
                self.sink.serve()

    def registration_failed(self, request: StreamSend | StreamReceive) -> None:
        """There is none: the bytes go by Bcopy."""
        if self._host.suspended is not None:
            return
        request.registering = False
        if isinstance(request, StreamSend):
            request.bcopy_only = True
        else:
            request.register_failed = True
            self.sink.serve()

    # --- the end of requests ---

    def end_send(self, send: StreamSend) -> None:
        if send.done or send.pending:
            return
        if send.offset < send.length and not (send.cancelled and send not in self.source.queue):
            return
        self._end_request(send)

    def end_receive(self, receive: StreamReceive) -> None:
        if receive.region is not None or receive.done:
            self._end_request(receive)
            return
        receive.done = True
        self._events.append(receive)

    def _end_request(self, request: StreamSend | StreamReceive) -> None:
        if request.done:
            return
        request.done = True
        if self._flow.gone and isinstance(request, StreamSend):
            request.error = self._host.error
        if request.region is not None:
            self._flow.work.append(Release(request.region))
            request.region = None
        self._events.append(request)

    def cancel_receives(self) -> None:
        """The user receives nothing more."""
        for receive in list(self.sink.receives):
            self.sink.cancel_receive(receive)

    def end_all(self) -> None:
        """The transport connection is gone, and nothing is outstanding: whatever the user asked for ends."""
        flow, source, sink = self._flow, self.source, self.sink
        suspended = self._host.suspended
        moved = suspended.unsent if suspended is not None else ()
        for _, send, _ in flow.in_flight:
            if send is not None and send not in moved:  # the rest of it goes elsewhere
                self._end_request(send)
        flow.in_flight.clear()
        for advert in source.adverts:
            self._end_request(advert.send)
        for send, _, _ in source.forced:
            self._end_request(send)
        for send in source.queue:
            self._end_request(send)
        source.adverts.clear()
        source.forced.clear()
        source.queue.clear()
        sink.let_go()
        self.give_up_receives()

    def give_up_receives(self) -> None:
        """Nothing more will come."""
        receives, error = self.sink.receives, self._host.error
        while receives:
            receive = receives.popleft()
            if not self.sink.ended or error is not None:
                receive.error = error
            self.end_receive(receive)
