"""Every initiator meets every responder: both agree on the same, or both know that they do not.

What is to come of it is told by `outcome`, which reads the rules of RFC 6581 9 and nothing of the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from start_talk import RTR_SEGMENTS, Talk, accepting, rejecting, talk

from sidestep.rdma.iwarp.startup.frame import NO_RTR, Rtr
from sidestep.rdma.iwarp.startup.terms import (
    Agreed,
    Asked,
    Failed,
    MpaCause,
    MpaSettings,
    MpaState,
    ReadDepths,
    Refused,
)
from sidestep.rdma.iwarp.terminate import Code, Terminate

RTRS = [Rtr(sum(some)) for count in (1, 2, 3) for some in combinations(Rtr, count)]
MODES = [(1, False, False), (2, False, False), (2, True, False), (2, True, True)]
SMALL = [
    ReadDepths(),
    ReadDepths(ird=0, ord=0),
    ReadDepths(ird=1, ird_max=1, ord=0),
    ReadDepths(ird=4, ird_max=8, ord=40),
    ReadDepths(ird=2, ord=12, ord_min=9),
    ReadDepths(ird=0, ird_max=3, ord=3, ord_min=3),
    ReadDepths(ird=5, ord=7, ird_announced=False),
    ReadDepths(ird=5, ord=0, ord_announced=False),
    ReadDepths(ird=5, ord=7, ird_announced=False, ord_announced=False),
]


@dataclass(frozen=True)
class Case:
    """Who meets whom."""

    asking: MpaSettings
    asked: MpaSettings
    accepts: bool = True
    there: bytes = b"from the initiator"
    back: bytes = b"from the responder"
    size: int | None = None


def within(rtr: Rtr, depth: int) -> Rtr:
    """Who makes or holds no Reads offers none, unless it has nothing else."""
    return rtr if depth else rtr & ~Rtr.READ or rtr


def outcome(case: Case) -> str:
    """By the rules: "agreed", or who says no and why."""
    asking, asked = case.asking, case.asked
    if asking.revision > asked.revision:
        return "older"
    if not case.accepts:
        return "rejected"
    if not asking.enhanced:
        return "agreed"
    mine, theirs = asking.depths, asked.depths
    if mine.ird_announced and mine.ird < theirs.ord_min:
        return "responder needs more"
    peers = asking.peer_to_peer
    offered = within(asking.rtr, mine.ord)
    ord_ = max(mine.ord, 1) if peers and Rtr.READ in offered else mine.ord
    taken = within(offered & asked.rtr or asked.rtr, theirs.ird_max) if peers else NO_RTR
    common = asking.rtr & taken
    if mine.ord_announced and theirs.ird_announced:
        held = min(max(theirs.ird, ord_), theirs.ird_max)
        if Rtr.READ in taken:
            held = max(held, 1)
        if held < mine.ord_min:
            return "initiator needs more"
        ord_ = min(ord_, held)
    else:
        ord_ = mine.ord
    if peers and not (common & ~Rtr.READ or (common and ord_)):
        return "no rtr"
    return "agreed"


def check(case: Case) -> str:
    """Lets them meet; tells what came of it."""
    answer = accepting(case.back) if case.accepts else rejecting(case.back)
    done = talk(case.asking, case.asked, answer, case.there, case.size)
    expected = outcome(case)
    told, heard = done.told, done.heard
    if expected == "agreed":
        mirrored(case, done)
        assert (done.initiator.state, done.responder.state) == (
            MpaState.FULL, MpaState.FULL_RX_ONLY,
        )  # fmt: skip
        return expected
    assert not any(isinstance(event, Agreed) for event in told)
    assert {done.initiator.state, done.responder.state} <= {MpaState.CLOSED, MpaState.REJECTED}
    (mine,), theirs = told, heard[-1]
    if expected == "older":
        assert isinstance(mine, Failed)
        assert isinstance(theirs, Failed)
        assert (mine.cause, theirs.rule) == (MpaCause.ENDED, "mpa_revision")
        return expected
    if expected in ("rejected", "responder needs more"):
        assert isinstance(mine, Refused)
        assert mine.private_data == (case.back if expected == "rejected" else b"")
        assert isinstance(theirs, Asked if expected == "rejected" else Failed)
        if expected == "responder needs more":
            assert mine.remote_ord == case.asked.depths.ord_min
        return expected
    code = {"initiator needs more": Code.MPA_START_CATASTROPHIC, "no rtr": Code.MPA_START_RTR}[expected]
    assert isinstance(mine, Failed)
    assert isinstance(theirs, Failed)
    assert (mine.code, theirs.cause, done.first) == (code, MpaCause.ENDED, [Terminate(code).segment])
    return expected


def mirrored(case: Case, done: Talk) -> None:
    """What one end sends the other expects."""
    (mine,), (asked, theirs) = done.told, done.heard
    assert isinstance(mine, Agreed)
    assert isinstance(asked, Asked)
    assert isinstance(theirs, Agreed)
    assert mine.revision == theirs.revision == asked.revision == case.asking.revision
    assert mine.crc == theirs.crc == (case.asking.crc or case.asked.crc)
    assert mine.markers_in == theirs.markers_out == case.asking.markers
    assert mine.markers_out == theirs.markers_in == case.asked.markers
    assert mine.peer_to_peer == theirs.peer_to_peer == case.asking.peer_to_peer
    assert (asked.private_data, theirs.private_data, mine.private_data) == (case.there, case.there, case.back)
    assert mine.leftover == theirs.leftover == b""
    assert (asked.remote_ird, asked.remote_ord) == (theirs.remote_ird, theirs.remote_ord)
    # what an end holds and told is what the other knows, and no less than what the other makes
    for one, other, depths in ((mine, theirs, case.asking.depths), (theirs, mine, case.asked.depths)):
        if not case.asking.enhanced:
            assert (one.ird, one.ord, one.remote_ird, one.remote_ord) == (depths.ird, depths.ord, None, None)
            continue
        assert one.ird <= depths.ird_max
        assert depths.ord_min <= one.ord
        if other.remote_ird is not None:
            assert other.remote_ird <= one.ird
            assert other.ord <= one.ird
    if case.asking.peer_to_peer:
        assert mine.rtr in tuple(Rtr)
        assert mine.rtr in theirs.rtr
        assert mine.rtr in case.asking.rtr
        assert mine.rtr is not Rtr.READ or (mine.ord >= 1 and theirs.ird >= 1)
        assert done.first == [RTR_SEGMENTS[mine.rtr]]
    else:
        assert (mine.rtr, theirs.rtr, done.first) == (NO_RTR, NO_RTR, [])


def asking(mode: tuple[int, bool, bool], **more: Any) -> MpaSettings:
    """An initiator."""
    revision, enhanced, peers = mode
    return replace(MpaSettings(), revision=revision, enhanced=enhanced, peer_to_peer=peers, **more)


def test_flags_and_revisions() -> None:
    """Each mode, marker and checksum, and both answers, at each kind of responder."""
    found = set()
    for mode, mine, theirs, most, accepts in product(
        MODES, product((False, True), repeat=2), product((False, True), repeat=2), (1, 2), (False, True)
    ):
        one = asking(mode, markers=mine[0], crc=mine[1])
        other = replace(MpaSettings(enhanced=most == 2, revision=most), markers=theirs[0], crc=theirs[1])
        found.add(check(Case(one, other, accepts)))
    assert found == {"agreed", "older", "rejected"}


@pytest.mark.slow
def test_depths_and_ready_to_receive() -> None:
    """Each choice of RTR and read depths at each other one."""
    found = set()
    for mine, theirs, some, others in product(SMALL, SMALL, [NO_RTR, *RTRS], RTRS):
        mode, rtr = (MODES[3], some) if some else (MODES[2], Rtr.WRITE)
        found.add(check(Case(asking(mode, rtr=rtr, depths=mine), MpaSettings(rtr=others, depths=theirs))))
    assert found == {"agreed", "responder needs more", "initiator needs more", "no rtr"}


COUNTS = st.integers(0, 130)


@st.composite
def depths(draw: st.DrawFn) -> ReadDepths:
    """Any."""
    ird_max, ord_ = draw(st.integers(1, 130)), draw(COUNTS)
    return ReadDepths(
        ird=draw(st.integers(0, ird_max)), ird_max=ird_max, ord=ord_, ord_min=draw(st.integers(0, ord_)),
        ird_announced=draw(st.booleans()), ord_announced=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any."""

    def more() -> dict[str, Any]:
        flags = {name: draw(st.booleans()) for name in ("markers", "crc")}
        return {**flags, "depths": draw(depths()), "rtr": draw(st.sampled_from(RTRS))}

    return Case(
        asking(draw(st.sampled_from(MODES)), **more()), replace(MpaSettings(), **more()), draw(st.booleans()),
        draw(st.binary(max_size=40)), draw(st.binary(max_size=40)), draw(st.none() | st.integers(1, 60)),
    )  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_two(case: Case) -> None:
    """In pieces of any size, down to byte by byte."""
    check(case)
    if case.size is not None:
        check(replace(case, size=1))
