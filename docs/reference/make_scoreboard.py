"""Writes docs/reference/scoreboard.md: the scenes of tests/shim, the conditions they run under, the known differences.

`python docs/reference/make_scoreboard.py` writes it; with `--check` it fails if it is not what it would write.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

HERE: Final = Path(__file__).parent
TESTS: Final = HERE.parents[1] / "tests"
PAGE: Final = HERE / "scoreboard.md"
sys.path[:0] = [str(TESTS / "shim"), str(TESTS / "support")]  # as pytest does for them

from scene_runner import KNOWN_DIFFERENCES, PROGRAMS, Sockets, difference_known, scene_names  # noqa: E402
from test_scenes import MODES  # noqa: E402

if TYPE_CHECKING:
    from scene_runner import Variant

# each condition of the tests belongs to one
COLUMNS: Final[dict[str, Callable[[Variant], bool]]] = {
    "promoted": lambda v: v.sockets is Sockets.ORDINARY and v.warm and not v.shaken,
    "promoted in the midst": lambda v: v.sockets is Sockets.ORDINARY and not v.warm,
    "to TCP and back all the while": lambda v: v.sockets is Sockets.ORDINARY and v.warm and v.shaken,
    "explicit": lambda v: v.sockets is Sockets.EXPLICIT,
    "direct": lambda v: v.sockets is Sockets.DIRECT,
}

# Differences that programs played at random show: by the moment, or in orders of calls too rare for a scene.
BY_CHANCE: Final = (
    "by edges, readiness that still holds may be reported once more, to an outer set once less",
    "`tcpi_state` is FIN_WAIT1 for longer: bytes by ring acknowledge nothing",
    "`sendfile` and `splice` may be short before a peer that reads no more",
    "`SIOCATMARK` is 0 where a reset meets a shut reader",
    "a reset's error is gone after `connect()` to AF_UNSPEC",
)


def columns() -> dict[str, list[str]]:
    """The conditions that are run, by column; each in one."""
    found: dict[str, list[str]] = {name: [] for name in COLUMNS}
    for mode in MODES:
        (name,) = (name for name, belongs in COLUMNS.items() if belongs(mode.variant))
        found[name].append(str(mode))
    if missing := [name for name, modes in found.items() if not modes]:
        raise SystemExit(f"no condition of tests/shim/test_scenes.py is {missing[0]!r}: correct COLUMNS")
    return found


def about(table: str) -> str:
    """What the scenes of a table are about: the first sentence of its file."""
    text = (PROGRAMS / f"scenes_{table}.c").read_text(encoding="utf-8")
    comment = re.sub(r"\s*\n \*\s*", " ", text[len("/*") : text.index("*/")]).strip()
    return re.split(r"(?<=\.) ", comment)[0].rstrip(".")


def cell(scenes: Iterable[str], modes: Iterable[str]) -> str:
    """How these scenes compare with kernel TCP under these conditions."""
    different = [f"`{scene}`" for scene in scenes if any(difference_known(scene, mode) for mode in modes)]
    return f"same, but for {', '.join(different)}" if different else "same"


def lines(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def page() -> str:
    """The whole page."""
    tables = [path.stem.removeprefix("scenes_") for path in sorted(PROGRAMS.glob("scenes_*.c"))]
    rows = [["scenes", "number", *COLUMNS]]
    for table in tables:
        names = list(scene_names(table))
        rows.append(
            [f"**{table}**: {about(table)}", str(len(names)), *(cell(names, modes) for modes in columns().values())]
        )
    rows.append(["together", str(len(list(scene_names()))), *[""] * len(COLUMNS)])
    conditions = [
        ["column", "conditions of `tests/shim/test_scenes.py`"],
        *([name, ", ".join(f"`{mode}`" for mode in modes)] for name, modes in columns().items()),
    ]
    known = [*(f"`{scene}`: {found.reason}" for scene, found in KNOWN_DIFFERENCES.items()), *BY_CHANCE]
    differences = "\n".join(f"- {difference}." for difference in known)
    return f"""<!-- Made from the tests by docs/reference/make_scoreboard.py; change it there. -->

# Scoreboard

Each scene is a small program of socket calls (`tests/shim/programs`). Over kernel TCP and under the shim it prints what
every call returned, its errno, and which bytes and events came. *Same* means that the two texts are equal; where a
switch in the midst may rightly change something (a short read), the scene says so. A test that finds it otherwise
fails.

{lines(rows)}

## Known differences

{differences}

## Conditions

{lines(conditions)}

A condition names the process of the peer, the end that connects, whether the connection is promoted before the scene,
the family, how the scene is compiled, and after how many calls it is promoted.
"""


def main() -> int:
    """Writes or checks the page; 1 if the check fails."""
    text = page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if sys.argv[1:] == ["--check"]:
        print("docs/reference/scoreboard.md is not what the tests say; run 'make docs'", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
