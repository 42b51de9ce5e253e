"""Random programs on the loopback device against a plain model: both modes, with and without faults."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_ends import End, connected

from sidestep.rdma.loopback import NO_DELAY, Fabric, Faults, Recorder, Timing
from sidestep.rdma.verbs import DeviceAttributes, QpCapabilities, QpState
from sidestep.rdma.work import Opcode, RdmaRead, RdmaWrite, Receive, Send, Status

SIZE = 64
_pieces = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)
_step = st.one_of(
    st.tuples(st.just("send"), st.lists(_pieces, max_size=3), st.booleans()),
    st.tuples(st.just("write"), _pieces, st.integers(0, SIZE)),
    st.tuples(st.just("read"), _pieces, st.integers(0, SIZE)),
)


def build(kind: str, seed: int) -> Fabric:
    if kind == "timed":
        return Fabric(Random(seed), timing=Timing(read_s=(0, 1e-4)))
    return Fabric(Random(seed), timing=NO_DELAY, observer=Recorder() if kind == "watched" else None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timed", "no delay", "watched"])
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(_step, max_size=12), seed=st.integers(0, 1000))
def test_programs_do_what_the_model_says(kind: str, steps: list[tuple[str, list, object]], seed: int) -> None:  # type: ignore[type-arg]
    fabric = build(kind, seed)
    active, passive = connected(fabric, QpCapabilities(initiator_depth=2, responder_resources=2))
    near = active.memory(bytes(range(SIZE)))
    far = passive.memory(bytes(range(100, 100 + SIZE)))
    model = bytearray(far.view)
    wanted_messages: list[bytes] = []
    wanted_done: list[tuple[int, Opcode, int]] = []
    sinks: list[tuple[bytearray, memoryview]] = []
    rooms = []
    for wr_id, (what, pieces, extra) in enumerate(steps):
        if what == "send":
            gather = tuple(near.view[begin:end] for begin, end in pieces)
            rooms.append(passive.room(3 * SIZE, wr_id))
            wanted_messages.append(b"".join(bytes(part) for part in gather))
            active.qp.post_send(Send(wr_id, gather, signaled=bool(extra)))
            if extra:
                wanted_done.append((wr_id, Opcode.SEND, 0))
            continue
        begin, end = pieces
        assert isinstance(extra, int)
        end = min(end, begin + SIZE - extra)
        length = max(0, end - begin)
        wanted_done.append((wr_id, Opcode.RDMA_WRITE if what == "write" else Opcode.RDMA_READ, 0))
        if what == "write":
            part = near.view[begin : begin + length]
            active.qp.post_send(RdmaWrite(wr_id, (part,), far.va + extra, far.rkey, fence=True))
            model[extra : extra + length] = part
        else:
            sink = active.memory(SIZE)
            sinks.append((bytearray(model[extra : extra + length]), sink.view[:length]))
            wanted_done[-1] = (wr_id, Opcode.RDMA_READ, length)
            active.qp.post_send(RdmaRead(wr_id, (sink.view[:length],), far.va + extra, far.rkey))
    fabric.run()
    assert [(each.wr_id, each.opcode, each.byte_len) for each in active.sent] == wanted_done
    assert all(each.ok for each in active.done + passive.done)
    got = [bytes(room.view[: each.byte_len]) for room, each in zip(rooms, passive.received, strict=True)]
    assert got == wanted_messages
    assert bytes(far.view) == bytes(model)
    assert [bytes(view) for _, view in sinks] == [bytes(wanted) for wanted, _ in sinks]


class _Talker:
    """Sends numbered messages whenever it may, and checks what it gets."""

    def __init__(self, fabric: Fabric, end: End, rng: Random) -> None:
        self.fabric, self.end, self.rng = fabric, end, rng
        self.posted: list[int] = []
        self.rooms: list[memoryview] = []
        for _ in range(8):
            self.receive()

    def receive(self) -> None:
        room = self.end.memory(8).view
        self.rooms.append(room)
        self.end.qp.post_recv(Receive(len(self.rooms) - 1, (room,)))

    def act(self) -> None:
        if self.end.qp.state is QpState.RTS and self.rng.random() < 0.8 and len(self.posted) < 6:
            number = len(self.posted)
            self.posted.append(number)
            self.end.qp.post_send(Send(number, (b"%08d" % number,), signaled=self.rng.random() < 0.7))
        elif self.rng.random() < 0.05:
            self.end.disconnect()


@pytest.mark.parametrize("acknowledged", [True, False], ids=["acknowledged", "unacknowledged"])
@pytest.mark.parametrize("seed", range(30))
def test_faults_keep_the_rules(seed: int, acknowledged: bool) -> None:
    """Whatever goes wrong: completions come once and in order, what is received is what was sent, all comes to rest."""
    rng = Random(seed)
    faults = Faults()
    fabric = Fabric(Random(seed), faults=faults)
    attributes = DeviceAttributes(acknowledged=acknowledged, error_disconnects=not acknowledged)
    active, passive = connected(fabric, attributes=attributes)
    faults.lose_cm = 0.1
    faults.lose_connection = rng.choice((0.0, 0.03))
    faults.complete_with_error = rng.choice((0.0, 0.03))
    talkers = [_Talker(fabric, end, rng) for end in (active, passive)]
    if rng.random() < 0.2:
        fabric.call_later(rng.uniform(0, 1e-4), lambda: fabric.reset(active.qp))
    for _ in range(30):
        rng.choice(talkers).act()
        fabric.run_until(fabric.now + rng.uniform(0, 2e-5))
    fabric.run_until(fabric.now + 1000.0)
    for talker, other in (talkers, talkers[::-1]):
        end = talker.end
        ended = end.qp.state is QpState.ERROR
        sent = [each.wr_id for each in end.sent]
        assert sent == sorted(set(sent))
        if ended:
            assert [each.status for each in end.sent if not each.ok][1:] == [Status.FLUSHED] * (
                len([each for each in end.sent if not each.ok]) - 1
            )
            assert len(end.received) == len(talker.rooms)
        assert [each.wr_id for each in end.received] == list(range(len(end.received)))
        good = [each for each in end.received if each.ok]
        got = [bytes(talker.rooms[each.wr_id][: each.byte_len]) for each in good]
        assert got == [b"%08d" % number for number in range(len(got))]
        done = [each for each in other.end.sent if each.ok]
        assert not acknowledged or not done or done[-1].wr_id < len(got)  # what was acknowledged has arrived
        assert end.kinds in (["Established"], ["Established", "Disconnected", "TimewaitExit"])
