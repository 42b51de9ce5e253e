"""Orders of a user to live connections: demote them, or let them be promoted again.

The provider passes an order on and keeps nothing. The result stands in the connection's slot, where the command that
gave the order looks. The provider does not wait for a process that does not read its socket: the command gets BUSY, and
asks again. Orders leave room for the answers to the process: the first that found none would cost it its connection.
"""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import termios
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.native import layout
from sidestep.native.layout import Rpc
from sidestep.provider import rpc
from sidestep.provider.clients import Arena, Client
from sidestep.provider.pairing.registry import Registry
from sidestep.provider.rpc import Message
from sidestep.provider.users import ROOT
from sidestep.switch.offers import ClientId

_INT: Final = struct.Struct("i")
OPERATIONS: Final = {"demote": Rpc.DEMOTE, "promote": Rpc.PROMOTE}  # name of the control request -> message


class Passed(StrEnum):
    """Result of passing an order to the processes of a family."""

    SENT = "sent"  # to every one of them
    BUSY = "busy"  # one of them has not read what was sent before; ask again
    GONE = "gone"  # none is connected any more
    FOREIGN = "foreign"  # they are another user's


def parse(request: Mapping[str, Any]) -> tuple[bytes, list[tuple[int, int]]]:
    """The arena and the (slot, generation) pairs a request names; raises Misuse."""
    try:
        arena_id = bytes.fromhex(request["arena"])
        slots = [(int(slot), int(generation)) for slot, generation in request["slots"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Misuse(f"not connections: {error!r}") from error
    if not 0 < len(slots) <= limits.ORDERS_PER_REQUEST:
        raise Misuse(f"{len(slots)} connections in a request; 1 to {limits.ORDERS_PER_REQUEST} are possible")
    if not all(0 <= slot < layout.ARENA_SLOTS_MAX and 0 <= generation < 1 << 32 for slot, generation in slots):
        raise Misuse("no connection has such a number")
    return arena_id, slots


def give(
    kind: Rpc,
    caller: Client,
    request: Mapping[str, Any],
    *,
    arenas: Mapping[bytes, Arena],
    clients: Mapping[ClientId, Client],
    registry: Registry,
    sees: Callable[[Client, Arena], bool],
) -> dict[str, Any]:
    """Passes an order on to all processes of one family, of which the one that holds a connection obeys.

    Returns the reply to the command: `passed`, and the number of the `slots` that all of them have got.

    Raises:
        Misuse: The request makes no sense.
    """
    arena_id, slots = parse(request)
    arena = arenas.get(arena_id)
    if arena is None:
        return {"passed": Passed.GONE, "told": 0}
    if caller.uid not in (ROOT, arena.uid) or not sees(caller, arena):
        return {"passed": Passed.FOREIGN, "told": 0}
    family = [clients[client_id] for client_id in arena.clients]
    # Before: a shim that the message wakes finds the word changed. After: one that saw it too early sees it once more.
    registry.bump_commands()
    told = 0
    passed = Passed.SENT
    for slot, generation in slots:
        message = Message(type=kind, token=slot << 32 | generation)
        # to every one, though one has no room: the order may be followed twice, and is then nothing the second time
        if not all([_send(client, message) for client in family]):  # noqa: C419 - a generator would stop early
            passed = Passed.BUSY
            break
        told += 1
    registry.bump_commands()
    return {"passed": passed, "told": told}


def _send(client: Client, message: Message) -> bool:
    """Sends a message; False: there is no room. The next read finds a broken connection, and drops it."""
    try:
        (unread,) = _INT.unpack(fcntl.ioctl(client.sock, termios.TIOCOUTQ, bytes(_INT.size)))
        if unread > client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) * limits.ORDERS_SHARE:
            return False
        rpc.send(client.sock, client.worded(message))
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.ENOBUFS)
    return True
