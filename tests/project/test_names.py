"""The code keeps to the words of the field: those of our own are few, and retired ones do not come back."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src" / "sidestep"
GLOSSARY: Final = ROOT / "docs" / "internals" / "glossary.md"
ENTRIES_MAX: Final = 25
WORDS_MAX: Final = 350

# Parts of identifiers, and the word of the field in their place. Some names of Python are older than this rule, where
# connections go between hosts.
RETIRED: Final = {
    "awake": "polled, or busy",
    "bell": "doorbell",
    "bells": "doorbells",
    "disown": "drop_stale",
    "doom": "arm_reset",
    "doomed": "reset_armed",
    "hear": "receive, wait, acknowledge",
    "hearing": "wait",
    "heir": "successor",
    "honour": "handle",
    "misnamed": "stale",
    "vain": "wasted, unanswered",
}
RETIRED_IN_C: Final = RETIRED | {
    "heard": "received",
    "hears": "waits_on",
    "lent": "inherited; of the engine: loaned",
    "told": "reported, announced",
    "unheard": "unacknowledged",
    "untold": "unreported",
}
RETIRED_IN_THE_SHIM: Final = RETIRED_IN_C | {"lend": "inherit", "native": "kernel, tcp", "plain": "tcp_only, unmanaged"}
# Codes that `ss` and `explain` show, and what is no private word: a message without its address, a command's result.
KEPT: Final = {"STATE_NATIVE", "REASON_UNHEARD", ("shim_io.c", "plain"), ("shim_fd.c", "plain")}

_C: Final = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|([A-Za-z_]\w*)", re.DOTALL)


def identifiers(path: Path) -> Iterator[str]:
    """Names in the code of a file, without comments and strings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in {".py", ".pyi"}:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.string
    else:
        yield from (found[1] for found in _C.finditer(text) if found[1])


def retired(path: Path, names: Iterator[str]) -> dict[str, str]:
    """Names of a file that have a retired part, and the words that replace it."""
    words = (
        RETIRED if path.suffix in {".py", ".pyi"}
        else RETIRED_IN_THE_SHIM if path.name.startswith("shim") else RETIRED_IN_C
    )  # fmt: skip
    return {
        f"{path.name}: {name}": words[part]
        for name in names
        for part in words.keys() & {*name.lower().split("_")}
        if not {name, (path.name, name)} & KEPT
    }


def sources() -> list[Path]:
    return [path for kind in ("c", "h", "S", "py", "pyi") for path in sorted(SOURCE.rglob(f"*.{kind}"))]


def test_no_retired_word_comes_back() -> None:
    found: dict[str, str] = {}
    for path in sources():
        found |= retired(path, identifiers(path))
        found |= retired(path, iter([path.stem]))
    assert found == {}


def glossary() -> list[str]:
    rows = re.findall(r"(?m)^\| (.+?) \| .+ \|$", GLOSSARY.read_text(encoding="utf-8"))
    assert rows[:2] == ["word", "---"]
    return rows[2:]


def test_words_of_our_own_are_few() -> None:
    words = glossary()
    assert len(words) == len(set(words)) <= ENTRIES_MAX
    assert [word for word in words if not re.fullmatch(r"[a-z]+(-[a-z]+)?", word)] == []  # one a row
    assert len(GLOSSARY.read_text(encoding="utf-8").split()) <= WORDS_MAX


def test_each_word_of_our_own_is_used() -> None:
    parts = {part for path in sources() for name in identifiers(path) for part in name.lower().split("_")}
    parts |= {
        part for path in (ROOT / "tests/shim").glob("*.py") for name in identifiers(path) for part in name.split("_")
    }
    assert [
        word for word in glossary() if not parts & {word.replace("-", ""), word.partition("-")[0], f"{word}s"}
    ] == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("shim_io.c", "int told_fd; /* told */", ["told_fd"]),
        ("shim_io.c", 'log("told")', []),
        ("shim_wait.c", "bool native = TOLD_MAX;", ["native", "TOLD_MAX"]),
        ("engine.c", "bool native;", []),
        ("shim_conn.c", "return STATE_NATIVE;", []),
        ("hub.py", "self._doom()  # doom", ["_doom"]),
        ("hub.py", "told = 'bell'", []),
    ],
)
def test_a_retired_word_is_found(file: str, line: str, found: list[str], tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_text(line + "\n")
    assert [*retired(path, identifiers(path))] == [f"{file}: {name}" for name in found]
