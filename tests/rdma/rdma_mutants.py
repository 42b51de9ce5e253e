"""Loopback devices that each break one rule, and the checks that must notice.

A mutant is a function that patches the loopback device through a `pytest.MonkeyPatch`. Together they make every check
of the conformance suite fail once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.cm import CmState, Listener, PrivateDataMatch, Unreachable
from sidestep.rdma.loopback.device import LoopbackDevice
from sidestep.rdma.loopback.fabric import Fabric
from sidestep.rdma.loopback.manager import (
    TRANSITIONS,
    LoopbackConnection,
    LoopbackManager,
    LoopbackRequest,
)
from sidestep.rdma.loopback.observer import CmMessage, Kind
from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.loopback.settings import CmKind
from sidestep.rdma.pools import DatagramPool, MessagePool, RdmaElement, RdmaPool
from sidestep.rdma.soft.keys import Keys
from sidestep.rdma.soft.memory import AccessRefusal, Domain, SoftRegion
from sidestep.rdma.soft.qp import SoftQueuePair
from sidestep.rdma.soft.queues import HandledQueue, PolledQueue
from sidestep.rdma.soft.receives import SharedReceives
from sidestep.rdma.soft.windows import SoftWindow
from sidestep.rdma.verbs import EventKind, QpState
from sidestep.rdma.work import (
    Access,
    BindWindow,
    CompareSwap,
    Completion,
    FetchAdd,
    LocalInvalidate,
    Opcode,
    RdmaRead,
    RdmaWrite,
    Send,
    Status,
)

Mutant: TypeAlias = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[Mutant, tuple[str, ...]]] = {}


def caught_by(*checks: str) -> Callable[[Mutant], Mutant]:
    def add(mutant: Mutant) -> Mutant:
        MUTANTS[mutant.__name__] = (mutant, checks)
        return mutant

    return add


def _around(patch: pytest.MonkeyPatch, owner: type, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


# The data path.


@caught_by("send_delivers_its_bytes", "long_messages_arrive_whole", "both_ways_at_once")
def loses_the_last_byte(patch: pytest.MonkeyPatch) -> None:
    def make(place: Any) -> Any:
        def short(
            self: LoopbackQueuePair, kind: Kind, gather: Iterable[memoryview], scatter: Iterable[memoryview]
        ) -> Any:
            parts = list(gather)
            return place(self, kind, [*parts[:-1], parts[-1][:-1]] if parts else (), scatter)

        return short

    _around(patch, LoopbackQueuePair, "place", make)


@caught_by("empty_send_takes_a_receive")
def drops_empty_messages(patch: pytest.MonkeyPatch) -> None:
    def make(take: Any) -> Any:
        return lambda self, request, length: take(self, request, length) if length else Status.SUCCESS

    _around(patch, LoopbackQueuePair, "take_send", make)


@caught_by("gather_is_sent_in_order")
def gathers_backwards(patch: pytest.MonkeyPatch) -> None:
    def make(place: Any) -> Any:
        return lambda self, kind, gather, scatter: place(self, kind, tuple(gather)[::-1], scatter)

    _around(patch, LoopbackQueuePair, "place", make)


@caught_by("scatter_is_filled_in_order", "read_scatters")
def scatters_backwards(patch: pytest.MonkeyPatch) -> None:
    def make(place: Any) -> Any:
        return lambda self, kind, gather, scatter: place(self, kind, gather, tuple(scatter)[::-1])

    _around(patch, LoopbackQueuePair, "place", make)


@caught_by("messages_arrive_in_order", "poll_takes_the_oldest", "shared_receives_are_used_in_order")
def uses_the_newest_receive(patch: pytest.MonkeyPatch) -> None:
    def make(take: Any) -> Any:
        def newest(self: LoopbackQueuePair, request: Send, length: int) -> Any:
            self._receives.rotate(1)
            return take(self, request, length)

        return newest

    _around(patch, LoopbackQueuePair, "take_send", make)


@caught_by("write_places_its_bytes", "bounds_do_not_hide_the_rest_of_a_buffer")
def forgets_the_offset(patch: pytest.MonkeyPatch) -> None:
    def grant(
        self: Domain, key: int, va: int, length: int, right: int, qp: SoftQueuePair
    ) -> memoryview | AccessRefusal:
        region = self.device.keys.get(key)
        return AccessRefusal.INVALID_STAG if region is None else region.view[:length]

    patch.setattr(Domain, "grant", grant)


@caught_by("write_comes_before_a_later_send")
def places_writes_late(patch: pytest.MonkeyPatch) -> None:
    def make(take: Any) -> Any:
        def later(self: LoopbackQueuePair, request: RdmaWrite, length: int) -> Status:
            self.fabric.call_later(1e-3, lambda: take(self, request, length))
            return Status.SUCCESS

        return later

    _around(patch, LoopbackQueuePair, "take_write", make)


@caught_by("read_fetches_bytes")
def tells_no_length(patch: pytest.MonkeyPatch) -> None:
    def make(complete: Any) -> Any:
        return lambda self, request, status, byte_len=0: complete(self, request, status, 0)

    _around(patch, LoopbackQueuePair, "complete", make)


@caught_by("reads_beyond_the_depth_wait")
def refuses_reads_beyond_the_depth(patch: pytest.MonkeyPatch) -> None:
    def make(post: Any) -> Any:
        def strict(self: LoopbackQueuePair, request: Any) -> None:
            if isinstance(request, RdmaRead) and self._reads >= self.initiator_depth:
                raise LimitReached("too many reads")
            post(self, request)

        return strict

    _around(patch, LoopbackQueuePair, "post_send", make)


@caught_by("read_with_a_depth_of_zero_fails", "read_depth_is_agreed")
def agrees_on_no_depth(patch: pytest.MonkeyPatch) -> None:
    def make(on_reply: Any) -> Any:
        def greedy(self: LoopbackConnection, message: CmMessage) -> None:
            on_reply(self, message)
            self.qp.initiator_depth = self.qp.capabilities.initiator_depth

        return greedy

    patch.setitem(TRANSITIONS, (CmState.REQUEST_SENT, CmKind.REP), make(LoopbackConnection.on_reply))


@caught_by("fence_waits_for_reads")
def knows_no_fence(patch: pytest.MonkeyPatch) -> None:
    def make(may_leave: Any) -> Any:
        def unfenced(self: LoopbackQueuePair, request: Any) -> Any:
            return may_leave(self, request if isinstance(request, LocalInvalidate) else replace(request, fence=False))

        return unfenced

    _around(patch, LoopbackQueuePair, "_may_leave", make)


@caught_by("fenced_invalidation_waits")
def invalidates_at_once(patch: pytest.MonkeyPatch) -> None:
    def make(may_leave: Any) -> Any:
        return lambda self, request: isinstance(request, LocalInvalidate) or may_leave(self, request)

    _around(patch, LoopbackQueuePair, "_may_leave", make)


@caught_by("memory_is_let_go")
def remembers_memory(patch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def make(deregister: Any) -> Any:
        def remembering(self: SoftRegion) -> None:
            kept.append(self.view)
            deregister(self)

        return remembering

    _around(patch, SoftRegion, "deregister", make)


@caught_by("requests_complete_in_order")
def swaps_completions(patch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []

    def make(complete: Any) -> Any:
        def swapped(self: LoopbackQueuePair, request: Any, status: Status, byte_len: int = 0) -> None:
            if status is Status.SUCCESS and not held:
                held.append((request, status, byte_len))
                return
            complete(self, request, status, byte_len)
            while held:
                complete(self, *held.pop())

        return swapped

    _around(patch, LoopbackQueuePair, "complete", make)


@caught_by("unsignaled_requests_are_silent")
def tells_everything(patch: pytest.MonkeyPatch) -> None:
    def make(complete: Any) -> Any:
        def loud(self: LoopbackQueuePair, request: Any, status: Status, byte_len: int = 0) -> None:
            complete(self, replace(request, signaled=True), status, byte_len)

        return loud

    _around(patch, LoopbackQueuePair, "complete", make)


@caught_by("solicited_is_told_to_the_receiver", "arm_for_solicited_only")
def keeps_the_bell_to_itself(patch: pytest.MonkeyPatch) -> None:
    def make(take: Any) -> Any:
        return lambda self, request, length: take(self, replace(request, solicited=False), length)

    _around(patch, LoopbackQueuePair, "take_send", make)


@caught_by("completed_memory_is_free")
def completes_before_it_reads(patch: pytest.MonkeyPatch) -> None:
    def make(leave: Any) -> Any:
        def early(self: LoopbackQueuePair, sent: Any) -> None:
            leave(self, sent)
            sent.status = Status.SUCCESS
            self._complete_answered()

        return early

    _around(patch, LoopbackQueuePair, "_leave", make)


@caught_by("empty_write_checks_no_key")
def checks_the_key_of_nothing(patch: pytest.MonkeyPatch) -> None:
    def make(grant: Any) -> Any:
        return lambda self, key, va, length, right, qp: grant(self, key, va, length or 1, right, qp)

    _around(patch, Domain, "grant", make)


# Memory.


@caught_by("unknown_key_is_refused")
def takes_any_key(patch: pytest.MonkeyPatch) -> None:
    def get(self: Keys, key: int) -> Any:
        return self._valid.get(key) or next(iter(self._valid.values()), None)

    patch.setattr(Keys, "get", get)


@caught_by("all_32_bits_of_a_key_count")
def looks_at_the_index_only(patch: pytest.MonkeyPatch) -> None:
    def get(self: Keys, key: int) -> Any:
        return self._held.get(key >> 8)

    patch.setattr(Keys, "get", get)


@caught_by(
    "deregistered_key_is_refused",
    "send_with_invalidate_voids_the_key",
    "rekey_shuts_out_who_had_the_key",
)
def keys_live_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keys, "withdraw", lambda self, region: None)


@caught_by("registering_again_gives_another_key")
def uses_a_key_again_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keys, "_index_at", lambda self, turn: next(i for i in range(1, 1 << 24) if i not in self._held))
    patch.setattr(Keys, "part", lambda self, chosen=None: 0)


@caught_by("bounds_are_those_of_the_region")
def knows_no_end(patch: pytest.MonkeyPatch) -> None:
    def make(grant: Any) -> Any:
        def endless(self: Domain, key: int, va: int, length: int, right: int, qp: SoftQueuePair) -> Any:
            region = self.device.keys.get(key)
            if region is not None and va + length > region.va + region.length:
                va = region.va + region.length - length
            return grant(self, key, va, length, right, qp)

        return endless

    _around(patch, Domain, "grant", make)


@caught_by("bounds_do_not_hide_the_rest_of_a_buffer")
def registers_all_of_the_buffer(patch: pytest.MonkeyPatch) -> None:
    def make(view_of: Any) -> Any:
        return lambda self, buffer, access: memoryview(view_of(self, buffer, access).obj).cast("B")

    _around(patch, Domain, "_view", make)


@caught_by("addresses_do_not_wrap")
def wraps_addresses(patch: pytest.MonkeyPatch) -> None:
    def make(grant: Any) -> Any:
        def wrapping(self: Domain, key: int, va: int, length: int, right: int, qp: SoftQueuePair) -> Any:
            region = self.device.keys.get(key)
            if region is not None and va + length >= 1 << 64:
                return region.view[:length]
            return grant(self, key, va, length, right, qp)

        return wrapping

    _around(patch, Domain, "grant", make)


@caught_by("rights_are_those_of_the_region")
def asks_for_no_rights(patch: pytest.MonkeyPatch) -> None:
    def make(grant: Any) -> Any:
        def lax(self: Domain, key: int, va: int, length: int, right: int, qp: SoftQueuePair) -> Any:
            region = self.device.keys.get(key)
            return grant(self, key, va, length, right if region is None or not region.rights else region.rights, qp)

        return lax

    _around(patch, Domain, "grant", make)


@caught_by("rights_are_those_of_the_queue_pair")
def lets_every_queue_pair(patch: pytest.MonkeyPatch) -> None:
    def make(grant: Any) -> Any:
        def lax(self: LoopbackQueuePair, key: int, va: int, length: int, right: int) -> Any:
            self.remote_access |= right
            return grant(self, key, va, length, right)

        return lax

    _around(patch, LoopbackQueuePair, "_grant", make)


@caught_by("keys_are_good_in_their_domain_only")
def knows_no_domains(patch: pytest.MonkeyPatch) -> None:
    def make(grant: Any) -> Any:
        def everywhere(self: Domain, key: int, va: int, length: int, right: int, qp: SoftQueuePair) -> Any:
            region = self.device.keys.get(key)
            return grant(region.domain if region else self, key, va, length, right, qp)

        return everywhere

    _around(patch, Domain, "grant", make)


@caught_by("impossible_regions_are_misuse")
def registers_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Domain, "_view", lambda self, buffer, access: memoryview(buffer).cast("B"))


@caught_by("later_registration_is_told_later")
def calls_from_inside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Domain, "register_later", lambda self, buffer, access, done: done(self.register(buffer, access)))


@caught_by("gather_lies_in_a_region")
def sends_what_is_not_registered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackQueuePair, "may_read", lambda self, gather: True)


@caught_by("part_of_a_buffer_is_not_all_of_it")
def takes_a_part_for_the_whole(patch: pytest.MonkeyPatch) -> None:
    def covers(self: Domain, entry: memoryview, rights: int) -> bool:
        return any(region.valid and region.view.obj is entry.obj for region in self.regions)

    patch.setattr(Domain, "covers", covers)


@caught_by("scatter_lies_in_a_writable_region", "read_sink_is_writable")
def writes_what_is_not_registered(patch: pytest.MonkeyPatch) -> None:
    for name in ("may_receive", "may_sink"):
        patch.setattr(LoopbackQueuePair, name, lambda self, scatter: True)


@caught_by("only_open_regions_are_invalidated")
def invalidates_what_is_not_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Domain, "may_be_invalidated", lambda self, key, qp: self.device.keys.find(key))


@caught_by("local_invalidate_voids_the_key")
def invalidates_nothing(patch: pytest.MonkeyPatch) -> None:
    def make(begin: Any) -> Any:
        return lambda self, request: Status.SUCCESS if isinstance(request, LocalInvalidate) else begin(self, request)

    _around(patch, LoopbackQueuePair, "begin", make)


@caught_by("void_keys_may_be_voided_again")
def knows_valid_keys_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keys, "find", Keys.get)


@caught_by("closed_queue_pair_voids_nothing")
def voids_on_every_queue_pair(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Domain, "may_be_invalidated", Domain.may_invalidate)


@caught_by("region_may_be_zero_based")
def forgets_the_base_when_rekeyed(patch: pytest.MonkeyPatch) -> None:
    def make(rekey: Any) -> Any:
        def rebased(self: SoftRegion) -> None:
            rekey(self)
            self.va = self.domain.device.next_va(self.length)

        return rebased

    _around(patch, SoftRegion, "rekey", make)


@caught_by("consumer_chooses_8_bits_of_a_key")
def chooses_all_of_a_key(patch: pytest.MonkeyPatch) -> None:
    def make(take: Any) -> Any:
        return lambda self, part: take(self, self.part())

    _around(patch, Keys, "take", make)


# Memory windows.


def _bound(patch: pytest.MonkeyPatch, change: Callable[[SoftWindow, BindWindow], object]) -> None:
    """Changes a window after it was bound."""

    def make(bind: Any) -> Any:
        def changed(self: SoftWindow, request: BindWindow, qp: SoftQueuePair) -> str | None:
            why: str | None = bind(self, request, qp)
            if why is None:
                change(self, request)
            return why

        return changed

    _around(patch, SoftWindow, "bind", make)


def _lax(patch: pytest.MonkeyPatch, ease: Callable[[SoftWindow, BindWindow, SoftQueuePair], BindWindow | None]) -> None:
    """Changes what is to be bound so that it may be."""

    def make(bind: Any) -> Any:
        def eased(self: SoftWindow, request: BindWindow, qp: SoftQueuePair) -> Any:
            return bind(self, ease(self, request, qp) or request, qp)

        return eased

    _around(patch, SoftWindow, "bind", make)


@caught_by("window_opens_a_part_of_a_region")
def opens_the_begin(patch: pytest.MonkeyPatch) -> None:
    _bound(patch, lambda window, request: setattr(window, "view", request.region.view[: request.length]))


@caught_by("window_has_bounds")
def opens_all_of_the_region(patch: pytest.MonkeyPatch) -> None:
    def widen(window: SoftWindow, request: BindWindow) -> None:
        begin = request.offset - 1
        window.view, window.length = request.region.view[begin:], request.region.length - begin
        window.va -= 1

    _bound(patch, widen)


@caught_by("window_has_rights_of_its_own")
def takes_the_rights_of_the_region(patch: pytest.MonkeyPatch) -> None:
    _bound(patch, lambda window, request: setattr(window, "rights", int(request.region.access)))


@caught_by("window_is_good_on_its_queue_pair_only")
def opens_windows_to_all(patch: pytest.MonkeyPatch) -> None:
    def make(grant: Any) -> Any:
        def everywhere(self: Domain, key: int, va: int, length: int, right: int, qp: SoftQueuePair) -> Any:
            memory = self.device.keys.get(key)
            return grant(self, key, va, length, right, (memory and memory.qp) or qp)

        return everywhere

    _around(patch, Domain, "grant", make)


@caught_by("bind_comes_before_what_is_behind_it")
def binds_late(patch: pytest.MonkeyPatch) -> None:
    def make(begin: Any) -> Any:
        def late(self: LoopbackQueuePair, request: Any) -> Any:
            if not isinstance(request, BindWindow):
                return begin(self, request)
            self.fabric.call_later(1e-3, lambda: begin(self, request))
            return Status.SUCCESS

        return late

    _around(patch, LoopbackQueuePair, "begin", make)


@caught_by("bind_needs_a_region_open_to_windows")
def binds_to_any_region(patch: pytest.MonkeyPatch) -> None:
    def ease(window: SoftWindow, request: BindWindow, qp: SoftQueuePair) -> None:
        request.region.access |= Access.WINDOW_BIND

    _lax(patch, ease)


@caught_by("bind_needs_a_region_with_addresses")
def binds_to_zero_based_regions(patch: pytest.MonkeyPatch) -> None:
    _lax(patch, lambda window, request, qp: setattr(request.region, "zero_based", False))


@caught_by("bind_stays_in_the_domain")
def binds_across_domains(patch: pytest.MonkeyPatch) -> None:
    def ease(window: SoftWindow, request: BindWindow, qp: SoftQueuePair) -> None:
        if isinstance(request.region, SoftRegion):
            qp.domain.regions.add(request.region)
        qp.domain.windows.add(window)

    _lax(patch, ease)


@caught_by("bind_stays_in_the_region")
def cuts_windows_off(patch: pytest.MonkeyPatch) -> None:
    def ease(window: SoftWindow, request: BindWindow, qp: SoftQueuePair) -> BindWindow:
        begin = max(request.offset, 0)
        return replace(request, offset=begin, length=min(request.length, request.region.length - begin))

    _lax(patch, ease)


@caught_by("bind_needs_rights")
def binds_without_rights(patch: pytest.MonkeyPatch) -> None:
    _lax(patch, lambda window, request, qp: replace(request, access=Access.REMOTE_READ))


@caught_by("bind_needs_a_void_window")
def binds_over(patch: pytest.MonkeyPatch) -> None:
    _lax(patch, lambda window, request, qp: window.invalidate())


@caught_by("bind_needs_a_valid_region")
def binds_to_void_regions(patch: pytest.MonkeyPatch) -> None:
    def ease(window: SoftWindow, request: BindWindow, qp: SoftQueuePair) -> None:
        if request.region in qp.domain.regions and not request.region.valid:
            request.region.rekey()

    _lax(patch, ease)


@caught_by("windows_are_voided_by_their_queue_pair_only")
def voids_windows_of_others(patch: pytest.MonkeyPatch) -> None:
    def make(may: Any) -> Any:
        def lax(self: Domain, key: int, qp: SoftQueuePair) -> Any:
            memory = self.device.keys.find(key)
            return may(self, key, (memory and memory.qp) or qp)

        return lax

    _around(patch, Domain, "may_invalidate", make)


@caught_by("window_is_bound_again_with_another_key")
def binds_with_the_last_key(patch: pytest.MonkeyPatch) -> None:
    _lax(patch, lambda window, request, qp: replace(request, key_part=window.rkey & 0xFF))


@caught_by("local_invalidate_closes_a_window", "send_with_invalidate_closes_a_window", "deallocated_window_is_closed")
def closes_no_window(patch: pytest.MonkeyPatch) -> None:
    def invalidate(self: SoftWindow) -> None:
        self.valid = False
        if self.region is not None and self.qp is not None:
            self.region.windows.discard(self)
            self.qp.windows.discard(self)

    patch.setattr(SoftWindow, "invalidate", invalidate)


def _void_all(windows: set[SoftWindow]) -> None:
    for window in list(windows):
        window.invalidate()


@caught_by("region_with_a_window_stays")
def takes_windows_along(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SoftRegion, "_refuse_windows", lambda self: _void_all(self.windows))


@caught_by("region_with_a_window_is_not_voided")
def voids_windows_with_their_region(patch: pytest.MonkeyPatch) -> None:
    def make(may: Any) -> Any:
        def lax(self: Domain, key: int, qp: SoftQueuePair) -> Any:
            if isinstance(memory := self.device.keys.find(key), SoftRegion):
                _void_all(memory.windows)
            return may(self, key, qp)

        return lax

    _around(patch, Domain, "may_invalidate", make)


@caught_by("queue_pair_with_a_window_stays")
def destroys_with_windows(patch: pytest.MonkeyPatch) -> None:
    def make(destroy: Any) -> Any:
        def lax(self: LoopbackQueuePair) -> None:
            _void_all(self.windows)
            destroy(self)

        return lax

    _around(patch, LoopbackQueuePair, "destroy", make)


@caught_by("window_may_be_zero_based")
def knows_no_zero_base(patch: pytest.MonkeyPatch) -> None:
    _lax(patch, lambda window, request, qp: replace(request, zero_based=False))


@caught_by("window_key_is_known_before_the_bind")
def chooses_the_key_of_a_window(patch: pytest.MonkeyPatch) -> None:
    _lax(patch, lambda window, request, qp: replace(request, key_part=None))


# Shared receive queues.


@caught_by("shared_receives_serve_all")
def uses_shared_receives_twice(patch: pytest.MonkeyPatch) -> None:
    def make(take: Any) -> Any:
        def twice(self: LoopbackQueuePair) -> Any:
            receive = take(self)
            if self.srq is not None and receive.wr_id % 2 == 0:
                self.srq.receives.appendleft(replace(receive, wr_id=receive.wr_id + 1))
            return receive

        return twice

    _around(patch, LoopbackQueuePair, "take_receive", make)


@caught_by("sharing_queue_pair_has_no_receives_of_its_own")
def posts_to_the_shared_queue(patch: pytest.MonkeyPatch) -> None:
    def make(post: Any) -> Any:
        def lax(self: LoopbackQueuePair, receive: Any) -> None:
            if self.srq is None:
                post(self, receive)
            else:
                self.srq.post_recv(receive)

        return lax

    _around(patch, LoopbackQueuePair, "post_recv", make)


@caught_by("shared_queue_has_bounds")
def shares_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedReceives, "post_recv", lambda self, receive: self.receives.append(receive))


@caught_by("low_shared_queue_is_told_once")
def tells_low_again_and_again(patch: pytest.MonkeyPatch) -> None:
    def make(taken: Any) -> Any:
        def again(self: SharedReceives) -> None:
            limit = self._limit
            taken(self)
            self._limit = limit

        return again

    _around(patch, SharedReceives, "taken", make)


@caught_by("shared_queue_that_is_low_already_tells_at_once")
def waits_for_a_message_to_tell(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedReceives, "arm", lambda self, limit: setattr(self, "_limit", limit))


@caught_by("error_leaves_shared_receives")
def flushes_shared_receives(patch: pytest.MonkeyPatch) -> None:
    def flush(self: LoopbackQueuePair) -> None:
        while self._receives:
            wr_id = self._receives.popleft().wr_id
            self.recv_cq.add(Completion(wr_id, Status.FLUSHED, Opcode.RECEIVE, 0, self.number))

    patch.setattr(LoopbackQueuePair, "_flush_receives", flush)


@caught_by("error_leaves_shared_receives")
def does_not_tell_that_it_takes_no_more(patch: pytest.MonkeyPatch) -> None:
    def make(tell: Any) -> Any:
        def silent(self: LoopbackQueuePair, kind: EventKind, why: str = "") -> None:
            if kind is not EventKind.QP_LAST_WQE_REACHED:
                tell(self, kind, why)

        return silent

    _around(patch, LoopbackQueuePair, "tell", make)


@caught_by("message_too_long_takes_one_shared_receive")
def leaves_the_receive_that_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackQueuePair, "take_receive", LoopbackQueuePair.next_receive)


@caught_by("shared_queue_in_use_stays")
def destroys_shared_queues_in_use(patch: pytest.MonkeyPatch) -> None:
    def make(destroy: Any) -> Any:
        def lax(self: SharedReceives) -> None:
            self.users.clear()
            destroy(self)

        return lax

    _around(patch, SharedReceives, "destroy", make)


@caught_by("shared_receives_lie_in_their_own_domain")
def looks_for_receives_in_the_wrong_domain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        LoopbackQueuePair,
        "may_receive",
        lambda self, scatter: all(self.domain.covers(entry, Access.LOCAL_WRITE) for entry in scatter),
    )


# The end of a queue pair.


@caught_by("sending_needs_a_connection", "entries_have_bounds", "too_much_inline_is_misuse")
def swallows_misuse(patch: pytest.MonkeyPatch) -> None:
    def make(check_post: Any) -> Any:
        def lax(self: LoopbackQueuePair, request: Any, held: int) -> Any:
            try:
                return check_post(self, request, held)
            except Misuse:
                return False

        return lax

    _around(patch, LoopbackQueuePair, "check_post", make)


@caught_by("queues_have_bounds")
def queues_without_end(patch: pytest.MonkeyPatch) -> None:
    def make(check_post: Any) -> Any:
        return lambda self, request, held: check_post(self, request, 0)

    _around(patch, LoopbackQueuePair, "check_post", make)


@caught_by("capabilities_have_bounds")
def promises_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackDevice, "check_capabilities", lambda self, capabilities: None)
    patch.setattr(LoopbackDevice, "own_queue", lambda self, queue: queue)


@caught_by("error_flushes_everything", "disconnect_is_told_to_both_ends", "nobody_answers")
def keeps_receives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackQueuePair, "_flush_receives", lambda self: None)


@caught_by("posting_in_error_is_flushed")
def forgets_what_is_posted_in_error(patch: pytest.MonkeyPatch) -> None:
    def make(check_post: Any) -> Any:
        def silent(self: LoopbackQueuePair, request: Any, held: int) -> Any:
            return self.state is not QpState.ERROR and check_post(self, request, held)

        return silent

    _around(patch, LoopbackQueuePair, "check_post", make)


@caught_by("failure_flushes_what_is_behind_it", "error_flushes_everything")
def forgets_requests(patch: pytest.MonkeyPatch) -> None:
    def make(take: Any) -> Any:
        return lambda self: take(self)[:0]

    _around(patch, LoopbackQueuePair, "take_unfinished", make)


@caught_by("message_too_long_is_an_error")
def cuts_messages_off(patch: pytest.MonkeyPatch) -> None:
    def make(take: Any) -> Any:
        def cutting(self: LoopbackQueuePair, request: Send, length: int) -> Any:
            room = sum(map(len, self._receives[0].scatter)) if self._receives else length
            whole = b"".join(request.gather)[:room]
            return take(self, replace(request, gather=(whole,)), len(whole))

        return cutting

    _around(patch, LoopbackQueuePair, "take_send", make)


@caught_by("message_without_a_receive_is_not_lost", "message_without_a_shared_receive_is_not_lost")
def loses_messages(patch: pytest.MonkeyPatch) -> None:
    def make(take: Any) -> Any:
        return lambda self, request, length: take(self, request, length) if self._receives else Status.SUCCESS

    _around(patch, LoopbackQueuePair, "take_send", make)


@caught_by("silence_becomes_an_error")
def waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackQueuePair, "expect_silence", lambda self: None)


@caught_by("error_and_connection")
def takes_the_connection_along(patch: pytest.MonkeyPatch) -> None:
    def make(init: Any) -> Any:
        def coupled(self: LoopbackQueuePair, *arguments: Any) -> None:
            init(self, *arguments)
            self._takes_connection_along = True

        return coupled

    _around(patch, LoopbackQueuePair, "__init__", make)


@caught_by("destroyed_queue_pair_is_quiet")
def flushes_when_destroyed(patch: pytest.MonkeyPatch) -> None:
    def make(destroy: Any) -> Any:
        def loud(self: LoopbackQueuePair) -> None:
            self.modify_to_error()
            destroy(self)

        return loud

    _around(patch, LoopbackQueuePair, "destroy", make)


# Completion queues.


@caught_by("poll_takes_the_oldest")
def polls_the_newest(patch: pytest.MonkeyPatch) -> None:
    def poll(self: PolledQueue, max_count: int) -> list[Completion]:
        return [self._entries.pop() for _ in range(min(max_count, len(self._entries)))]

    patch.setattr(PolledQueue, "poll", poll)


@caught_by("arm_calls_once")
def stays_armed(patch: pytest.MonkeyPatch) -> None:
    def make(add: Any) -> Any:
        def again(self: PolledQueue, completion: Completion) -> None:
            armed = self._armed
            add(self, completion)
            self._armed = armed

        return again

    _around(patch, PolledQueue, "add", make)


@caught_by("arm_for_solicited_only")
def wakes_for_anything(patch: pytest.MonkeyPatch) -> None:
    def make(arm: Any) -> Any:
        return lambda self, callback, solicited_only=False: arm(self, callback)

    _around(patch, PolledQueue, "arm", make)


@caught_by("arm_for_any_wins")
def the_last_arm_wins(patch: pytest.MonkeyPatch) -> None:
    def arm(self: PolledQueue, callback: Any, *, solicited_only: bool = False) -> None:
        self._armed, self._solicited_only = callback, solicited_only

    patch.setattr(PolledQueue, "arm", arm)


@caught_by("handler_gets_everything")
def hands_over_from_inside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandledQueue, "add", lambda self, completion: self.handler([completion]))


@caught_by("queue_pairs_share_a_queue", "send_delivers_its_bytes")
def names_the_wrong_queue_pair(patch: pytest.MonkeyPatch) -> None:
    def make(add: Any) -> Any:
        def wrong(self: PolledQueue, completion: Completion) -> None:
            completion.qp_number = 0x11
            add(self, completion)

        return wrong

    _around(patch, PolledQueue, "add", make)


@caught_by("overflow_is_an_error")
def overflows_in_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PolledQueue, "_overflow", lambda self: None)


@caught_by("one_queue_for_both_directions")
def takes_all_for_receives(patch: pytest.MonkeyPatch) -> None:
    def make(add: Any) -> Any:
        def wrong(self: PolledQueue, completion: Completion) -> None:
            completion.opcode = Opcode.RECEIVE
            add(self, completion)

        return wrong

    _around(patch, PolledQueue, "add", make)


# The connection manager.


@caught_by("private_data_arrives_exactly", "reply_can_be_refused")
def shortens_private_data(patch: pytest.MonkeyPatch) -> None:
    def make(padded: Any) -> Any:
        return lambda self, kind, private_data: padded(self, kind, private_data[:4])

    _around(patch, LoopbackManager, "padded", make)


@caught_by("too_much_private_data_is_misuse")
def takes_any_private_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackManager, "check_private_data", lambda self, kind, private_data: None)


@caught_by("rejection_tells_reason_and_private_data", "nobody_listens", "backlog_is_bounded", "no_match_is_a_rejection")
def rejects_for_no_reason(patch: pytest.MonkeyPatch) -> None:
    def make(reject: Any) -> Any:
        return lambda self, message, reason, private_data=b"": reject(self, message, 3, private_data)

    _around(patch, LoopbackManager, "reject", make)


@caught_by("listeners_are_told_apart_by_private_data", "no_match_is_a_rejection")
def matches_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrivateDataMatch, "matches", lambda self, private_data: True)


@caught_by("one_listener_for_each_match")
def listens_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrivateDataMatch, "__eq__", lambda self, other: False)


@caught_by("backlog_is_bounded")
def counts_no_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Listener, "pending", property(lambda self: 0, lambda self, value: None), raising=False)


@caught_by("a_request_is_answered_once")
def answers_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackRequest, "_answer", lambda self: None)


@caught_by("a_queue_pair_is_connected_once")
def connects_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackManager, "check_qp", lambda self, qp: qp)


@caught_by("states_follow_the_handshake")
def hurries_to_rts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackQueuePair, "ready_to_receive", lambda self: setattr(self, "state", QpState.RTS))


@caught_by("reply_can_be_refused")
def never_asks_about_the_reply(patch: pytest.MonkeyPatch) -> None:
    def make(init: Any) -> Any:
        def deaf(self: LoopbackConnection, *arguments: Any) -> None:
            init(self, *arguments[:4])

        return deaf

    _around(patch, LoopbackConnection, "__init__", make)


@caught_by("first_message_is_as_good_as_the_last_word")
def insists_on_the_last_word(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackConnection, "communication_established", lambda self: None)


@caught_by("disconnect_is_told_to_both_ends", "close_ends_connections")
def does_not_tell_the_other_end(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(TRANSITIONS, (CmState.ESTABLISHED, CmKind.DREQ), LoopbackConnection.on_disconnect_again)


@caught_by("crossing_disconnects_are_normal")
def tells_the_end_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(TRANSITIONS, (CmState.TIMEWAIT, CmKind.DREP), LoopbackConnection.on_disconnected)


@caught_by("an_attempt_can_be_given_up", "an_acceptance_can_be_given_up")
def tells_who_gave_up(patch: pytest.MonkeyPatch) -> None:
    def make(disconnect: Any) -> Any:
        def loud(self: LoopbackConnection) -> None:
            was = self.state
            disconnect(self)
            if was in (CmState.REQUEST_SENT, CmState.REPLY_SENT):
                self._tell(Unreachable())

        return loud

    _around(patch, LoopbackConnection, "disconnect", make)


@caught_by("nobody_answers")
def asks_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        LoopbackConnection,
        "send_again_and_again",
        lambda self, kind, give_up, **more: self._manager.send(
            kind, self.remote_address, self.local_id, self.remote_id, qp=self.qp, **more
        ),
    )


@caught_by("many_connections_are_kept_apart")
def has_one_communication_id(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fabric, "next_comm_id", lambda self: 1)


@caught_by("close_ends_connections")
def closes_in_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopbackManager, "close", lambda self: None)


# Pools.


@caught_by("message_pool_lends_registered_buffers")
def takes_buffers_back_twice(patch: pytest.MonkeyPatch) -> None:
    def make(put: Any) -> Any:
        def lax(self: MessagePool, element: Any) -> None:
            element.lent = True
            put(self, element)

        return lax

    _around(patch, MessagePool, "put", make)


@caught_by("message_pool_serves_in_order")
def serves_the_last_first(patch: pytest.MonkeyPatch) -> None:
    def make(put: Any) -> Any:
        def last_first(self: MessagePool, element: Any) -> None:
            self._waiters = deque(reversed(self._waiters))
            put(self, element)

        return last_first

    _around(patch, MessagePool, "put", make)


@caught_by("datagram_pool_leaves_room")
def leaves_no_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DatagramPool, "HEADROOM", 0)


@caught_by("rdma_pool_remembers_buffers")
def remembers_nothing(patch: pytest.MonkeyPatch) -> None:
    def make(put: Any) -> Any:
        return lambda self, element, keep=True: put(self, element, keep=False)

    _around(patch, RdmaPool, "put", make)


@caught_by("rdma_pool_remembers_buffers")
def never_changes_a_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SoftRegion, "rekey", lambda self: None)


@caught_by("rdma_pool_is_shared_and_joined")
def counts_no_users(patch: pytest.MonkeyPatch) -> None:
    def make(put: Any) -> Any:
        def at_once(self: RdmaPool, element: RdmaElement, *, keep: bool = True) -> None:
            element.users = 1
            put(self, element, keep=keep)

        return at_once

    _around(patch, RdmaPool, "put", make)


@caught_by("rdma_pool_forgets_the_least_recently_used")
def forgets_the_newest(patch: pytest.MonkeyPatch) -> None:
    def make(make_room: Any) -> Any:
        def newest(self: RdmaPool, size: int) -> Any:
            if self._idle:
                self._idle.move_to_end(next(reversed(self._idle)), last=False)
            return make_room(self, size)

        return newest

    _around(patch, RdmaPool, "_make_room", make)


@caught_by("rdma_pool_serves_in_order")
def lets_the_small_pass(patch: pytest.MonkeyPatch) -> None:
    def make(get: Any) -> Any:
        def passing(self: RdmaPool, *arguments: Any) -> Any:
            waiters, self._waiters = self._waiters, deque()
            waiting = sum(waiter.callback is not None for waiter, *_ in waiters)
            self._waiters_max -= waiting
            try:
                return get(self, *arguments)
            finally:
                self._waiters = waiters + self._waiters
                self._waiters_max += waiting

        return passing

    _around(patch, RdmaPool, "get", make)


# What not every device offers.


@caught_by("send_tells_immediate_data", "write_with_immediate_takes_a_receive")
def tells_no_immediate_data(patch: pytest.MonkeyPatch) -> None:
    def make(take: Any) -> Any:
        return lambda self, request, length: take(self, replace(request, immediate=None), length)

    _around(patch, LoopbackQueuePair, "take_send", make)
    _around(patch, LoopbackQueuePair, "take_write", make)


def _operates(patch: pytest.MonkeyPatch, change: Callable[[CompareSwap | FetchAdd], CompareSwap | FetchAdd]) -> None:
    def make(take: Any) -> Any:
        return lambda self, request: take(self, change(request))

    _around(patch, LoopbackQueuePair, "take_atomic", make)


@caught_by("compare_swap_changes_what_is_equal")
def swaps_always(patch: pytest.MonkeyPatch) -> None:
    _operates(patch, lambda one: replace(one, compare=7) if isinstance(one, CompareSwap) else one)


@caught_by("fetch_add_adds", "fence_waits_for_atomics")
def adds_nothing(patch: pytest.MonkeyPatch) -> None:
    _operates(patch, lambda one: replace(one, add=0) if isinstance(one, FetchAdd) else one)


@caught_by("atomics_need_alignment")
def operates_anywhere(patch: pytest.MonkeyPatch) -> None:
    _operates(patch, lambda one: replace(one, remote_va=one.remote_va & ~7))


@caught_by("atomics_need_their_right")
def operates_on_what_may_be_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("sidestep.rdma.loopback.qp.REMOTE_ATOMIC", int(Access.REMOTE_WRITE))


@caught_by("devices_without_datagrams_say_so")
def gives_handles_that_lead_nowhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Domain, "create_ah", lambda self, address: object())
