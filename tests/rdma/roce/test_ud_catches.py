"""Each check of unreliable datagrams is seen to fail: against an HCA that breaks its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from wire_dut import WireUnderTest

from sidestep.rdma import grh
from sidestep.rdma.conformance import CHECKS, Violation, run
from sidestep.rdma.roce import ud
from sidestep.rdma.roce.device import RoceDevice
from sidestep.rdma.roce.packet import Deth, Packet
from sidestep.rdma.roce.ud import DatagramMaker, UdQueuePair
from sidestep.rdma.soft.handles import SoftAddressHandle
from sidestep.rdma.soft.qp import SoftQueuePair
from sidestep.rdma.verbs import EventKind
from sidestep.rdma.work import UdSend

Mutant: TypeAlias = Callable[[pytest.MonkeyPatch], None]
BY_NAME = {check.name: check for check in CHECKS}
WITHOUT = "devices_without_datagrams_say_so"  # a loopback mutant's
MUTANTS: dict[str, tuple[Mutant, str]] = {}


def caught_by(check: str) -> Callable[[Mutant], Mutant]:
    def add(mutant: Mutant) -> Mutant:
        MUTANTS[mutant.__name__] = mutant, check
        return mutant

    return add


def _around(patch: pytest.MonkeyPatch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def _instead(patch: pytest.MonkeyPatch, dropped: str, then: Callable[[UdQueuePair, Packet], object]) -> None:
    """What is dropped for this reason has another effect."""

    def make(handle: Any) -> Any:
        def lax(self: UdQueuePair, remote: Any, packet: Packet) -> Any:
            reason = handle(self, remote, packet)
            if reason == dropped:
                then(self, packet)
            return reason

        return lax

    _around(patch, UdQueuePair, "handle_packet", make)


@caught_by("datagram_delivers_its_bytes")
def leaves_no_header(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ud, "GRH_LEN", 0)


@caught_by("datagram_delivers_its_bytes")
def loses_empty_ones(patch: pytest.MonkeyPatch) -> None:
    _around(
        patch,
        UdQueuePair,
        "handle_packet",
        lambda handle: lambda self, remote, packet: handle(self, remote, packet) if packet.payload else "length",
    )


@caught_by("datagram_can_be_answered")
def swaps_the_addresses(patch: pytest.MonkeyPatch) -> None:
    _around(patch, grh, "written", lambda written: lambda one, other, length: written(other, one, length))


@caught_by("datagram_tells_immediate_data")
def sends_no_immediate_data(patch: pytest.MonkeyPatch) -> None:
    def make(packet: Any) -> Any:
        return lambda self, qp, qkey, payload, immediate, **more: packet(self, qp, qkey, payload, **more)

    _around(patch, DatagramMaker, "packet", make)


@caught_by("datagram_has_the_size_of_a_packet")
def promises_more_than_goes(patch: pytest.MonkeyPatch) -> None:
    def make(make_ah: Any) -> Any:
        return lambda self, domain, address: SoftAddressHandle(domain, address, 8192)

    _around(patch, RoceDevice, "make_ah", make)


@caught_by("datagram_has_the_size_of_a_packet")
def cuts_what_is_long(patch: pytest.MonkeyPatch) -> None:
    def make(packet: Any) -> Any:
        return lambda self, qp, qkey, payload, *rest, **more: packet(self, qp, qkey, payload[:255], *rest, **more)

    _around(patch, ud.DatagramMaker, "packet", make)


@caught_by("datagram_needs_the_key")
def takes_any_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ud, "deth_of", lambda packet, qkey: packet.find(Deth))


@caught_by("datagram_with_a_controlled_key_has_its_own")
def sends_controlled_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ud, "QKEY_CONTROLLED", 0)


@caught_by("datagram_without_a_receive_is_dropped")
def ends_without_a_receive(patch: pytest.MonkeyPatch) -> None:
    _instead(patch, "no_receive", lambda qp, packet: qp.break_off(EventKind.QP_REQUEST_ERROR, "no receive"))


@caught_by("datagram_too_long_for_its_receive_is_dropped")
def uses_up_short_receives(patch: pytest.MonkeyPatch) -> None:
    _instead(patch, "receive", lambda qp, packet: qp.take_receive())


@caught_by("datagram_queue_pair_hears_many")
def tells_one_source(patch: pytest.MonkeyPatch) -> None:
    def make(deth_of: Any) -> Any:
        return lambda packet, qkey: None if deth_of(packet, qkey) is None else Deth(qkey, 17)

    _around(patch, ud, "deth_of", make)


@caught_by("datagrams_use_shared_receives")
def looks_for_its_own_receives(patch: pytest.MonkeyPatch) -> None:
    def make(next_receive: Any) -> Any:
        return lambda self: next_receive(self) if self.srq is None else None

    _around(patch, SoftQueuePair, "next_receive", make)


@caught_by("types_of_queue_pairs_keep_to_themselves")
def swallows_what_is_no_datagram(patch: pytest.MonkeyPatch) -> None:
    def make(post_send: Any) -> Any:
        return lambda self, request: post_send(self, request) if isinstance(request, UdSend) else None

    _around(patch, UdQueuePair, "post_send", make)


@caught_by("address_handles_are_looked_at")
def keeps_handles_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SoftAddressHandle, "destroy", lambda self: None)


@caught_by("error_flushes_a_datagram_queue_pair")
def keeps_receives_in_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UdQueuePair, "_flush_receives", lambda self: None)


@caught_by("error_flushes_a_datagram_queue_pair")
def hears_in_error(patch: pytest.MonkeyPatch) -> None:
    def end(self: UdQueuePair) -> None:
        self._flush_receives()

    patch.setattr(UdQueuePair, "modify_to_error", end)


@caught_by("datagram_memory_is_registered")
def reads_any_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UdQueuePair, "may_read", lambda self, gather: True)


@caught_by("datagram_memory_is_registered")
def fills_any_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UdQueuePair, "may_receive", lambda self, scatter: True)


@caught_by("datagrams_are_bounded_and_signaled")
def counts_no_unsignaled_ones(patch: pytest.MonkeyPatch) -> None:
    _around(patch, UdQueuePair, "check_post", lambda check: lambda self, request, held: check(self, request, 0))


@caught_by("datagrams_are_bounded_and_signaled")
def signals_all(patch: pytest.MonkeyPatch) -> None:
    def make(complete: Any) -> Any:
        return lambda self, request, *told: complete(self, replace(request, signaled=True), *told)

    _around(patch, UdQueuePair, "complete", make)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_fault_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, check = MUTANTS[mutant]
    run(BY_NAME[check], lambda: WireUnderTest(1))
    patch(monkeypatch)
    with pytest.raises(Violation):
        run(BY_NAME[check], lambda: WireUnderTest(1))


def test_every_check_of_datagrams_catches_something() -> None:
    group = {check.name for check in CHECKS if check.group == "datagrams"}
    assert {check for _, check in MUTANTS.values()} == group - {WITHOUT}
