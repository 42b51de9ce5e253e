"""Mutants: faults that the project once had, as patches. `tests/mutants/NAME.patch` is a diff below a few words.

fault: what a user saw. source: the commit or the line of the changelog. found: how it was found then. room: the folder
below src/sidestep. likely: items, functions, files that probably find it, separated by commas; left out where none is
known. A star in an item's name stands for any words: most items are but in some rows.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from source_copy import ROOT

MUTANTS: Final = ROOT / "tests" / "mutants"
KEYS: Final = ("fault", "source", "found", "room")
LINES_MAX: Final = 20  # that a mutant adds and takes away
_BETWEEN: Final = re.compile(r"[,\s]+(?=tests/)")  # a parameter of an item may hold a comma
_HUNK: Final = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault that can be put back."""

    path: Path
    header: dict[str, str]
    changed: dict[str, frozenset[int]]  # old lines of each file; of an insertion the lines around it
    size: int  # lines added and taken away

    @property
    def name(self) -> str:
        """The file's name, without its end."""
        return self.path.stem

    @property
    def digest(self) -> str:
        """Of the patch, not of the words above it."""
        text = self.path.read_text(encoding="utf-8")
        return hashlib.sha256(text[text.find("diff --git") :].encode()).hexdigest()[:16]

    @property
    def likely(self) -> list[str]:
        """Items, functions and files that probably find it."""
        return [word for word in _BETWEEN.split(self.header.get("likely", "").strip()) if word]

    @classmethod
    def read(cls, path: Path) -> Mutant:
        """The mutant of a file."""
        lines = path.read_text(encoding="utf-8").splitlines()
        begin = next((at for at, line in enumerate(lines) if line.startswith("diff --git")), len(lines))
        header = {}
        for line in filter(None, lines[:begin]):
            key, colon, value = line.partition(": ")
            if not colon:
                raise ValueError(f"{path.name}: this line of the header is not `key: value`: {line}")
            header[key] = value
        changed, size = _changed(lines[begin:])
        return cls(path, header, changed, size)

    def apply(self, tree: Path, *options: str) -> None:
        """Puts the fault into a tree; raises ValueError with git's words where it does not fit."""
        env = os.environ | {
            "GIT_CEILING_DIRECTORIES": str(tree.parent)
        }  # a copy below build/ is no part of our repository
        command = ["git", "apply", *options, str(self.path)]
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{self.path.name} does not fit the tree:\n{done.stderr}")


def _changed(lines: list[str]) -> tuple[dict[str, frozenset[int]], int]:
    changed: dict[str, set[int]] = {}
    file, old, size = "", 0, 0
    inserted_at: set[int] = set()
    for line in lines:
        if line.startswith("--- "):
            file = line[4:].removeprefix("a/")
        elif line.startswith("+++ ") or not file:
            continue
        elif hunk := _HUNK.match(line):
            old = int(hunk[1])
            inserted_at = set()
        elif line.startswith("-"):
            changed.setdefault(file, set()).add(old)
            inserted_at = {old}
            old, size = old + 1, size + 1
        elif line.startswith("+"):
            size += 1
            if not inserted_at:  # nothing is taken away here: the lines around it
                changed.setdefault(file, set()).update({max(old - 1, 1), old})
                inserted_at = {old}
        elif line.startswith(" ") or not line:
            old, inserted_at = old + 1, set()
    return {name: frozenset(numbers) for name, numbers in changed.items()}, size


def mutants() -> list[Mutant]:
    """All of the tree."""
    return [Mutant.read(path) for path in sorted(MUTANTS.glob("*.patch"))]
