"""`bench/iwarp.py --siw` measures everything on both paths, or says why not. What it measures is not asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_guest import ROOT

_ON_PATH = {"host-guest": {"device", "to siw", "TCP"}, "guest": {"device", "siw", "TCP"}}
_TASKS = 12  # six with a CRC, six without


def _bench(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "bench" / "iwarp.py", "--siw", *options], env={**os.environ, **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_without_a_lab_it_says_why(tmp_path: Path) -> None:
    done = _bench(SIDESTEP_LAB=str(tmp_path))
    assert done.returncode == 0, done.stderr
    why = f"no program `lab` in the folder of the lab: SIDESTEP_LAB names {tmp_path}"
    assert done.stderr == f"siw is not measured: {why}\n"


@pytest.mark.usefixtures("lab")
def test_each_takes_part(tmp_path: Path) -> None:
    """In a guest of its own."""
    done = _bench("--rounds", "1", "--seconds", "0.05", "--save", str(tmp_path / "figures"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "figures").read_text())["rows"]
    for path, who in _ON_PATH.items():
        here = [row for row in rows if row["path"] == path]
        assert len(here) == _TASKS
        assert all(row["figures"].keys() == who for row in here), here
    assert all(len(each) == 1 for row in rows for each in row["figures"].values()), rows
    assert "Not on equal terms" in done.stdout
