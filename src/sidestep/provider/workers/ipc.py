"""The line between a provider and one of its workers, either end: records in order, never waited for.

A record that the kernel does not take at once waits in a queue. A full queue, a record that makes no sense and the end
of the other side end the line.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.provider import rpc
from sidestep.provider.rpc import Descriptors
from sidestep.provider.workers.messages import FDS_MAX, PACKET_MAX, Record, decode

if TYPE_CHECKING:
    from sidestep.loop import Loop

_FULL: Final = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS})  # the last: of descriptors on their way


class IpcChannel:
    """One end.

    Args:
        sock: A connected AF_UNIX SOCK_SEQPACKET socket; the line's own from now on.
        loop: Where it lives.
        on_record: Gets each record, with its descriptors, which are closed afterwards unless it takes them; may raise
            PeerViolation.
        on_end: Called once with the reason, unless it is closed before.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: Loop,
        on_record: Callable[[Record, Descriptors], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._on_record = on_record
        self._on_end = on_end
        self._queue: deque[tuple[bytes, Descriptors]] = deque()
        self._waits = False  # true while it waits for a timer, to go on with the queue
        self.open = True
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.CLIENT_SEND_BUFFER)
        loop.on_readable(sock.fileno(), self.handle_readable)

    def fileno(self) -> int:
        """Readable when a record has come."""
        return self._sock.fileno()

    def send(self, record: Record, fds: Sequence[int] = ()) -> None:
        """Sends it, or queues it with duplicates of the descriptors; the line may end over that."""
        if not self.open:
            return
        data = record.encode()
        try:
            if self._queue or not self._send(data, fds):
                if len(self._queue) >= limits.WORKER_QUEUE_MAX:
                    self._end("it takes no more messages")
                    return
                self._queue.append((data, Descriptors([os.dup(fd) for fd in fds])))
                self._wait()
        except OSError as error:
            self._end(error.strerror or "broken")

    def close(self) -> None:
        """Closes the line: no more records go out or come in."""
        if self.open:
            self.open = False
            self._loop.forget(self._sock.fileno())
            self._sock.close()
            for _, descriptors in self._queue:
                descriptors.close()
            self._queue.clear()

    def _send(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            rpc.send_bytes(self._sock, data, fds)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return False
        return True

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._loop.call_later(limits.WORKER_QUEUE_LOOK_S, self._go_on)

    def _go_on(self) -> None:
        self._waits = False
        try:
            while self._queue and self._send(self._queue[0][0], self._queue[0][1].numbers):
                self._queue.popleft()[1].close()
        except OSError as error:
            self._end(error.strerror or "broken")
        if self._queue:
            self._wait()

    def handle_readable(self) -> None:
        """Takes what has come, some of it at a time."""
        for _ in range(limits.MESSAGES_PER_TURN):
            if not self.open:
                return
            try:
                received = rpc.receive_bytes(self._sock, PACKET_MAX, FDS_MAX)
                if received is None:
                    self._end("it has ended")
                    return
                data, descriptors = received
                with descriptors:
                    self._on_record(decode(data, len(descriptors)), descriptors)
            except BlockingIOError:
                return
            except PeerViolation as why:
                self._end(str(why))
            except OSError as error:
                self._end(error.strerror or "broken")

    def _end(self, why: str) -> None:
        if self.open:
            self.close()
            self._loop.call_later(0, lambda: self._on_end(why))  # a later turn, not inside a caller's send
