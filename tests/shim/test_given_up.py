"""A protocol that stands between two ends, and then finds that it cannot carry them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from common import PATIENCE_S
from ledger import install

from sidestep.provider import control
from sidestep.testing import Sidestep

PROGRAM = Path(__file__).parent / "programs" / "talk.py"


def test_what_a_protocol_has_opened_and_given_up_goes_back_to_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch).refuse("ledger", "open and give up")
    with Sidestep() as sidestep:
        with control.ControlConnection(sidestep.socket) as connection:
            connection.document("module_remove", name="local")
        counters: dict[str, int] = {}
        for _ in range(30):  # on a busy machine a talk may be over before its ends are paired
            program = sidestep.popen([sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True)
            assert program.communicate(timeout=PATIENCE_S)[0] == "done\n"
            if counters := {name: n for name, n in sidestep.status()["counters"].items() if name.startswith("relay_")}:
                break
        assert counters["relay_opened"] == counters["relay_left"] >= 1
