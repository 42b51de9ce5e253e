"""What pools do when those who asked do things from within the answer."""

from __future__ import annotations

import random

from sidestep.errors import SidestepError
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.pools import RdmaElement, RdmaPool
from sidestep.rdma.work import Access


def test_one_who_gives_back_at_once_takes_nothing_from_who_asked_as_well() -> None:
    fabric = Fabric(random.Random(0))
    domain = fabric.device("one").alloc_pd()
    pool = RdmaPool(domain)
    buffer = bytearray(1000)
    kept: list[RdmaElement] = []

    def give_back(found: RdmaElement | SidestepError) -> None:
        assert isinstance(found, RdmaElement)
        pool.put(found, keep=False)

    def keep(found: RdmaElement | SidestepError) -> None:
        assert isinstance(found, RdmaElement)
        kept.append(found)

    pool.get(buffer, Access.REMOTE_READ, give_back)
    pool.get(buffer, Access.REMOTE_READ, keep)
    fabric.run()
    [element] = kept
    assert element.region is not None
    assert element.region.valid
    pool.put(element, keep=False)
    assert (pool.regions, pool.bytes) == (0, 0)


def test_one_cancelled_from_within_the_answer_of_another_holds_nothing() -> None:
    fabric = Fabric(random.Random(0))
    pool = RdmaPool(fabric.device("one").alloc_pd())
    buffer = bytearray(1000)
    found: list[RdmaElement] = []

    def cancel_other(element: RdmaElement | SidestepError) -> None:
        assert isinstance(element, RdmaElement)
        other.cancel()
        found.append(element)

    pool.get(buffer, Access.REMOTE_READ, cancel_other)
    other = pool.get(buffer, Access.REMOTE_READ, found.append)  # type: ignore[arg-type]
    fabric.run()
    [element] = found
    pool.put(element, keep=False)
    assert (pool.regions, pool.bytes) == (0, 0)
