"""Which source lines a byte of a map stands for, in C and in Python.

C: a byte is the address behind a call of __sanitizer_cov_trace_pc. It stands for the lines of the machine code from
there to the next such call, inlined ones included. Python: a byte is a statement. The bytecode that the interpreter
finds beside a source file, in the copy of the tree, is that of the file with `__hit__[NUMBER] = 1` before each
statement; the file itself is untouched, so that tracebacks and what reads sources see no difference.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import marshal
import re
import subprocess
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Final

PYTHON: Final = "python"  # the name of its map
Line = tuple[str, int]  # of a file, relative to the tree
Lines = dict[int, list[Line]]  # of each byte of a map

_FUNCTION: Final = re.compile(r"([0-9a-f]+) <(.*)>:$")
_CALL: Final = re.compile(r"\s+[0-9a-f]+:\s+(?:call|bl)\s.*<__sanitizer_cov_trace_pc>")
_INSTRUCTION: Final = re.compile(r"\s+([0-9a-f]+):\t")
_ROW: Final = re.compile(r"(\S+)\s+(\d+)\s+0x([0-9a-f]+)\b")

_HELPER: Final = '''"""Notes which statements have run; coverage_lines.py of the tests has written it."""
import mmap
import os

SIZE = {size}


def _map():
    folder = os.path.join({maps!r}, os.environ.get("PYTEST_XDIST_WORKER", "none"))
    try:
        os.makedirs(folder, exist_ok=True)
        fd = os.open(os.path.join(folder, {name!r}), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if os.fstat(fd).st_size != SIZE:
                os.ftruncate(fd, SIZE)
                os.chmod(fd, 0o666)
            return mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
    except OSError:
        return bytearray(SIZE)


hit = _map()
'''


def c_lines(library: Path, root: Path) -> Lines:
    """The lines of each block of a library or program, those of C files of ours only."""
    ours = {path.name: str(path.relative_to(root)) for path in (root / "src/sidestep/native").rglob("*.[ch]")}
    rows: list[tuple[int, str, int]] = []
    for text in _said("objdump", "--dwarf=decodedline", library):
        if row := _ROW.match(text):
            rows.append((int(row[3], 16), ours.get(row[1], ""), int(row[2])))
    rows.sort()
    addresses = [row[0] for row in rows]
    lines: Lines = {}
    for byte, begin, end in _blocks(library):
        first, behind = bisect_left(addresses, begin), bisect_left(addresses, end)
        inside = rows[first:behind] or rows[max(first - 1, 0) : first]
        lines[byte] = sorted({(file, line) for _, file, line in inside if file})
    return lines


def _blocks(library: Path) -> Iterator[tuple[int, int, int]]:
    """Of each block the address that the call returns to, and the extent: from the call to the next, or to the end."""
    byte = begin = before = 0
    calling = False
    for text in _said("objdump", "--disassemble", "--no-show-raw-insn", library):
        if found := _FUNCTION.match(text):
            if byte:
                yield byte, begin, int(found[1], 16)
            byte, begin, calling = 0, int(found[1], 16), False
        elif found := _INSTRUCTION.match(text):
            address = int(found[1], 16)
            if calling:
                if byte:
                    yield byte, begin, before
                    begin = before
                byte = address
            calling, before = _CALL.match(text) is not None, address
    if byte:
        yield byte, begin, before + 1


def _said(*command: str | Path) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


class Statements:
    """Instrumented bytecode for the Python files of a tree."""

    def __init__(self, root: Path, maps: Path) -> None:
        self._root, self._maps = root, maps
        self.lines: list[tuple[str, int, int]] = []  # of each statement its file, first and last line

    def write(self) -> None:
        """Writes the bytecode beside all files of the library, and the list of the statements."""
        for path in sorted((self._root / "src" / "sidestep").rglob("*.py")):
            self._instrument(path)
        helper = _HELPER.format(maps=str(self._maps), name=PYTHON, size=len(self.lines))
        (self._root / "src" / "sidestep_lines.py").write_text(helper)
        self._maps.mkdir(parents=True, exist_ok=True)
        (self._maps.parent / "statements.json").write_text(json.dumps(self.lines))

    def _instrument(self, path: Path) -> None:
        module = ast.parse(path.read_bytes(), str(path))
        name = str(path.relative_to(self._root))
        for node in ast.walk(module):
            for field in ("body", "orelse", "finalbody"):
                if isinstance(body := getattr(node, field, None), list):
                    setattr(node, field, list(self._marked(name, body)))
        prelude = ast.parse("from sidestep_lines import hit as __hit__").body
        at = next((i for i, one in enumerate(module.body) if not _leads(one)), len(module.body))
        module.body[at:at] = prelude
        code = compile(ast.fix_missing_locations(module), str(path), "exec", dont_inherit=True)
        cached = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
        cached.parent.mkdir(exist_ok=True)
        cached.write_bytes(_unchecked(code))

    def _marked(self, name: str, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for at, statement in enumerate(body):
            if not (at == 0 and _is_text(statement)) and not _is_future(statement):
                first, last = _extent(statement)
                mark = ast.parse(f"__hit__[{len(self.lines)}] = 1").body[0]
                self.lines.append((name, first, last))
                for part in ast.walk(mark):
                    ast.copy_location(part, statement)
                yield mark
            yield statement


def _unchecked(code: CodeType) -> bytes:
    """A .pyc that the interpreter takes without a look at the source."""
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _leads(statement: ast.stmt) -> bool:
    return _is_text(statement) or _is_future(statement)


def _extent(statement: ast.stmt) -> tuple[int, int]:
    """First and last line of a statement; of one that holds others, of its head."""
    last = statement.end_lineno or statement.lineno
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    if body:
        first_inside = body[0].pattern.lineno if isinstance(body[0], ast.match_case) else body[0].lineno
        last = max(statement.lineno, first_inside - 1)
    decorators = [one.lineno for one in getattr(statement, "decorator_list", [])]
    return min([statement.lineno, *decorators]), last


def python_lines(statements: Path) -> Lines:
    """The lines of each statement, from the list that `Statements.write` left."""
    found = json.loads(statements.read_text())
    return {byte: [(file, line) for line in range(first, last + 1)] for byte, (file, first, last) in enumerate(found)}


def by_file(lines: Lines) -> dict[str, set[int]]:
    """All lines that a map can tell of, of each file."""
    found: dict[str, set[int]] = defaultdict(set)
    for several in lines.values():
        for file, line in several:
            found[file].add(line)
    return found
