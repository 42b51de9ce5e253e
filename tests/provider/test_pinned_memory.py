"""What devices of the kernel pin of a provider's memory: little for each connection, and no more than is allowed.

The devices are played: see `fake_device`.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import IPv4Address
from mmap import PAGESIZE
from typing import Final

import pytest
from fake_device import FakeVerbs, fake_verbs
from remote_world import World, all_of, settle

from sidestep import limits
from sidestep.errors import LimitReached
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.rdma.kernel.pinned import PinnedMemory
from sidestep.remote.link import SdpLink
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEventKind, StreamEvent
from sidestep.sdp.settings import Addresses

MIB: Final = 1 << 20
THOUSAND_MAX: Final = 64 * MIB  # bytes that a thousand connections may pin at one end
FEW, MORE = 4, 24
EACH: Final = 13 * PAGESIZE  # bytes that a connection pins
DEVICE: Final = limits.SDP_SPARE_BUFFERS * limits.SDP_CHECKED_MESSAGE_MAX  # and a device with none
MINE, YOURS = 1000, 1001
DESCRIPTORS: Final = 10_000  # a queue pair of a device that is played has a pipe


@pytest.fixture
def device() -> Iterator[FakeVerbs]:
    """Its knobs."""
    found = fake_verbs()
    yield found
    found.hold()


def used(world: World) -> None:
    """One more connection, over which bytes have gone both ways, in Python and by engines if there are any."""
    a, b, one, two = world.pair()
    for _ in range(2):
        for sender, receiver in ((a, b), (b, a)):
            sender.send(b"x" * 3000)
            world.turns(lambda receiver=receiver: receiver.end.avail == 3000)  # type: ignore[misc]
            assert receiver.receive() == b"x" * 3000
            receiver.hint()
        world.rest()
        one.reclaim()
        two.reclaim()


@pytest.mark.least("ci")
@pytest.mark.slow
@pytest.mark.parametrize("engine", [True, False])
def test_a_thousand_connections_pin_little(closing: ExitStack, device: FakeVerbs, *, engine: bool) -> None:
    """Each as many pages as the next, beside what all of a device share."""
    before = device.count("pages")
    world = World(closing, engines=(engine, engine), wire="verbs", relays_max=MORE)
    pinned = []
    for connections in (FEW, MORE - FEW):
        for _ in range(connections):
            used(world)
        pinned.append((device.count("pages") - before) // 2)  # two providers
    each = (pinned[1] - pinned[0]) / (MORE - FEW)
    assert (pinned[1] + (1000 - MORE) * each) * PAGESIZE <= THOUSAND_MAX
    assert not world.one.faults + world.two.faults


@pytest.mark.least("ci")
@pytest.mark.slow
def test_a_thousand_connections_are_made(closing: ExitStack, device: FakeVerbs) -> None:
    """All of them, at rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < DESCRIPTORS:
        pytest.skip(f"{DESCRIPTORS} descriptors are needed, and {hard} allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, DESCRIPTORS), hard))
    closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    world = World(closing, wire="verbs")
    caller = Caller(world)
    for made in range(100, 1001, 100):
        for _ in range(100):
            caller.call(MINE)
        world.turns(lambda made=made: len(caller.told) == 2 * made)  # type: ignore[misc]
    assert {kind for _, kind in caller.told} == {SdpEventKind.ESTABLISHED}
    for host in (world.one, world.two):
        assert host.device.counters()["queue_pairs"] == 1000
        assert host.device.counters()["pinned_bytes"] + limits.VERBS_ENGINE_SLAB <= THOUSAND_MAX


class Caller:
    """Asks for connections with the other host, whose answers are kept."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.told: list[tuple[SdpStream, SdpEventKind]] = []
        self.taken: list[SdpStream] = []
        stack = world.two.stack
        self.uid = MINE  # whose the other end is
        self.listener = stack.take_requests(
            0,
            lambda request: stack.serve(
                request, self._accept, 0, uid=self.uid, why_not=lambda why: b"why-not:" + why.message.encode()
            ),
        )

    def _accept(self, stream: SdpStream) -> None:
        stream.tell = self._tell
        self.taken.append(stream)

    def _tell(self, stream: SdpStream, event: StreamEvent) -> None:
        if (kind := getattr(event, "kind", None)) is not None:
            self.told.append((stream, kind))

    def call(self, uid: int) -> SdpStream:
        """Raises LimitReached."""
        one, two = (IPv4Address(host.device.address) for host in (self.world.one, self.world.two))
        addresses = Addresses(one, 1, two, self.listener.service_id & 0xFFFF)
        return self.world.one.stack.connect(str(two), addresses, self._tell, uid=uid)

    def answer(self, stream: SdpStream) -> SdpEventKind:
        """How that one began."""
        self.world.turns(lambda: any(one is stream for one, _ in self.told))
        return next(kind for one, kind in self.told if one is stream)


def test_a_user_has_a_share_of_what_may_be_pinned(closing: ExitStack, device: FakeVerbs) -> None:
    """His connections beyond it are refused, another's are not, and what he gives back is his again."""
    pinned = PinnedMemory(DEVICE + 8 * EACH, lambda _whole, _uid: 3 * EACH)
    world = World(closing, wire="verbs", pinned=(pinned, None))
    caller = Caller(world)
    mine = [caller.call(MINE) for _ in range(3)]
    with pytest.raises(LimitReached, match=f"uid {MINE}") as caught:
        caller.call(MINE)
    assert "--remote-pinned" in caught.value.remedy
    yours = [caller.call(YOURS) for _ in range(3)]
    assert {caller.answer(stream) for stream in mine + yours} == {SdpEventKind.ESTABLISHED}
    assert pinned.bytes == DEVICE + 6 * EACH
    assert world.one.device.counters()["pinned_bytes"] == pinned.bytes
    assert world.one.device.counters()["registration_refused{bound}"] == 1
    mine[0].abort()
    world.turns(lambda: pinned.bytes == DEVICE + 5 * EACH)
    assert caller.answer(caller.call(MINE)) is SdpEventKind.ESTABLISHED


def test_all_together_have_no_more_than_may_be_pinned(closing: ExitStack, device: FakeVerbs) -> None:
    """Nothing is left behind by the connections that were refused: no queue pair, and no memory."""
    pinned = PinnedMemory(DEVICE + 2 * EACH)
    world = World(closing, wire="verbs", pinned=(pinned, None))
    caller = Caller(world)
    kept = [caller.call(uid) for uid in (MINE, YOURS)]
    before = world.one.device.counters()
    for uid in (MINE, YOURS, 0):
        with pytest.raises(LimitReached, match="pinned"):
            caller.call(uid)
    after = world.one.device.counters()
    assert after.pop("registration_refused{bound}") == 3
    assert after == before
    assert {caller.answer(stream) for stream in kept} == {SdpEventKind.ESTABLISHED}


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EAGAIN], ids=lambda error: errno.errorcode[error])
def test_what_the_kernel_refuses_to_pin_is_refused_alike(closing: ExitStack, device: FakeVerbs, error: int) -> None:
    """As where RLIMIT_MEMLOCK is small."""
    world = World(closing, wire="verbs")
    caller = Caller(world)
    before = world.one.device.counters()
    device.fail("reg_mr", error)
    with pytest.raises(LimitReached, match="could not be registered") as caught:
        caller.call(MINE)
    assert "sidestep doctor" in caught.value.remedy
    after = world.one.device.counters()
    assert after.pop("registration_refused{kernel}") == 1
    assert after == before
    assert caller.answer(caller.call(MINE)) is SdpEventKind.ESTABLISHED


def test_the_accepting_end_says_why_it_refuses(closing: ExitStack, device: FakeVerbs) -> None:
    """Before it has told its own program of the connection."""
    pinned = PinnedMemory(DEVICE + 4 * EACH, lambda _whole, _uid: EACH)
    world = World(closing, wire="verbs", pinned=(None, pinned))
    caller = Caller(world)
    assert caller.answer(caller.call(MINE)) is SdpEventKind.ESTABLISHED
    refused = caller.call(MINE)
    assert caller.answer(refused) is SdpEventKind.BROKEN
    assert refused.refused_with.startswith(f"why-not:RDMA devices have pinned {EACH} bytes for uid {MINE}".encode())
    assert len(caller.taken) == 1
    caller.uid = YOURS
    assert caller.answer(caller.call(MINE)) is SdpEventKind.ESTABLISHED


@pytest.mark.parametrize("engine", [True, False])
def test_buffers_do_not_grow_beyond_what_may_be_pinned(closing: ExitStack, device: FakeVerbs, *, engine: bool) -> None:
    """The other end asks for larger ones in vain, and all bytes come in small ones."""
    shared = limits.VERBS_INLINE_SLOTS * limits.VERBS_INLINE_MAX + engine * limits.VERBS_ENGINE_SLAB
    pinned = PinnedMemory(DEVICE + EACH + shared + (256 << 10))
    world = World(closing, engines=(engine, engine), wire="verbs", pinned=(None, pinned))
    a, b, _, two = world.pair(rings=(65536, 65536))
    sent, got = b"".join(bytes([n]) * 30_000 for n in range(20)), b""
    left = memoryview(sent)
    while len(got) < len(sent):
        left = left[a.send(bytes(left[:60_000])) :]
        world.turn()
        got += b.receive()
    assert got == sent
    assert isinstance(two.link, SdpLink)
    assert two.link.stream.connection._resize.local == limits.REMOTE_RECEIVE_SIZE
    assert world.two.device.counters()["registration_refused{bound}"] >= 1
    assert not world.one.faults + world.two.faults


def test_without_memory_to_send_from_a_connection_goes_back(closing: ExitStack, device: FakeVerbs) -> None:
    """A header has to be copied, and the kernel registers no more: every byte is accounted for."""
    world = World(closing, wire="verbs")
    a, b, *_ = world.pair()
    device.fail("reg_mr", errno.ENOMEM, 1000)
    sent = a.send(b"x" * 3000)
    try:
        world.turns(lambda: bool(world.one.lost and world.two.lost))
    finally:
        device.fail("reg_mr", 0, 0)
    (one,), (two,) = world.one.lost, world.two.lost
    assert isinstance(one, RemoteRelay)
    assert isinstance(two, RemoteRelay)
    settle(one, two)
    world.rest()
    all_of(a, b, sent)
    all_of(b, a, 0)
    assert not world.one.faults + world.two.faults
