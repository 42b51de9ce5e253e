"""Random programs for two connected ends of any device: against a plain model, and with whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

from hypothesis import strategies as st
from verbs_end import DrivenEnd

from sidestep.rdma.verbs import QpState
from sidestep.rdma.work import Opcode, RdmaRead, RdmaWrite, Receive, Send, Status

Step: TypeAlias = tuple[str, list, object]  # type: ignore[type-arg]


def programs(point: st.SearchStrategy[int]) -> st.SearchStrategy[list[Step]]:
    """Sends of pieces of memory, Writes and Reads, whose pieces begin and end at such points."""
    pieces = st.tuples(point, point).map(sorted)
    step = st.one_of(
        st.tuples(st.just("send"), st.lists(pieces, max_size=3), st.booleans()),
        st.tuples(st.just("write"), pieces, point),
        st.tuples(st.just("read"), pieces, point),
    )
    return st.lists(step, max_size=12)


def play(active: DrivenEnd, passive: DrivenEnd, steps: Sequence[Step], size: int, run: Callable[[], object]) -> None:
    """Posts a program, lets it happen, and compares all that it has moved and completed with the model."""
    near = active.memory(bytes(index % 251 for index in range(size)))
    far = passive.memory(bytes(index % 241 for index in range(100, 100 + size)))
    model = bytearray(far.view)
    wanted_messages: list[bytes] = []
    wanted_done: list[tuple[int, Opcode, int]] = []
    sinks: list[tuple[bytes, memoryview]] = []
    rooms = []
    for wr_id, (what, pieces, extra) in enumerate(steps):
        if what == "send":
            gather = tuple(near.view[begin:end] for begin, end in pieces)
            rooms.append(passive.room(3 * size, wr_id))
            wanted_messages.append(b"".join(bytes(part) for part in gather))
            active.qp.post_send(Send(wr_id, gather, signaled=bool(extra)))
            if extra:
                wanted_done.append((wr_id, Opcode.SEND, 0))
            continue
        begin, end = pieces
        assert isinstance(extra, int)
        length = max(0, min(end, begin + size - extra) - begin)
        if what == "write":
            part = near.view[begin : begin + length]
            active.qp.post_send(RdmaWrite(wr_id, (part,), far.va + extra, far.rkey, fence=True))
            model[extra : extra + length] = part
            wanted_done.append((wr_id, Opcode.RDMA_WRITE, 0))
        else:
            sink = active.memory(size).view[:length]
            active.qp.post_send(RdmaRead(wr_id, (sink,), far.va + extra, far.rkey))
            sinks.append((bytes(model[extra : extra + length]), sink))
            wanted_done.append((wr_id, Opcode.RDMA_READ, length))
    run()
    assert [(each.wr_id, each.opcode, each.byte_len) for each in active.sent] == wanted_done
    assert all(each.ok for each in active.done + passive.done)
    got = [bytes(room.view[: each.byte_len]) for room, each in zip(rooms, passive.received, strict=True)]
    assert got == wanted_messages
    assert bytes(far.view) == bytes(model)
    assert [bytes(view) for _, view in sinks] == [wanted for wanted, _ in sinks]


class Talker:
    """Sends numbered messages whenever it may, and checks what it gets."""

    def __init__(self, end: DrivenEnd, rng: Random, repeats: int = 1) -> None:
        self.end, self.rng, self._repeats = end, rng, repeats
        self.posted = 0
        self.rooms: list[memoryview] = []
        for number in range(8):
            room = end.memory(8 * repeats).view
            self.rooms.append(room)
            end.qp.post_recv(Receive(number, (room,)))

    def message(self, number: int) -> bytes:
        return b"%08d" % number * self._repeats

    def act(self) -> None:
        if self.end.qp.state is QpState.RTS and self.rng.random() < 0.8 and self.posted < 6:
            word = self.message(self.posted)
            gather = word if self._repeats == 1 else self.end.memory(word).view  # inline, or of a region
            self.end.qp.post_send(Send(self.posted, (gather,), signaled=self.rng.random() < 0.7))
            self.posted += 1
        elif self.rng.random() < 0.05:
            assert self.end.connection is not None
            self.end.connection.disconnect()

    def has_kept_the_rules(self, other: Talker, *, acknowledged: bool = True) -> None:
        """Completions came once and in order, what was received is what the other one has sent, all came to rest."""
        end = self.end
        sent = [each.wr_id for each in end.sent]
        assert sent == sorted(set(sent))
        failed = [each.status for each in end.sent if not each.ok]
        if end.qp.state is QpState.ERROR:
            assert failed[1:] == [Status.FLUSHED] * (len(failed) - 1)
            assert len(end.received) == len(self.rooms)
        assert [each.wr_id for each in end.received] == list(range(len(end.received)))
        good = [each for each in end.received if each.ok]
        got = [bytes(self.rooms[each.wr_id][: each.byte_len]) for each in good]
        assert got == [other.message(number) for number in range(len(got))]
        done = [each for each in other.end.sent if each.ok]
        assert not acknowledged or not done or done[-1].wr_id < len(got)  # what was acknowledged has arrived
        assert end.kinds in (["Established"], ["Established", "Disconnected", "TimewaitExit"])
