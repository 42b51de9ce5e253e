"""Faults of the software HCA are seen: each of these breaks a rule that a check of the conformance suite keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from wire_dut import WireUnderTest

from sidestep.rdma.conformance import CHECKS, Check, Violation, run
from sidestep.rdma.roce import numbers, requester, responder
from sidestep.rdma.roce.manager import RoceConnection, RoceManager
from sidestep.rdma.roce.qp import RoceQueuePair
from sidestep.rdma.roce.requester import Requester
from sidestep.rdma.roce.responder import Nak, Responder
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import WireFaults

Mutant: TypeAlias = Callable[[pytest.MonkeyPatch], None]
BY_NAME = {check.name: check for check in CHECKS}
SEEDS = range(4)


def _around(patch: pytest.MonkeyPatch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def never_goes_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requester, "_rewind", lambda self: None)


def has_no_timer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requester, "deadline", None)


def carries_out_what_is_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(responder, "ahead", lambda psn, of: min(numbers.ahead(psn, of), 0))


def carries_out_twice(patch: pytest.MonkeyPatch) -> None:
    def make(handle: Any) -> Any:
        def again(self: Responder, packet: Any) -> Any:
            if numbers.ahead(packet.bth.psn, self._expected) == -1 and self._message is None:
                self._expected = packet.bth.psn
            return handle(self, packet)

        return again

    _around(patch, Responder, "handle", make)


def takes_any_answer(patch: pytest.MonkeyPatch) -> None:
    """A packet of a Read's answer counts for the one that is missing."""

    def make(answered: Any) -> Any:
        def lax(self: Requester, packet: Any, now: float) -> bool:
            if self._flights and self._flights[0].read is not None:
                object.__setattr__(packet.bth, "psn", self._acknowledged)
            found: bool = answered(self, packet, now)
            return found

        return lax

    _around(patch, Requester, "_answered", make)


def cuts_at_another_mtu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requester, "piece_of", lambda gather, offset, size: b"".join(gather)[offset : offset + size - 1])


def places_at_the_begin(patch: pytest.MonkeyPatch) -> None:
    _around(patch, responder, "place", lambda place: lambda scatter, offset, data: place(scatter, 0, data))


def refuses_with_another_code(patch: pytest.MonkeyPatch) -> None:
    def make(refuse: Any) -> Any:
        return lambda self, psn, nak, *rest: refuse(self, psn, Nak.REMOTE_OPERATION, *rest)

    _around(patch, Responder, "_refuse", make)


def waits_for_no_receive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Responder, "_not_ready", lambda self, psn: None)


def takes_all_reads_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoceQueuePair, "_may_leave", lambda self, request: True)


def forgets_the_header_of_the_other_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoceConnection, "_follow", lambda self, *given: None)


def answers_no_disconnect(patch: pytest.MonkeyPatch) -> None:
    def make(queue: Any) -> Any:
        def mute(self: RoceManager, address: str, mad: Any, *wire: Any) -> None:
            if type(mad.message).__name__ not in ("Drep", "Dreq"):
                queue(self, address, mad, *wire)

        return mute

    _around(patch, RoceManager, "_queue", make)


def operates_twice(patch: pytest.MonkeyPatch) -> None:
    def again(self: Responder, packet: Any) -> None:
        expected, self._expected = self._expected, packet.bth.psn
        self._take_atomic(packet)
        self._expected = expected

    patch.setattr(Responder, "_operated_before", again)


def forgets_what_it_operated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Responder, "_operated_before", lambda self, packet: None)


CAUGHT: dict[Mutant, str] = {
    operates_twice: "fetch_add_adds",
    forgets_what_it_operated: "fetch_add_adds",
    never_goes_back: "long_messages_arrive_whole",
    has_no_timer: "silence_becomes_an_error",
    carries_out_what_is_ahead: "both_ways_at_once",
    carries_out_twice: "messages_arrive_in_order",
    takes_any_answer: "both_ways_at_once",
    cuts_at_another_mtu: "long_messages_arrive_whole",
    places_at_the_begin: "long_messages_arrive_whole",
    refuses_with_another_code: "message_too_long_is_an_error",
    waits_for_no_receive: "message_without_a_receive_is_not_lost",
    takes_all_reads_at_once: "fence_waits_for_reads",
    forgets_the_header_of_the_other_end: "send_delivers_its_bytes",
    answers_no_disconnect: "disconnect_is_told_to_both_ends",
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", CAUGHT, ids=lambda mutant: mutant.__name__)
def test_the_fault_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((Violation, AssertionError)):
        _run_all(BY_NAME[CAUGHT[mutant]])


def _run_all(check: Check) -> None:
    for seed in SEEDS:
        faults = WireFaults(loss=0.05, duplicate=0.05, late=0.05)
        run(check, lambda seed=seed, faults=faults: WireUnderTest(seed, faults, RoceSettings(mtu=256)))  # type: ignore[misc]
