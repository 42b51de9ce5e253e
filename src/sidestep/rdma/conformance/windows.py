"""Checks of memory windows: what they open, to whom, how they are bound, voided and given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidestep.errors import Misuse
from sidestep.rdma.conformance.harness import ALL, LOCAL, READ, Side, check
from sidestep.rdma.conformance.needs import WINDOWS, ZERO_BASED
from sidestep.rdma.verbs import EventKind, QpState
from sidestep.rdma.work import Access, BindWindow, LocalInvalidate, Opcode, RdmaRead, RdmaWrite, Send, Status

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench
    from sidestep.rdma.verbs import MemoryRegion, MemoryWindow

_WRITE = Access.REMOTE_WRITE
_BOTH = READ | _WRITE
_OPEN = LOCAL | Access.WINDOW_BIND  # closed to the other end but for windows


def _request(side: Side, region: MemoryRegion, window: MemoryWindow | None = None, **fields: Any) -> BindWindow:
    """A bind of 8 bytes of a region for reading, unless the fields say otherwise."""
    wanted = {"access": READ, "length": 8} | fields
    return BindWindow(wr_id=1, window=window or side.domain.alloc_window(), region=region, **wanted)


def _bind(
    bench: Bench, side: Side, region: MemoryRegion, access: Access = _BOTH, offset: int = 8, length: int = 8, *,
    zero_based: bool = False, window: MemoryWindow | None = None,
) -> MemoryWindow:  # fmt: skip
    """A window that is bound to a part of a region of 32 bytes."""
    window = window or side.domain.alloc_window()
    before = len(side.sent)
    request = BindWindow(
        wr_id=50, window=window, region=region, access=access, offset=offset, length=length, zero_based=zero_based
    )
    side.qp.post_send(request)
    bench.eventually(lambda: len(side.sent) > before, "the bind completes")
    done = side.sent[-1]
    bench.equal((done.wr_id, done.opcode, done.status), (50, Opcode.BIND_WINDOW, Status.SUCCESS), "it succeeds")
    bench.expect(window.valid, "the window says that it is bound")
    return window


def _bind_fails(bench: Bench, passive: Side, request: BindWindow, rule: str) -> None:
    """A bind fails and ends the queue pair; the window is as it was before."""
    window = request.window
    before = (window.valid, window.rkey)
    passive.qp.post_send(request)
    bench.eventually(lambda: passive.qp.state is QpState.ERROR, f"{rule}: the queue pair is in ERROR")
    told = [(each.opcode, each.status) for each in passive.sent if each.wr_id == request.wr_id]
    bench.equal(told, [(Opcode.BIND_WINDOW, Status.WINDOW_BIND_ERROR)], f"{rule}: the request tells it")
    bench.equal((window.valid, window.rkey), before, f"{rule}: the window is as it was")


@check("iWARP verbs draft 7.10", needs=(WINDOWS,))
def window_opens_a_part_of_a_region(bench: Bench) -> None:
    """A window opens its part of a region to the other end, although the region itself is open to nobody."""
    sides = active, passive = bench.pair()
    region = passive.memory(b"." * 32, _OPEN)
    window = _bind(bench, passive, region)
    bench.equal((window.length, window.access), (8, _BOTH), "the window tells what it opens")
    word, sink = active.memory(b"windowed"), active.memory(8)
    active.qp.post_send(RdmaWrite(1, (word.view,), window.va, window.rkey))
    active.qp.post_send(RdmaRead(2, (sink.view,), window.va, window.rkey, fence=True))
    bench.eventually(lambda: len(active.sent) == 2, "Write and Read complete")
    bench.all_ok(active, "they succeed")
    bench.equal(bytes(region.view), b"........windowed................", "the bytes are where the window is")
    bench.equal(bytes(sink.view), b"windowed", "and are read from there")
    bench.write_refused(region, sides, region.va + 8, region.rkey, "the key of the region")


@check("RFC 5041 7.1; iWARP verbs draft 7.10.6", needs=(WINDOWS,))
def window_has_bounds(bench: Bench) -> None:
    """What begins before a window or ends behind it is refused, though it lies in the region."""
    for what, offset in (("a byte before", -1), ("across the end", 5), ("behind the end", 8)):
        sides = bench.pair()
        region = sides[1].memory(b"." * 32, _OPEN)
        window = _bind(bench, sides[1], region)
        bench.write_refused(region, sides, window.va + offset, window.rkey, f"a Write {what}")
        sides = bench.pair()
        window = _bind(bench, sides[1], sides[1].memory(b"." * 32, _OPEN))
        bench.read_refused(sides, window.va + offset, window.rkey, f"a Read {what}")


@check("iWARP verbs draft 7.10.2", needs=(WINDOWS,))
def window_has_rights_of_its_own(bench: Bench) -> None:
    """A window for reading is not written and one for writing not read, whatever its region allows."""
    sides = bench.pair()
    region = sides[1].memory(b"." * 32, ALL | Access.WINDOW_BIND)
    window = _bind(bench, sides[1], region, READ)
    bench.write_refused(region, sides, window.va, window.rkey, "a Write into a window for reading")
    sides = bench.pair()
    window = _bind(bench, sides[1], sides[1].memory(b"." * 32, ALL | Access.WINDOW_BIND), _WRITE)
    bench.read_refused(sides, window.va, window.rkey, "a Read of a window for writing")


@check("iWARP verbs draft 7.10; RFC 5040 8.1.1", needs=(WINDOWS,))
def window_is_good_on_its_queue_pair_only(bench: Bench) -> None:
    """The key of a window is refused on another queue pair of the same domain, and that one alone ends."""
    first = bench.pair()
    other = bench.pair(passive=bench.side(bench.passive, domain=first[1].domain))
    region = first[1].memory(b"." * 32, _OPEN)
    window = _bind(bench, first[1], region)
    bench.write_refused(region, other, window.va, window.rkey, "a window of another queue pair")
    bench.write(first[0], b"mine", window.va, window.rkey)
    bench.equal(bytes(region.view[8:12]), b"mine", "and is placed")


@check("iWARP verbs draft 8.2.2.2", needs=(WINDOWS,))
def bind_comes_before_what_is_behind_it(bench: Bench) -> None:
    """A window is open when a message posted behind its bind arrives, and requests around it complete in order."""
    active, passive = bench.pair()
    region = passive.memory(b"." * 32, _OPEN)
    far = active.memory(bytes(8), ALL)
    for turn in range(10):
        room = active.post_recv(turn, 8)
        window = passive.domain.alloc_window()
        key = window.key(turn)
        bind = BindWindow(
            wr_id=2, window=window, region=region, access=_WRITE, offset=8, length=8, key_part=turn,
            signaled=turn % 2 == 0,
        )  # fmt: skip
        passive.qp.post_send(RdmaRead(1, (passive.memory(8).view,), far.va, far.rkey))
        passive.qp.post_send(bind)
        passive.qp.post_send(Send(3, (key.to_bytes(4, "big"),)))
        bench.eventually(lambda wanted=turn + 1: len(active.received) == wanted, "the message arrives")  # type: ignore[misc]
        told = int.from_bytes(room.view[:4], "big")
        bench.write(active, b"turn %03d" % turn, region.va + 8, key)
        bench.equal((told, bytes(region.view[8:16])), (key, b"turn %03d" % turn), "the window was open by then")
        window.deallocate()
    bench.all_ok(passive, "all succeed")
    bench.equal([each.wr_id for each in passive.sent], [1, 2, 3, 1, 3] * 5, "completions come in the order of posting")


@check("iWARP verbs draft 7.10.2", needs=(WINDOWS,))
def bind_needs_a_region_open_to_windows(bench: Bench) -> None:
    """A window is not bound to a region without WINDOW_BIND, though that one is open to the other end itself."""
    _, passive = bench.pair()
    _bind_fails(bench, passive, _request(passive, passive.memory(32, ALL)), "a region not open to windows")


@check("iWARP verbs draft 7.10.6.1", needs=(WINDOWS, ZERO_BASED))
def bind_needs_a_region_with_addresses(bench: Bench) -> None:
    """A window is not bound to a region that is zero-based."""
    _, passive = bench.pair()
    region = passive.domain.register(bytearray(32), _OPEN, zero_based=True)
    _bind_fails(bench, passive, _request(passive, region), "a zero-based region")


@check("iWARP verbs draft 7.10.6.1; IBTA 10.2.3", needs=(WINDOWS,))
def bind_stays_in_the_domain(bench: Bench) -> None:
    """Window and region are of the domain of the queue pair that binds them."""
    for what in ("a region", "a window", "both"):
        _, passive = bench.pair()
        other = passive.device.alloc_pd()
        region = passive.memory(32, _OPEN) if what == "a window" else other.register(bytearray(32), _OPEN)
        window = None if what == "a region" else other.alloc_window()
        _bind_fails(bench, passive, _request(passive, region, window), f"{what} of another domain")


@check("iWARP verbs draft 7.10.6.1", needs=(WINDOWS,))
def bind_stays_in_the_region(bench: Bench) -> None:
    """A window is of at least a byte, and all of it lies in the region."""
    for offset, length in ((-1, 8), (25, 8), (32, 1), (0, 33), (0, 0), (4, -2), (1 << 40, 1)):
        _, passive = bench.pair()
        request = _request(passive, passive.memory(32, _OPEN), offset=offset, length=length)
        _bind_fails(bench, passive, request, f"{length} bytes at {offset} of 32")


@check("iWARP verbs draft 7.10.2, figures 19 and 20", needs=(WINDOWS,))
def bind_needs_rights(bench: Bench) -> None:
    """A window has a right of the other end; REMOTE_WRITE only where the region has LOCAL_WRITE."""
    for access, region_access in (
        (Access.LOCAL_READ, _OPEN),
        (LOCAL, _OPEN),
        (READ | Access.WINDOW_BIND, _OPEN),
        (_WRITE, Access.WINDOW_BIND),
        (_BOTH, READ | Access.WINDOW_BIND),
    ):
        _, passive = bench.pair()
        request = _request(passive, passive.memory(32, region_access), access=access)
        _bind_fails(bench, passive, request, f"{access!r} of {region_access!r}")


@check("iWARP verbs draft 7.10.5, 7.10.6.1", needs=(WINDOWS,))
def bind_needs_a_void_window(bench: Bench) -> None:
    """A window that is bound is not bound again before it is voided, and one given back never; it stays as it was."""
    _, passive = bench.pair()
    region = passive.memory(b"." * 32, _OPEN)
    bound = _bind(bench, passive, region)
    _bind_fails(bench, passive, _request(passive, region, bound), "a window that is bound")
    _, passive = bench.pair()
    request = _request(passive, passive.memory(32, _OPEN))
    request.window.deallocate()
    _bind_fails(bench, passive, request, "a window that is given back")


@check("iWARP verbs draft 7.10.6.1", needs=(WINDOWS,))
def bind_needs_a_valid_region(bench: Bench) -> None:
    """A window is not bound to a region whose key is void, or that is deregistered."""
    _, passive = bench.pair()
    region = passive.memory(32, _OPEN)
    passive.qp.post_send(LocalInvalidate(9, region.rkey))
    _bind_fails(bench, passive, _request(passive, region), "a void region")
    _, passive = bench.pair()
    region = passive.memory(32, _OPEN)
    region.deregister()
    _bind_fails(bench, passive, _request(passive, region), "a deregistered region")


@check("iWARP verbs draft 7.8, 7.10.4", needs=(WINDOWS,))
def local_invalidate_closes_a_window(bench: Bench) -> None:
    """A local invalidate voids a window, not its region; voiding it once more changes nothing."""
    sides = _, passive = bench.pair()
    region = passive.memory(b"." * 32, _OPEN)
    window = _bind(bench, passive, region)
    for wr_id in (1, 2):
        passive.qp.post_send(LocalInvalidate(wr_id, window.rkey))
    bench.eventually(lambda: len(passive.sent) == 3, "both complete")
    bench.all_ok(passive, "both succeed")
    bench.equal((window.valid, region.valid), (False, True), "the window is void, the region is not")
    bench.write_refused(region, sides, region.va + 8, window.rkey, "a voided window")
    region.deregister()


@check("RFC 5040 5.3; iWARP verbs draft 7.8", needs=(WINDOWS,))
def send_with_invalidate_closes_a_window(bench: Bench) -> None:
    """A Send with Invalidate voids a window of the queue pair it comes on, and tells which."""
    sides = active, passive = bench.pair()
    region = passive.memory(b"." * 32, _OPEN)
    window = _bind(bench, passive, region)
    room = passive.post_recv(1, 8)
    active.qp.post_send(Send(1, (b"done",), invalidate=window.rkey))
    bench.eventually(lambda: bool(passive.received), "the message arrives")
    bench.equal((bytes(room.view[:4]), passive.received[0].invalidated), (b"done", window.rkey), "it tells the key")
    bench.equal((window.valid, region.valid), (False, True), "the window is void, the region is not")
    bench.write_refused(region, sides, region.va + 8, window.rkey, "a voided window")


@check("iWARP verbs draft 7.8; RFC 5042 6.4.5", needs=(WINDOWS,))
def windows_are_voided_by_their_queue_pair_only(bench: Bench) -> None:
    """Another queue pair of the domain voids a bound window neither by itself nor by a message of its other end."""
    first = bench.pair()
    region = first[1].memory(b"." * 32, _OPEN)
    window = _bind(bench, first[1], region)
    _, other = bench.pair(passive=bench.side(bench.passive, domain=first[1].domain))
    other.qp.post_send(LocalInvalidate(1, window.rkey))
    bench.eventually(lambda: bool(other.sent), "the local invalidate completes")
    bench.equal(other.sent[0].status, Status.LOCAL_PROTECTION_ERROR, "it fails")
    active, other = bench.pair(passive=bench.side(bench.passive, domain=first[1].domain))
    room = other.post_recv(1, 8)
    active.qp.post_send(Send(1, (b"done",), invalidate=window.rkey))
    bench.is_refused(active, other, 1, Status.REMOTE_ACCESS_ERROR, EventKind.QP_ACCESS_ERROR, "a window of another")
    bench.equal((window.valid, bytes(room.view)), (True, bytes(8)), "the window is bound, nothing is delivered")
    bench.write(first[0], b"good", window.va, window.rkey)
    bench.equal(bytes(region.view[8:12]), b"good", "the window is good all the same")


@check("iWARP verbs draft 7.10.6; RFC 5042 6.1.1", needs=(WINDOWS,))
def window_is_bound_again_with_another_key(bench: Bench) -> None:
    """A voided window can be bound to something else; who has only the key from before is refused."""
    sides = active, passive = bench.pair()
    first, second = (passive.memory(b"." * 32, _OPEN) for _ in range(2))
    window = _bind(bench, passive, first)
    old = window.rkey
    passive.qp.post_send(LocalInvalidate(1, old))
    _bind(bench, passive, second, window=window, offset=0, length=4)
    bench.equal((window.rkey == old, window.rkey >> 8), (False, old >> 8), "the low 8 bits changed, and they alone")
    first.deregister()
    bench.write(active, b"here", window.va, window.rkey)
    bench.equal(bytes(second.view[:8]), b"here....", "it goes where the window is now")
    bench.write_refused(second, sides, window.va, old, "the key from before")


@check("iWARP verbs draft 7.2.2, 7.10.5; RFC 5042 6.2.2", needs=(WINDOWS,))
def deallocated_window_is_closed(bench: Bench) -> None:
    """A window that is given back is closed at once, and its region is free; doing it again does nothing."""
    sides = _, passive = bench.pair()
    region = passive.memory(b"." * 32, _OPEN)
    window = _bind(bench, passive, region)
    va = window.va
    window.deallocate()
    window.deallocate()
    bench.expect(not window.valid, "a window given back says so")
    bench.write_refused(region, sides, va, window.rkey, "a window given back")
    region.deregister()


@check("iWARP verbs draft 7.10.5", needs=(WINDOWS,))
def region_with_a_window_stays(bench: Bench) -> None:
    """A region is neither deregistered nor rekeyed while a window is bound to it."""
    _, passive = bench.pair()
    region = passive.memory(32, _OPEN)
    windows = [_bind(bench, passive, region, offset=offset) for offset in (0, 4)]
    for _ in range(2):
        bench.refused(Misuse, region.deregister, "a region with a window is not deregistered")
        bench.refused(Misuse, region.rekey, "and not rekeyed")
        bench.expect(region.valid, "it stays valid")
        windows.pop().deallocate()
    region.rekey()
    region.deregister()


@check("iWARP verbs draft 7.8", needs=(WINDOWS,))
def region_with_a_window_is_not_voided(bench: Bench) -> None:
    """The key of a region is voided neither by this end nor by the other while a window is bound to it."""
    active, passive = bench.pair()
    region = passive.memory(32, ALL | Access.WINDOW_BIND)
    window = _bind(bench, passive, region)
    passive.qp.post_send(LocalInvalidate(1, region.rkey))
    bench.eventually(lambda: len(passive.sent) == 2, "the local invalidate completes")
    bench.equal(passive.sent[1].status, Status.LOCAL_PROTECTION_ERROR, "it fails")
    bench.equal((region.valid, window.valid), (True, True), "and changes nothing")
    active, passive = bench.pair()
    region = passive.memory(32, ALL | Access.WINDOW_BIND)
    window = _bind(bench, passive, region)
    passive.post_recv(1, 8)
    active.qp.post_send(Send(1, (b"done",), invalidate=region.rkey))
    bench.is_refused(
        active, passive, 1, Status.REMOTE_ACCESS_ERROR, EventKind.QP_ACCESS_ERROR, "a region with a window"
    )
    bench.equal((region.valid, window.valid), (True, True), "a message changes nothing either")


@check("iWARP verbs draft 6.1", needs=(WINDOWS,))
def queue_pair_with_a_window_stays(bench: Bench) -> None:
    """A queue pair is not destroyed while a window is bound to it, in ERROR neither; nor is a domain with a window."""
    active, passive = bench.pair()
    window = _bind(bench, passive, passive.memory(32, _OPEN))
    bench.refused(Misuse, passive.qp.destroy, "a queue pair with a window is not destroyed")
    bench.equal(passive.qp.state, QpState.RTS, "it lives on")
    passive.qp.modify_to_error()
    bench.refused(Misuse, passive.qp.destroy, "in ERROR neither")
    window.deallocate()
    passive.qp.destroy()
    domain = active.device.alloc_pd()
    void = domain.alloc_window()
    bench.refused(Misuse, domain.deallocate, "a domain with a window is in use")
    void.deallocate()
    domain.deallocate()


@check("iWARP verbs draft 7.10.2", needs=(WINDOWS, ZERO_BASED))
def window_may_be_zero_based(bench: Bench) -> None:
    """A window may begin at address 0 although its region does not."""
    sides = active, passive = bench.pair()
    region = passive.memory(b"." * 32, _OPEN)
    window = _bind(bench, passive, region, zero_based=True)
    bench.equal(window.va, 0, "it begins at 0")
    bench.write(active, b"low", 2, window.rkey)
    bench.equal(bytes(region.view), b"..........low...................", "it goes into the window")
    bench.write_refused(region, sides, 5, window.rkey, "the bytes behind it")


@check("iWARP verbs draft 7.2", needs=(WINDOWS,))
def window_key_is_known_before_the_bind(bench: Bench) -> None:
    """The consumer may choose the low 8 bits of a window's key; more bits are refused at the call."""
    active, passive = bench.pair()
    region, window = passive.memory(b"." * 32, _OPEN), passive.domain.alloc_window()
    for part in (-1, 256):
        request = BindWindow(wr_id=1, window=window, region=region, access=_WRITE, length=8, key_part=part)
        bench.refused(Misuse, lambda request=request: passive.qp.post_send(request), "the part has 8 bits")  # type: ignore[misc]
    key = window.key(0xA7)
    bench.equal((key & 0xFF, key >> 8), (0xA7, window.rkey >> 8), "the window tells the key")
    passive.qp.post_send(BindWindow(wr_id=1, window=window, region=region, access=_WRITE, length=8, key_part=0xA7))
    bench.eventually(lambda: bool(passive.sent), "the bind completes")
    bench.equal(window.rkey, key, "it is the key")
    bench.write(active, b"good", window.va, key)
    bench.equal(bytes(region.view[:8]), b"good....", "it is good")
