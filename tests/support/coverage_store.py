"""What each test item touches, kept in build/coverage/items.sqlite: of each item, files with sets of lines.

A set of lines is an integer with a bit for each line; equal sets of a file are kept once. Figures of later runs
replace those of the same items. The text of each file is kept as well: where it has changed since, the lines of items
that did not run again move along with it.
"""

from __future__ import annotations

import difflib
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import coverage_items
import coverage_lines
from coverage_lines import Lines
from source_copy import ROOT

DIRECTORY: Final = ROOT / "build" / "coverage"
KEPT: Final = DIRECTORY / "items.sqlite"
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS item (id INTEGER PRIMARY KEY, nodeid TEXT UNIQUE, wall_s REAL, outcome TEXT);
CREATE TABLE IF NOT EXISTS lines (id INTEGER PRIMARY KEY, file TEXT, bits BLOB, UNIQUE (file, bits));
CREATE TABLE IF NOT EXISTS touched (item INTEGER, lines INTEGER, PRIMARY KEY (item, lines)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS touched_lines ON touched (lines);
CREATE TABLE IF NOT EXISTS can (file TEXT PRIMARY KEY, bits BLOB);
CREATE TABLE IF NOT EXISTS source (file TEXT PRIMARY KEY, text BLOB);
"""


def _blob(bits: int) -> bytes:
    return zlib.compress(bits.to_bytes((bits.bit_length() + 7) // 8, "little"))


def _bits(blob: bytes) -> int:
    return int.from_bytes(zlib.decompress(blob), "little")


def bits_of(lines: Iterable[int]) -> int:
    """The set as an integer."""
    bits = 0
    for line in lines:
        bits |= 1 << line
    return bits


@dataclass(frozen=True, slots=True)
class Row:
    """A file of the report."""

    file: str
    lines: int
    covered: int


class Store:
    """The data base."""

    def __init__(self, path: Path = KEPT) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path)
        self._db.executescript(_SCHEMA)

    def add(self, raw: Path, maps: dict[str, Lines]) -> int:
        """Takes in what a worker has kept; returns the number of items."""
        source = sqlite3.connect(raw)
        count = 0
        for key, nodeid, wall_s, outcome in source.execute("SELECT * FROM item").fetchall():
            seen = source.execute("SELECT map, bytes FROM seen WHERE item = ?", (key,))
            self.put(nodeid, wall_s, outcome, _resolved(seen, maps))
            count += 1
        source.close()
        self._db.commit()
        return count

    def put(self, nodeid: str, wall_s: float, outcome: str, found: dict[str, int]) -> None:
        """Keeps what an item touches, in place of what it did before."""
        self._db.execute("DELETE FROM touched WHERE item = (SELECT id FROM item WHERE nodeid = ?)", (nodeid,))
        self._db.execute("DELETE FROM item WHERE nodeid = ?", (nodeid,))
        row = (nodeid, wall_s, outcome)
        key = self._db.execute("INSERT INTO item (nodeid, wall_s, outcome) VALUES (?, ?, ?)", row).lastrowid
        for file, bits in found.items():
            self._touch(key, file, _blob(bits))

    def may_have(self, lines: dict[str, set[int]]) -> None:
        """Lines that runs can tell of, beside those that are kept of the same build."""
        rows = [(file, _blob(bits_of(several))) for file, several in lines.items()]
        self._db.executemany("REPLACE INTO can VALUES (?, ?)", rows)
        self._db.commit()

    def follow(self, root: Path) -> None:
        """Moves what is kept to where the lines stand now, in the files of a tree."""
        kept = dict(self._db.execute("SELECT file, text FROM source").fetchall())
        for (file,) in self._db.execute("SELECT file FROM can").fetchall():
            path = root / file
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            old = zlib.decompress(kept[file]).decode() if file in kept else text
            if old != text:
                self._move(file, _moves(old.splitlines(), text.splitlines()))
            if file not in kept or old != text:
                self._db.execute("REPLACE INTO source VALUES (?, ?)", (file, zlib.compress(text.encode())))
        self._db.commit()

    def _move(self, file: str, moves: dict[int, list[int]]) -> None:
        def moved(blob: bytes) -> bytes:
            return _blob(bits_of(new for line in members(_bits(blob)) for new in moves.get(line, ())))

        (can,) = self._db.execute("SELECT bits FROM can WHERE file = ?", (file,)).fetchone()
        self._db.execute("UPDATE can SET bits = ? WHERE file = ?", (moved(can), file))
        rows = self._db.execute("SELECT id, bits FROM lines WHERE file = ?", (file,)).fetchall()
        items = {
            key: self._db.execute("SELECT item FROM touched WHERE lines = ?", (key,)).fetchall() for key, _ in rows
        }
        for key, _ in rows:
            self._db.execute("DELETE FROM touched WHERE lines = ?", (key,))
            self._db.execute("DELETE FROM lines WHERE id = ?", (key,))
        for key, blob in rows:
            for (item,) in items[key]:
                self._touch(item, file, moved(blob))

    def _touch(self, item: int | None, file: str, blob: bytes) -> None:
        self._db.execute("INSERT OR IGNORE INTO lines (file, bits) VALUES (?, ?)", (file, blob))
        query = "INSERT OR IGNORE INTO touched SELECT ?, id FROM lines WHERE file = ? AND bits = ?"
        self._db.execute(query, (item, file, blob))

    def executable(self, file: str) -> int:
        """Lines of a file that a run can tell of."""
        row = self._db.execute("SELECT bits FROM can WHERE file = ?", (file,)).fetchone()
        return _bits(row[0]) if row else 0

    def touching(self, file: str, bits: int) -> set[str]:
        """Items that have run one of these lines."""
        sets = self._db.execute("SELECT id, bits FROM lines WHERE file = ?", (file,)).fetchall()
        found: set[str] = set()
        for key, blob in sets:
            if _bits(blob) & bits:
                query = "SELECT nodeid FROM touched JOIN item ON item.id = touched.item WHERE touched.lines = ?"
                found.update(nodeid for (nodeid,) in self._db.execute(query, (key,)))
        return found

    def items(self) -> dict[str, float]:
        """All items of which anything is kept, and their seconds."""
        return dict(self._db.execute("SELECT nodeid, wall_s FROM item"))

    def report(self) -> Iterator[Row]:
        """Each file: its lines, and those that any item has run."""
        files = self._db.execute("SELECT file, bits FROM can ORDER BY file").fetchall()
        for file, blob in files:
            covered = 0
            query = "SELECT DISTINCT bits FROM lines JOIN touched ON touched.lines = lines.id WHERE file = ?"
            for (bits,) in self._db.execute(query, (file,)):
                covered |= _bits(bits)
            can = _bits(blob)
            yield Row(file, can.bit_count(), (covered & can).bit_count())


def _resolved(seen: Iterable[tuple[str, bytes]], maps: dict[str, Lines]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, content in seen:
        lines = maps.get(name, {})
        data = zlib.decompress(content)
        at = data.find(1)
        while at >= 0:
            for file, line in lines.get(at, ()):
                found[file] = found.get(file, 0) | 1 << line
            at = data.find(1, at + 1)
    return found


def libraries(root: Path, maps: Path) -> dict[str, Lines]:
    """The lines of each byte of all maps that programs have left, by the map's name."""
    found: dict[str, Lines] = {}
    for name in sorted({path.name for path in maps.glob("*/*")}):
        if name == coverage_lines.PYTHON:
            found[name] = coverage_lines.python_lines(maps.parent / "statements.json")
            continue
        made = root / "build" / "native-tests" / name
        places = (root / "src/sidestep/native" / name, made / "shim-0.so", made)
        library = next((place for place in places if place.is_file()), None)
        if library:
            found[name] = coverage_lines.c_lines(library, root)
    return found


def take_in(store: Store, root: Path, maps: Path) -> int:
    """Takes in what all workers of a run have kept; returns the number of items."""
    store.follow(root)
    lines = libraries(root, maps)
    for name in lines:
        store.may_have(_union(store, coverage_lines.by_file(lines[name])))
    raw = maps.parent / coverage_items.RAW
    count = 0
    for path in sorted(raw.glob("*.sqlite")):
        count += store.add(path, lines)
        path.unlink()
    store.follow(root)  # the texts of files that are new
    return count


def _moves(old: list[str], new: list[str]) -> dict[int, list[int]]:
    """Where each old line is now; one that was changed is in all that stands in its place."""
    found: dict[int, list[int]] = {}
    for what, begin, end, new_begin, new_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for line in range(begin, end):
            same = what == "equal"
            found[line + 1] = [new_begin + line - begin + 1] if same else list(range(new_begin + 1, new_end + 1))
    return found


def _union(store: Store, lines: dict[str, set[int]]) -> dict[str, set[int]]:
    return {file: several | set(members(store.executable(file))) for file, several in lines.items()}


def members(bits: int) -> Iterator[int]:
    """The lines of a set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
