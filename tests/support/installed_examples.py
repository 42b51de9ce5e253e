"""Distributions of examples/, as pip installs them, for providers that are started while they are on the path."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import toolchain


@cache
def installed(name: str) -> Path:
    """A directory into which pip has installed it; it stays in build/native-tests for the next to ask."""
    example = toolchain.ROOT / "examples" / name
    digest = hashlib.sha256(sys.executable.encode())
    for path in sorted(path for path in example.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(example)).encode() + path.read_bytes())
    return toolchain.made_once(f"{digest.hexdigest()[:16]}-{name}", partial(_install, example))


def _install(example: Path, target: Path) -> None:
    with TemporaryDirectory(prefix=f"{example.name}-") as scratch:
        source = shutil.copytree(example, Path(scratch) / "source")  # what is built leaves its traces there
        pip: list[str | Path] = [sys.executable, "-m", "pip"]
        wheel = [*pip, "wheel", "--quiet", "--no-deps", "-w", scratch, source]
        subprocess.run(wheel, check=True, capture_output=True)
        (built,) = Path(scratch).glob("*.whl")
        install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--target", target, built]
        subprocess.run(install, check=True, capture_output=True)


@contextmanager
def on_the_path(name: str) -> Iterator[None]:
    """What starts meanwhile finds it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(installed(name))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
