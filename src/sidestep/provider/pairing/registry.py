"""The registry: the page on which shims see, with one load, that an offer may be waiting for them.

A bucket word has two parts. Bits 0-7 are the number of pending offers whose connection hashes there, saturating. Bits
8-31 are a generation that grows with every offer. It is only a hint: the truth is the offer table, asked by a CLAIM. So
words need no ordering among each other; each is one aligned 32-bit store.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from typing import Final

from sidestep.native import layout
from sidestep.provider import memory
from sidestep.switch.offers import ConnectionKey

_COUNT_MAX: Final = 0xFF
_GENERATION_MASK: Final = 0xFFFFFF


class Registry:
    """The provider's side of the page: the only writer."""

    def __init__(self, *, netns_cookie: int) -> None:
        self.secret = secrets.randbits(64)
        writable = memory.sealed_memfd("sidestep-registry", layout.REGISTRY_SIZE)
        try:
            self._map = mmap.mmap(writable, layout.REGISTRY_SIZE)  # shared, read and write
            # The seal leaves our mapping as the only thing that can ever write the page.
            fcntl.fcntl(writable, fcntl.F_ADD_SEALS, memory.F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            self.fd = memory.reopen_read_only(writable)
        finally:
            os.close(writable)
        self._map[: layout.size("registry_header")] = layout.pack(
            "registry_header",
            magic=layout.RPC_MAGIC,
            version=layout.LAYOUT_VERSION,
            provider_pid=os.getpid(),
            netns_cookie=netns_cookie,
            secret=self.secret,
        )
        self._view = memoryview(self._map)
        words = self._view.cast("I")
        self._closing_index = layout.offsets("registry_header")["closing"] // 4
        self._asks_index = layout.offsets("registry_header")["asks_connect"] // 4
        self._commands_index = layout.offsets("registry_header")["commands"] // 4
        self._answers_index = layout.offsets("registry_header")["answers"] // 4
        self._header_words = words
        self._words = words[layout.REGISTRY_BUCKETS_OFFSET // 4 :]
        self._pending = [0] * layout.REGISTRY_BUCKETS  # exact, where the word saturates
        self._generation = [0] * layout.REGISTRY_BUCKETS

    def bucket(self, key: ConnectionKey) -> int:
        """The bucket of a connection, the same from both ends."""
        return layout.bucket_index(self.secret, key.local_addr, key.local_port, key.remote_addr, key.remote_port)

    def handle_added(self, bucket: int) -> None:
        """An offer was taken in."""
        self._pending[bucket] += 1
        self._generation[bucket] = (self._generation[bucket] + 1) & _GENERATION_MASK
        self._publish(bucket)

    def handle_removed(self, bucket: int) -> None:
        """An offer was claimed, withdrawn, or expired."""
        if not self._pending[bucket]:
            raise ValueError(f"bucket {bucket} holds no offer")
        self._pending[bucket] -= 1
        self._publish(bucket)

    def set_closing(self) -> None:
        """Makes all shims stop making offers."""
        self._header_words[self._closing_index] = 1

    def set_asks_connect(self, asks: bool) -> None:
        """Makes the ordinary sockets of all shims ask, or not ask, before they connect."""
        self._header_words[self._asks_index] = int(asks)

    def bump_commands(self) -> None:
        """Makes all shims that are awake look at their sockets."""
        self._bump(self._commands_index)

    def bump_answers(self) -> None:
        """Makes shims that wait for an answer look at their sockets."""
        self._bump(self._answers_index)

    def _bump(self, index: int) -> None:
        self._header_words[index] = (self._header_words[index] + 1) & 0xFFFFFFFF

    def close(self) -> None:
        """Unmaps the page; shims keep their view of it."""
        self._words.release()
        self._header_words.release()
        self._view.release()
        self._map.close()
        os.close(self.fd)

    def _publish(self, bucket: int) -> None:
        self._words[bucket] = self._generation[bucket] << 8 | min(self._pending[bucket], _COUNT_MAX)
