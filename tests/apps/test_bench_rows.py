"""Rows of `bench/run.py` of each kind, run for a moment: what they give has its shape. No figure is asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import needed
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from harness import sockmap  # type: ignore[import-not-found]  # noqa: E402 - the path has to be there first
from harness.cli import build_programs  # type: ignore[import-not-found]  # noqa: E402
from harness.large import package_missing  # type: ignore[import-not-found]  # noqa: E402
from harness.machine import family, process_cpu_s  # type: ignore[import-not-found]  # noqa: E402
from harness.model import (  # type: ignore[import-not-found]  # noqa: E402
    OURS,
    PEER,
    SPREAD,
    Outcome,
    Row,
    Settings,
)
from harness.runner import judge  # type: ignore[import-not-found]  # noqa: E402
from harness.talks import pingpong  # type: ignore[import-not-found]  # noqa: E402
from harness.world import WINDOW_LEAST_S, CountedWorld  # type: ignore[import-not-found]  # noqa: E402

from sidestep.demo.world import Sample  # noqa: E402

TCP = {SPREAD, "one-cpu"}


def run(*rows: str) -> dict[str, Any]:
    """The document of a short run of these rows, all of which took place."""
    argv = [sys.executable, str(ROOT / "bench/run.py"), "--rows", ",".join(rows), "--quick", "--rounds", "1", "--json"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr  # 1: one of a busy machine was too slow
    document: dict[str, Any] = json.loads(done.stdout)
    assert [row["row"] for row in document["rows"]] == list(rows), done.stderr
    for row in document["rows"]:
        assert (row["failed"], row["invalid"]) == (None, None), done.stderr
    return document


def peers(document: dict[str, Any]) -> set[str]:
    """The peer's world, where it can be run."""
    missing = document["peer"]["missing"]
    assert missing is None or os.geteuid() or "not allowed here" in missing
    return set() if missing else {PEER}


def test_crowded_rows_have_the_peer_and_what_others_keep() -> None:
    needed.program("nginx")
    needed.program("wrk")
    document = run("pingpong-load4", "nginx-short-load4")
    for row in document["rows"]:
        assert set(row["worlds"]) == TCP | {OURS} | peers(document)
        busy = [world["beside"]["busy_cpus"] for world in row["worlds"].values() if "busy_cpus" in world["beside"]]
        assert busy or "short" in row["row"]  # a look may take as long as wrk
        assert all(used > 0 for used in busy)
        assert (row["peer"] is None) == (not peers(document))
        assert row["peer"] is None or row["peer"]["ratio_min"] <= row["peer"]["ratio"] <= row["peer"]["ratio_max"]


def test_costs_and_an_idle_second() -> None:
    stream, idle = (document := run("cpu-stream-64k", "after-idle"))["rows"]
    assert set(stream["worlds"]) == TCP | {OURS} | peers(document)
    assert all(0 < world["median"] == pytest.approx(world["beside"]["cpu_us"] / 65.536, rel=0.01)
               for world in stream["worlds"].values())  # fmt: skip
    assert set(idle["worlds"]) == {SPREAD, OURS} | peers(document)
    assert idle["over_tcp"]
    assert idle["ratio"] is None


def test_transfers_in_python() -> None:
    (row,) = run("python-16m")["rows"]
    assert row["promotion"][0]["ring_share"] > 0


@contextmanager
def redirecting() -> Iterator[Any]:
    if why := sockmap.sockmap_missing():
        pytest.skip(why)  # the kernel, or this user's rights, leave no way to try: root is needed
    with sockmap.sockmap_world() as world:
        yield world


def test_a_connection_that_is_not_redirected_does_not_count_for_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    build_programs()
    settings = Settings(seconds=0.1, warmup_s=0.1, idle_s=0)
    with redirecting() as world:
        assert pingpong("blocking")(world, settings).evidence.ends_promoted == 2
        row = Row("a", "work", "us", 1, 1, pingpong("blocking", stranger=True))
        assert "0 of 2 ends redirected: 1 were found" in judge(row, row.measure(world, settings), "redirected")
        group = Path(world.server.argv([])[-1])
        assert group.is_dir()
    assert not group.exists()
    monkeypatch.setattr(sockmap, "_OF_OTHER_END", sockmap._OF_OTHER_END[::-1])  # finds no socket
    with redirecting() as world:
        row = Row("a", "work", "us", 1, 1, pingpong("blocking"))
        assert "0 of 2 ends redirected: 2 were found" in judge(row, row.measure(world, settings), "redirected")


def test_a_row_says_what_it_lacks() -> None:
    assert package_missing("json")() is None
    assert package_missing("no_such")() == "Python's package no_such is not installed; make bench LARGE=1"


def outcome(row: Row, **worlds: Sample) -> Outcome:
    return Outcome(row, {name.replace("_", "-"): [sample] for name, sample in worlds.items()})


def test_a_peer_is_no_placement_of_tcp_and_has_a_ratio_of_its_own() -> None:
    row = Row("a", "work", "tps", 1.5, 3, lambda world, settings: Sample(0), load=4)
    beside = {"busy_cpus": 1.0}
    found = outcome(
        row, unpinned=Sample(100, beside), one_cpu=Sample(120, {"busy_cpus": 2.0}),
        sidestep=Sample(240, {"busy_cpus": 0.9}), sockmap=Sample(300, beside),
    )  # fmt: skip
    assert found.best_tcp()[0] == "one-cpu"
    assert found.ratios()[0] == 2
    assert found.as_json()["peer"] == {"name": "sockmap", "ratio": 2.5, "ratio_min": 2.5, "ratio_max": 2.5}
    assert found.work_kept() == pytest.approx(0.9)  # beside TCP in the same placement


@pytest.mark.parametrize(("ours", "reached"), [(11, "aim"), (13, "must"), (19, "missed")])
def test_what_may_exceed_tcp_is_judged_by_the_excess(ours: float, reached: str) -> None:
    row = Row("a", "memory", "KiB", 8, 2, lambda world, settings: Sample(0), absolute=True, over_tcp=True)
    assert outcome(row, unpinned=Sample(10), sidestep=Sample(ours)).reached() == reached


def test_cpu_time_is_of_all_that_a_program_started() -> None:
    with CountedWorld("unpinned") as world:
        program = world.start(["sh", "-c", "sh -c 'echo up; while :; do :; done' & wait"])
        program.expect("up", 20)
        (inner,) = family([program.pid]) - {program.pid}
        try:
            with world.counted(program):
                enough = process_cpu_s(inner) + 2 * WINDOW_LEAST_S
                while process_cpu_s(inner) < enough:
                    pass
        finally:
            os.kill(inner, signal.SIGKILL)
        assert world.spent["cpus"] > 0
