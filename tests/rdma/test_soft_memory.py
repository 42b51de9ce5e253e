"""Memory of software devices: keys in a secret order, reasons of refusals, the end of access."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from secrets import SystemRandom
from statistics import mean

import pytest

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.soft.keys import Keys
from sidestep.rdma.soft.memory import AccessRefusal, Domain, SoftRegion
from sidestep.rdma.soft.qp import SoftQueuePair
from sidestep.rdma.work import Access

READ, WRITE = Access.REMOTE_READ, Access.LOCAL_WRITE | Access.REMOTE_WRITE


def region(
    fabric: Fabric, access: Access = READ | WRITE, *, zero_based: bool = False
) -> tuple[SoftRegion, SoftQueuePair]:
    device = fabric.device(f"device{len(fabric.devices)}")
    domain = device.alloc_pd()
    queue = device.create_cq(8)
    made = domain.register(bytearray(range(16)), access, zero_based=zero_based)
    assert isinstance(made, SoftRegion)
    return made, made.domain.create_qp(queue, queue)


@pytest.mark.parametrize("seed", range(5))
def test_every_index_but_0_comes_once_in_a_round(seed: int) -> None:
    keys = Keys(Random(seed), index_bits=8)
    found = [keys.take(7) >> 8 for _ in range(255)]
    assert sorted(found) == list(range(1, 256))
    with pytest.raises(LimitReached):
        keys.take(7)


@pytest.mark.spec("RFC 5042 6.1.1")
def test_an_index_is_used_again_as_late_as_possible() -> None:
    keys = Keys(Random(1), index_bits=8)
    kept = {keys.take(7) >> 8 for _ in range(100)}
    seen: list[int] = []
    for _ in range(155 * 3):
        key = keys.take(7)
        seen.append(key >> 8)
        del keys._held[key >> 8]
    assert seen[:155] == seen[155:310] == seen[310:]  # once round all that are free, always in the same order
    assert len(set(seen[:155]) | kept) == 255


@pytest.mark.spec("RFC 5042 6.1.1")
def test_keys_are_scattered_and_hard_to_tell_from_others() -> None:
    assert Keys(SystemRandom()).take(7) >> 8 in range(1, 1 << 24)
    keys = Keys(Random(2))
    found = [keys.take(keys.part()) for _ in range(4096)]
    indices = [key >> 8 for key in found]
    assert 0 not in indices
    assert mean(indices) == pytest.approx(1 << 23, rel=0.05)
    steps = [(after - before) % (1 << 24) for before, after in pairwise(indices)]
    assert len(set(steps)) > 4000  # the distance of two tells nothing of the third
    assert len({key & 0xFF for key in found}) == 256


def test_equal_seeds_give_equal_keys_and_change_nothing_else() -> None:
    def run() -> list[tuple[int, int]]:
        fabric = Fabric(Random(7))
        domains = [fabric.device(name).alloc_pd() for name in "ab"]
        made = [domain.register(bytearray(100 + size), READ) for size in range(10) for domain in domains]
        made[3].rekey()
        assert fabric.rng.random() == Random(7).random()  # keys are drawn from a twin: delays do not depend on them
        return [(each.va, each.rkey) for each in made]

    assert run() == run()
    assert len({key for _, key in run()}) == 20


def test_the_consumer_may_choose_8_bits() -> None:
    domain = Fabric(Random(1)).device("a").alloc_pd()
    assert [domain.register(bytearray(8), READ, key_part=part).rkey & 0xFF for part in (0, 7, 255)] == [0, 7, 255]
    for part in (-1, 256):
        with pytest.raises(Misuse):
            domain.register(bytearray(8), READ, key_part=part)
        with pytest.raises(Misuse):
            domain.register_later(bytearray(8), READ, print, key_part=part)
    found: list[object] = []
    domain.register_later(bytearray(8), READ, found.append, key_part=9, zero_based=True)
    domain.device.fabric.run()  # type: ignore[attr-defined]
    (later,) = found
    assert isinstance(later, SoftRegion)
    assert (later.rkey & 0xFF, later.va) == (9, 0)


@pytest.mark.spec("RFC 5041 7.1")
@pytest.mark.spec("RFC 5040 7.2")
def test_the_first_check_that_fails_is_told() -> None:
    fabric = Fabric(Random(1))
    mine, qp = region(fabric, WRITE)
    domain = mine.domain
    other, _ = region(fabric)
    foreign = domain.device.alloc_pd().register(bytearray(16), READ)
    top, read, write = (1 << 64) - 4, int(READ), int(Access.REMOTE_WRITE)

    def ask(key: int, va: int, length: int, right: int) -> object:
        return domain.grant(key, va, length, right, qp)

    assert ask(0, 0, 0, read) == b""  # nothing is looked at for nothing
    for key in (0, mine.rkey ^ 1, mine.rkey ^ 0x100, other.rkey):
        assert ask(key, top, 8, read) is AccessRefusal.INVALID_STAG
    assert ask(foreign.rkey, top, 8, write) is AccessRefusal.NOT_ASSOCIATED
    assert ask(mine.rkey, top, 8, read) is AccessRefusal.ACCESS
    assert ask(mine.rkey, top, 4, write) is AccessRefusal.WRAP
    assert ask(mine.rkey, top, 3, write) is AccessRefusal.BOUNDS
    assert ask(mine.rkey, mine.va - 1, 2, write) is AccessRefusal.BOUNDS
    assert ask(mine.rkey, mine.va + 15, 2, write) is AccessRefusal.BOUNDS
    assert ask(mine.rkey, mine.va + 15, 1, write) == b"\x0f"
    assert ask(mine.rkey, mine.va, 16, write) == bytes(range(16))
    mine.deregister()
    assert ask(mine.rkey, mine.va, 16, write) is AccessRefusal.INVALID_STAG


@pytest.mark.spec("RFC 5041 7.1")
def test_a_zero_based_region_begins_at_0() -> None:
    mine, qp = region(Fabric(Random(1)), zero_based=True)
    assert mine.va == 0

    def ask(va: int, length: int) -> object:
        return mine.domain.grant(mine.rkey, va, length, int(READ), qp)

    assert ask(0, 16) == bytes(range(16))
    assert ask(1, 16) is AccessRefusal.BOUNDS
    mine.rekey()
    assert ask(3, 1) == b"\x03"


@pytest.mark.spec("RFC 5042 6.2.2")
def test_the_device_is_told_before_the_end_of_access_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric(Random(1))
    mine, _ = region(fabric)
    device = fabric.devices["device0"]
    told: list[tuple[SoftRegion, object]] = []
    monkeypatch.setattr(
        type(device), "access_ended", lambda self, one: told.append((one, self.keys.get(one.rkey))), raising=True
    )
    for end in (mine.invalidate, mine.rekey, mine.rekey, mine.deregister):
        end()
    assert told == [(mine, None)] * 3  # not when it was voided before; the key was void by then


def test_a_domain_that_is_gone_registers_nothing() -> None:
    fabric = Fabric(Random(1))
    device = fabric.device("a")
    domain = device.alloc_pd()
    assert isinstance(domain, Domain)
    found: list[object] = []
    domain.register_later(bytearray(8), READ, found.append)
    domain.deallocate()
    domain.deallocate()
    fabric.run()
    assert [type(each).__name__ for each in found] == ["Unavailable"]
    assert (len(device.keys), device.domains) == (0, [])
    with pytest.raises(Misuse):
        domain.register(bytearray(8), READ)
