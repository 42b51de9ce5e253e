"""What `bench/run.py --page` makes of saved runs, and that the committed page is made so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAVED = "docs/guides/performance.json"
DOCUMENTS = (SAVED, "docs/guides/performance.md", "README.md")


def page(tree: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, tree / "bench/run.py", *args], capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the documents and what makes them."""
    shutil.copytree(ROOT / "bench/harness", tmp_path / "bench/harness")
    shutil.copy(ROOT / "bench/run.py", tmp_path / "bench")
    (tmp_path / "docs/guides").mkdir(parents=True)
    for path in DOCUMENTS:
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def row(name: str, ratio: float, **other: object) -> dict[str, Any]:
    world = {"min": 90.0, "max": 110.0, "beside": {}, "values": [100.0]}
    return {
        "row": name, "title": f"work {name}", "unit": "tps", "absolute": False, "lower_is_better": False,
        "worlds": {"unpinned": world | {"median": 100.0}, "sidestep": world | {"median": 100 * ratio}},
        "must": 1, "aim": 2, "best_tcp": "unpinned", "reached": "must",
        "ratio": ratio, "ratio_min": ratio - 0.1, "ratio_max": ratio + 0.1,
        "invalid": None, "failed": None, "promotion": [],
    } | other  # fmt: skip


def saved(tree: Path, name: str, *rows: dict[str, Any], **other: object) -> Path:
    """A run, as `--save` writes it."""
    document = {
        "machine": {"cpus": 2, "text": "a machine"}, "load_before": [0.1, 0.2, 0.3], "load_after": [1.0, 1.0, 1.0],
        "settings": {"rounds": 5, "seconds": 1.0, "promote_after": None, "quick": False},
        "rows": rows, "skipped": [],
    } | other  # fmt: skip
    path = tree / name
    path.write_text(json.dumps(document))
    return path


def block(tree: Path, name: str, document: str = "docs/guides/performance.md") -> str:
    return (tree / document).read_text().partition(f"<!-- figures: {name} -->")[2].partition("<!-- end of figures")[0]


def test_the_page_is_what_the_committed_run_gives() -> None:
    found = page(ROOT, "--page", ROOT / SAVED, "--check")
    assert found.returncode == 0, found.stderr


def test_rows_stand_where_they_belong_and_the_slower_are_said_to_be(tree: Path) -> None:
    run = saved(tree, "run.json", row("redis-1", 2.5), row("b", 0.8), row("c", 1.02), row("d-load8", 0.97))
    assert page(tree, "--page", run).returncode == 0
    assert "| work redis-1, tps | 100.0 | 250.0 | **2.50x** (2.40..2.60) | 1x/2x |" in block(tree, "gain")
    assert "| work b, tps | 100.0 | 80.00 | **slower 0.80x** (0.70..0.90) | 1x/2x |" in block(tree, "even")
    assert "**1.02x**" in block(tree, "even")
    assert "**slower 0.97x**" in block(tree, "load")
    assert block(tree, "readme", "README.md").splitlines()[3:] == ["| work redis-1, tps | 100.0 | 250.0 | **2.50x** |"]
    for name, works in (("gain", ["redis-1"]), ("even", ["b", "c"]), ("load", ["d-load8"])):
        picture = ElementTree.parse(tree / f"docs/guides/performance-{name}.svg").getroot()
        titles = [str(text.text) for text in picture.iter() if text.attrib.get("class") == "head"]
        assert [title for title in titles if title.startswith("work")] == [f"work {work}" for work in works]
        assert f"](performance-{name}.svg)" in block(tree, name)
    assert page(tree, "--page", tree / SAVED, "--check").returncode == 0


def test_the_peer_stands_beside_tcp_and_two_copies_below_the_table(tree: Path) -> None:
    peer = {"name": "sockmap", "ratio": 1.5, "ratio_min": 1.4, "ratio_max": 1.6}
    failed = {"name": "sockmap", "failed": "0 of 2 ends redirected"}
    rows = row("a", 2), row("b", 2, peer=failed), row("c", 2, peer=peer)
    rows[2]["worlds"]["sidestep"]["beside"] = {"limit": 400.0}
    rows[2]["worlds"]["sockmap"] = {"median": 150.0, "beside": {}}
    run = saved(tree, "run.json", *rows, peer={"name": "sockmap", "missing": None})
    assert page(tree, "--page", run).returncode == 0
    gain = block(tree, "gain").strip().splitlines()
    assert gain[0] == "| work | TCP | sidestep | ratio | sockmap | must/aim |"
    assert gain[2].endswith("| - | 1x/2x |")
    assert gain[3].endswith("| failed | 1x/2x |")
    assert gain[4].endswith("| 1.50x (1.40..1.60) | 1x/2x |")
    assert "Two copies alone: work c 4.00x." in gain
    assert "Not counted for sockmap: work b: 0 of 2 ends redirected." in block(tree, "machine")
    assert "150.0" in (tree / "docs/guides/performance-gain.svg").read_text()


def test_a_work_has_one_line_for_few_and_many_busy_programs(tree: Path) -> None:
    peer = {"name": "sockmap", "ratio": 1.5, "ratio_min": 1.4, "ratio_max": 1.6}
    busy = {load: f"work, beside {load} busy programs" for load in (4, 8)}
    rows = (
        row("a-load8", 2, title=busy[8], work_kept=0.985), row("b-load8", 0.9),
        row("a-load4", 3, title=busy[4], peer=peer),
    )  # fmt: skip
    rows[2]["worlds"]["sockmap"] = {"median": 150.0, "beside": {}}
    assert page(tree, "--page", saved(tree, "run.json", *rows)).returncode == 0
    load = block(tree, "load").strip().splitlines()
    assert load[0] == "| work | 4 busy | 8 busy | sockmap | work kept beside | must/aim |"
    assert load[2] == "| work | **3.00x** (2.90..3.10) | **2.00x** (1.90..2.10) | 1.50x/- | -/98.5% | 1x/2x |"
    assert load[3] == "| work b-load8 | - | **slower 0.90x** (0.80..1.00) | - | - | 1x/2x |"


def test_a_cost_may_exceed_that_of_tcp_by_so_much(tree: Path) -> None:
    rows = (
        row("idle", 2, absolute=True, over_tcp=True, must=8), row("cpu", 2, absolute=True, must=3),
        row("cpu-stream", 2), row("cpu-pingpong", 2, must=2),
    )  # fmt: skip
    run = saved(tree, "run.json", *rows, peer={"name": "sockmap", "missing": "BPF's sockmap needs root"})
    assert page(tree, "--page", run).returncode == 0
    cells = [line.split(" | ")[-1] for line in block(tree, "cost").strip().splitlines()]
    assert cells[2:] == ["TCP + 8.00 |", "3.00 |", "TCP |", "TCP / 2 |"]
    assert "No sockmap beside them: BPF's sockmap needs root." in block(tree, "machine")


def test_a_check_writes_nothing_and_names_what_differs(tree: Path) -> None:
    before = {path: (tree / path).read_text() for path in DOCUMENTS}
    found = page(tree, "--page", saved(tree, "run.json", row("a", 3)), "--check")
    assert found.returncode == 2
    assert "docs/guides/performance.md" in found.stderr
    assert {path: (tree / path).read_text() for path in DOCUMENTS} == before


def test_what_stands_against_the_figures_is_said(tree: Path) -> None:
    quick = {"rounds": 2, "seconds": 0.3, "promote_after": None, "quick": True}
    rows = row("a", 3), row("b", 3, invalid="0 of 2 ends promoted: offered"), row("c", 3, failed="no|ne")
    skipped = [{"row": "nginx", "why": "wrk is not installed"}]
    run = saved(tree, "run.json", *rows, settings=quick, load_before=[1.5, 1, 1], skipped=skipped)
    assert page(tree, "--page", run).returncode == 0
    about = block(tree, "machine")
    for sentence in (
        "2 rounds of 0.3 s", "load before: 1.50 1.00 1.00", "a look, and no figures to keep", "no figures to trust",
        "Not counted: work b: 0 of 2 ends promoted: offered.", "Not counted: work c: no|ne.",
        "Not measured: nginx: wrk is not installed.",
    ):  # fmt: skip
        assert sentence in about
    assert "work b" not in block(tree, "gain")


def test_later_runs_replace_rows_of_earlier_ones_on_the_same_machine(tree: Path) -> None:
    first, later = saved(tree, "1.json", row("a", 3), row("b", 2)), saved(tree, "2.json", row("b", 4), row("e", 5))
    assert page(tree, "--page", first, "--page", later).returncode == 0
    assert [row["ratio"] for row in json.loads((tree / SAVED).read_text())["rows"]] == [3, 4, 5]
    other = saved(tree, "3.json", row("b", 6), machine={"cpus": 64, "text": "another"})
    found = page(tree, "--page", first, "--page", other)
    assert found.returncode == 2
    assert "two machines: a machine and another" in found.stderr
