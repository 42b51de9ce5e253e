"""Random lives of regions and windows against a plain model: after each step, every key that ever was is tried."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sidestep.errors import Misuse
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.soft.keys import Memory
from sidestep.rdma.soft.memory import AccessRefusal, Domain, SoftRegion
from sidestep.rdma.soft.qp import SoftQueuePair
from sidestep.rdma.soft.windows import SoftWindow
from sidestep.rdma.work import Access, BindWindow, LocalInvalidate, RKey, Status

READ, WRITE, LOCAL, BIND = Access.REMOTE_READ, Access.REMOTE_WRITE, Access.LOCAL_WRITE, Access.WINDOW_BIND
TOP = 1 << 64
# What can be bound is drawn more often than what cannot.
_region_access = st.sampled_from(
    [LOCAL | BIND, LOCAL | WRITE | READ | BIND, BIND, READ | BIND, LOCAL, READ, LOCAL | WRITE, LOCAL | WRITE | READ]
)
_window_access = st.sampled_from([READ | WRITE, READ, WRITE, LOCAL, Access(0), READ | LOCAL])
_mostly_false = st.sampled_from([False, False, False, True])
_part = st.sampled_from([(0, 8), (4, 8), (8, 8), (0, 16), (9, 8), (8, 9), (-1, 4), (4, 0), (16, 1), (3, -1)])
_any = st.integers(0, 99)
_QP = (0, 1, 0, 1, 2)


@dataclass
class Opened:
    """What one key opens, as the model sees it."""

    domain: Domain
    qp: SoftQueuePair | None
    rights: int
    va: int
    content: bytes

    def ask(self, domain: Domain, qp: SoftQueuePair, va: int, length: int, right: int) -> bytes | AccessRefusal:
        if self.domain is not domain or self.qp not in (None, qp):
            return AccessRefusal.NOT_ASSOCIATED
        if not self.rights & right:
            return AccessRefusal.ACCESS
        if va + length >= TOP:
            return AccessRefusal.WRAP
        if va < self.va or va + length > self.va + len(self.content):
            return AccessRefusal.BOUNDS
        return self.content[va - self.va : va - self.va + length]


class Lives(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 99))
    def make(self, seed: int) -> None:
        device = Fabric(Random(seed)).device("a")
        queue = device.create_cq(8)
        domains = [device.alloc_pd(), device.alloc_pd()]
        self.rng = Random(seed)
        self.keys = device.keys
        self.domains = domains
        self.qps = [domain.create_qp(queue, queue) for domain in (domains[0], domains[0], domains[1])]
        self.regions: list[SoftRegion] = []
        self.windows: list[SoftWindow] = []
        self.bound: dict[SoftWindow, SoftRegion] = {}
        self.opened: dict[int, Opened] = {}  # what is valid, by key
        self.ever: dict[int, int] = {0: 0}  # every key that was, and an address that it had
        for which in range(2):  # so that most examples have windows
            self.register(which, LOCAL | WRITE | READ | BIND, zero_based=False)
            self.alloc(which)

    def open(self, memory: SoftRegion | SoftWindow, qp: SoftQueuePair | None, content: bytes) -> None:
        assert memory.rkey not in self.opened
        self.opened[memory.rkey] = Opened(memory.domain, qp, int(memory.access), memory.va, content)
        self.ever[memory.rkey] = memory.va

    def of(self, region: SoftRegion) -> list[SoftWindow]:
        return [window for window, bound in self.bound.items() if bound is region]

    @rule(which=_any, access=_region_access, zero_based=_mostly_false)
    def register(self, which: int, access: Access, zero_based: bool) -> None:
        domain = self.domains[which % 5 == 4]
        memory = bytearray(self.rng.randbytes(16))
        region = domain.register(memory, access, zero_based=zero_based, key_part=which if which % 3 == 0 else None)
        assert isinstance(region, SoftRegion)
        self.regions.append(region)
        self.open(region, None, bytes(memory))

    @rule(which=_any, rekey=st.booleans())
    def end(self, which: int, rekey: bool) -> None:
        if not self.regions:
            return
        region = self.regions[which % len(self.regions)]
        call = region.rekey if rekey else region.deregister
        if self.of(region):
            with pytest.raises(Misuse):
                call()
            return
        self.opened.pop(region.rkey, None)
        call()
        if rekey:
            self.open(region, None, bytes(region.view))
        else:
            self.regions.remove(region)

    @rule(which=_any)
    def alloc(self, which: int) -> None:
        window = self.domains[which % 5 == 4].alloc_window()
        assert isinstance(window, SoftWindow)
        self.windows.append(window)
        self.ever[window.rkey] = 0

    @rule(
        whose=_any,
        window=_any,
        region=_any,
        access=_window_access,
        part=_part,
        zero_based=_mostly_false,
    )
    def bind(
        self, whose: int, window: int, region: int, access: Access, part: tuple[int, int], zero_based: bool
    ) -> None:
        if not self.windows or not self.regions:
            return
        qp = self.qps[_QP[whose % 5]]
        opens, opened = self.windows[window % len(self.windows)], self.regions[region % len(self.regions)]
        offset, length = part
        request = BindWindow(
            wr_id=1,
            window=opens,
            region=opened,
            access=access,
            offset=offset,
            length=length,
            zero_based=zero_based,
            key_part=whose if whose % 2 else None,
        )
        may = (
            opens not in self.bound
            and opens.domain is opened.domain is qp.domain
            and opened.rkey in self.opened
            and bool(opened.access & BIND)
            and not opened.zero_based
            and access in (READ, WRITE, READ | WRITE)
            and not (access & WRITE and not opened.access & LOCAL)
            and 0 <= offset < offset + length <= 16
        )
        assert qp.begin(request) is (Status.SUCCESS if may else Status.WINDOW_BIND_ERROR)
        if may:
            assert opens.va == (0 if zero_based else opened.va + offset)
            self.bound[opens] = opened
            self.open(opens, qp, bytes(opened.view[offset : offset + length]))

    @rule(whose=_any, which=_any, remote=st.booleans())
    def invalidate(self, whose: int, which: int, remote: bool) -> None:
        qp = self.qps[_QP[whose % 5]]
        key = list(self.ever)[which % len(self.ever)]
        there: list[Memory] = [*self.regions, *self.windows]
        found = next((each for each in there if each.rkey == key), None)
        may = (
            found is not None
            and found.domain is qp.domain
            and not (isinstance(found, SoftRegion) and self.of(found))
            and not (isinstance(found, SoftWindow) and found in self.bound and self.opened[key].qp is not qp)
        )
        if remote:
            may = may and found is not None and (isinstance(found, SoftWindow) or bool(found.access & (READ | WRITE)))
            memory = qp.domain.may_be_invalidated(key, qp)
            assert (memory is found) if may else isinstance(memory, AccessRefusal)
            if not isinstance(memory, AccessRefusal):
                memory.invalidate()
        else:
            status = qp.begin(LocalInvalidate(1, RKey(key)))
            assert status is (Status.SUCCESS if may else Status.LOCAL_PROTECTION_ERROR)
        if may:
            self.opened.pop(key, None)
            if isinstance(found, SoftWindow):
                self.bound.pop(found, None)

    @rule(which=_any)
    def give_back(self, which: int) -> None:
        if self.windows:
            window = self.windows.pop(which % len(self.windows))
            if self.bound.pop(window, None):
                del self.opened[window.rkey]
            window.deallocate()

    @invariant()
    def every_key_opens_what_the_model_says(self) -> None:
        if not hasattr(self, "keys"):
            return
        assert len(self.keys) == len(self.regions) + len(self.windows)
        for key, va in self.ever.items():
            opened = self.opened.get(key)
            for at, length in ((va, 1), (va, 16), (va - 1, 1), (va + 15, 2), (va + 3, 4), (TOP - 2, 1), (TOP - 2, 2)):
                for right in (int(READ), int(WRITE)):
                    for qp in self.qps:
                        got = qp.domain.grant(key, at, length, right, qp)
                        want = opened.ask(qp.domain, qp, at, length, right) if opened else AccessRefusal.INVALID_STAG
                        assert got == want, (hex(key), at - va, length, right, got, want)

    def teardown(self) -> None:
        if not hasattr(self, "keys"):
            return
        for window in self.windows:
            window.deallocate()
        for region in self.regions:
            region.deregister()
        for qp in self.qps:
            qp.destroy()
        for domain in self.domains:
            domain.deallocate()
        assert len(self.keys) == 0


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLives = pytest.mark.slow(TestLives)
