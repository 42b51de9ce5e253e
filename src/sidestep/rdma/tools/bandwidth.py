"""Many messages one behind the other: Sends, RDMA Writes or RDMA Reads, one way or both.

Of Sends no more go out than the other end has receives posted for: it tells when it has posted some again. Contents:
each Send and each Read is compared; Writes all go to the same place, which is compared at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sidestep.errors import PeerViolation
from sidestep.rdma.tools.talk import Talk, holds, receives_of
from sidestep.rdma.tools.terms import Note, NoteKind, Op, Terms, pattern
from sidestep.rdma.work import Access, Completion, RdmaRead, RdmaWrite, RKey, Send

if TYPE_CHECKING:
    from sidestep.rdma.verbs import Device


@dataclass(slots=True)
class Count:
    """Of one direction."""

    messages: int = 0
    wrong: int = 0


class Bandwidth(Talk):
    """One end.

    Args:
        device: Any.
        asked: What the client asked for.
        active: This is the client's end.
        failed: As `Talk`.
    """

    def __init__(self, device: Device, asked: Terms, failed: Callable[[str], object], *, active: bool) -> None:
        self._active = active
        self._sends = active or asked.both
        super().__init__(device, asked, receives_of(asked), asked.size if asked.op is Op.SEND else 0, failed)
        self.out = Count()  # what this end did; of Reads, what it read
        self.back = Count()  # what the other end did, as far as this one sees it
        self.done: Note | None = None  # of the other end
        self._credits = 2 * asked.depth
        self._owed = 0  # credits not told yet
        self._free: list[int] = []  # of the slots that Reads go to
        self._under_way = 0
        self._stopping = False
        self._stop: Note | None = None
        self._cpu_s = time.process_time()
        self._remote: Terms | None = None
        try:
            self._prepare()
        except Exception:
            self.close()
            raise

    def _prepare(self) -> None:
        terms = self.terms
        self._expected = pattern(terms.size)
        source = bytearray(self._expected)
        if terms.op is Op.WRITE:
            self._target = self.memory(bytearray(terms.size), Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        elif terms.op is Op.READ:
            self._target = self.memory(bytearray(source), Access.LOCAL_READ | Access.REMOTE_READ)
        else:
            self._target = bytearray()
        if self._target:
            region = self.regions[-1]
            self.terms = replace(terms, rkey=region.rkey, va=region.va)
        self._source = self.memory(source, Access.LOCAL_READ)
        count = terms.depth if terms.op is Op.READ and self._sends else 0
        self._sinks = [self.memory(bytearray(terms.size), Access.LOCAL_WRITE) for _ in range(count)]
        self._free = list(range(count))

    # --- who drives it ---

    def begin(self, remote: Terms) -> None:
        """The connection is there, and these are the terms of the other end."""
        self._remote = remote
        self._cpu_s = time.process_time()
        self._fill()

    def stop(self) -> None:
        """Begins nothing more; `done` is set when the other end has everything."""
        if not self._stopping:
            self._stopping = True
            self._finish()

    @property
    def cpu_s(self) -> float:
        """Processor time of this process since `begin`."""
        return time.process_time() - self._cpu_s

    # --- what happens ---

    def sent(self, completion: Completion) -> None:
        self._under_way -= 1
        self.out.messages += 1
        if self.terms.op is Op.READ:
            sink = self._sinks[completion.wr_id]
            if self.terms.verify:
                self.out.wrong += sink != self._expected
                sink[:8] = bytes(min(8, len(sink)))  # what is read next is seen to be new
            self._free.append(completion.wr_id)
        self._fill()
        self._finish()

    def received(self, index: int, length: int) -> None:
        if self.terms.op is not Op.SEND:
            raise PeerViolation("a Send that nobody agreed on", rule="unexpected")
        self.back.messages += 1
        if self.terms.verify:
            self.back.wrong += not holds(self.slots[index], length, self._expected)
        self.post_receive(index)
        self._owed += 1
        if 2 * self._owed >= self.terms.depth:
            self.tell(Note(NoteKind.CREDIT, self._owed))
            self._owed = 0

    def noted(self, note: Note) -> None:
        if note.kind is NoteKind.CREDIT:
            self._credits = min(self._credits + note.count, 2 * self.terms.depth)
            self._fill()
        elif note.kind is NoteKind.STOP and not self._active and self._stop is None:
            self._stop = note
            self._stopping = True
            self._finish()
        elif note.kind is NoteKind.DONE and self._active and self._stopping and self.done is None:
            self._look_at_target(note)
            self.done = note
        else:
            raise PeerViolation(f"a note {note.kind.name} out of turn", rule="unexpected")

    def _fill(self) -> None:
        remote, terms = self._remote, self.terms
        if not self._sends or remote is None:
            return
        while not self._stopping and self._under_way < terms.depth:
            if terms.op is Op.SEND:
                if not self._credits:
                    return
                self._credits -= 1
                self.qp.post_send(Send(0, (memoryview(self._source),)))
            elif terms.op is Op.WRITE:
                self.qp.post_send(RdmaWrite(0, (memoryview(self._source),), remote.va, RKey(remote.rkey)))
            else:
                index = self._free.pop()
                self.qp.post_send(RdmaRead(index, (memoryview(self._sinks[index]),), remote.va, RKey(remote.rkey)))
            self._under_way += 1

    def _finish(self) -> None:
        if not self._stopping or self._under_way or self.done is not None:
            return
        if self._active:
            if self._stop is None:
                self._stop = Note(NoteKind.STOP, self.out.messages, self.out.wrong)
                self.tell(self._stop)
        elif self._stop is not None:
            self._look_at_target(self._stop)
            wrong = self.out.wrong if self.terms.op is Op.READ else self.back.wrong
            self.done = Note(NoteKind.DONE, self.out.messages, wrong, round(self.cpu_s * 1e6))
            self.tell(self.done)

    def _look_at_target(self, said: Note) -> None:
        """The other end is through: whether what it wrote is here, and how much it was."""
        if self.terms.op is not Op.SEND:
            self.back.messages = said.count
        if self.terms.op is Op.READ:
            self.back.wrong = said.wrong
        elif self.terms.op is Op.WRITE and self.terms.verify and said.count:
            self.back.wrong = int(self._target != self._expected)
