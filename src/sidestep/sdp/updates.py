"""Messages that only tell of credit: when one is due, and when one asks for another (docs/wire/sdp.md §9).

Any message tells of credit, so an update is the last thing thought of. It goes at once when there is something new to
tell and the other end is short of credit. What only updates have used up is told of after a pause (`refresh`), or two
ends would answer each other's updates for ever. An end whose payload waits for credit, while a message without payload
could go, says something from time to time (`probe`): that takes a credit, until the other end has to tell of more. Both
pauses double while nothing comes of it; docs/internals/sdp.md shows what goes wrong without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection

_PAUSE_MAX_S: Final = 1.0


class Updates:
    """Of one end."""

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
        """It was in vain so far."""
        self._probed = self._first()
        if self._starved and self._host.sendable and self._flow.may_send_bare():
            self._flow.send_update()
        self._probe_wait = min(2 * self._probe_wait, _PAUSE_MAX_S)
