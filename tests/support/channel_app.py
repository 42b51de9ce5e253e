"""Applications at the other end of a channel with the provider, played by a test word for word."""

from __future__ import annotations

import os
import random
from mmap import MADV_REMOVE, mmap

from sidestep.native import _channel, layout
from sidestep.provider import memory
from sidestep.provider.carry.hub import End

RING = 4096
MOST = layout.CHANNEL_SPILL  # that can be unread
PAGE = 4096 * 65  # the words, and a page of hints for each of 64 doorbells


class App:
    """One application: its side of its segment, its doorbell, and what its socket would tell."""

    def __init__(self, side: int, ring: int = RING) -> None:
        self.segment = _channel.create(ring, ring)
        self.end = _channel.map(self.segment, side)
        self.provider_side = 1 - side
        self.doorbell = _channel.doorbell_make()
        self.page = memory.sealed_memfd("sidestep-doorbells", PAGE)
        self.name = os.urandom(16)
        self.named = 0
        self.held = self.connected = True
        self.by_tcp = 0  # bytes that TCP has brought

    def close(self) -> None:
        for fd in (self.segment, self.doorbell, self.page):
            os.close(fd)
        self.end.close()

    def given(self) -> End:
        return End(
            _channel.map(self.segment, self.provider_side),
            self.name, 0, self.doorbell, self.page, held=lambda: self.held, received=lambda: self.by_tcp,
            client_open=lambda: self.connected,
        )  # fmt: skip

    def hint(self) -> None:
        """Names its channel as having news, as `conn_hint` does."""
        number = int.from_bytes(os.pread(self.segment, 4, self.at("hint", remote=True)), "little")
        entry = self.named << 32 | number
        os.pwrite(self.page, entry.to_bytes(8, "little"), 4096 + 8 + 8 * (self.named % 511))
        self.begin_hint()

    def begin_hint(self) -> None:
        """What a reader sees of a hint whose writer has taken its place and not filled it yet."""
        self.named += 1
        os.pwrite(self.page, self.named.to_bytes(8, "little"), 4096)

    def at(self, word: str, *, remote: bool) -> int:
        side = self.provider_side if remote else 1 - self.provider_side
        if word == "hint":  # not among the named words
            return _channel.HEADER_WORDS[f"side[{side}].rx_frozen"][0] + 8
        return _channel.HEADER_WORDS[f"side[{side}].{word}"][0]

    def word(self, name: str) -> int:
        """What the provider has published."""
        return self._word(self.provider_side, name)

    def own_word(self, name: str) -> int:
        """What the application has published, and the provider may have replaced."""
        return self._word(1 - self.provider_side, name)

    def _word(self, side: int, name: str) -> int:
        offset, size = _channel.HEADER_WORDS[f"side[{side}].{name}"]
        return int.from_bytes(os.pread(self.segment, size, offset), "little")

    def send_control(self, **words: int) -> None:
        """Stores words of its own, and names the channel."""
        for name, value in words.items():
            self.end.publish(name, value)
        self.hint()

    def poke(self, name: str, value: int) -> None:
        """Stores any word of the segment."""
        offset, size = _channel.HEADER_WORDS[name]
        os.pwrite(self.segment, (value % (1 << 8 * size)).to_bytes(size, "little"), offset)
        self.hint()

    def send(self, data: bytes) -> int:
        count = self.end.write(data)
        self.hint()
        return count

    def spill(self, data: bytes) -> int:
        """Sends what finds no room in the ring behind it."""
        count = self.end.write(data)
        return count + (self.send(data[count:]) if self.end.spill() else self.send(b""))

    def trim(self, *, counted: bool = True) -> None:
        """Gives the pages of its ring back, as `channel_trim` does; all has been read."""
        assert not self.end.unread
        name = f"producer[{1 - self.provider_side}].pages"
        offset, size = _channel.HEADER_WORDS[name]
        pages = int.from_bytes(os.pread(self.segment, size, offset), "little") | 1
        if counted:
            self.poke(name, pages)
        with mmap(self.segment, 4096 + 2 * self.end.tx_size) as memory:
            memory.madvise(MADV_REMOVE, 4096 + (1 - self.provider_side) * self.end.tx_size, self.end.tx_size)
        if counted:
            self.poke(name, pages + 1)

    def receive(self) -> bytes:
        data = self.end.read()
        self.hint()
        return data


class Stream:
    """One direction: what was sent, and how much of it has come."""

    def __init__(self, sender: App, receiver: App, dice: random.Random) -> None:
        self.sender, self.receiver, self._dice = sender, receiver, dice
        self.sent, self.got = bytearray(), 0

    def send(self, size: int) -> None:
        data = self._dice.randbytes(size)
        self.sent += data[: self.sender.send(data)]

    def receive(self) -> None:
        data = self.receiver.receive()
        right = data == self.sent[self.got : self.got + len(data)]
        assert right  # of so many bytes it is not to show the difference
        self.got += len(data)
