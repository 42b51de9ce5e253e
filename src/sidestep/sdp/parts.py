"""What the parts of a connection ask of the whole: of `SdpConnection`, and its halves of `Halves`."""

from __future__ import annotations

from typing import Protocol

from sidestep.errors import SidestepError
from sidestep.sdp.requests import SdpCause, SdpEventKind, StreamReceive, StreamSend, Suspended
from sidestep.sdp.settings import Addresses
from sidestep.sdp.states import SdpState, Stimulus
from sidestep.sdp.wire import SinkAvail


class ConnectionHost(Protocol):
    """What the parts need of their connection."""

    accepting: bool  # the other end asked for the connection
    addresses: Addresses | None  # of the transport connection
    cause: SdpCause | None
    error: SidestepError | None  # what ended the connection
    now: float  # monotonic seconds
    readable_told: bool
    state: SdpState
    suspended: Suspended | None  # what another process goes on with

    @property
    def sendable(self) -> bool:
        """Whether messages may be sent."""

    def move(self, stimulus: Stimulus) -> None:
        """To the next state."""

    def establish(self, stimulus: Stimulus) -> None:
        """Both ends may send."""

    def refuse(self, error: SidestepError, cause: SdpCause) -> None:
        """The connection ends before it has begun."""

    def tell(self, kind: SdpEventKind, error: SidestepError | None = None) -> None:
        """Tell the user."""

    def forget(self) -> None:
        """No timer runs any more, and no message without payload waits."""

    def control(self, action: object) -> None:
        """Queue a message without payload, or what sends one."""

    def withdraw_control(self, action: object) -> bool:
        """Take a queued message back; False if it has gone."""

    def remote_size_changed(self) -> None:
        """The payload that fits has changed."""

    def resized(self) -> None:
        """What the user asked for has an answer."""


class HalvesHost(Protocol):
    """What either half needs of both."""

    def end_send(self, send: StreamSend) -> None:
        """No byte of it is in use any more, and none is queued."""

    def end_receive(self, receive: StreamReceive) -> None:
        """Tell the user."""

    def adverts_left(self) -> int:
        """Advertisements, of both kinds, that this end may still send."""

    def adverts_of_peer(self) -> int:
        """Advertisements of the other end that are outstanding."""

    def holds_advert(self) -> bool:
        """Whether a SrcAvail of the other end waits to be read."""

    def waits_for_reader(self) -> bool:
        """Whether a SrcAvail of our own waits to be read."""

    def transaction(self) -> tuple[SinkAvail, StreamReceive] | None:
        """A SinkAvail that may ride on the next payload."""

    def advertised(self, receive: StreamReceive) -> None:
        """That SinkAvail went out."""

    def advert_timer(self, what: str | None) -> None:
        """An answer to an advertisement ("answer") or to its withdrawal ("cancel") is awaited, or none."""

    def control(self, action: object) -> None:
        """Queue a message without payload, or what sends one."""

    def withdraw_control(self, action: object) -> bool:
        """Take a queued message back; False if it has gone."""

    def mode_changed(self) -> None:
        """The user may want to know."""

    def tell_urgent(self) -> None:
        """The user may want to know: an urgent byte has come that nothing has announced."""
