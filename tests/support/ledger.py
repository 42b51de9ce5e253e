"""Installs two offload protocols, `ledger` and `witness`, which write down what they are told (sidestep_ledger.py).

What they have been told stands in the file `book`; a file named `refuse-NAME` makes that protocol fail its next calls:
an errno's name for bind, `no way` for a connection, `raise` for an exception that nobody expects.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import queue_link
import sidestep_ledger
from sidestep_ledger import WHERE, WITNESS_NUMBER

__all__ = ["WITNESS_NUMBER", "Book", "install"]


class Book:
    """The tests' side."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def lines(self) -> list[str]:
        """What the protocols were told so far."""
        book = self._directory / "book"
        return book.read_text(encoding="ascii").splitlines() if book.exists() else []

    def refuse(self, name: str, how: str) -> None:
        """From now on that protocol fails so."""
        (self._directory / f"refuse-{name}").write_text(how, encoding="ascii")


def install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    """Installs them into `directory`, for every provider that is started from now on."""
    shutil.copy(sidestep_ledger.__file__, directory)
    shutil.copy(queue_link.__file__, directory)
    info = directory / "sidestep_ledger-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sidestep-ledger\nVersion: 1\n", encoding="ascii")
    (info / "entry_points.txt").write_text(
        "[sidestep.protocols]\nledger = sidestep_ledger:Ledger\nwitness = sidestep_ledger:Witness\n", encoding="ascii"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv(WHERE, str(directory))
    return Book(directory)
