"""One end of a conversation: its queue pair, its memory, and the notes beside the payload; Sends that come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import PeerViolation, SidestepError
from sidestep.rdma.tools.terms import Note, Op, Terms, pattern
from sidestep.rdma.verbs import EventKind, QpCapabilities
from sidestep.rdma.work import Access, Completion, Opcode, Receive, Send, Status

if TYPE_CHECKING:
    from sidestep.rdma.cm import Connection
    from sidestep.rdma.verbs import AsyncEvent, Device, MemoryRegion

NOTES_MAX: Final = 16  # under way, each way
_NOTE_ID: Final = 1 << 40


class Talk:
    """What all conversations have in common.

    Args:
        device: Any.
        terms: What it is about, as this end says it.
        slots: Receives posted at a time, besides those for notes.
        slot_len: Bytes of each.
        failed: Is called once when it cannot go on, with the reason.
    """

    def __init__(
        self, device: Device, terms: Terms, slots: int, slot_len: int, failed: Callable[[str], object]
    ) -> None:
        self.device = device
        self.terms = terms
        self.connection: Connection | None = None
        self._failed = failed
        self._over = False
        self.regions: list[MemoryRegion] = []
        with ExitStack() as closing:  # also if there is no room for all of it
            self._open(closing, slots, slot_len)
            self._closing = closing.pop_all()

    def _open(self, closing: ExitStack, slots: int, slot_len: int) -> None:
        terms, device = self.terms, self.device
        self.domain = device.alloc_pd()
        closing.callback(self.domain.deallocate)
        self.cq = device.create_cq(device.attributes.completions_max, self._completed)
        closing.callback(self.cq.destroy)
        closing.callback(self._deregister)
        reads = min(terms.depth, device.attributes.read_depth_max, limits.RDMA_TOOL_DEPTH_MAX)
        self.qp = self.domain.create_qp(
            self.cq,
            self.cq,
            QpCapabilities(
                max_send_wr=terms.depth + slots + NOTES_MAX,
                max_recv_wr=slots + NOTES_MAX,
                initiator_depth=reads,
                responder_resources=reads,
            ),
            on_event=self._event,
        )
        closing.callback(self.qp.destroy)
        length = max(slot_len, Note.LENGTH)
        self.slots = [self.memory(bytearray(length), Access.LOCAL_WRITE) for _ in range(slots + NOTES_MAX)]
        for index in range(len(self.slots)):
            self.post_receive(index)

    def memory(self, buffer: bytearray, access: Access) -> bytearray:
        self.regions.append(self.domain.register(buffer, access))
        return buffer

    def post_receive(self, index: int) -> None:
        self.qp.post_recv(Receive(index, (memoryview(self.slots[index]),)))

    def tell(self, note: Note) -> None:
        self.qp.post_send(Send(_NOTE_ID, (note.encode(),), solicited=True))

    def fail(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._failed(why)

    def close(self) -> None:
        self._over = True
        self._closing.close()

    def _deregister(self) -> None:
        for region in self.regions:
            region.deregister()
        self.regions.clear()

    # --- what a kind of conversation adds ---

    def received(self, index: int, length: int) -> None:
        """Payload is in a slot, which is the conversation's until it posts it again."""
        raise PeerViolation("a message that is no note", rule="unexpected")

    def noted(self, note: Note) -> None:
        raise PeerViolation(f"a note {note.kind.name}", rule="unexpected")

    def sent(self, completion: Completion) -> None:
        """A request of this conversation is done."""

    # --- what happens ---

    def _completed(self, batch: list[Completion]) -> None:
        for completion in batch:
            if self._over:
                return
            if completion.status is Status.FLUSHED:
                continue  # the connection has ended, which its handler is told, and why
            if not completion.ok:
                self.fail(f"a {completion.opcode.name} ended with {completion.status.name}")
                return
            try:
                self._take(completion)
            except SidestepError as error:
                self.fail(error.message)
                return
            except MemoryError:
                self.fail("there is no memory for it")
                return

    def _take(self, completion: Completion) -> None:
        if completion.opcode is not Opcode.RECEIVE:
            if completion.wr_id != _NOTE_ID:
                self.sent(completion)
        elif completion.solicited:
            note = Note.decode(bytes(memoryview(self.slots[completion.wr_id])[: completion.byte_len]))
            self.post_receive(completion.wr_id)
            self.noted(note)
        else:
            self.received(completion.wr_id, completion.byte_len)

    def _event(self, event: AsyncEvent) -> None:
        if event.kind is not EventKind.COMMUNICATION_ESTABLISHED:  # a message that overtook the last word of the start
            self.fail(event.why or event.kind.name)


def holds(slot: bytearray, length: int, expected: bytes) -> bool:
    """Whether so many bytes of a slot are the expected ones."""
    return slot == expected if length == len(slot) else length == len(expected) and slot[:length] == expected


def receives_of(terms: Terms) -> int:
    if terms.op is Op.SEND:
        return 2 * terms.depth
    return 2 if terms.op is Op.PING else 0


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
