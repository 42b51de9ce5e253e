"""What the Makefile does that a program which runs meanwhile could notice."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MADE = ("libsidestep.so", "_channel.abi3.so", "_framing.abi3.so")


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
    for prerequisite in ("pyproject.toml", ".venv/.core", ".venv/.dependencies", ".venv/.installed"):  # each newer than the one before
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
