"""What engineers expect around the code: hooks, and a container for development."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import needed
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("message", "accepted"),
    [
        ("x" * 72 + "\n\n" + "y" * 100, True),
        ("x" * 73 + "\n", False),
        ("\u00fc" * 72 + "\n", True),  # characters, not bytes
        ("# git's own remark, of any length" + "x" * 80 + "\nshort\n", True),
        ("fixup! " + "x" * 72 + "\n", True),
        ("", True),  # git refuses it itself
    ],
)
def test_a_long_subject_is_refused(tmp_path: Path, message: str, accepted: bool) -> None:
    (file := tmp_path / "message").write_text(message, encoding="utf-8")
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    done = subprocess.run([ROOT / ".ci/subject", file], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == accepted
    assert done.stderr.count("\n") == (0 if accepted else 1)


def test_hooks_are_local_and_what_they_call_is_installed() -> None:
    found: Any = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in found["repos"]] == ["local"]
    hooks = found["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} <= {"system", "script"}  # none builds an environment of its own
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {re.split("[>=]", line)[0] for line in extras["check"]}
    for hook in hooks:
        program = hook["entry"].split()[0]
        assert (ROOT / program).exists() or program.removeprefix(".venv/bin/") in brought, program
    assert {"ruff", "clang-format"} <= {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks}


def test_a_container_has_no_list_of_programs_of_its_own() -> None:
    text = (ROOT / "Containerfile").read_text()
    steps = re.findall(r"^RUN (.+)", text, re.M)
    first, *others = steps
    named = first.partition("--no-install-recommends ")[2].split()
    assert named == ["python3", "python3-pip", "gcc", "libc6-dev", "make", "git", "ca-certificates"]  # before make
    assert others == ["tests/setup --all", "make packages-ci", "make build"]
    packages = re.findall(r"^(?:demo|core|all) \S+ (\S+)$", needed.SETUP.read_text(), re.M)
    assert not set(packages) & set(text.split())


def test_what_is_missing_fails_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "SEARCH_PATH", "/nowhere")
    for name, by in (("nginx", "setup-test"), ("musl-gcc", "setup-test"), ("caddy", "setup-ci")):
        with pytest.raises(pytest.fail.Exception, match=f"^{name} is not installed: make {by}$"):
            needed.program(name)
    with pytest.raises(pytest.fail.Exception, match=r"^the Python module nothing is not installed: make setup-ci$"):
        needed.module("nothing")
