"""Random programs of socket calls over kernel TCP and promoted: the same results.

A bounded run with fixed examples by default; SIDESTEP_DIFFERENTIAL=N plays N new random programs in each setting, and a
failure prints what reproduces it (`@reproduce_failure`) beside the shrunk program.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import Op, Player, World, differences

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("SIDESTEP_DIFFERENTIAL", "0"))
_INTERESTS = [
    select.EPOLLIN,
    select.EPOLLOUT,
    select.EPOLLIN | select.EPOLLOUT,
    select.EPOLLIN | select.EPOLLRDHUP,
    select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLPRI,
    0,
]
_ends = st.integers(0, 3)
_kinds = st.integers(0, 5)
_lengths = st.one_of(st.integers(1, 40), st.integers(41, 1500), st.integers(1501, 3072))
_sets = st.integers(0, 1)
_interests = st.tuples(st.sampled_from(_INTERESTS), st.booleans()).map(lambda i: i[0] | select.EPOLLET * i[1])


def _op(verb: str, *arguments: st.SearchStrategy[int]) -> st.SearchStrategy[Op]:
    return st.tuples(st.just(verb), *arguments)


_moves = st.one_of(_op("send", _ends, _kinds, _lengths), _op("recv", _ends, _kinds, _lengths))
_looks = st.one_of(
    _op("peek", _ends, _lengths),
    _op("skip", _ends, _lengths),
    _op("poll", _ends, st.integers(0, 2), st.sampled_from([1, 4, 5, 0x2005, 0x2007, 0])),
    _op("fionread", _ends),
    _op("error", _ends),
    _op("dup", _ends),
    _op("lowat", _ends, st.integers(1, 60)),
)
_sets_of = st.one_of(
    _op("add", _ends, _sets, _interests),
    _op("mod", _ends, _sets, _interests),
    _op("del", _ends, _sets, st.just(0)),
    _op("wait", _sets, st.just(16)),
    _op("wait", _sets, st.just(16)),
)
_full = st.one_of(_op("flood", _ends), _op("drain", _ends))
_endings = st.one_of(_op("shutdown", _ends, st.integers(0, 2)), _op("close", _ends), _op("abort", _ends))
_programs = st.lists(
    st.one_of(_moves, _moves, _moves, _looks, _looks, _sets_of, _sets_of, _sets_of, st.one_of(_full, _endings)),
    min_size=1,
    max_size=60,
)


def _compare(native: World, shimmed: World, connections: int, rounds: int, program: list[Op]) -> None:
    """Plays the program in both worlds; where they differ, tells so with the whole course of events."""
    try:
        expected = Player(native, connections, rounds).play(program)
        got = Player(shimmed, connections, rounds).play(program)
        found = differences(expected, got)
        for _ in range(2 if found else 0):
            # what kernel TCP shows now and then is right as well
            if not differences(Player(native, connections, rounds).play(program), got):
                return
    except BaseException:  # an answer may be on its way, which the next program would take for its own
        native.close()
        shimmed.close()
        raise
    if found:
        course = "\n".join(f"  {o.op}: {o.shown} {o.events or ''}" for o in got)
        pytest.fail("\n".join([*found, "under the shim:", course]), pytrace=False)


@pytest.mark.parametrize("ring_size", [None, 4096], ids=["ring-default", "ring-4096"])
@pytest.mark.parametrize("warm", [True, False], ids=["promoted", "promoted-on-the-way"])
@pytest.mark.parametrize("processes", [1, 2], ids=["one-process", "two-processes"])
def test_same_results(interpreter: Path, processes: int, warm: bool, ring_size: int | None) -> None:
    with (
        Sidestep(promote_after="0", ring_size=ring_size) as sidestep,
        World(interpreter, processes=processes) as native,
        World(interpreter, processes=processes, sidestep=sidestep, warm=warm) as shimmed,
    ):

        @settings(
            max_examples=EXAMPLES or 60,
            derandomize=not EXAMPLES,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(connections=st.integers(1, 2), rounds=st.integers(0, 0 if warm else 100), program=_programs)
        def played(connections: int, rounds: int, program: list[Op]) -> None:
            _compare(native, shimmed, connections, rounds, program)

        played()
        # how many rounds come before a program is up to chance, and with it when promotion comes
        share = shimmed.promoted_count / shimmed.connections_count
        assert share == 1 if warm else share > 0.1, f"{share:.0%} of {shimmed.connections_count} were promoted"
