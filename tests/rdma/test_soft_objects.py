"""Windows and shared receive queues of software devices: bounds, reasons, what is told, and what is left."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.loopback import Fabric, LoopbackDevice
from sidestep.rdma.soft.keys import Memory
from sidestep.rdma.soft.memory import AccessRefusal, Domain
from sidestep.rdma.soft.qp import SoftQueuePair
from sidestep.rdma.verbs import AsyncEvent, DeviceAttributes, EventKind, MemoryRegion
from sidestep.rdma.work import Access, BindWindow, LocalInvalidate, Receive, RKey, Status

ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.WINDOW_BIND
READ = int(Access.REMOTE_READ)


def device(attributes: DeviceAttributes | None = None) -> LoopbackDevice:
    return Fabric(Random(1)).device("a", attributes)


def queue_pair(domain: Domain) -> SoftQueuePair:
    assert isinstance(domain.device, LoopbackDevice)
    queue = domain.device.create_cq(8)
    return domain.create_qp(queue, queue)


def bind(qp: SoftQueuePair, region: MemoryRegion) -> BindWindow:
    window = qp.domain.alloc_window()
    request = BindWindow(wr_id=1, window=window, region=region, access=Access.REMOTE_READ, offset=4, length=8)
    assert qp.begin(request) is Status.SUCCESS
    return request


def test_what_is_not_offered_is_misuse() -> None:
    nothing = DeviceAttributes(windows_max=0, shared_receive_queues_max=0, zero_based=False, key_part_chosen=False)
    domain = device(nothing).alloc_pd()
    foreign = device().alloc_pd().alloc_window()
    region = domain.register(bytearray(8), ALL)
    request = BindWindow(wr_id=1, window=foreign, region=region, access=Access.REMOTE_READ, length=8)
    qp = queue_pair(domain)
    qp.ready_to_receive()  # type: ignore[attr-defined]
    qp.ready_to_send()
    calls: tuple[Callable[[], object], ...] = (
        domain.alloc_window,
        lambda: domain.create_srq(1),
        lambda: domain.register(bytearray(8), ALL, zero_based=True),
        lambda: domain.register_later(bytearray(8), ALL, print, zero_based=True),
        lambda: domain.register(bytearray(8), ALL, key_part=1),
        lambda: qp.post_send(request),
    )
    for call in calls:
        with pytest.raises(Misuse):
            call()
    assert len(domain.device.keys) == 1


def test_each_kind_has_a_bound_of_its_own() -> None:
    bounds = DeviceAttributes(
        windows_max=2, regions_max=2, shared_receive_queues_max=2, queue_pairs_max=2, region_bytes_max=8
    )
    domain = device(bounds).alloc_pd()
    with pytest.raises(LimitReached):
        domain.register(bytearray(9), ALL)
    regions = [domain.register(bytearray(8), ALL) for _ in range(2)]
    windows = [domain.alloc_window() for _ in range(2)]
    queues = [domain.create_srq(1) for _ in range(2)]
    pairs = [queue_pair(domain) for _ in range(2)]
    makers: tuple[Callable[[], object], ...] = (
        lambda: domain.register(bytearray(8), ALL),
        domain.alloc_window,
        lambda: domain.create_srq(1),
        lambda: queue_pair(domain),
    )
    ends = (regions[0].deregister, windows[0].deallocate, queues[0].destroy, pairs[0].destroy)
    for make, end in zip(makers, ends, strict=True):
        with pytest.raises(LimitReached):
            make()
        end()
        end()
        make()
        with pytest.raises(LimitReached):
            make()


@pytest.mark.spec("RFC 5041 7.1")
def test_a_window_is_granted_like_a_region() -> None:
    domain = device().alloc_pd()
    own, other = queue_pair(domain), queue_pair(domain)
    region = domain.register(bytearray(range(16)), ALL)
    window = bind(own, region).window

    def ask(qp: SoftQueuePair, va: int, length: int, right: int = READ) -> object:
        return domain.grant(window.rkey, region.va + va, length, right, qp)

    assert ask(own, 4, 8) == bytes(range(4, 12))
    assert ask(other, 4, 8) is AccessRefusal.NOT_ASSOCIATED
    assert ask(own, 4, 8, int(Access.REMOTE_WRITE)) is AccessRefusal.ACCESS
    assert ask(own, 4, 9) is AccessRefusal.BOUNDS
    assert ask(own, 0, 4) is AccessRefusal.BOUNDS
    assert own.begin(LocalInvalidate(1, window.rkey)) is Status.SUCCESS
    assert ask(own, 4, 8) is AccessRefusal.INVALID_STAG


@pytest.mark.spec("RFC 5040 5.3")
def test_why_something_is_not_voided_is_told() -> None:
    one = device()
    domain = one.alloc_pd()
    own, other = queue_pair(domain), queue_pair(domain)
    closed = domain.create_qp(own.send_cq, own.send_cq, remote_access=Access.LOCAL_READ)
    used, local = domain.register(bytearray(16), ALL), domain.register(bytearray(16), Access.LOCAL_WRITE)
    foreign = one.alloc_pd().register(bytearray(16), ALL)
    window = bind(own, used).window
    void = domain.alloc_window()
    here = {
        (0, own): AccessRefusal.INVALID_STAG,
        (used.rkey ^ 1, own): AccessRefusal.INVALID_STAG,
        (foreign.rkey, own): AccessRefusal.NOT_ASSOCIATED,
        (window.rkey, other): AccessRefusal.NOT_ASSOCIATED,
        (used.rkey, own): AccessRefusal.IN_USE,
        (window.rkey, own): window,
        (void.rkey, other): void,
        (local.rkey, own): local,
    }
    assert {(key, qp): domain.may_invalidate(key, qp) for key, qp in here} == here
    there = here | {(local.rkey, own): AccessRefusal.ACCESS, (void.rkey, closed): AccessRefusal.ACCESS}
    assert {(key, qp): domain.may_be_invalidated(key, qp) for key, qp in there} == there


@pytest.mark.spec("RFC 5042 6.2.2")
def test_the_device_is_told_that_a_window_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    one = device()
    domain = one.alloc_pd()
    qp = queue_pair(domain)
    region = domain.register(bytearray(b"0123456789abcdef"), ALL)
    told: list[tuple[bytes, Memory | None]] = []
    monkeypatch.setattr(
        LoopbackDevice, "access_ended", lambda self, one: told.append((bytes(one.view), self.keys.get(one.rkey)))
    )
    request = bind(qp, region)
    qp.begin(LocalInvalidate(1, request.window.rkey))
    assert qp.begin(request) is Status.SUCCESS
    request.window.deallocate()
    region.deregister()
    assert told == [(b"456789ab", None), (b"456789ab", None), (b"0123456789abcdef", None)]


def test_a_device_that_is_closed_holds_nothing() -> None:
    one = device()
    domain, other = one.alloc_pd(), one.alloc_pd()
    srq = other.create_srq(4)
    srq.post_recv(Receive(1, ()))
    queue = one.create_cq(8)
    qp = domain.create_qp(queue, queue, srq=srq)
    bind(qp, domain.register(bytearray(16), ALL))
    domain.alloc_window()
    one.close()
    one.close()
    assert (len(one.keys), one.region_count, one.window_count, one.srq_count, srq.receives_posted) == (0, 0, 0, 0, 0)
    calls: tuple[Callable[[], object], ...] = (
        domain.alloc_window,
        lambda: domain.create_srq(1),
        lambda: domain.register(bytearray(8), ALL),
    )
    for call in calls:
        with pytest.raises(Misuse):
            call()


def test_events_of_a_shared_queue_go_to_the_device_unless_it_has_a_handler() -> None:
    one = device()
    told: list[AsyncEvent] = []
    one.on_event = told.append
    srq = one.alloc_pd().create_srq(4)
    srq.arm(1)
    one.fabric.run()
    assert [(event.kind, event.source) for event in told] == [(EventKind.SRQ_LIMIT_REACHED, srq)]


def test_another_part_of_the_key_even_if_the_same_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    one = device()
    qp = queue_pair(one.alloc_pd())
    region = qp.domain.register(bytearray(16), ALL)
    monkeypatch.setattr(one.keys, "part", lambda chosen=None: 7)
    request = bind(qp, region)
    keys = {request.window.rkey}
    for _ in range(2):
        before = request.window.rkey
        qp.begin(LocalInvalidate(1, before))
        qp.begin(request)
        assert request.window.rkey != before
        keys.add(request.window.rkey)
    assert {RKey(key & 0xFFFF_FF00) for key in keys} == {request.window.key(0)}
