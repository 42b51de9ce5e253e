"""A socket that goes to another process in the middle of a conversation (docs/wire/sdp.md §15).

The first process asks the other end to connect anew, the second one listens for it and goes on with what the first one
hands over. Here both are the same user: it has no stream in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sidestep.rdma.cm import ConnectionRequest
from sidestep.rdma.loopback import Fabric
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.settings import SdpSettings
from sidestep.sdp.stack import Stack
from sidestep.sdp.wire import service_id
from simulate.user import CheckedUser

_PATIENCE: Final = 2.0  # times the time that a connection gives a move


class Move:
    """One of them."""

    def __init__(
        self,
        fabric: Fabric,
        stack: Stack,
        settings: SdpSettings,
        user: CheckedUser,
        port: int,
        joined: Callable[[SdpStream], None],
    ) -> None:
        self.over = False
        self._stack = stack
        self._settings = settings
        self._user = user
        self._port = port
        self._joined = joined
        self._leaving = user.stream.connection
        self._request: ConnectionRequest | None = None
        self._listener = stack.device.cm.listen(service_id(port), self._came)
        fabric.call_later(_PATIENCE * settings.suspend_s, self._give_up)
        user.say(f"moves to port {port}")
        user.stream.suspend(port)

    def _came(self, request: ConnectionRequest) -> None:
        self._request = request
        self.go_on()

    def go_on(self) -> None:
        """Takes the stream over as soon as the first process has let go and the other end is there."""
        if self.over:
            return
        if self._leaving.error is not None or self._user.closed:
            self._end()
            if self._request is not None:
                self._request.reject()
        elif self._request is not None and self._leaving.suspended is not None and not self._user.joined:
            self._end()
            self._stack.serve(
                self._request, self._accepted, self._port, self._settings, suspended=self._leaving.suspended
            )
            if not self._user.joined:  # it could not be accepted
                self._user.lose()

    def _accepted(self, stream: SdpStream) -> None:
        stream.tell = self._user.tell
        self._joined(stream)
        self._user.move(stream)

    def _give_up(self) -> None:
        if not self.over:
            self._end()
            if not self._user.joined:
                self._user.lose()

    def _end(self) -> None:
        self.over = True
        self._listener.close()
