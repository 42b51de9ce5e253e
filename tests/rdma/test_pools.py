"""What pools do when those who asked do things from within the answer."""

from __future__ import annotations

import random

import pytest

from sidestep.errors import LimitReached, SidestepError
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


def test_one_who_does_not_want_to_wait_is_refused() -> None:
    fabric = Fabric(random.Random(0))
    pool = RdmaPool(fabric.device("one").alloc_pd(), regions_max=1)
    found: list[RdmaElement] = []
    pool.get(bytearray(10), Access.LOCAL_WRITE, found.append, wait=False)  # type: ignore[arg-type]
    fabric.run()
    with pytest.raises(LimitReached):
        pool.get(bytearray(10), Access.LOCAL_WRITE, found.append, wait=False)  # type: ignore[arg-type]
    assert pool.waiting == 0
    pool.put(found[0])
    pool.get(bytearray(20), Access.LOCAL_WRITE, found.append, wait=False)  # type: ignore[arg-type]
    fabric.run()
    assert len(found) == 2  # what nobody uses makes room


def test_a_buffer_is_forgotten_if_one_of_its_users_wants_it_so() -> None:
    fabric = Fabric(random.Random(0))
    pool = RdmaPool(fabric.device("one").alloc_pd())
    buffer = bytearray(1000)
    found: list[RdmaElement] = []
    for _ in range(2):
        pool.get(buffer, Access.REMOTE_READ, found.append)  # type: ignore[arg-type]
    fabric.run()
    pool.put(found[0], keep=False)
    assert found[1].region is not None
    assert found[1].region.valid
    pool.put(found[1])
    assert (pool.regions, pool.bytes) == (0, 0)


def test_a_closed_pool_tells_when_nothing_is_registered_any_more() -> None:
    fabric = Fabric(random.Random(0))
    domain = fabric.device("one").alloc_pd()
    told: list[str] = []
    empty = RdmaPool(domain)
    empty.close(lambda: told.append("empty"))
    assert told == ["empty"]
    pool = RdmaPool(domain)
    used: list[RdmaElement] = []
    pool.get(bytearray(10), Access.REMOTE_READ, used.append)  # type: ignore[arg-type]
    fabric.run()
    pool.get(bytearray(20), Access.REMOTE_READ, lambda found: None)  # under way
    pool.close(lambda: told.append("closed"))
    pool.put(used[0])
    assert told == ["empty"]
    fabric.run()
    assert told == ["empty", "closed"]
    domain.deallocate()


def test_who_shares_with_nobody_has_a_region_of_his_own() -> None:
    """Also while another one is being registered; what is remembered in the end serves again, and keys differ."""
    fabric = Fabric(random.Random(0))
    pool = RdmaPool(fabric.device("one").alloc_pd(), regions_max=3)
    buffer = bytearray(1000)
    found: list[RdmaElement] = []

    def ask() -> None:
        pool.get(buffer, Access.REMOTE_READ, found.append, shared=False)  # type: ignore[arg-type]

    ask()
    ask()
    fabric.run()
    ask()
    fabric.run()
    assert len({element.rkey for element in found}) == 3
    assert (pool.regions, pool.bytes) == (3, 3000)
    ask()
    fabric.run()
    assert (len(found), pool.waiting) == (3, 1)  # each counts
    for element in found[:3]:
        pool.put(element)
    fabric.run()
    assert (len(found), pool.waiting) == (4, 0)
    pool.put(found[3])
    assert (pool.regions, pool.bytes) == (1, 1000)  # remembered
    ask()
    assert found[4].region is not None
    pool.put(found[4], keep=False)
    assert (pool.regions, pool.bytes) == (0, 0)


def test_a_region_that_was_voided_while_in_use_counts_until_it_is_given_back() -> None:
    """The other end can void what it was shown; that makes no room for others."""
    fabric = Fabric(random.Random(0))
    pool = RdmaPool(fabric.device("one").alloc_pd(), regions_max=1)
    buffer = bytearray(1000)
    found: list[RdmaElement] = []
    pool.get(buffer, Access.REMOTE_READ, found.append)  # type: ignore[arg-type]
    fabric.run()
    assert found[0].region is not None
    found[0].region.invalidate()  # type: ignore[attr-defined]
    for _ in range(2):
        pool.get(buffer, Access.REMOTE_READ, found.append)  # type: ignore[arg-type]
        pool.get(bytearray(10), Access.REMOTE_READ, found.append)  # type: ignore[arg-type]
    fabric.run()
    assert (len(found), pool.regions) == (1, 1)
    pool.put(found[0])
    fabric.run()
    assert pool.regions == 1
