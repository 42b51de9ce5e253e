"""How RDMA is measured, whatever the device: what a client does, and what a server answers.

A server offers a region of REGION bytes, whose address and key are the private data with which it accepts (`TARGET`),
and keeps WINDOW receives of SMALL bytes posted.
"""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from typing import Final

REGION: Final = 1 << 20  # bytes
SMALL: Final = 64  # bytes of a Send
WINDOW: Final = 256  # Sends under way
SEND_WR, RECV_WR = 4 * WINDOW, WINDOW  # what a queue pair holds
SIGNALED_MAX: Final = 100  # signaled Sends under way
DEPTH: Final = 8  # Writes or Reads posted
READS: Final = 4  # of them under way at a time, by either end's leave
TARGET: Final = struct.Struct("!QI")  # address and key
DEVICE_PORT, SIW_PORT = 7471, 7473


class NoConnection(Exception):
    """A client has not been accepted."""


class Replies:
    """What a server answers on a connection: each `P`, and of `R` each WINDOW / 2."""

    def __init__(self) -> None:
        self._counted = 0

    def length(self, letter: int) -> int:
        """Of the answer to a Send that begins with that byte; 0 if there is none."""
        if letter == ord("P"):
            return SMALL
        self._counted += 1
        return int(self._counted % (WINDOW // 2) == 0)


class Client(ABC):
    """A connection to a server, of some device."""

    @abstractmethod
    def write(self, size: int) -> None:
        """Posts a signaled Write of so many bytes into the server's region."""

    @abstractmethod
    def read(self, size: int) -> None:
        """Posts a signaled Read of so many bytes of it."""

    @abstractmethod
    def send(self, letter: str, *, signaled: bool) -> None:
        """Posts a Send of SMALL bytes that begins so."""

    @abstractmethod
    def completions(self) -> tuple[int, int]:
        """Waits for some: how many requests, and how many receives, which are posted again."""

    @abstractmethod
    def close(self) -> None:
        """The connection is over."""

    def bandwidth(self, size: int, seconds: float, *, write: bool) -> float:
        """Bytes per second."""
        post = self.write if write else self.read
        posted = done = 0
        began = time.perf_counter()
        until = began + seconds
        while time.perf_counter() < until:
            while posted - done < DEPTH:
                post(size)
                posted += 1
            done += self.completions()[0]
        while done < posted:
            done += self.completions()[0]
        if write:  # all has arrived when a Read behind it is answered
            self.read(1)
            self.completions()
        return posted * size / (time.perf_counter() - began)

    def latency(self, seconds: float) -> list[float]:
        """Seconds of each round trip of a small Send."""
        times = []
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            self.send("P", signaled=True)
            left = 2
            while left:
                left -= sum(self.completions())
            times.append(time.perf_counter() - began)
        return times

    def rate(self, seconds: float) -> float:
        """Small Sends per second."""
        sent = acknowledged = outstanding = 0
        began = time.perf_counter()
        until = began + seconds
        while time.perf_counter() < until or acknowledged < sent // (WINDOW // 2) * (WINDOW // 2):
            while sent - acknowledged < WINDOW and outstanding < SIGNALED_MAX and time.perf_counter() < until:
                signaled = sent % 16 == 0
                self.send("R", signaled=signaled)
                outstanding += signaled
                sent += 1
            done, arrived = self.completions()
            outstanding -= done
            acknowledged += arrived * (WINDOW // 2)
        return acknowledged / (time.perf_counter() - began)
