"""A test that its timeout does not end: the run goes on without it, and says which it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import stuck


@pytest.mark.slow
@pytest.mark.parametrize("way", ["its clean-up waits again", "its process is stopped"])
def test_a_test_that_stands_fails_by_name(tmp_path: Path, way: str) -> None:
    stands = {
        "its clean-up waits again": "    try: time.sleep(60)\n    finally: time.sleep(60)\n",
        "its process is stopped": "    os.kill(os.getpid(), signal.SIGSTOP)\n",
    }[way]
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 1\n")
    (tmp_path / "test_these.py").write_text(
        f"import os, signal, time\ndef test_stands():\n{stands}def test_a(): pass\ndef test_b(): pass\n"
    )
    (tmp_path / "conftest.py").write_text(
        f"import pathlib, sys\nsys.path.insert(0, {str(Path(stuck.__file__).parent)!r})\n"
        "import stuck\nstuck.GRACE_S = 1\nstuck.LOOK_S = 0.2\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(stuck.plugin(config, pathlib.Path(__file__).with_name('running')))\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", tmp_path, "-n", "1", "-p", "no:cacheprovider"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "1 failed, 2 passed" in run.stdout, run.stdout + run.stderr
    assert "crashed while running 'test_these.py::test_stands'" in run.stdout
    assert "stuck: test_these.py::test_stands in process" in run.stderr
    assert "in test_stands" in run.stderr  # the stack, by faulthandler
