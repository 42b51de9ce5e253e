"""The provider's protocol, spoken from Python as the shim speaks it from C."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sidestep import config
from sidestep.errors import Misuse
from sidestep.native import _channel, layout
from sidestep.native.layout import Ask, Rpc, Welcome
from sidestep.provider import memory, rpc
from sidestep.provider.proof import lookup as proof
from sidestep.provider.rpc import Message
from sidestep.testing import WAIT_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Channel:
    """What one end brings to an offer or a claim: a doorbell always, a segment when it offers. It owns them."""

    doorbell: int
    doorbell_page: int
    segment: int | None
    ring_size: tuple[int, int]
    doorbell_page_id: bytes
    segment_id: bytes

    @classmethod
    def make(cls, ring_size: tuple[int, int] | None = (4096, 4096)) -> Self:
        """New ones; `ring_size` None: for a claim."""
        segment = None
        if ring_size is not None:
            segment = memory.sealed_memfd("sidestep-channel", memory.segment_size(ring_size))
        return cls(
            _channel.doorbell_make(),
            memory.sealed_memfd("sidestep-doorbells", 4096),
            segment,
            ring_size or (0, 0),
            secrets.token_bytes(16),
            secrets.token_bytes(16) if ring_size is not None else bytes(16),
        )

    def close(self) -> None:
        """Closes the descriptors."""
        for fd in (self.doorbell, self.doorbell_page, self.segment):
            if fd is not None:
                os.close(fd)


class ShimClient:
    """One process's connection to a provider, as the shim makes it: an arena, HELLO, offers and claims."""

    def __init__(
        self,
        path: Path,
        *,
        slots_max: int = 16,
        timeout_s: float = WAIT_TIMEOUT_S,
        version: int = layout.LAYOUT_VERSION,
    ) -> None:
        """Connects; `hello` introduces it."""
        self.version = version  # of the layout that it speaks
        self.arena_id = secrets.token_bytes(16)
        self.family_id = secrets.token_bytes(16)
        self.arena = memory.sealed_memfd(
            "sidestep-arena", layout.ARENA_SLOTS_OFFSET + slots_max * layout.CONN_SLOT_SIZE
        )
        self._slots_max = slots_max
        self.write_arena([])
        self.netns_cookie = proof.netns_cookie()  # of the sockets it speaks of
        self.wants = Welcome(0)  # what the provider asked for as proof
        self.sock = config.connect(path)
        self.sock.settimeout(timeout_s)
        self._registry: mmap.mmap | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnects, as the end of a process does."""
        self.sock.close()
        if self._registry is not None:
            self._registry.close()
            self._registry = None
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1

    def write_arena(self, slots: Sequence[Mapping[str, Any]]) -> None:
        """Fills the arena with these connection slots, fields as in layout.RECORDS."""
        header = layout.pack(
            "arena_header",
            magic=layout.ARENA_MAGIC,
            version=self.version,
            slot_size=layout.CONN_SLOT_SIZE,
            slots_max=self._slots_max,
            slots_used=len(slots),
            arena_id=self.arena_id,
        )
        os.pwrite(self.arena, header, 0)
        for index, slot in enumerate(slots):
            at = layout.ARENA_SLOTS_OFFSET + index * layout.CONN_SLOT_SIZE
            os.pwrite(self.arena, layout.pack("conn_slot", **slot), at)

    def hello(self) -> Message:
        """Says HELLO, maps the registry that comes with the WELCOME, and returns that."""
        read_only = memory.reopen_read_only(self.arena)
        try:
            hello = Message(
                type=Rpc.HELLO, version=self.version, pid=os.getpid(), arena_id=self.arena_id, segment_id=self.family_id
            )  # fmt: skip
            rpc.send(self.sock, hello, [read_only])
        finally:
            os.close(read_only)
        packet = self.receive()
        with packet.descriptors:
            self._registry = mmap.mmap(packet.descriptors[0], layout.REGISTRY_SIZE, prot=mmap.PROT_READ)
        self.wants = Welcome(packet.message.flags) & ~(Welcome.SERVES | Welcome.NEW_DOORBELLS | Welcome.JOINS)
        return packet.message

    def offer(self, tcp: socket.socket, channel: Channel, token: int, *, way: socket.socket | None = None) -> None:
        """Offers `channel` for the connected socket `tcp`; `way`: the UDP socket for the proof of the path."""
        if channel.segment is None:
            raise Misuse("a channel to offer needs a segment")
        message = self.message_about(Rpc.OFFER, tcp, channel, token)
        rpc.send(self.sock, message, [*self._proof(tcp, way), channel.segment, channel.doorbell, channel.doorbell_page])

    def claim(self, tcp: socket.socket, channel: Channel, token: int, *, way: socket.socket | None = None) -> None:
        """Claims the channel offered for the connection of which `tcp` is the other end."""
        message = self.message_about(Rpc.CLAIM, tcp, channel, token)
        rpc.send(self.sock, message, [*self._proof(tcp, way), channel.doorbell, channel.doorbell_page])

    def _proof(self, tcp: socket.socket, way: socket.socket | None) -> list[int]:
        """The descriptors that the provider wants before those of the channel."""
        possession = [tcp] if self.wants & Welcome.POSSESSION else []
        return [one.fileno() for one in (*possession, *([way] if way else []))]

    def withdraw(self, token: int) -> None:
        """Takes an offer back."""
        rpc.send(self.sock, Message(type=Rpc.WITHDRAW, token=token))

    def ask(
        self,
        what: Ask,
        *,
        protocol: int = 0,
        local: tuple[str, int] = ("0.0.0.0", 0),
        remote: tuple[str, int] = ("0.0.0.0", 0),
        fds: Sequence[int] = (),
    ) -> Message:
        """Asks as an explicit socket does, and returns the ANSWER; `fds` for a bind: the socket and the lease."""
        message = Message(
            type=Rpc.ASK,
            token=secrets.randbits(64),
            flags=what,
            protocol=protocol,
            local_addr=proof.mapped_address(local[0]),
            local_port=local[1],
            remote_addr=proof.mapped_address(remote[0]),
            remote_port=remote[1],
        )
        rpc.send(self.sock, message, fds)
        with (packet := self.receive()).descriptors:
            answer = packet.message
        if (answer.type, answer.token) != (Rpc.ANSWER, message.token):
            raise ConnectionError(f"{answer.type.name} came for an answer")
        return answer

    def offers_waiting(self, tcp: socket.socket) -> int:
        """Pending offers in the registry bucket of this connection, as a shim sees it before it claims."""
        return self.registry_word(tcp) & 0xFF

    def wait_offer(self, tcp: socket.socket, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Looks at the registry until an offer may be waiting for this connection; TimeoutError if none comes."""
        deadline = time.monotonic() + timeout_s
        while not self.offers_waiting(tcp):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no offer was announced in {timeout_s} s")
            os.sched_yield()

    def receive(self) -> rpc.Packet:
        """The provider's next message; the caller closes its descriptors. ConnectionError if it hung up."""
        packet = rpc.receive(self.sock)
        if packet is None:
            raise ConnectionError("the provider closed the connection")
        return packet

    def hung_up(self) -> bool:
        """Waits for the provider to close the connection; False if it says something instead."""
        try:
            packet = rpc.receive(self.sock)
        except ConnectionResetError:
            return True
        if packet is None:
            return True
        packet.descriptors.close()
        return False

    def registry_header(self) -> dict[str, Any]:
        """The first page of the registry."""
        if self._registry is None:
            raise Misuse("there is no registry before hello()")
        return layout.unpack("registry_header", self._registry[: layout.size("registry_header")])

    def registry_word(self, tcp: socket.socket) -> int:
        """The registry word of the bucket of this connection."""
        key = proof.connection_key(tcp, self.netns_cookie)
        bucket = layout.bucket_index(
            self.registry_header()["secret"], key.local_addr, key.local_port, key.remote_addr, key.remote_port
        )
        if self._registry is None:
            raise Misuse("there is no registry before hello()")
        (word,) = struct.unpack_from("=I", self._registry, layout.REGISTRY_BUCKETS_OFFSET + 4 * bucket)
        return int(word)

    def message_about(self, kind: Rpc, tcp: socket.socket, channel: Channel, token: int) -> Message:
        """The OFFER or CLAIM that `offer` or `claim` would send."""
        key = proof.connection_key(tcp, self.netns_cookie)
        return Message(
            type=kind,
            token=token,
            local_addr=key.local_addr,
            local_port=key.local_port,
            remote_addr=key.remote_addr,
            remote_port=key.remote_port,
            cookie=proof.socket_cookie(tcp),
            netns_cookie=key.netns_cookie,
            ring_size=channel.ring_size,
            doorbell_page_id=channel.doorbell_page_id,
            segment_id=channel.segment_id,
        )
