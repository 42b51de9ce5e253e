"""Whether the other end lives (docs/wire/sdp.md §18): after a silence an RDMA Write of nothing asks its transport.

It takes no credit and no buffer, and no program sees it; a dead peer shows as an error of the transport.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.rdma.work import RKey

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection


class Keepalive:
    """Of one end."""

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
        """It may have been a silence."""
        flow = self._flow
        traffic = flow.tx_mseq + flow.rx_mseq
        if traffic == self._traffic and not self._asks and self._host.sendable and flow.room():
            self._asks = True
            flow.send_write((), 0, RKey(0), self._answered)
        self._traffic = traffic
        self.start()

    def _answered(self) -> None:
        self._asks = False
