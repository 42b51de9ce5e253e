"""What goes out, and in what order: answers first, then the stream, then advertisements, then mere credit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidestep.rdma.work import RKey
from sidestep.sdp.states import SENDABLE
from sidestep.sdp.wire import Header, Mode

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection

_PIPELINED: Final = Mode.PIPELINED
_PAUSE_MAX_S: Final = 1.0


class Updates:
    """Messages that only tell of credit: when one is due, and when one asks for another (docs/wire/sdp.md §9).

    Any message tells of credit, so an update is the last thing thought of. It goes at once when there is something new
    to tell and the other end is short of credit. What only updates have used up is told of after a pause (`refresh`),
    or two ends would answer each other's updates for ever. An end whose payload waits for credit, while a message
    without payload could go, says something from time to time (`probe`): that takes a credit, until the other end has
    to tell of more. Both pauses double while nothing comes of it; docs/internals/sdp.md shows what goes wrong without
    them.
    """

    __slots__ = (
        "_flow", "_host", "_probe_wait", "_probed", "_refresh_wait", "_settings", "_sink", "_source", "_timers",
    )  # fmt: skip

    def __init__(self, host: SdpConnection) -> None:
        self._host = host
        self._flow, self._settings, self._timers = host._flow, host._settings, host.timers
        self._source, self._sink = host._source, host._sink
        self._probe_wait = self._settings.probe_s
        self._refresh_wait = self._settings.refresh_s
        self._probed: tuple[object, int] | None = None  # what waited when the last one went

    def look(self) -> bool:
        """Does both, after all else has gone that may go; True if an update waits for room in the send queue."""
        flow, timers = self._flow, self._timers
        waits = (timers or flow.credit_low()) and self.refresh()
        if timers or flow.credit < flow.payload_credit:
            self.probe()
        return bool(waits)

    def refresh(self) -> bool:
        """Tells of new credit, if the other end is short of it and nothing else has told; True if it has to wait."""
        flow, sink, timers = self._flow, self._sink, self._timers
        if not flow.credit_low() or not flow.credit or not flow.brings_credit():
            timers.pop("refresh", None)
        elif flow.owes or flow.unacknowledged() >= 2:
            self._refresh_wait = self._settings.refresh_s
            if flow.remote_credit() >= 2 and flow.credit == 2 and (sink.adverts or sink.reads) and not sink.due:
                return False  # the answer to an advertisement brings it, and must not lack the credit itself
            if not flow.may_send_bare():
                return True  # for room in the send queue
            timers.pop("refresh", None)
            flow.send_update()
        elif flow.remote_credit() <= 1 and "refresh" not in timers:
            timers["refresh"] = self._host.now + self._refresh_wait
        return False

    def refresh_timeout(self) -> None:
        """The pause is over."""
        flow = self._flow
        if self._host.sendable and flow.brings_credit() and flow.may_send_bare():
            flow.send_update()
        self._refresh_wait = min(2 * self._refresh_wait, _PAUSE_MAX_S)

    @property
    def _starved(self) -> bool:
        """Whether payload waits for credit, and a message without payload could go."""
        flow = self._flow
        return 2 <= flow.credit < flow.payload_credit and bool(self._source.queue or self._source.forced)

    def _first(self) -> tuple[object, int] | None:
        """The bytes that go next: whose, and from where on."""
        source = self._source
        if source.forced:
            return source.forced[0][:2]
        return (source.queue[0], source.queue[0].offset) if source.queue else None

    def probe(self) -> None:
        """Starts or ends the wait for credit."""
        timers = self._timers
        if self._starved:
            if "probe" not in timers:
                if self._probed is not None and self._probed != self._first():
                    self._probed = None
                    self._probe_wait = max(self._settings.probe_s, self._probe_wait / 2)  # bytes have gone since
                # not both ends at the same moment, time and again: each would use up what the other one brings
                timers["probe"] = self._host.now + self._probe_wait * (1.5 if self._host.accepting else 1.0)
        elif "probe" in timers:
            del timers["probe"]
            self._probe_wait = self._settings.probe_s

    def probe_timeout(self) -> None:
        """Nothing could be sent: the next attempt waits longer."""
        self._probed = self._first()
        if self._starved and self._host.sendable and self._flow.may_send_bare():
            self._flow.send_update()
        self._probe_wait = min(2 * self._probe_wait, _PAUSE_MAX_S)


class Keepalive:
    """Whether the other end lives (docs/wire/sdp.md §18): after a silence an RDMA Write of nothing asks its transport.

    The Write takes no credit and no buffer, and no program sees it; a dead peer shows as an error of the transport.
    """

    __slots__ = ("_asks", "_flow", "_host", "_settings", "_timers", "_traffic")

    def __init__(self, host: SdpConnection) -> None:
        self._host = host
        self._flow, self._settings, self._timers = host._flow, host._settings, host.timers
        self._asks = False  # a question is under way
        self._traffic = 0  # sequence numbers when the timer last looked

    def start(self) -> None:
        """The silence begins, if that is wanted at all."""
        if self._settings.keepalive_s is not None:
            self._timers["keepalive"] = self._host.now + self._settings.keepalive_s

    def timeout(self) -> None:
        """Asks, if there was a silence."""
        flow = self._flow
        traffic = flow.tx_mseq + flow.rx_mseq
        if traffic == self._traffic and not self._asks and self._host.sendable and flow.room():
            self._asks = True
            flow.send_write((), 0, RKey(0), self._answered)
        self._traffic = traffic
        self.start()

    def _answered(self) -> None:
        self._asks = False


class Outgoing:
    """Sends, in `pump`, whatever may be sent.

    `control` holds messages without payload, or what sends them; the connection fills it.
    """

    __slots__ = ("_control", "_flow", "_host", "_sink", "_source", "_suspend", "_teardown", "_updates")

    def __init__(self, host: SdpConnection) -> None:
        self._host = host
        self._flow, self._source, self._sink, self._control = host._flow, host._source, host._sink, host._control
        self._teardown, self._suspend, self._updates = host._teardown, host._suspend, host._updates

    def pump(self) -> bool:
        """True if something waits for credit, room or an answer: whatever comes in may set it going."""
        flow, control, source, sink, suspend = self._flow, self._control, self._source, self._sink, self._suspend
        if not flow.open or flow.down:
            return False
        if suspend.sent:
            suspend.go_on()
            if not suspend.confirmed and not suspend.answered:
                self._updates.refresh()  # or the answer could lack the credit to go (docs/internals/sdp.md)
            return True
        if sink.adverts and sink.receives:
            sink.serve()  # there may be room for RDMA Reads now
        if control:
            self._send_control()
        if not control and (not sink.cancel_wanted or sink.pump()):
            if suspend.port is not None:
                if suspend.send():
                    return True
            elif not source.ended:
                if source.queue or source.forced or source.cancel_wanted or source.mode_wanted is not None:
                    source.pump()
                if source.ending and source.idle and flow.may_send_bare() and not source.ended:
                    self._teardown.send_end()
            if sink.receives and sink.mode is _PIPELINED and not suspend.answered:
                sink.show()
            if source.urgent and flow.announce is not None and source.announce_alone() and flow.may_send_bare():
                flow.send_update()
        update_waits = self._updates.look()
        return bool(
            update_waits
            or source.queue
            or control
            or sink.mode is _PIPELINED
            or source.forced
            or source.ending
            or source.cancel_wanted
            or source.mode_wanted is not None
            or sink.cancel_wanted
            or sink.adverts
            or flow.announce is not None
            or suspend.port is not None
        )

    def _send_control(self) -> None:
        flow, control = self._flow, self._control
        while control and flow.may_send_bare():
            item = control.popleft()
            if isinstance(item, Header):
                assert item.MID in SENDABLE[self._host.state], (item, self._host.state)
                flow.send_header(item)
            else:
                item()  # type: ignore[operator]
