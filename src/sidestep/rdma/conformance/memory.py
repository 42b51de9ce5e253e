"""Checks of memory: regions, keys, rights, bounds, at both ends; nothing is placed before all were looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.errors import Misuse, SidestepError
from sidestep.rdma.conformance.harness import ALL, LOCAL, READ, WRITE, check
from sidestep.rdma.conformance.needs import KEY_PARTS, LOCAL_CHECKS, VOIDED_REGIONS, ZERO_BASED
from sidestep.rdma.verbs import EventKind, MemoryRegion, QpState
from sidestep.rdma.work import Access, LocalInvalidate, RdmaRead, RdmaWrite, Receive, RKey, Send, Status

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench


@check("RFC 5042 6.1.1; IBTA 10.6.2")
def unknown_key_is_refused(bench: Bench) -> None:
    """A key that names no region is refused."""
    sides = bench.pair()
    target = sides[1].memory(8, ALL)
    bench.write_refused(target, sides, target.va, target.rkey ^ 0x5A00, "an unknown index")
    sides = bench.pair()
    bench.read_refused(sides, target.va, 0, "key 0")


@check("RFC 5042 6.1.1")
def all_32_bits_of_a_key_count(bench: Bench) -> None:
    """A key of which only the low 8 bits are wrong is refused."""
    sides = bench.pair()
    target = sides[1].memory(8, ALL)
    bench.write_refused(target, sides, target.va, target.rkey ^ 0x01, "a wrong key part")


@check("RFC 5042 6.2.2; IBTA 10.6.4")
def deregistered_key_is_refused(bench: Bench) -> None:
    """Once a region is deregistered its key is refused; doing it again does nothing."""
    sides = bench.pair()
    target = sides[1].memory(8, ALL)
    target.deregister()
    target.deregister()
    bench.expect(not target.valid, "a deregistered region says so")
    bench.write_refused(target, sides, target.va, target.rkey, "a key after deregister")


@check("RFC 5042 6.1.1")
def registering_again_gives_another_key(bench: Bench) -> None:
    """Memory that is registered again has another key, and the old one stays void."""
    sides = bench.pair()
    passive = sides[1]
    memory = bytearray(8)
    keys = set()
    for _ in range(5):
        with passive.domain.register(memory, ALL) as region:
            bench.expect(region.rkey not in keys, "a key is not used twice in a row", region.rkey)
            keys.add(region.rkey)
            old_va = region.va
    region = passive.domain.register(memory, ALL)
    old = min(keys - {region.rkey})
    bench.write_refused(region, sides, region.va, old, "an old key with the new address")
    sides = bench.pair(passive=bench.side(bench.passive, domain=passive.domain))
    bench.read_refused(sides, old_va, old, "an old key with its address")


@check("IBTA 10.6.7.2; RFC 5042 6.3.2")
def rekey_shuts_out_who_had_the_key(bench: Bench) -> None:
    """After `rekey` the old key is refused at once and the new one is good, at the same address."""
    sides = bench.pair()
    target = sides[1].memory(8, ALL)
    old, va = target.rkey, target.va
    target.rekey()
    bench.equal((target.va, target.valid), (va, True), "address and memory stay")
    bench.write(sides[0], b"good", va, target.rkey)
    bench.equal(bytes(target.view), b"good\0\0\0\0", "and its bytes are placed")
    bench.write_refused(target, sides, va, old, "the key from before")
    target.deregister()
    bench.refused(Misuse, target.rekey, "a deregistered region has no new key")


@check("RFC 5041 7.1; IBTA 10.6.3")
def bounds_are_those_of_the_region(bench: Bench) -> None:
    """What begins before a region or ends behind it is refused as a whole, by a byte as by a mile."""
    for what, offset in (("a byte before", -1), ("across the end", 13), ("behind the end", 16), ("far away", 1 << 40)):
        sides = bench.pair()
        memory = sides[1].memory(b"." * 16, ALL)
        bench.write_refused(memory, sides, memory.va + offset, memory.rkey, f"a Write {what}")
        sides = bench.pair()
        memory = sides[1].memory(b"." * 16, ALL)
        bench.read_refused(sides, memory.va + offset, memory.rkey, f"a Read {what}")


@check("RFC 5041 7.1")
def bounds_do_not_hide_the_rest_of_a_buffer(bench: Bench) -> None:
    """A region of a part of a buffer opens that part only, and all of it."""
    sides = bench.pair()
    memory = bytearray(b"." * 24)
    region = sides[1].domain.register(memoryview(memory)[8:16], ALL)
    bench.write(sides[0], b"12345678", region.va, region.rkey)
    bench.equal(bytes(memory), b"........12345678........", "the bytes are where the region is")
    bench.read_refused(sides, region.va - 8, region.rkey, "the bytes before it")


@check("RFC 5041 7.1")
def addresses_do_not_wrap(bench: Bench) -> None:
    """An address and a length that pass the end of the 64 bits are refused."""
    for va in (0xFFFF_FFFF_FFFF_FFFE, 0xFFFF_FFFF_FFFF_FFFC):
        sides = bench.pair()
        target = sides[1].memory(b"." * 16, ALL)
        bench.write_refused(target, sides, va, target.rkey, "a Write across the end of all addresses")


@check("IBTA 10.6.3.1; RFC 5040 8.1.1")
def rights_are_those_of_the_region(bench: Bench) -> None:
    """A region that was not opened for reading is not read, one not opened for writing not written."""
    sides = bench.pair()
    target = sides[1].memory(b"." * 8, LOCAL | READ)
    bench.write_refused(target, sides, target.va, target.rkey, "a Write into a region for reading")
    sides = bench.pair()
    target = sides[1].memory(b"." * 8, WRITE)
    bench.read_refused(sides, target.va, target.rkey, "a Read of a region for writing")
    sides = bench.pair()
    target = sides[1].memory(b"." * 8, LOCAL)
    bench.read_refused(sides, target.va, target.rkey, "a Read of a region for nobody")


@check("IBTA 10.3.1, 9.7.4.1")
def rights_are_those_of_the_queue_pair(bench: Bench) -> None:
    """What a queue pair does not allow the other end is refused whatever the region says."""
    for allowed, write in ((READ, True), (Access.REMOTE_WRITE, False)):
        passive = bench.side(bench.passive, remote_access=allowed)
        active, passive = bench.pair(passive=passive)
        far, near = passive.memory(b"." * 8, ALL), active.memory(4)
        if write:
            active.qp.post_send(RdmaWrite(1, (near.view,), far.va, far.rkey))
        else:
            active.qp.post_send(RdmaRead(1, (near.view,), far.va, far.rkey))
        bench.eventually(lambda side=active: side.qp.state is QpState.ERROR, "the connection ends")  # type: ignore[misc]
        succeeded = [each for each in active.sent if each.ok]
        bench.expect(not succeeded or not active.device.attributes.acknowledged, "it does not succeed", succeeded)
        bench.equal((bytes(far.view), bytes(near.view)), (b"." * 8, bytes(4)), "nothing is moved")


@check("IBTA 10.2.3; RFC 5040 8.1.1")
def keys_are_good_in_their_domain_only(bench: Bench) -> None:
    """A key of another protection domain is refused, though the region is open."""
    sides = bench.pair()
    other = bench.passive.alloc_pd()
    target = other.register(bytearray(b"." * 8), ALL)
    bench.write_refused(target, sides, target.va, target.rkey, "a key of another domain")


@check("IBTA 10.6.3.1")
def impossible_regions_are_misuse(bench: Bench) -> None:
    """Remote write without local write, writing of read-only memory, and no memory at all, are refused at the call."""
    domain = bench.active.alloc_pd()
    no_local = "remote write needs local write"
    bench.refused(Misuse, lambda: domain.register(bytearray(8), Access.REMOTE_WRITE), no_local)
    bench.refused(Misuse, lambda: domain.register(b"constant", LOCAL), "constant bytes are not written")
    bench.refused(Misuse, lambda: domain.register(bytearray(), LOCAL), "no memory is no region")
    scattered = memoryview(bytearray(16))[::2]
    bench.refused(Misuse, lambda: domain.register(scattered, LOCAL), "scattered memory is no region")
    region = domain.register(b"constant", READ)
    bench.equal((region.length, bytes(region.view)), (8, b"constant"), "constant bytes may be read")
    bench.refused(Misuse, domain.deallocate, "a domain with a region is in use")
    region.deregister()
    domain.deallocate()


@check("sidestep.rdma.verbs")
def later_registration_is_told_later(bench: Bench) -> None:
    """`register_later` calls back with a region that is as good as any, and never from inside the call."""
    active, passive = bench.pair()
    found: list[MemoryRegion | SidestepError] = []
    memory = bytearray(b"registered later")
    passive.domain.register_later(memory, READ, found.append)
    bench.equal(found, [], "the callback is not called from inside the call")
    bench.eventually(lambda: bool(found), "the callback is called")
    region = found[0]
    bench.expect(isinstance(region, MemoryRegion), "it is given a region", region)
    assert isinstance(region, MemoryRegion)
    sink = active.memory(16)
    active.qp.post_send(RdmaRead(1, (sink.view,), region.va, region.rkey))
    bench.eventually(lambda: bool(active.sent), "a Read of it completes")
    bench.equal(bytes(sink.view), bytes(memory), "its bytes are read")
    bench.dut.run()
    bench.equal(len(found), 1, "the callback is called once")


@check("IBTA 10.6.1", needs=(LOCAL_CHECKS,))
def gather_lies_in_a_region(bench: Bench) -> None:
    """A Send or Write of memory that is not registered, or no longer, fails, and nothing of it arrives."""
    for write in (False, True):
        for deregistered in (False, True):
            active, passive = bench.pair()
            room, far = passive.post_recv(1, 8), passive.memory(8, ALL)
            view = memoryview(bytearray(b"loose"))
            if deregistered:
                active.domain.register(view, LOCAL).deregister()
            if write:
                active.qp.post_send(RdmaWrite(1, (view,), far.va, far.rkey))
            else:
                active.qp.post_send(Send(1, (view,)))
            bench.eventually(lambda side=active: bool(side.sent), "the request completes")  # type: ignore[misc]
            bench.equal(active.sent[0].status, Status.LOCAL_PROTECTION_ERROR, "unregistered memory is not sent")
            bench.dut.run()
            bench.equal((bytes(room.view), bytes(far.view)), (bytes(8), bytes(8)), "nothing arrives")


@check("IBTA 10.6.1", needs=(LOCAL_CHECKS,))
def part_of_a_buffer_is_not_all_of_it(bench: Bench) -> None:
    """Where a part of a buffer is registered, entries in that part are good and those across its end are not."""
    active, passive = bench.pair()
    passive.post_recvs(2, 16)
    memory = memoryview(bytearray(b"0123456789abcdef"))
    active.domain.register(memory[4:12], LOCAL)
    active.qp.post_send(Send(1, (memory[4:8], memory[8:12])))
    bench.eventually(lambda: bool(active.sent), "the first Send completes")
    bench.all_ok(active, "entries in the region are good")
    active.qp.post_send(Send(2, (memory[8:13],)))
    bench.eventually(lambda: len(active.sent) == 2, "the second Send completes")
    bench.equal(active.sent[1].status, Status.LOCAL_PROTECTION_ERROR, "an entry across the end is not sent")


@check("IBTA 10.6.1", needs=(LOCAL_CHECKS,))
def scatter_lies_in_a_writable_region(bench: Bench) -> None:
    """A message does not go into memory that is not registered for writing; both ends are told."""
    for registered in (False, True):
        active, passive = bench.pair()
        memory = bytearray(8)
        if registered:
            passive.domain.register(memory, READ)
        passive.qp.post_recv(Receive(1, (memoryview(memory),)))
        active.send(1, b"message")
        bench.eventually(lambda side=passive: bool(side.received), "the receive completes")  # type: ignore[misc]
        bench.equal(passive.received[0].status, Status.LOCAL_PROTECTION_ERROR, "the receive tells it")
        bench.eventually(lambda side=active: side.qp.state is QpState.ERROR, "the sender is in ERROR")  # type: ignore[misc]
        bench.equal(bytes(memory), bytes(8), "nothing is placed")


@check("IBTA 10.6.3.1; iWARP verbs draft 7.4", needs=(LOCAL_CHECKS,))
def read_sink_is_writable(bench: Bench) -> None:
    """An RDMA Read into memory that may not be written fails, and nothing of it is placed."""
    attributes = bench.active.attributes
    for access in (READ, LOCAL) if attributes.read_sink_remote_write else (READ,):
        active, passive = bench.pair()
        source = passive.memory(b"fetched", READ)
        sink = active.memory(7, access)
        active.qp.post_send(RdmaRead(1, (sink.view,), source.va, source.rkey))
        bench.eventually(lambda side=active: bool(side.sent), "the Read completes")  # type: ignore[misc]
        bench.equal(active.sent[0].status, Status.LOCAL_PROTECTION_ERROR, "the sink must be writable")
        bench.equal(bytes(sink.view), bytes(7), "nothing is placed")


@check("RFC 5040 5.3; IBTA 9.4.1.1", needs=(VOIDED_REGIONS,))
def send_with_invalidate_voids_the_key(bench: Bench) -> None:
    """A Send with Invalidate delivers its bytes, voids the key it names, and tells which; the region can be rekeyed."""
    sides = active, passive = bench.pair()
    target = passive.memory(b"." * 8, ALL)
    room = passive.post_recv(1, 8)
    old = target.rkey
    active.qp.post_send(Send(1, (b"done",), invalidate=old))
    bench.eventually(lambda: bool(passive.received), "the message arrives")
    bench.equal((bytes(room.view[:4]), passive.received[0].invalidated), (b"done", old), "bytes and key are told")
    bench.expect(not target.valid, "the region says that its key is void")
    bench.write_refused(target, sides, target.va, old, "the voided key")
    sides = bench.pair(passive=bench.side(bench.passive, domain=passive.domain))
    target.rekey()
    bench.write(sides[0], b"again", target.va, target.rkey)
    bench.equal(bytes(target.view), b"again...", "a voided region lives again with a new key")


@check("RFC 5040 5.3, 7.2", needs=(VOIDED_REGIONS,))
def only_open_regions_are_invalidated(bench: Bench) -> None:
    """A Send with Invalidate fails for a key that is none, of another domain, or of a region not open to the peer."""
    for what in ("no key", "other domain", "local only"):
        active, passive = bench.pair()
        room = passive.post_recv(1, 8)
        key = passive.memory(8, ALL).rkey ^ 0x3300
        kept: MemoryRegion | None = None
        if what == "other domain":
            kept = bench.passive.alloc_pd().register(bytearray(8), ALL)
        elif what == "local only":
            kept = passive.memory(8, LOCAL)
        active.qp.post_send(Send(1, (b"done",), invalidate=kept.rkey if kept else RKey(key)))
        bench.eventually(lambda side=active: side.qp.state is QpState.ERROR, f"{what}: the sender is in ERROR")  # type: ignore[misc]
        bench.expect(kept is None or kept.valid, f"{what}: the region is not voided")
        bench.expect(not any(each.ok for each in passive.received), f"{what}: the message is not delivered")
        bench.equal(bytes(room.view), bytes(8), f"{what}: nothing is placed")


@check("IBTA 10.7.1; iWARP verbs draft 7.10", needs=(VOIDED_REGIONS,))
def local_invalidate_voids_the_key(bench: Bench) -> None:
    """A local invalidate voids a key of this end, in the order of the send queue, and completes."""
    active, passive = bench.pair()
    mine = active.memory(b"." * 8, ALL)
    active.qp.post_send(LocalInvalidate(1, mine.rkey))
    bench.eventually(lambda: bool(active.sent), "it completes")
    bench.all_ok(active, "it succeeds")
    bench.expect(not mine.valid, "the region says that its key is void")
    bench.write_refused(mine, (passive, active), mine.va, mine.rkey, "the voided key")
    active, passive = bench.pair()
    active.qp.post_send(LocalInvalidate(1, RKey(0x7777_7700)))
    bench.eventually(lambda: bool(active.sent), "one of a key that is none completes")
    bench.expect(not active.sent[0].ok, "and fails", active.sent)


@check("iWARP verbs draft 7.8", needs=(VOIDED_REGIONS,))
def void_keys_may_be_voided_again(bench: Bench) -> None:
    """Voiding a key that is void already succeeds at both ends, and changes nothing."""
    active, passive = bench.pair()
    far, near = passive.memory(8, ALL), active.memory(8, ALL)
    passive.post_recvs(2)
    for index in range(2):
        active.qp.post_send(LocalInvalidate(2 * index, near.rkey))
        active.qp.post_send(Send(2 * index + 1, (b"void",), invalidate=far.rkey))
    bench.eventually(lambda: len(active.sent) == 4 and len(passive.received) == 2, "all complete")
    bench.all_ok(active, "here it succeeds twice")
    bench.all_ok(passive, "there too")
    bench.equal((near.valid, far.valid), (False, False), "the keys are void")
    near.rekey()
    bench.expect(near.valid, "and can be made new")


@check("RFC 5040 5.3; iWARP verbs draft 7.8", needs=(VOIDED_REGIONS,))
def closed_queue_pair_voids_nothing(bench: Bench) -> None:
    """A Send with Invalidate fails on a queue pair that allows the other end no access."""
    active, passive = bench.pair(passive=bench.side(bench.passive, remote_access=Access.LOCAL_READ))
    kept, room = passive.memory(8, ALL), passive.post_recv(1, 8)
    active.qp.post_send(Send(1, (b"done",), invalidate=kept.rkey))
    bench.is_refused(active, passive, 1, Status.REMOTE_ACCESS_ERROR, EventKind.QP_ACCESS_ERROR, "a closed queue pair")
    bench.equal((kept.valid, bytes(room.view)), (True, bytes(8)), "nothing is voided or delivered")


@check("iWARP verbs draft 7.3.1.1, 7.6.1", needs=(ZERO_BASED,))
def region_may_be_zero_based(bench: Bench) -> None:
    """The addresses of a zero-based region begin at 0, and its bounds are as strict as any, with a new key too."""
    sides = active, passive = bench.pair()
    memory = bytearray(b"." * 24)
    region = passive.domain.register(memoryview(memory)[8:16], ALL, zero_based=True)
    bench.equal(region.va, 0, "it begins at 0")
    region.rekey()
    sink = active.memory(8)
    active.qp.post_send(RdmaWrite(1, (b"low",), 2, region.rkey))
    active.qp.post_send(RdmaRead(2, (sink.view,), 0, region.rkey, fence=True))
    bench.eventually(lambda: len(active.sent) == 2, "Write and Read complete")
    bench.all_ok(active, "they succeed")
    bench.equal((bytes(memory), bytes(sink.view)), (b"..........low...........", b"..low..."), "its bytes are moved")
    bench.write_refused(region, sides, 5, region.rkey, "a Write across the end")


@check("iWARP verbs draft 7.2", needs=(KEY_PARTS,))
def consumer_chooses_8_bits_of_a_key(bench: Bench) -> None:
    """The low 8 bits of a key may be chosen, and are good and compared like the others; more bits are refused."""
    sides = active, passive = bench.pair()
    for part in (0, 1, 255):
        region = passive.domain.register(bytearray(8), ALL, key_part=part)
        bench.equal(region.rkey & 0xFF, part, "the low 8 bits are those")
        bench.write(active, b"good", region.va, region.rkey)
        bench.equal(bytes(region.view), b"good\0\0\0\0", "the key is good")
    bench.write_refused(region, sides, region.va, region.rkey ^ 0x80, "another key part")
    for part in (-1, 256):
        bench.refused(Misuse, lambda part=part: passive.domain.register(bytearray(8), ALL, key_part=part), "8 bits")  # type: ignore[misc]


@check("IBTA 10.7.2.1")
def too_much_inline_is_misuse(bench: Bench) -> None:
    """More bytes in `bytes` entries than the device copies are refused at the call; as many as that are sent."""
    active, passive = bench.pair()
    most = active.device.attributes.inline_max
    room = passive.post_recv(1, most + 1)
    bench.refused(Misuse, lambda: active.qp.post_send(Send(1, (bytes(most), b"x"))), "too much inline data is refused")
    active.qp.post_send(Send(2, (b"i" * most,)))
    bench.eventually(lambda: bool(passive.received), "the message arrives")
    bench.equal(bytes(room.view), b"i" * most + b"\0", "as much as the device copies is sent")
