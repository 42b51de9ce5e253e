"""CPython's own socket tests have the same results with the Python API as without, and connections were promoted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import needed
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpython"))
from suite import Exceptions, differences, run_module  # type: ignore[import-not-found]

from sidestep.testing import Sidestep

# What the interpreter does before the tests are imported.
INSTALLED = "import sidestep; sidestep.install()"
STAND_IN = "import sys; from sidestep import socket; sys.modules['socket'] = socket"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("module", "first", "reached"),
    [
        ("test_socket", INSTALLED, "claim_matched"),
        ("test_socket", STAND_IN, "claim_matched"),
        # Its connections end at once: whether one does so before or after it is paired is a matter of luck.
        ("test_asyncio.test_streams", INSTALLED, "offer_accepted"),
    ],
    ids=["socket-installed", "socket-stand_in", "asyncio-installed"],
)
def test_same_results(module: str, first: str, reached: str, tmp_path: Path) -> None:
    """Each test ends as it does natively."""
    needed.module("test.test_socket")
    exceptions = Exceptions.load()
    (tmp_path / "sitecustomize.py").write_text(first + "\n")
    bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    native = run_module(f"test.{module}", bare, excluded=list(exceptions.excluded))
    with Sidestep(promote_after="0") as sidestep:
        env = sidestep.env(LD_PRELOAD=None, PYTHONPATH=str(tmp_path))
        taken = run_module(f"test.{module}", env, excluded=list(exceptions.excluded))
        counters = sidestep.status()["counters"]
    assert len(native.outcomes) > 5
    assert not (found := differences(native, taken, exceptions)), "\n\n".join(found)
    assert counters.get(reached, 0) >= 1
