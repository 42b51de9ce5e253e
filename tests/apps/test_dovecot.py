"""Dovecot: another process accepts than serves. dovecot_case.py does it, as one user or several."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import needed
import pytest
from other_user import own, run_case
from selection import rotate
from stage import Mode

pytestmark = pytest.mark.usefixtures("load")

CASE = Path(__file__).resolve().parent / "dovecot_case.py"
USER = "nobody"


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory with a certificate; pytest's own are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="sidestep-mail-") as made:
        Path(made).chmod(0o755)
        subprocess.run(
            [needed.program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
             "-nodes", "-days", "2", "-subj", "/CN=here", "-keyout", "key", "-out", "certificate"],
            check=True, cwd=made, capture_output=True, timeout=60,
        )  # fmt: skip
        yield Path(made)


@pytest.mark.parametrize("mode", rotate(list(Mode), test=2), ids=str)
@pytest.mark.parametrize("protocol", ["imap", "imaps"])
def test_mail_there_and_back(mode: Mode, protocol: str, home: Path) -> None:
    """Over imaps by ring, over imap by TCP."""
    own(home, USER)
    run_case(CASE, USER, home, mode, str(home), needed.program("dovecot"), protocol, "one")


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to be several users")
@pytest.mark.parametrize("protocol", ["imap", "imaps"])
def test_its_processes_are_of_several_users(protocol: str, home: Path) -> None:
    """As it comes; each of them met root's provider before it changed its user."""
    run_case(CASE, "root", home, Mode.BOTH, str(home), needed.program("dovecot"), protocol, "several")
