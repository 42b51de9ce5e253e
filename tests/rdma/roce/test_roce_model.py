"""Random programs on the software HCA against a plain model, on wires that lose, double, delay and damage."""

from __future__ import annotations

from random import Random

import pytest
from hca_ends import HcaEnd, connected
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import Wire, WireFaults
from sidestep.rdma.verbs import QpCapabilities, QpState
from sidestep.rdma.work import Opcode, RdmaRead, RdmaWrite, Receive, Send, Status

SIZE = 1300  # five packets and a piece
_point = st.sampled_from([0, 1, 255, 256, 257, 512, 1024, SIZE - 1, SIZE]) | st.integers(0, SIZE)
_pieces = st.tuples(_point, _point).map(sorted)
_step = st.one_of(
    st.tuples(st.just("send"), st.lists(_pieces, max_size=3), st.booleans()),
    st.tuples(st.just("write"), _pieces, _point),
    st.tuples(st.just("read"), _pieces, _point),
)
_chance = st.sampled_from([0.0, 0.02, 0.1])
_faults = st.builds(WireFaults, loss=_chance, duplicate=_chance, late=_chance, damage=st.sampled_from([0.0, 0.02]))
_settings = RoceSettings(mtu=256, window=8, retry_count=7)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(steps=st.lists(_step, max_size=12), seed=st.integers(0, 1000), faults=_faults)
def test_programs_do_what_the_model_says(steps: list[tuple[str, list, object]], seed: int, faults: WireFaults) -> None:  # type: ignore[type-arg]
    capabilities = QpCapabilities(initiator_depth=2, responder_resources=2)
    wire, active, passive = connected(seed, faults, capabilities, _settings)
    near = active.memory(bytes(index % 251 for index in range(SIZE)))
    far = passive.memory(bytes(index % 241 for index in range(SIZE)))
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
    wire.run_until(lambda: False, limit_s=60.0)
    assert [(each.wr_id, each.opcode, each.byte_len) for each in active.sent] == wanted_done
    assert all(each.ok for each in active.done + passive.done)
    got = [bytes(room.view[: each.byte_len]) for room, each in zip(rooms, passive.received, strict=True)]
    assert got == wanted_messages
    assert bytes(far.view) == bytes(model)
    assert [bytes(view) for _, view in sinks] == [bytes(wanted) for wanted, _ in sinks]


class _Talker:
    """Sends numbered messages whenever it may, and checks what it gets."""

    def __init__(self, end: HcaEnd, rng: Random) -> None:
        self.end, self.rng = end, rng
        self.posted: list[int] = []
        self.rooms: list[memoryview] = []
        for _ in range(8):
            self.receive()

    def receive(self) -> None:
        room = self.end.memory(600).view
        self.rooms.append(room)
        self.end.qp.post_recv(Receive(len(self.rooms) - 1, (room,)))

    def act(self) -> None:
        if self.end.qp.state is QpState.RTS and self.rng.random() < 0.8 and len(self.posted) < 6:
            number = len(self.posted)
            self.posted.append(number)
            word = self.end.memory(b"%08d" % number * 70).view
            self.end.qp.post_send(Send(number, (word,), signaled=self.rng.random() < 0.7))
        elif self.rng.random() < 0.05:
            assert self.end.connection is not None
            self.end.connection.disconnect()


@pytest.mark.parametrize("seed", range(40))
def test_faults_keep_the_rules(seed: int) -> None:
    """Whatever goes wrong: completions come once and in order, what is received is what was sent, all comes to rest."""
    rng = Random(seed)
    faults = WireFaults(loss=rng.choice((0.02, 0.2)), duplicate=0.05, late=0.05, damage=0.02)
    wire, active, passive = connected(seed, faults, settings=_settings)
    talkers = [_Talker(end, rng) for end in (active, passive)]
    if rng.random() < 0.2:
        faults.lose = lambda target, payload: wire.now > 1e-3  # the wire is cut
    for _ in range(30):
        rng.choice(talkers).act()
        _pass(wire, rng.uniform(0, 2e-5))
    _pass(wire, 1000.0)
    for talker, other in (talkers, talkers[::-1]):
        end = talker.end
        sent = [each.wr_id for each in end.sent]
        assert sent == sorted(set(sent))
        failed = [each.status for each in end.sent if not each.ok]
        if end.qp.state is QpState.ERROR:
            assert failed[1:] == [Status.FLUSHED] * (len(failed) - 1)
            assert len(end.received) == len(talker.rooms)
        assert [each.wr_id for each in end.received] == list(range(len(end.received)))
        good = [each for each in end.received if each.ok]
        got = [bytes(talker.rooms[each.wr_id][: each.byte_len]) for each in good]
        assert got == [b"%08d" % number * 70 for number in range(len(got))]
        done = [each for each in other.end.sent if each.ok]
        assert not done or done[-1].wr_id < len(got)  # what was acknowledged has arrived
        assert end.kinds in (["Established"], ["Established", "Disconnected", "TimewaitExit"])


def _pass(wire: Wire, seconds: float) -> None:
    until = wire.now + seconds
    while wire.step(until):
        pass
    wire.now = until
