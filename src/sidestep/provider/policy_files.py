"""The policy in force: read from its files, and anew whenever one of them changes.

Each place (the user's file, the system's) keeps its last content without a fault. So a bad line in one neither opens
nor closes what another says. A place that is bad at the start says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from sidestep import limits
from sidestep.policy import Policy, Problem
from sidestep.policy.disk import DiskFiles, DiskNames
from sidestep.policy.load import Glob, Loaded, compile_all, load
from sidestep.provider.watch import FileWatch
from sidestep.settings import PolicyPlace

_LOGGED_MAX: Final = 5  # problems that go to the log; `sidestep policy check` shows all


def read_places(
    places: Iterable[PolicyPlace], files: DiskFiles | None = None, names: DiskNames | None = None
) -> list[Loaded]:
    """Statements of each place, and its problems."""
    files, names = files or DiskFiles(), names or DiskNames()
    return [load(place.path, files, names, required=place.required) for place in places]


class PolicyFiles:
    """The policy of one provider.

    Watch `fileno()` for being readable, then call `handle_readable`; it calls `on_change` if the policy, or what is
    wrong with it, may have changed.
    """

    def __init__(
        self,
        places: Sequence[PolicyPlace],
        *,
        log: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        owners: frozenset[int] | None = None,
        names: DiskNames | None = None,
    ) -> None:
        """`owners`: files that other users could write are not taken; see `DiskFiles`."""
        self._places = tuple(places)
        self._log = log
        self._on_change = on_change
        self._files = DiskFiles(owners)
        self._names = names or DiskNames()
        self._good = [Loaded() for _ in self._places]  # content of each when it was last without a fault
        self._watch: FileWatch | None = None
        self._followed = [place.path for place in self._places]
        self._globs: list[Glob] = []
        self.policy = Policy()
        self.errors: tuple[Problem, ...] = ()  # state of the files as they are now
        self.generation = 0  # number of times they were read
        self.blind: str | None = None  # reason why a change might not be noticed
        try:
            self._watch = FileWatch()
        except OSError as error:
            self.blind = f"files cannot be watched: {error.strerror}"
        self._read()

    def fileno(self) -> int | None:
        """Descriptor that becomes readable when a file may have changed; None: there is none, as `blind` explains."""
        return None if self._watch is None else self._watch.fileno()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def handle_readable(self) -> None:
        """Reads the files anew if one of them may have changed."""
        if self._watch is not None and self._watch.handle_readable():
            self._read()
            self._on_change()

    def as_json(self) -> dict[str, Any]:
        return {
            "places": [str(place.path) for place in self._places],
            "rules": len(self.policy.rules),
            "errors": len(self.errors),
            "first_error": str(self.errors[0]) if self.errors else None,
            "generation": self.generation,
            "blind": self.blind,
        }

    # ---- reading ----

    def _read(self) -> None:
        self._follow()
        for _ in range(limits.POLICY_LOOKS_MAX):
            found = read_places(self._places, self._files, self._names)
            self._followed = [path for one in found for path in one.files]
            self._globs = [glob for one in found for glob in one.globs]
            if not self._follow():
                break  # the watch reports every change since it was read
        self._take(found)

    def _follow(self) -> bool:
        """Watches all that was read, or looked for; whether some of it was not watched while it was read."""
        if self._watch is None:
            return False
        fresh = self._watch.follow(self._followed, self._globs)
        self.blind = self._watch.blind
        return fresh

    def _take(self, found: Sequence[Loaded]) -> None:
        self._good = [old if new.problems else new for old, new in zip(self._good, found, strict=True)]
        before = self.policy.statements
        self.policy = compile_all(self._good)
        self.errors = tuple(problem for one in found for problem in one.problems)
        self.generation += 1
        for problem in self.errors[:_LOGGED_MAX]:
            self._log(f"policy: {problem}; {problem.remedy}" if problem.remedy else f"policy: {problem}")
        if self.errors:
            more = f"{len(self.errors) - _LOGGED_MAX} more problems; " if len(self.errors) > _LOGGED_MAX else ""
            kept = ", ".join(
                f"{place.path} {'as it was' if good.files else 'not at all'}"
                for place, good, new in zip(self._places, self._good, found, strict=True)
                if new.problems
            )
            self._log(f"policy: {more}in force until that is mended: {kept}; see 'sidestep policy check'")
        elif self.generation > 1 and before != self.policy.statements:
            self._log(f"policy: {len(self.policy.rules)} rules are in force now")
        if self.blind:
            self._log(f"policy: changes may go unnoticed: {self.blind}")
