"""Connections of the Python API by SDP, both ends in this process, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from common import PATIENCE_S

from sidestep.api.sockets import SdpSocket
from sidestep.socket import create_connection, create_server

T = TypeVar("T")
WAIT_S = PATIENCE_S  # that no call takes, unless something is wrong
LARGE = 3 << 20  # bytes that go by Zcopy


@contextmanager
def pair() -> Iterator[tuple[SdpSocket, SdpSocket]]:
    """Client and server end."""
    with create_server(("127.0.0.1", 0), protocol="sdp") as listener:
        listener.settimeout(WAIT_S)
        port = listener.getsockname()[1]
        client = create_connection(("127.0.0.1", port), WAIT_S, protocol="sdp", rdma_port=port)
        server, _ = listener.accept()
    with client, server:
        server.settimeout(WAIT_S)
        yield client, server


class Running:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """What it has returned, or raised."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "it still waits"
        if self._error is not None:
            raise self._error
        return self._result


def moved(details: dict[str, object], what: str) -> int:
    """A counter of the connection's queue pair, such as `bytes_sent{write}`."""
    return int(cast("dict[str, int]", details["queue_pair"]).get(what, 0))
