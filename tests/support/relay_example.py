"""The example protocol of examples/sidestep-relay, as another distribution that a provider finds installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import toolchain

from sidestep.provider import control
from sidestep.testing import Sidestep

EXAMPLE = toolchain.ROOT / "examples" / "sidestep-relay"


@cache
def installed() -> Path:
    """A directory into which pip has installed the example; it stays in build/native-tests for the next to ask."""
    digest = hashlib.sha256(sys.executable.encode())
    for path in sorted(path for path in EXAMPLE.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(EXAMPLE)).encode() + path.read_bytes())
    return toolchain.made_once(f"{digest.hexdigest()[:16]}-relay", _install)


def _install(target: Path) -> None:
    with TemporaryDirectory(prefix="sidestep-relay-") as scratch:
        source = shutil.copytree(EXAMPLE, Path(scratch) / "source")  # what is built leaves its traces there
        pip: list[str | Path] = [sys.executable, "-m", "pip"]
        wheel = [*pip, "wheel", "--quiet", "--no-deps", "-w", scratch, source]
        subprocess.run(wheel, check=True, capture_output=True)
        (built,) = Path(scratch).glob("*.whl")
        install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--target", target, built]
        subprocess.run(install, check=True, capture_output=True)


@contextmanager
def relayed(sidestep: Sidestep) -> Iterator[Sidestep]:
    """`sidestep` with the example in the place of `local`."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(installed())
    try:
        sidestep.__enter__()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    try:
        prefer_relay(sidestep)
        yield sidestep
    finally:
        sidestep.__exit__(None, None, None)


def prefer_relay(sidestep: Sidestep) -> None:
    """Takes `local` out of its provider, so that the next in order is asked."""
    with control.ControlConnection(sidestep.socket) as connection:
        answer, descriptors = connection.request("module_remove", name="local")
        descriptors.close()
    assert answer == {"done": True}, answer
