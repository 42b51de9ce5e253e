"""The provider's messages: one fixed record a packet over AF_UNIX SOCK_SEQPACKET, descriptors beside it.

The record is `rpc_msg` of `sidestep.native.layout`; a CONTROL or CONTROL_REPLY is followed by JSON in the same packet.
Nothing here blocks: sockets are used with MSG_DONTWAIT.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.native import layout
from sidestep.native.layout import Rpc

_NO_ID: Final = bytes(16)


class Message(NamedTuple):
    """One `rpc_msg`; the fields are explained in layout.py."""

    type: Rpc
    version: int = layout.LAYOUT_VERSION
    token: int = 0
    reason: int = 0
    flags: int = 0
    local_addr: bytes = _NO_ID
    remote_addr: bytes = _NO_ID
    local_port: int = 0
    remote_port: int = 0
    pid: int = 0
    cookie: int = 0
    netns_cookie: int = 0
    ring_size: tuple[int, int] = (0, 0)
    doorbell_index: int = 0
    promote_after_calls: int = 0
    promote_after_bytes: int = 0
    doorbell_page_id: bytes = _NO_ID
    arena_id: bytes = _NO_ID
    segment_id: bytes = _NO_ID
    protocol: int = 0
    error: int = 0
    wait_ms: int = 0
    turns: int = 0

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        """The record at the start of `packet`; raises PeerViolation."""
        if len(packet) < layout.RPC_MSG_SIZE:
            raise PeerViolation(f"a message of {len(packet)} bytes is too short", rule="malformed")
        fields: dict[str, Any] = layout.unpack("rpc_msg", packet)
        if fields.pop("magic") != layout.RPC_MAGIC:
            raise PeerViolation("a message does not begin with the magic number", rule="malformed")
        if fields["version"] not in layout.LAYOUTS:
            raise PeerViolation(f"layout version {fields['version']}, not of {layout.LAYOUTS}", rule="version")
        try:
            fields["type"] = Rpc(fields["type"])
        except ValueError:
            raise PeerViolation(f"message type {fields['type']} is unknown", rule="malformed") from None
        return cls(**fields)

    def encode(self) -> bytes:
        return layout.pack("rpc_msg", magic=layout.RPC_MAGIC, **self._asdict())


_FD: Final = array("i")  # form in which the kernel lists descriptors


class Descriptors:
    """Descriptors that arrived with a message. They are closed on leaving the `with` block unless they were taken."""

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self._numbers = tuple(numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The descriptors, still owned by this object."""
        return self._numbers

    def take_first(self) -> int:
        """Moves the first descriptor out, to the caller; IndexError if there is none."""
        first, self._numbers = self._numbers[0], self._numbers[1:]
        return first

    def take(self) -> Descriptors:
        """Moves the descriptors into a new owner."""
        taken = Descriptors(self._numbers)
        self._numbers = ()
        return taken

    def close(self) -> None:
        """Closes them; does nothing the second time."""
        numbers, self._numbers = self._numbers, ()
        for number in numbers:
            os.close(number)


class Packet(NamedTuple):
    """Content of one read."""

    message: Message
    body: bytes  # JSON of a CONTROL or CONTROL_REPLY
    descriptors: Descriptors


def expect(packet: Packet, *fds_counts: int) -> None:
    """Raises PeerViolation unless a message came with so many descriptors."""
    if len(packet.descriptors) not in fds_counts:
        raise PeerViolation(
            f"{packet.message.type.name} came with {len(packet.descriptors)} descriptors, "
            f"not {' or '.join(map(str, fds_counts))}",
            rule="malformed",
        )


_PACKET_MAX: Final = layout.RPC_MSG_SIZE + max(limits.CONTROL_REQUEST_MAX, limits.CONTROL_PIECE_MAX)


def receive(sock: socket.socket, *, fds_max: int = limits.FDS_PER_MESSAGE) -> Packet | None:
    """The next packet; None at the end of the connection.

    Raises:
        PeerViolation: The packet breaks a rule; all descriptors it brought are closed.
        BlockingIOError: There is none (only if the socket is non-blocking).
        OSError: The connection is broken.
    """
    received = receive_bytes(sock, _PACKET_MAX, fds_max)
    if received is None:
        return None
    data, descriptors = received
    try:
        message = Message.decode(data)
        body = data[layout.RPC_MSG_SIZE :]
        if body and message.type not in (Rpc.CONTROL, Rpc.CONTROL_REPLY):
            raise PeerViolation(f"{message.type.name} is followed by {len(body)} stray bytes", rule="malformed")
        return Packet(message, body, descriptors.take())
    finally:
        descriptors.close()


def receive_bytes(sock: socket.socket, size_max: int, fds_max: int) -> tuple[bytes, Descriptors] | None:
    """The next packet, unchecked; None at the end of the connection. Raises as `receive`."""
    # Python's socket.recv_fds will not do: it drops its flags argument in Python 3.11, so descriptors would leak into
    # children.
    data, ancillary, flags, _ = sock.recvmsg(size_max, socket.CMSG_LEN(fds_max * _FD.itemsize), socket.MSG_CMSG_CLOEXEC)
    descriptors = Descriptors(_passed(ancillary))
    if not data and not len(descriptors):
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        descriptors.close()
        raise PeerViolation("a packet is too large or brings too many descriptors", rule="malformed")
    return data, descriptors


def _passed(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    numbers = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return numbers.tolist()


def send(sock: socket.socket, message: Message, fds: Sequence[int] = (), body: bytes = b"") -> None:
    """Sends one packet; OSError (BlockingIOError among them) if the kernel does not take it at once."""
    send_bytes(sock, message.encode() + body, fds)


def send_bytes(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """The same of any packet."""
    if fds:
        socket.send_fds(sock, [data], list(fds), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    else:
        sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
