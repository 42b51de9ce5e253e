"""A protocol that stands between two ends, and then finds that it cannot carry them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from common import PATIENCE_S, eventually
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

        def counted(name: str) -> int:
            return int(sidestep.status()["counters"].get(name, 0))

        while not counted("relay_opened"):  # on a busy machine a talk may be over before its ends are paired
            program = sidestep.popen([sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True)
            assert program.communicate(timeout=PATIENCE_S)[0] == "done\n"
        eventually(lambda: counted("relay_opened") == counted("relay_left"))
