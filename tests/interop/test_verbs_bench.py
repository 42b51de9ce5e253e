"""`sidestep rdma bench` between two guests over rxe: each way gives figures, and sidestep's go over verbs.

What it prints (`pytest -rP`) is of emulated processors, and says nothing of adapters.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import pytest
from lab_guest import Lab, Unusable

from sidestep.demo.hosts import Way, Work

_SOCKET: Final = "--socket=/run/sidestep-bench/provider"
_START_S: Final = 60.0
_BENCH_S: Final = 900.0


@contextmanager
def provider(lab: Lab) -> Iterator[None]:
    """One that promotes all, over verbs."""
    lab.run(
        lab.sidestep("provider", "start", _SOCKET, "--remote=198.18.2.0/24", "--remote-transports=verbs",
                     "--remote-promote=always"), timeout_s=_START_S,
    )  # fmt: skip
    try:
        yield
    finally:
        lab.run(lab.sidestep("provider", "stop", _SOCKET), timeout_s=_START_S)


@contextmanager
def serving(lab: Lab) -> Iterator[None]:
    command = shlex.join(lab.sidestep("rdma", "bench", "--serve", f"--address={lab.rxe_address}", _SOCKET))
    server = lab.background("rdma_bench", f"exec {command}")
    try:
        server.wait_for("^listening at ", _START_S)
        yield
    finally:
        server.kill()


@pytest.mark.timeout(_BENCH_S + 600)
def test_two_guests_are_compared(lab: Lab, second: Lab | Unusable) -> None:
    if isinstance(second, Unusable):
        pytest.skip(str(second))  # there is no lab, or no room for a second guest: it says which
    with ExitStack() as stack:
        for each in (lab, second):
            stack.enter_context(provider(each))
        stack.enter_context(serving(second))
        asked = lab.sidestep("rdma", "bench", second.rxe_address, _SOCKET, "--rounds=1", "--json")
        found = json.loads(lab.run(asked, timeout_s=_BENCH_S).stdout)
    rows = {row["way"]: row for row in found["rows"]}
    for way in Way:
        row = rows[way]
        print(f"{way:9} {row['round_trip_us']} us, {row['messages_per_s']} /s, {row['mb_per_s']} MB/s", row["problem"])
    for way in Way:
        assert not rows[way]["problem"]
        assert rows[way]["message_us"].keys() == set(Work)
    assert f"sdp over verbs@{lab.rxe_address}" in rows[Way.SIDESTEP]["carried"].values()
    assert [device["name"] for device in found["client"]["devices"]] == ["rxe0", "siw0"]
