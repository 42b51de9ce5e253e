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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, Final

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.native import layout
from sidestep.native.layout import Doorbells, Rpc
from sidestep.provider import memory, rpc
from sidestep.provider.carry.hub import NewDoorbell
from sidestep.provider.client_quota import ClientQuota
from sidestep.provider.clients import Arena, Client
from sidestep.provider.pairing.registry import Registry
from sidestep.provider.rpc import Message, Packet, expect
from sidestep.provider.users import ROOT
from sidestep.switch.offers import ClientId

_NEW_DOORBELLS_SINCE: Final = 9  # version of the layout
_INT: Final = struct.Struct("i")
OPERATIONS: Final = {"demote": Rpc.DEMOTE, "promote": Rpc.PROMOTE}  # name of the control request -> message


class Passed(StrEnum):
    """Result of passing an order to the processes of a family."""

    SENT = "sent"  # sent to every one of them
    BUSY = "busy"  # one of them has not read earlier messages; ask again
    GONE = "gone"  # none is connected any more
    FOREIGN = "foreign"  # the connections are another user's


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
    # Order before: a shim that the message wakes finds the word changed. After: one that saw it too early sees it once
    # more.
    registry.bump_commands()
    sent = 0
    passed = Passed.SENT
    for slot, generation in slots:
        message = Message(type=kind, token=slot << 32 | generation, arena_id=arena_id)
        # every one gets it, though one has no room: the order may be followed twice, and is then nothing the second
        # time
        if not all([_send(client, message) for client in family]):  # noqa: C419 - a generator would stop early
            passed = Passed.BUSY
            break
        sent += 1
    registry.bump_commands()
    return {"passed": passed, "told": sent}


def serve(
    asked: Message, *, arenas: Mapping[bytes, Arena], clients: Mapping[ClientId, Client], registry: Registry
) -> None:
    """Tells a family that the peer of one of its connections waits for an answer, whatever its threads wait on."""
    if not (members := _members(asked, arenas, clients)):
        return
    registry.bump_commands()
    for client, _ in members:
        _send(client, Message(type=Rpc.SERVE, segment_id=asked.segment_id))
    registry.bump_commands()


def _members(
    message: Message, arenas: Mapping[bytes, Arena], clients: Mapping[ClientId, Client], uid: int | None = None
) -> list[tuple[Client, Arena]]:
    """The processes of the family that its peers know by that name, which understand what peers say, and its arena.

    A process that has learned the name may use it, too, and gets them as well. `uid`: of that user only.
    """
    return [
        (clients[client_id], arena)
        for arena in arenas.values()
        if arena.family_id == message.arena_id != bytes(16) and uid in (None, ROOT, arena.uid)
        for client_id in arena.clients
        if clients[client_id].version >= _NEW_DOORBELLS_SINCE
    ]


def new_doorbell_of(sender: Client, packet: Packet) -> tuple[bytes, NewDoorbell]:
    """Returns a NEW_DOORBELL as a hub takes it, and the name of its hub or family. Raises PeerViolation."""
    expect(packet, 2)
    message, (doorbell, page) = packet.message, packet.descriptors.numbers
    memory.check_doorbell(message.doorbell_index, doorbell, page)
    return message.arena_id, NewDoorbell(
        message.token & 0xFFFFFFFF, message.cookie, bool(message.flags & Doorbells.ALONE),
        sender.doorbell_name(message.doorbell_page_id), message.doorbell_index, (doorbell, page),
    )  # fmt: skip


def pass_new_doorbell(
    sender: Client,
    packet: Packet,
    *,
    arenas: Mapping[bytes, Arena],
    clients: Mapping[ClientId, Client],
    registry: Registry,
    quota: ClientQuota,
) -> None:
    """Tells the family of one end of a connection that the other has another doorbell.

    The family checks that the sender is that end. Only the same user and root can reach it, so that no stranger fills
    its queues. An end that does not learn it rings always, and the shim names it again later.
    """
    message = packet.message
    members = _members(message, arenas, clients, sender.uid)
    if sender.arena is None or not members:
        return
    name = sender.doorbell_name(message.doorbell_page_id)
    news = Message(
        type=Rpc.NEW_DOORBELL, token=message.token, cookie=message.cookie, doorbell_index=message.doorbell_index,
        doorbell_page_id=name,
    )  # fmt: skip
    registry.bump_commands()
    for client, arena in members:
        with suppress(OSError):  # too many descriptors are on their way to it
            if _unread(client):
                continue  # an idle client: messages that it leaves count against its user
            quota.count(client, len(packet.descriptors))
            _send(client, news._replace(arena_id=arena.arena_id), packet.descriptors.numbers)
    registry.bump_commands()


def _unread(client: Client) -> int:
    """Memory that holds what it was sent and has not received, in bytes. Raises OSError."""
    (unread,) = _INT.unpack(fcntl.ioctl(client.sock, termios.TIOCOUTQ, bytes(_INT.size)))
    return int(unread)


def _send(client: Client, message: Message, fds: Sequence[int] = ()) -> bool:
    """Sends a message; False: there is no room. The next read finds a broken connection, and drops it."""
    try:
        if _unread(client) > client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) * limits.ORDERS_SHARE:
            return False
        rpc.send(client.sock, client.worded(message), fds)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.ENOBUFS)
    return True
