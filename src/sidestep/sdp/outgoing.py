"""What goes out, and in what order: answers first, then the stream, then advertisements, then mere credit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidestep.sdp.states import SENDABLE
from sidestep.sdp.wire import Header, Mode

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection

_PIPELINED: Final = Mode.PIPELINED


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
