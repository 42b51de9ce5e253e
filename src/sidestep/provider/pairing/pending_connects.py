"""Programs that wait in connect() for a connection that an offload protocol opens in the place of TCP.

The program's socket stays TCP's, and leads to this provider. The answer to its question names the place, and only that
very socket is taken in there. Each such connection counts from the question to its end, for its user and in all.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sidestep import limits
from sidestep.counters import Counters
from sidestep.errors import LimitReached, Unavailable
from sidestep.loop import nothing
from sidestep.native.layout import Ask, Refusal, Rpc
from sidestep.provider.clients import Client
from sidestep.provider.proof.lookup import SocketProver, mapped_address
from sidestep.provider.rpc import Message
from sidestep.provider.users import Users
from sidestep.switch.modules import Protocols
from sidestep.switch.offers import ConnectionKey
from sidestep.switch.protocol import Endpoint, OffloadProtocol, Request


@dataclass(slots=True, eq=False, kw_only=True)
class PendingConnects:
    """Waiting programs of one provider."""

    protocols: Protocols
    users: Users
    counters: Counters
    prover: SocketProver
    send: Callable[[Client, Message], bool]  # False if the client is gone
    _there: dict[_PendingConnect, None] = field(default_factory=dict)
    _of_user: Counter[int] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self._there)

    def handle_disconnect(self, client: Client) -> None:
        """A client has gone: it waits no more."""
        for asked in [each for each in self._there if each.client is client]:
            asked.on_gone()

    def ask(self, client: Client, message: Message, request: Request, cookie: int, protocol: OffloadProtocol) -> None:
        """Has the protocol open the connection for the socket with that cookie; answers the client once it is known.

        Raises:
            LimitReached: There are too many, of this user or in all.
        """
        most = self.users.share(limits.REACHED_MAX, client.uid)
        if len(self._there) >= limits.REACHED_MAX or self._of_user[client.uid] >= most:
            raise LimitReached(f"{most} connections begin with an offload protocol")
        asked = _PendingConnect(self, client, message, request, cookie)
        self._there[asked] = None
        self._of_user[client.uid] += 1
        try:
            protocol.open(asked)
        except Unavailable:
            asked.refuse(errno.ENETUNREACH)
            asked.over()
        except Exception as error:  # a stranger's code: the others go on
            self.protocols.fail(protocol.name, error)
            asked.refuse(errno.EIO)
            asked.over()

    def ended(self, asked: _PendingConnect) -> None:
        del self._there[asked]
        self._of_user[asked.client.uid] -= 1
        if not self._of_user[asked.client.uid]:
            del self._of_user[asked.client.uid]


@dataclass(eq=False)
class _PendingConnect:
    """One (`switch.protocol.PendingConnect`)."""

    pending_connects: PendingConnects
    client: Client
    message: Message
    request: Request
    cookie: int
    answered: bool = False
    ended: bool = False

    def __post_init__(self) -> None:
        self.on_gone: Callable[[], None] = nothing

    @property
    def uid(self) -> int:
        return self.client.uid

    @property
    def insists(self) -> bool:
        return self.message.protocol != 0

    @property
    def wait_s(self) -> float:
        return min(self.message.wait_ms / 1000, limits.REACH_WAIT_MAX_S)

    def redirect(self, place: Endpoint) -> None:
        self.pending_connects.counters.add("reach_opened")
        self._answer(remote_addr=mapped_address(str(place.address)), remote_port=place.port)

    def refuse(self, error: int) -> None:
        self.pending_connects.counters.add("reach_refused", errno.errorcode.get(error, "UNKNOWN"))
        self._answer(error=error if self.insists else 0, reason=0 if self.insists else Refusal.PROTOCOL_FAILED)

    def is_from(self, local: Endpoint, place: Endpoint) -> bool:
        key = ConnectionKey(
            0, mapped_address(str(local.address)), local.port, mapped_address(str(place.address)), place.port
        )
        return self.pending_connects.prover.holds(key, self.cookie)

    def over(self) -> None:
        if not self.ended:
            self.ended = True
            self.pending_connects.ended(self)

    def _answer(self, **fields: Any) -> None:
        if not self.answered:
            self.answered = True
            asked = self.message
            answer = Message(type=Rpc.ANSWER, token=asked.token, flags=Ask.CONNECT, protocol=asked.protocol, **fields)
            self.pending_connects.send(self.client, answer)
