"""What the Debian package says, against what the project needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEBIAN = ROOT / "packaging/debian"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_package_depends_on_what_pip_would_bring() -> None:
    lines = dict(line.split(": ", 1) for line in (DEBIAN / "control").read_text().splitlines() if line[0] != " ")
    depends = lines["Depends"].split(", ")
    needed = [f"python3 ({PROJECT['requires-python'].replace('>=', '>= ')})"]
    needed += [re.sub(r"(.*)>=(.*)", r"python3-\1 (>= \2)", each) for each in PROJECT["dependencies"]]
    assert [each for each in depends if each.startswith("python3")] == needed
    assert lines["Description"].lower() == PROJECT["description"].lower()


@pytest.mark.parametrize("examples", [False, True], ids=["as it is", "with its examples"])
def test_the_policy_file_says_nothing_and_its_examples_are_valid(tmp_path: Path, examples: bool) -> None:
    text = (DEBIAN / "policy.conf").read_text()
    if examples:
        text = re.sub(r"(?m)^# (?=use |include )", "", text)
    (policy := tmp_path / "policy.conf").write_text(text)
    check = [sys.executable, "-m", "sidestep", "policy", "check", "--strict", str(policy)]
    found = subprocess.run(check, capture_output=True, text=True, check=True)
    assert f"{2 if examples else 0} rules and 0 pairs" in found.stderr + found.stdout
