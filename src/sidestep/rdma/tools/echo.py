"""Sends that come back: what `ping` does, at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidestep.rdma.tools.talk import Talk, receives_of
from sidestep.rdma.tools.terms import Terms, pattern
from sidestep.rdma.work import Access, Completion, Send

if TYPE_CHECKING:
    from sidestep.rdma.verbs import Device


class Echo(Talk):
    """The end that sends back: each message from where it came to lie."""

    def __init__(self, device: Device, terms: Terms, failed: Callable[[str], object]) -> None:
        super().__init__(device, terms, receives_of(terms), terms.size, failed)
        self.messages = 0

    def received(self, index: int, length: int) -> None:
        self.messages += 1
        self.qp.post_send(Send(index, (memoryview(self.slots[index])[:length],)))

    def sent(self, completion: Completion) -> None:
        self.post_receive(completion.wr_id)


class Pinger(Talk):
    """The end that asks."""

    def __init__(self, device: Device, terms: Terms, failed: Callable[[str], object]) -> None:
        super().__init__(device, terms, receives_of(terms), terms.size, failed)
        self._message = self.memory(bytearray(pattern(terms.size)), Access.LOCAL_READ) if terms.size else bytearray()
        self._asked_ns = 0
        self._number = 0
        self.waiting = False  # for what was asked last
        self.round_trip_ns = 0  # of the last one
        self.wrong = False  # the last one has come back changed

    def ask(self) -> None:
        """Sends one; `waiting` until it is back."""
        self.waiting = True
        self._number += 1
        count = self._number.to_bytes(8)[-len(self._message) :] if self._message else b""
        self._message[: len(count)] = count  # no two are alike, so that an old answer is not taken for a new one
        gather = (memoryview(self._message),) if self._message else ()
        self._asked_ns = time.perf_counter_ns()
        self.qp.post_send(Send(0, gather))

    def received(self, index: int, length: int) -> None:
        self.round_trip_ns = time.perf_counter_ns() - self._asked_ns
        self.wrong = self.terms.verify and bytes(memoryview(self.slots[index])[:length]) != bytes(self._message)
        self.post_receive(index)
        self.waiting = False
