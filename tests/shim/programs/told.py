"""One end of a connection that does what it is told: each line on stdin is evaluated, and the result printed.

`serve()` listens and gives the port, `accept()` or `connect(port)` makes `s`. An error is printed by its name.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

listener = socket.socket()
s = socket.socket()


def serve() -> int:
    """Listens."""
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port: int = listener.getsockname()[1]
    return port


def accept() -> None:
    """Takes the connection."""
    global s
    s = listener.accept()[0]


def connect(port: int) -> None:
    """Makes it."""
    s.connect(("127.0.0.1", port))


def get(count: int) -> bytes:
    """So many bytes, or fewer if they end before."""
    data = b""
    while len(data) < count and (part := s.recv(count - len(data))):
        data += part
    return data


def put_until_full() -> int:
    """Sends what can be sent without waiting; the number of bytes."""
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += s.send(b"f" * 65536, socket.MSG_DONTWAIT)
    return sent


def polled(seconds: float) -> list[int]:
    """What poll and epoll tell of the end."""
    poller, epoll = select.poll(), select.epoll()
    poller.register(s, 0)
    with epoll:
        epoll.register(s, select.EPOLLRDHUP)
        return [event for _, event in [*poller.poll(1000 * seconds), *epoll.poll(seconds)]]


class Later:
    """A call in a thread of its own."""

    last: Later

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self._result = call, "no result"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @staticmethod
    def of(call: Callable[[], object]) -> None:
        """Begins the call; `last` names it."""
        Later.last = Later(call)

    def _run(self) -> None:
        self._result = tried(self._call)

    def waits(self, seconds: float) -> bool:
        """Whether it has not returned after so long."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def result(self) -> str:
        """What it gave, when it has."""
        self._thread.join()
        return self._result


def tried(call: Callable[[], object]) -> str:
    """What a call gives, or the name of its errno."""
    try:
        return repr(call())
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def timed(call: Callable[[], object]) -> float:
    """How many seconds a call takes."""
    start = time.monotonic()
    tried(call)
    return time.monotonic() - start


if __name__ == "__main__":
    for told in iter(sys.stdin.readline, ""):
        print(tried(lambda told=told: eval(told)), flush=True)  # type: ignore[misc]
