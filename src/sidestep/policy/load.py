"""The way from the first file of a policy to all of its statements: follows includes, looks users and groups up.

All problems are collected, so that one look shows them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sidestep import limits
from sidestep.errors import SidestepError
from sidestep.policy.compiled import Policy
from sidestep.policy.disk import DiskFiles, DiskNames
from sidestep.policy.grammar import parse
from sidestep.policy.model import Identity, Include, Origin, Pair, PolicyError, Problem, Rule, Statement, is_glob


class Glob(NamedTuple):
    """An `include` of many files."""

    directory: Path
    pattern: str


@dataclass(slots=True)
class Loaded:
    """Statements of one place and of all that it includes."""

    statements: list[Statement] = field(default_factory=list)  # instead of includes stands what they bring
    problems: list[Problem] = field(default_factory=list)
    uids: dict[str, int] = field(default_factory=dict)  # numbers of the users that are named
    gids: dict[str, int] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)  # files that were read, or should have been
    globs: list[Glob] = field(default_factory=list)


def load(place: Path, files: DiskFiles, names: DiskNames, *, required: bool = True) -> Loaded:
    """Loads the file `place` and all that it includes, and collects problems; unless `required` it may be missing."""
    loading = _Loading(files, names)
    loading.take_file(place, None if required else _MAY_BE_MISSING, ())
    return loading.loaded


def compile_all(places: Iterable[Loaded]) -> Policy:
    """One policy of several places; rules of an earlier one come first. Raises PolicyError if anything is wrong."""
    found = list(places)
    problems = [problem for one in found for problem in one.problems]
    if problems:
        raise PolicyError(problems)
    uids = {name: number for one in found for name, number in one.uids.items()}
    gids = {name: number for one in found for name, number in one.gids.items()}
    return Policy((statement for one in found for statement in one.statements), uids=uids, gids=gids)


_MAY_BE_MISSING = Origin()


class _Loading:
    """One place on its way in."""

    def __init__(self, files: DiskFiles, names: DiskNames) -> None:
        self.loaded = Loaded()
        self._files = files
        self._uid, self._gid = cache(names.uid), cache(names.gid)
        self._bytes_left = limits.POLICY_BYTES_MAX
        self._files_left = limits.POLICY_FILES_MAX
        self._full = False

    def take_file(self, path: Path, origin: Origin | None, chain: tuple[Path, ...]) -> None:
        """Reads a file that `origin` includes; None: it is the place itself."""
        self.loaded.files.append(path)
        try:
            data = self._files.read(path, self._bytes_left)
        except SidestepError as error:
            self._complain(origin, path, error.message, error.remedy)
            return
        if data is None:
            if origin is not _MAY_BE_MISSING:
                self._complain(origin, path, f"{path} does not exist", "create it, or name another one")
            return
        self._bytes_left -= len(data)
        document = parse(data, str(path))
        self.loaded.problems += document.problems
        for statement in document.statements:
            if self._full:
                return
            if isinstance(statement, Include):
                self._include(statement, path, (*chain, path))
            elif len(self.loaded.statements) >= limits.POLICY_RULES_MAX:
                self._full = True
                self._complain(
                    statement.origin, path, f"more than {limits.POLICY_RULES_MAX} statements; later ones were not read",
                    "one rule can name a whole network, a range of ports, and programs by a glob",
                )  # fmt: skip
            else:
                self._look_up(statement)
                self.loaded.statements.append(statement)

    def _include(self, include: Include, path: Path, chain: tuple[Path, ...]) -> None:
        if len(chain) >= limits.POLICY_INCLUDE_DEPTH_MAX:
            message = f"files include each other more than {limits.POLICY_INCLUDE_DEPTH_MAX} deep"
            self._complain(include.origin, path, message, "include them from one file", word=include.pattern)
            return
        if is_glob(include.pattern):
            self.loaded.globs.append(Glob(path.parent, include.pattern))
            found = self._files.expand(path.parent, include.pattern, self._files_left + 1)
        else:
            found = [path.parent / include.pattern]
        for file in found:
            if file in chain:
                way = " includes ".join(str(step) for step in (*chain[chain.index(file) :], file))
                self._complain(
                    include.origin, path, f"{way}, in a circle", "take one of them out", word=include.pattern
                )
            elif not self._files_left:
                message = f"more than {limits.POLICY_FILES_MAX} included files"
                self._complain(include.origin, path, message, "put several of them into one", word=include.pattern)
                return
            else:
                self._files_left -= 1
                self.take_file(file, include.origin, chain)

    def _look_up(self, statement: Statement) -> None:
        if isinstance(statement, Rule):
            self._identity(statement.user, False, statement.origin)
            self._identity(statement.group, True, statement.origin)
        elif isinstance(statement, Pair):
            for side in statement.sides:
                self._identity(side.identity, side.is_group, statement.origin)

    def _identity(self, name: Identity | None, is_group: bool, origin: Origin) -> None:
        known = self.loaded.gids if is_group else self.loaded.uids
        if not isinstance(name, str) or name in known:
            return
        number = self._gid(name) if is_group else self._uid(name)
        if number is not None:
            known[name] = number
            return
        kind = "group" if is_group else "user"
        self._complain(
            origin, None, f"there is no {kind} {name!r} here", f"add the {kind}, or give its number", word=name
        )

    def _complain(
        self, origin: Origin | None, path: Path | None, message: str, remedy: str, *, word: str | None = None
    ) -> None:
        if len(self.loaded.problems) > limits.POLICY_PROBLEMS_MAX:
            return
        if origin is None or not origin.line:
            self.loaded.problems.append(Problem(str(path), 0, 0, "", message, remedy))
            return
        word = str(path) if word is None else word
        column = origin.text.rfind(word) + 1
        self.loaded.problems.append(
            Problem(origin.file, origin.line, column, word if column else "", message, remedy, origin.text)
        )
