"""What checks do to see that the other end is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.rdma.verbs import EventKind
from sidestep.rdma.work import RdmaRead, RdmaWrite, RKey, Status

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench, Side
    from sidestep.rdma.verbs import MemoryRegion

_BAD = Status.REMOTE_ACCESS_ERROR
_EVENT = EventKind.QP_ACCESS_ERROR


def write_refused(bench: Bench, target: MemoryRegion, sides: tuple[Side, Side], va: int, key: int, rule: str) -> None:
    """A Write of four bytes is refused, and the memory is as it was."""
    active, passive = sides
    before = bytes(target.view)
    word = active.memory(b"EVIL")
    active.qp.post_send(RdmaWrite(66, (word.view,), va, RKey(key)))
    bench.is_refused(active, passive, 66, _BAD, _EVENT, rule)
    bench.equal(bytes(target.view), before, f"{rule}: nothing is placed")


def read_refused(bench: Bench, sides: tuple[Side, Side], va: int, key: int, rule: str) -> None:
    active, passive = sides
    sink = active.memory(4)
    active.qp.post_send(RdmaRead(66, (sink.view,), va, RKey(key)))
    bench.is_refused(active, passive, 66, _BAD, _EVENT, rule)
    bench.equal(bytes(sink.view), bytes(4), f"{rule}: nothing is read")
