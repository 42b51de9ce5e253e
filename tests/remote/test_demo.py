"""`sidestep demo --two-hosts`: every work runs, is offloaded in both ways, and receives what was sent."""

from __future__ import annotations

import os

import needed
import pytest

from sidestep.demo.demo import run_two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces, as root")]


def test_the_demo_on_two_hosts() -> None:
    needed.programs("redis-server", "redis-benchmark", "nginx")
    told: list[str] = []
    demo = run_two_hosts(rounds=1, seconds=0.2, tell=told.append)
    assert not [(line.work.name, line.why_not_promoted, line.equal) for line in demo.lines if not line.promoted]
    assert demo.good
    assert not demo.skipped
    assert [line.work.name for line in demo.lines] == ["redis-1", "redis-50", "echo", "bulk", "nginx"]
    assert all(list(line.runs) == ["tcp", "sidestep", "sdp"] for line in demo.lines)
    assert len(told) == len(demo.lines)
