"""A queue pair that is lent to the engine (native/engine/engine_verbs.h), and what the engine leaves of it.

Nothing moves in the device when it changes hands. Receives stay posted: the engine gets a table of them, and posts each
again once its message was taken, so what is posted is the same afterwards, in another order. Requests are numbered on:
those of the engine that are not done when it gives the queue pair back stand in the send queue here, behind what was
there before, and when one is done the slots of the slab are free that it went out from.
"""

from __future__ import annotations

from ctypes import c_void_p, cast, sizeof
from typing import TYPE_CHECKING, Any, Final

from sidestep import limits
from sidestep.errors import SidestepError
from sidestep.rdma.address import buffer_address
from sidestep.rdma.kernel import abi
from sidestep.rdma.verbs import LentQueuePair, QpState
from sidestep.rdma.work import Send

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidestep.native._engine import KernelQueuePair as EngineQueuePair
    from sidestep.rdma.kernel.device import KernelDevice
    from sidestep.rdma.kernel.qp import KernelQueuePair
    from sidestep.rdma.verbs import SendRing

OF_ENGINE: Final = Send(0, (), signaled=False)  # in the place of each request of an engine


def calls(device: KernelDevice) -> tuple[int, ...]:
    """`struct verbs_calls`: the addresses of what an engine calls."""
    ops, libraries = device.ops, device.libraries
    functions: tuple[Any, ...] = (
        ops.post_send, ops.post_recv, ops.poll_cq, ops.req_notify_cq,
        libraries.ibv_get_cq_event, libraries.ibv_ack_cq_events,
    )  # fmt: skip
    return tuple(cast(each, c_void_p).value or 0 for each in functions)


class Lending:
    """That of one queue pair."""

    __slots__ = ("_engine", "_gathered_until", "_qp", "_reclaim")

    def __init__(self, qp: KernelQueuePair) -> None:
        self._qp = qp
        self._engine: EngineQueuePair | None = None  # once it was lent
        self._reclaim: Callable[[], object] | None = None  # while it is
        self._gathered_until = 0  # the number behind the last request that the ring may be read for

    @property
    def lent(self) -> bool:
        return self._reclaim is not None

    @property
    def gathering(self) -> bool:
        """Whether the device may read the ring still; not known while it is lent."""
        return self._qp.done_number < self._gathered_until

    @property
    def gathered(self) -> int:
        """Bytes that were ever sent from the ring itself."""
        return self._engine.gathered if self._engine is not None else 0

    def lend(
        self, record: dict[str, int], reclaim: Callable[[], object], ring: Callable[[], SendRing]
    ) -> LentQueuePair | None:
        """As `QueuePair.lend`."""
        qp = self._qp
        if self.lent or qp.told is not QpState.RTS or qp.own is None or qp.srq is not None or not qp.may_be_lent:
            return None
        before = sum(each.request is OF_ENGINE for each in qp.sends)
        if any(each.tells or each.verdict is not None for each in qp.sends):
            return None
        table = self._table()
        engine = self._engine or self._made()
        if table is None or engine is None:
            return None
        sends_from, rings = ring(), qp.domain.rings
        if engine.hot:
            rings.pin(self, sends_from)
            engine.cool(round(1000 * limits.VERBS_RING_RETRY_S))
        record["ring_lkey"], record["ring_pages"] = rings.words(self, sends_from)
        engine.begin(qp.next_number, before, table, limits.VERBS_RING_BYTES if sends_from.pages else 0)
        self._reclaim = reclaim
        qp.own.lend()
        return LentQueuePair(engine)

    def _made(self) -> EngineQueuePair | None:
        """None: there is no memory to send from."""
        from sidestep.native._engine import KernelQueuePair as EngineQueuePair

        qp = self._qp
        own = qp.own
        assert own is not None
        try:
            slab = qp.domain.send_slab()
        except SidestepError as why:
            qp.device.log.debug("queue pair %d is not lent: %s", qp.number, why)
            return None
        channel = cast(own.channel, c_void_p).value or 0
        self._engine = EngineQueuePair(
            calls(qp.device), qp.address, own.address, channel, own.fd, slab, qp.inline_max,
            qp.device.attributes.gather_max,
        )  # fmt: skip
        return self._engine

    def _table(self) -> list[tuple[int, int, int, int]] | None:
        """What is posted, the oldest first; None: there is something in it that an engine does not know."""
        found = []
        for number, receive in self._qp.receives.items():
            if len(receive.scatter) != 1:
                return None
            (entry,) = receive.scatter
            address = buffer_address(entry)
            region = self._qp.domain.find(entry, address)
            if region is None:
                return None
            found.append((number << 1 | 1, address, len(entry), int(region.lkey)))
        return found

    def reclaim(self) -> None:
        """Somebody here has to do with it."""
        if self._reclaim is not None:
            self._reclaim()

    def take_back(self, record: dict[str, int], error: int) -> None:
        """As `QueuePair.take_back`. What has come and was not taken is told in this turn."""
        qp, engine = self._qp, self._engine
        assert engine is not None
        assert qp.own is not None
        self._reclaim = None
        done, unfinished, self._gathered_until = engine.unfinished()
        qp.go_on(done, unfinished)
        posted = list(qp.receives.items())
        at = record["messages_received"] % len(posted) if posted else 0
        qp.receives = dict(posted[at:] + posted[:at])
        left = engine.left()
        for offset in range(0, len(left), sizeof(abi.Wc)):
            qp.device.completed(abi.Wc.from_buffer_copy(left, offset))
        qp.own.take_back()
        if error:
            qp.failed()

    def finish(self, number: int) -> None:
        """A request of the engine is done, or never will be."""
        assert self._engine is not None
        self._engine.finish(number)

    def release(self) -> None:
        """The queue pair is no more."""
        self._qp.domain.rings.forget(self)
        if self._engine is not None:
            self._engine.release()
