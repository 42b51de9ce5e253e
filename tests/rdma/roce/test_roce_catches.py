"""Faults of the software HCA are seen: each of these breaks a rule that a check of the conformance suite keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from wire_dut import WireUnderTest

from sidestep.rdma.conformance import CHECKS, Check, Violation, run
from sidestep.rdma.roce.datagram import seal
from sidestep.rdma.roce.manager import RoceConnection, RoceManager
from sidestep.rdma.roce.numbers import after, ahead
from sidestep.rdma.roce.packet import ENDS, READ_RESPONSES, SENDS, STARTS, WRITES, Aeth, Op, Packet
from sidestep.rdma.roce.qp import RoceQueuePair
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import WireFaults

Mutant: TypeAlias = Callable[[pytest.MonkeyPatch], None]
Tamper: TypeAlias = Callable[[RoceQueuePair, Packet], Packet | None]
BY_NAME = {check.name: check for check in CHECKS}
SEEDS = range(4)
ATOMICS = {Op.CMP_SWAP, Op.FETCH_ADD}
REQUESTS = SENDS | WRITES | ATOMICS | {Op.READ_REQUEST}


def _around(patch: pytest.MonkeyPatch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def _takes(patch: pytest.MonkeyPatch, tamper: Tamper) -> None:
    """Each packet reaches the connection as `tamper` makes it, or not at all."""

    def make(take_in: Any) -> Any:
        def tampered(self: RoceQueuePair, data: memoryview, segment: int, port: int, now: float) -> int:
            packet = tamper(self, Packet.decode(data[:-4]))
            if packet is not None and self.path is not None:
                take_in(self, memoryview(seal(packet.encode(), self.path.remote, self.device.ip, port)), 0, port, now)
            return len(data)

        return tampered

    _around(patch, RoceQueuePair, "take_in", make)


def _sends(patch: pytest.MonkeyPatch, tamper: Tamper) -> None:
    """Each packet leaves as `tamper` makes it, or not at all."""

    def make(poll_train: Any) -> Any:
        def tampered(self: RoceQueuePair, room: memoryview, most: int, now: float) -> tuple[int, int, int] | None:
            while (train := poll_train(self, room, most, now)) is not None:
                packet = tamper(self, Packet.decode(memoryview(bytes(room[: train[0] - 4]))))
                if packet is not None and self.path is not None:
                    sealed = seal(packet.encode(), self.device.ip, self.path.remote)
                    room[: len(sealed)] = sealed
                    return len(sealed), 0, 1
            return None

        return tampered

    _around(patch, RoceQueuePair, "poll_train", make)


def _at(packet: Packet, psn: int) -> Packet:
    return replace(packet, bth=replace(packet.bth, psn=psn))


def _distance(qp: RoceQueuePair, packet: Packet) -> int:
    """Of a request from the one that is expected."""
    assert qp.rc is not None
    return ahead(packet.bth.psn, qp.rc.expected)


def never_goes_back(patch: pytest.MonkeyPatch) -> None:
    sent: dict[RoceQueuePair, int] = {}

    def once(qp: RoceQueuePair, packet: Packet) -> Packet | None:
        psn = packet.bth.psn
        if packet.bth.opcode in REQUESTS:
            if qp in sent and ahead(psn, sent[qp]) <= 0:
                return None
            sent[qp] = psn
        return packet

    _sends(patch, once)


def has_no_timer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoceQueuePair, "deadline", None)


def carries_out_what_is_ahead(patch: pytest.MonkeyPatch) -> None:
    def lax(qp: RoceQueuePair, packet: Packet) -> Packet:
        is_ahead = packet.bth.opcode in REQUESTS and _distance(qp, packet) > 0
        return _at(packet, qp.rc.expected) if is_ahead and qp.rc else packet

    _takes(patch, lax)


def carries_out_twice(patch: pytest.MonkeyPatch) -> None:
    def again(qp: RoceQueuePair, packet: Packet) -> Packet:
        repeats = packet.bth.opcode in STARTS & ENDS & (SENDS | WRITES) and _distance(qp, packet) == -1
        return _at(packet, qp.rc.expected) if repeats and qp.rc else packet

    _takes(patch, again)


def takes_any_answer(patch: pytest.MonkeyPatch) -> None:
    """A packet of a Read's answer counts for the one that is missing."""
    missing: dict[RoceQueuePair, int] = {}

    def lax(qp: RoceQueuePair, packet: Packet) -> Packet:
        if packet.bth.opcode not in READ_RESPONSES:
            return packet
        psn = missing.setdefault(qp, packet.bth.psn)
        missing[qp] = after(psn, 1)
        return _at(packet, psn)

    _takes(patch, lax)


def cuts_at_another_mtu(patch: pytest.MonkeyPatch) -> None:
    def cut(qp: RoceQueuePair, packet: Packet) -> Packet:
        short = packet.payload[:-1]
        return replace(packet, bth=replace(packet.bth, pad=-len(short) % 4), payload=short) if short else packet

    _sends(patch, cut)


def places_at_the_begin(patch: pytest.MonkeyPatch) -> None:
    """What follows the first packet of a message does not lie behind it."""

    def astray(qp: RoceQueuePair, packet: Packet) -> Packet:
        behind = packet.bth.opcode in (SENDS | WRITES) - STARTS
        return replace(packet, payload=bytes(len(packet.payload))) if behind else packet

    _takes(patch, astray)


def refuses_with_another_code(patch: pytest.MonkeyPatch) -> None:
    def other(qp: RoceQueuePair, packet: Packet) -> Packet:
        aeth = packet.find(Aeth)
        refuses = aeth is not None and aeth.syndrome > 0x60
        return replace(packet, extensions=(Aeth.of(0x63, 0),)) if refuses else packet

    _sends(patch, other)


def waits_for_no_receive(patch: pytest.MonkeyPatch) -> None:
    def mute(qp: RoceQueuePair, packet: Packet) -> Packet | None:
        aeth = packet.find(Aeth)
        return None if aeth is not None and aeth.syndrome >> 5 == 1 else packet

    _sends(patch, mute)


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
    def again(qp: RoceQueuePair, packet: Packet) -> Packet:
        repeats = packet.bth.opcode in ATOMICS and _distance(qp, packet) < 0
        return _at(packet, qp.rc.expected) if repeats and qp.rc else packet

    _takes(patch, again)


def forgets_what_it_operated(patch: pytest.MonkeyPatch) -> None:
    _takes(patch, lambda qp, packet: None if packet.bth.opcode in ATOMICS and _distance(qp, packet) < 0 else packet)


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
