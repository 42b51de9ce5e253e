"""Programs that wait in connect() for a connection that an offload protocol opens in the place of TCP.

The program's socket stays TCP's, and leads to this provider: where to, the answer to its question says, and only that
very socket is taken in there. Each such connection counts from the question to its end, for its user and in all.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from typing import Final

from sidestep import limits
from sidestep.counters import Counters
from sidestep.errors import LimitReached, Unavailable
from sidestep.native.layout import Ask, Refusal, Rpc
from sidestep.provider.clients import Client
from sidestep.provider.proof.lookup import SocketProver, mapped_address
from sidestep.provider.rpc import Message
from sidestep.provider.users import Users
from sidestep.switch.modules import Protocols
from sidestep.switch.offers import ConnectionKey
from sidestep.switch.protocol import Endpoint, OffloadProtocol, Request


class PendingConnects:
    """Those of one provider.

    Args:
        send: Sends a message to a client; False if that is gone.
    """

    def __init__(
        self, *, protocols: Protocols, users: Users, counters: Counters, send: Callable[[Client, Message], bool]
    ) -> None:
        self._protocols = protocols
        self._users = users
        self.counters: Final = counters
        self.send: Final = send
        self._there: dict[_PendingConnect, None] = {}
        self._of_user: Counter[int] = Counter()
        self._prover: SocketProver | None = None  # made when it is first wanted

    def __len__(self) -> int:
        return len(self._there)

    def close(self) -> None:
        """Asks the kernel nothing more; after the protocols were stopped."""
        if self._prover is not None:
            self._prover.close()

    def handle_disconnect(self, client: Client) -> None:
        """A client has gone: it waits no more."""
        for asked in [each for each in self._there if each.client is client]:
            asked.on_gone()

    def ask(self, client: Client, message: Message, request: Request, cookie: int, protocol: OffloadProtocol) -> None:
        """Has the protocol open the connection for the socket with that cookie; answers the client once it is known.

        Raises:
            LimitReached: There are too many, of this user or in all.
        """
        most = self._users.share(limits.REACHED_MAX, client.uid)
        if len(self._there) >= limits.REACHED_MAX or self._of_user[client.uid] >= most:
            raise LimitReached(f"{most} connections begin with an offload protocol")
        asked = _PendingConnect(self, client, message, request, cookie)
        self._there[asked] = None
        self._of_user[client.uid] += 1
        try:
            protocol.open(asked)
        except Unavailable as why:
            asked.refuse(errno.ENETUNREACH, why.message)
            asked.over()
        except Exception as error:  # a stranger's code: the others go on
            self._protocols.fail(protocol.name, error)
            asked.refuse(errno.EIO, "the protocol failed")
            asked.over()

    def ended(self, asked: _PendingConnect) -> None:
        del self._there[asked]
        self._of_user[asked.client.uid] -= 1
        if not self._of_user[asked.client.uid]:
            del self._of_user[asked.client.uid]

    def holds(self, key: ConnectionKey, cookie: int) -> bool:
        """Whether the kernel has that connection, with that cookie."""
        if self._prover is None:
            self._prover = SocketProver()
        return self._prover.holds(key, cookie)


class _PendingConnect:
    """One (`switch.protocol.PendingConnect`)."""

    def __init__(
        self, pending_connects: PendingConnects, client: Client, message: Message, request: Request, cookie: int
    ) -> None:
        self.client: Final = client
        self.on_gone: Callable[[], None] = _nobody
        self._pending_connects = pending_connects
        self._message = message
        self._request = request
        self._cookie = cookie
        self._answered = False
        self._over = False

    @property
    def request(self) -> Request:
        return self._request

    @property
    def insists(self) -> bool:
        return self._message.protocol != 0

    @property
    def wait_s(self) -> float:
        return min(self._message.wait_ms / 1000, limits.REACH_WAIT_MAX_S)

    def redirect(self, place: Endpoint) -> None:
        self._pending_connects.counters.add("reach_opened")
        self._answer(Message(
            type=Rpc.ANSWER, token=self._message.token, flags=Ask.CONNECT, protocol=self._message.protocol,
            remote_addr=mapped_address(str(place.address)), remote_port=place.port,
        ))  # fmt: skip

    def refuse(self, error: int, why: str) -> None:
        del why  # who opens it has a log
        name = errno.errorcode.get(error, "UNKNOWN")
        self._pending_connects.counters.add("reach_refused", name)
        self._answer(Message(
            type=Rpc.ANSWER, token=self._message.token, flags=Ask.CONNECT, protocol=self._message.protocol,
            error=error if self.insists else 0, reason=0 if self.insists else Refusal.PROTOCOL_FAILED,
        ))  # fmt: skip

    def is_from(self, local: Endpoint, place: Endpoint) -> bool:
        key = ConnectionKey(
            0, mapped_address(str(local.address)), local.port, mapped_address(str(place.address)), place.port
        )
        return self._pending_connects.holds(key, self._cookie)

    def over(self) -> None:
        if not self._over:
            self._over = True
            self._pending_connects.ended(self)

    def _answer(self, message: Message) -> None:
        if not self._answered:
            self._answered = True
            self._pending_connects.send(self.client, message)


def _nobody() -> None:
    """Nothing has begun that could end with the program."""
