"""A peer that takes part honestly until its connection is promoted, and then does what it likes.

It speaks the provider's protocol through `ShimClient` and the channel's through a mapping of the segment, from
a process without the shim. Everything it decides comes from one seed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import select
import socket
import struct
import time
from dataclasses import replace
from typing import Final, Self

from common import PATIENCE_S
from shim_client import Channel, ShimClient

from sidestep.native import _channel, layout
from sidestep.native.layout import Rpc

WITHIN_S: Final = PATIENCE_S
NOTICE_BITS: Final = 32  # CHANNEL_NOTICE values, and one beyond
_EDGES: Final = (
    0,
    1,
    2,
    3,
    4095,
    4096,
    4097,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 63,
    (1 << 64) - 1,
    (1 << 64) - 4096,
)


def fill(doorbell: int) -> None:
    """Brings an eventfd to its highest count: whoever writes to it now waits, or is told EAGAIN."""
    os.set_blocking(doorbell, False)
    for bit in reversed(range(64)):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(doorbell, 1 << bit)


def block(doorbell: int) -> None:
    """Makes a write() to an eventfd wait for ever: O_NONBLOCK belongs to all who hold it."""
    fill(doorbell)
    os.set_blocking(doorbell, True)


class HostilePeer:
    """The connecting end of one connection to a victim under the shim, which echoes messages of `message_len` bytes."""

    def __init__(self, client: ShimClient, port: int, *, ring_size: int = 4096, message_len: int = 64) -> None:
        self.client = client
        self.message_len = message_len
        self.tcp = socket.create_connection(("127.0.0.1", port))
        self.tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.tcp.setblocking(False)
        self.tcp_sent = self.tcp_received = 0
        made = Channel.make(None)
        segment = _channel.create(ring_size, ring_size)
        self.mine = replace(made, segment=segment, ring_size=(ring_size, ring_size), segment_id=os.urandom(16))
        self.end = _channel.map(segment, 0)
        self.words = mmap.mmap(segment, 0)
        self.doorbell: int | None = None  # the victim's
        self._slept = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tcp.close()
        self.end.close()
        self.words.close()
        self.mine.close()
        if self.doorbell is not None:
            os.close(self.doorbell)
            self.doorbell = None

    # ---- words ----

    def peek(self, name: str) -> int:
        offset, size = _channel.HEADER_WORDS[name]
        return int.from_bytes(self.words[offset : offset + size], "little")

    def poke(self, name: str, value: int) -> None:
        offset, size = _channel.HEADER_WORDS[name]
        self.words[offset : offset + size] = (value % (1 << 8 * size)).to_bytes(size, "little")

    def ring(self) -> None:
        """Rings the victim's doorbell."""
        assert self.doorbell is not None
        assert _channel.doorbell_ring(self.doorbell)

    def seem_asleep(self) -> None:
        """Has the victim ring our doorbell once more, with the next thing it has to say."""
        self._slept += 1
        os.pwrite(self.mine.doorbell_page, struct.pack("=Q", self._slept << 16 | 1), 0)

    def attack_doorbell(self, dice: random.Random) -> None:
        """Whatever can be done to the victim's doorbell by who holds it, so that nobody else's ring is heard."""
        assert self.doorbell is not None
        match dice.randrange(4):
            case 0:
                with contextlib.suppress(BlockingIOError):  # it is empty
                    os.preadv(self.doorbell, [bytearray(8)], -1, os.RWF_NOWAIT)
            case 1:
                fill(self.doorbell)
            case 2:
                os.set_blocking(self.doorbell, dice.random() < 0.5)
            case _:
                block(self.doorbell)

    # ---- the honest part ----

    def exchange(self) -> None:
        """Sends one message by the path it belongs to, and reads the echo from wherever it comes."""
        message = os.urandom(self.message_len)
        if self.peek("side[0].tx_switched"):
            assert self.end.write(message) == len(message)
            self.ring()
        else:
            assert self.tcp.send(message) == len(message)
            self.tcp_sent += len(message)
        answer = b""
        deadline = time.monotonic() + WITHIN_S
        while len(answer) < len(message):
            switched = self.peek("side[1].tx_switched")
            if switched and self.tcp_received == self.peek("side[1].tx_switch_offset"):
                answer += self.end.read(len(message) - len(answer))
                if select.select([self.tcp], [], [], 0)[0]:  # its end, as it sends by ring
                    self.tcp.recv(1)
            elif select.select([self.tcp], [], [], 0.001)[0]:
                part = self.tcp.recv(len(message) - len(answer))
                assert part, "the victim closed an honest connection"
                answer += part
                self.tcp_received += len(part)
            assert time.monotonic() < deadline, f"no echo; switched {switched}"
        assert answer == message

    def promote(self) -> None:
        """Offers, and plays by the rules until both directions use the rings."""
        self.client.offer(self.tcp, self.mine, token=self.mine.doorbell)
        self.client.wait_offer(self.tcp)
        deadline = time.monotonic() + WITHIN_S
        while not select.select([self.client.sock], [], [], 0.001)[0]:
            self.exchange()  # the victim claims in one of its calls, once the provider has welcomed it
            assert time.monotonic() < deadline, "the victim never claimed"
        packet = self.client.receive()
        with packet.descriptors as passed:
            assert (packet.message.type, packet.message.token) == (Rpc.CLAIMED, self.mine.doorbell), packet.message
            self.doorbell = os.dup(passed.numbers[0])
        self.poke("side[0].attached", 1)
        self.poke("side[0].rx_ready", 1)
        self.ring()
        deadline = time.monotonic() + WITHIN_S
        while not (self.peek("side[0].tx_switched") and self.peek("side[1].tx_switched")):
            if self.peek("side[1].rx_ready") and not self.peek("side[0].tx_switched"):
                self.poke("side[0].tx_switch_offset", self.tcp_sent)
                self.poke("side[0].tx_switched", 1)
            self.exchange()
            assert time.monotonic() < deadline, "the connection was not promoted"
        for _ in range(3):
            self.exchange()

    # ---- the other part ----

    def flood(self) -> None:
        """Sends more than the victim's answers have room for, and reads none: it has one more to answer and no room."""
        deadline = time.monotonic() + WITHIN_S
        while self.end.avail < self.end.tx_most or self.end.unread < self.message_len:
            self.end.write(bytes(self.end.tx_size))
            self.ring()
            assert time.monotonic() < deadline, "the victim never ran out of room"

    def wait_end(self) -> type[ConnectionResetError] | None:
        """Waits until the victim's end of the TCP connection has ended, and how; TimeoutError if it does not."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            self.ring()
            if select.select([self.tcp], [], [], 0.01)[0]:
                try:
                    if not self.tcp.recv(65536):
                        return None
                except ConnectionResetError:
                    return ConnectionResetError
            if time.monotonic() > deadline:
                raise TimeoutError("the victim goes on with a peer that broke the rules")

    def _value(self, dice: random.Random, now: int) -> int:
        match dice.randrange(5):
            case 0:
                return dice.choice(_EDGES)
            case 1:
                return now + dice.randrange(-5000, 5000)
            case 2:
                return dice.randrange(NOTICE_BITS)
            case 3:
                return 1 << dice.randrange(64)
            case _:
                return dice.getrandbits(64)

    def _act(self, dice: random.Random, name: str) -> None:
        match dice.randrange(12):
            case 0 | 1 | 2 | 3 | 4 | 5:
                self.poke(name, self._value(dice, self.peek(name)))
            case 6 | 7:
                self.ring()
            case 8:  # bytes anywhere in either ring, and where a spill begins; of the rest most is never used
                starts = [_channel.HEADER_SIZE]
                for size in (self.end.tx_size, self.end.rx_size):
                    starts += [starts[-1] + size, starts[-1] + size + self.end.tx_most]
                far = dice.choice([self.end.tx_size, self.end.tx_size, len(self.words)])
                at = min(dice.choice(starts) + dice.randrange(far), len(self.words) - 64)
                self.words[at : at + 64] = dice.randbytes(64)
            case 9:  # our own doorbell word: sleepers that are none, generations that go back
                line = dice.randrange(layout.DOORBELLS_PER_PAGE) * 64 if dice.randrange(2) else 0
                os.pwrite(self.mine.doorbell_page, struct.pack("=Q", self._value(dice, 0) % (1 << 64)), line)
            case 10:
                with contextlib.suppress(OSError):  # the victim may have closed the connection
                    self.tcp.send(dice.randbytes(dice.randrange(1, 200)))
            case _:
                with contextlib.suppress(OSError):
                    self.end.write(dice.randbytes(dice.randrange(1, 5000)))

    def attack(self, seed: int) -> str:
        """Random words, doorbells and bytes; then the connection is reset. The moves made, for a failure to print."""
        dice = random.Random(seed)
        # mostly the words that a side 0 writes and its peer reads
        ours = [n for n in _channel.HEADER_WORDS if n.startswith(("side[0]", "producer[0]", "consumer[1]"))]
        anything = list(_channel.HEADER_WORDS)
        # few words an attack: with many, the first impossible count hides what the others would have done
        names = dice.sample(ours, dice.randrange(1, 4)) if dice.randrange(4) else anything
        pauses = dice.random() < 0.5
        for _ in range(dice.choice([3, 30, 300])):
            self._act(dice, dice.choice(names))
            if pauses and dice.randrange(4) == 0:
                self.ring()
                os.sched_yield()
        if dice.randrange(3) == 0:
            with contextlib.suppress(OSError):
                self.tcp.shutdown(socket.SHUT_WR)
            self.ring()
            os.sched_yield()
        self.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.tcp.close()
        return f"seed {seed}, words {names if len(names) < 9 else 'any'}"
