"""`sidestep demo`: its table, its picture, and what it says against its own figures."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import needed
import pytest
from common import run_command

from sidestep.cli.demo import _picture, _slower, _table
from sidestep.demo.demo import Demo, ResultLine
from sidestep.demo.machine import Machine, Others
from sidestep.demo.works import WORKS
from sidestep.demo.world import Evidence, Sample

SVG = "{http://www.w3.org/2000/svg}"


def lines_of(picture: str) -> list[str]:
    return [str(found.text) for found in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def result(work: int, tcp: list[float], sidestep: list[float]) -> ResultLine:
    """What a work gave over TCP and under sidestep, promoted and with the right bytes."""
    look = Evidence(2, 2)
    places = {"tcp": (tcp, None), "tcp-one-cpu": (tcp, None), "sidestep": (sidestep, look)}
    runs = {name: [Sample(value, evidence=seen) for value in values] for name, (values, seen) in places.items()}
    return ResultLine(WORKS[work], runs)


def demo(*lines: ResultLine, before: float = 0.01, during: float = 0.02) -> Demo:
    return Demo(Machine.now(), 3, 0.25, Others(before, during), list(lines))


@pytest.mark.slow
@pytest.mark.app
def test_the_demo_shows_a_table_and_writes_a_picture(tmp_path: Path) -> None:
    needed.programs("redis-server", "redis-benchmark", "nginx")
    picture = tmp_path / "shown.svg"
    args = "--rounds=1", "--seconds=0.2", "--json", f"--picture={picture}"
    found = run_command(tmp_path, "demo", *args, PATH="/usr/local/bin:/usr/bin:/bin")  # as users of Debian have it
    document = json.loads(found.stdout)
    assert document["good"]
    assert [work["work"] for work in document["works"]] == ["redis-1", "redis-50", "echo", "bulk", "nginx"]
    assert found.stderr.splitlines()[-1] == f"picture: {picture}"
    lines = lines_of(picture.read_text())
    assert {work["title"] for work in document["works"]} <= set(lines)
    assert lines.count("kernel TCP") == lines.count("sidestep") == 5


def test_a_place_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    found = run_command(tmp_path, "demo", "--picture", str(tmp_path / "absent" / "shown.svg"))
    assert found.returncode == 1
    assert "absent/shown.svg cannot be written" in found.stderr
    assert "--picture FILE" in found.stderr
    assert "rounds" not in found.stderr


def test_the_picture_needs_nothing_else_and_shows_figures_machine_and_method() -> None:
    picture = _picture(demo(result(0, [100, 110, 120], [200, 220, 240]), result(2, [20, 20, 21], [10, 10, 11])))
    for other in ("<script", "href", "url(", "@import", "<image"):
        assert other not in picture
    assert "prefers-color-scheme: dark" in picture
    lines = lines_of(picture)
    assert {"110.0", "220.0", "2.00x", "requests/s, longer is better", "us, shorter is better"} <= set(lines)
    text = " ".join(lines)
    assert str(Machine.now()) in text
    assert "Medians of 3 rounds of 0.25 s" in text
    widths = [float(bar.attrib["width"]) for bar in ElementTree.fromstring(picture).iter(f"{SVG}rect")][1:]
    assert widths == [210.0, 420.0, 420.0, 210.0]


def test_what_is_slower_than_tcp_is_said_to_be_with_the_reason() -> None:
    steady = result(3, [100, 100, 100], [50, 50, 50])
    quiet, busy = demo(steady), demo(steady, during=0.8)
    chance = demo(result(3, [100, 100, 100], [50, 50, 80]))
    assert "slower 0.50x" in _table(quiet)[1]
    assert "slower 0.50x" in lines_of(_picture(quiet))
    title = steady.work.title
    assert _slower(quiet) == [f"slower than TCP: {title}: the reason is not known; `make bench` measures longer"]
    assert _slower(busy) == [f"slower than TCP: {title}: perhaps because other programs used the CPUs"]
    assert _slower(chance) == [f"slower than TCP: {title}: perhaps by chance: its rounds differ by 60%"]
    assert _slower(chance)[0] in " ".join(lines_of(_picture(chance)))
    assert quiet.as_json()["slower"] == {"bulk": "the reason is not known; `make bench` measures longer"}


def test_a_row_that_does_not_count_is_neither_slower_nor_faster() -> None:
    line = result(3, [100], [50])
    line.runs["sidestep"] = [Sample(50, evidence=Evidence(0, 2, ("offered",)))]
    assert _slower(demo(line)) == []
    assert _table(demo(line))[1][-3:] == ["-", "NO", "yes"]
    assert "does not count" in lines_of(_picture(demo(line)))


def test_a_machine_too_busy_to_judge_is_said_to_be_first() -> None:
    line = result(0, [100, 100, 100], [200, 200, 200])
    assert demo(line).warnings() == []
    for busy in (demo(line, before=0.9), demo(line, during=0.9)):
        (warning,) = busy.warnings()
        assert warning.startswith("Too busy to judge: other programs used ")
        assert lines_of(_picture(busy))[1].startswith("Too busy to judge")
        assert busy.as_json()["warnings"] == [warning]


def test_rounds_that_differ_too_much_are_said_to_with_their_work() -> None:
    line = result(0, [100, 100, 100], [100, 200, 300])
    assert demo(line).warnings() == [f"Too far apart to judge are the rounds of {line.work.title} (100%)."]
