"""The clients: taken in, read a few messages at a time, answered at once or not at all, and dropped with a reason.

The provider never waits for a client: a send that the kernel does not take at once costs the client its connection. A
client that breaks a rule is dropped. Both are counted with the reason.
"""

from __future__ import annotations

import errno
import socket
import traceback
from collections.abc import Callable, Sequence
from itertools import count

from sidestep import limits
from sidestep.accepting import Acceptor
from sidestep.config import peer
from sidestep.counters import Counters
from sidestep.errors import PeerViolation
from sidestep.loop import Loop
from sidestep.native.layout import Rpc
from sidestep.provider import rpc
from sidestep.provider.client_quota import ClientQuota
from sidestep.provider.clients import Arena, Client, Kind
from sidestep.provider.history import History
from sidestep.provider.log import Writer
from sidestep.provider.rpc import Message, Packet
from sidestep.provider.users import Users
from sidestep.switch.offers import ClientId


class ClientTable:
    """Clients of `listener`, by number.

    Attributes:
        on_message: Handles a message; a PeerViolation that it raises costs the client its connection.
        on_sent: Called after each message to a client.
        on_dropped: Called with each client that has gone.
    """

    on_message: Callable[[Client, Packet], None]
    on_sent: Callable[[], None]
    on_dropped: Callable[[Client], None]

    def __init__(
        self,
        listener: socket.socket,
        loop: Loop,
        users: Users,
        quota: ClientQuota,
        counters: Counters,
        tell: Callable[[str, Writer], None],
    ) -> None:
        self._loop = loop
        self._users = users
        self.quota = quota
        self._counters = counters
        self._tell = tell
        self.numbers = count(1)  # numbers of clients and arenas
        self._silent: dict[ClientId, Client] = {}  # no message yet; in order of arrival
        self.clients: dict[ClientId, Client] = {}
        self.arenas: dict[bytes, Arena] = {}
        self.history = History()
        self._acceptor = Acceptor(loop, listener, self._take_in)

    def _take_in(self, sock: socket.socket, _address: object) -> None:
        pid, uid = peer(sock)
        if refusal := self._refusal(uid):
            self._counters.add("client_dropped", refusal)
            sock.close()
            return
        self.quota.enter(uid)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.CLIENT_SEND_BUFFER)
        client = Client(ClientId(next(self.numbers)), sock, pid, uid, self._loop.now)
        self.clients[client.client_id] = self._silent[client.client_id] = client
        self._loop.on_readable(sock.fileno(), lambda: self.read(client))
        self._counters.add("client_accepted")

    def _refusal(self, uid: int) -> str | None:
        if not self._users.admits(uid):
            return "credentials"
        return "too_many" if self.quota.full(uid) else None

    def received(self, client: Client) -> None:
        """Takes note of the client's first message."""
        self._silent.pop(client.client_id, None)

    def read(self, client: Client) -> None:
        """Handles some of its messages."""
        for _ in range(limits.MESSAGES_PER_TURN):
            if not client.open:
                return
            try:
                packet = rpc.receive(client.sock)
                if packet is None:
                    self.drop(client, "closed")
                    return
                with packet.descriptors:
                    self.on_message(client, packet)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # the client has closed without reading all; its earlier messages follow, and then the end
            except PeerViolation as violation:
                if violation.rule == "version":
                    self.send(client, Message(type=Rpc.LAYOUT))  # the program stays on TCP, and can give the reason
                self._tell(f"client {client.pid} is dropped: {violation}", client.uid)
                self.drop(client, violation.rule)
            except OSError as error:
                self.drop(client, "closed" if error.errno == errno.EPIPE else "broken")
            except Exception:
                # One client's message must not take the others down; the traceback goes to the log, and it is counted.
                self._counters.add("internal_error", "message")
                self._tell(traceback.format_exc(), client.uid)
                self.drop(client, "internal_error")

    def drop(self, client: Client, reason: str) -> None:
        """Ends a connection; does nothing if it has ended."""
        if not client.open:
            return
        client.open = False
        self._counters.add("client_dropped", reason)
        self._loop.forget(client.sock.fileno())
        self.quota.leave(client)
        del self.clients[client.client_id]
        self._silent.pop(client.client_id, None)
        self.on_dropped(client)
        for arena in filter(None, (client.arena, *client.guests.values())):
            self.leave(client, arena)

    def leave(self, client: Client, arena: Arena) -> None:
        """Takes a client out of a family, which ends with its last."""
        arena.clients.discard(client.client_id)
        if not arena.clients:
            del self.arenas[arena.arena_id]
            self.history.keep(arena, client, self._loop.now)
            arena.close()

    def send(self, client: Client, message: Message, fds: Sequence[int] = (), body: bytes = b"") -> bool:
        """Sends at once, or drops the client; False if it is gone."""
        if not client.open:
            return False
        try:
            self.quota.count(client, len(fds))
            rpc.send(client.sock, client.worded(message), fds, body)
        except OSError as error:
            self.drop(client, "slow" if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS) else "closed")
            return False
        self.on_sent()
        return True

    def next_deadline(self) -> float | None:
        return next((client.accepted_at + limits.HELLO_TIMEOUT_S for client in self._silent.values()), None)

    def handle_timeouts(self, now: float) -> None:
        """Drops clients that have sent nothing for too long."""
        while self._silent:
            client = next(iter(self._silent.values()))
            if client.accepted_at + limits.HELLO_TIMEOUT_S > now:
                break
            self.drop(client, "silent")

    def close(self) -> None:
        for client in list(self.clients.values()):
            self.drop(client, "shutting_down")
        self.quota.close()

    @property
    def shims(self) -> int:
        """Number of clients that are programs."""
        return sum(client.kind is Kind.SHIM for client in self.clients.values())
