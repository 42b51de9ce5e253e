"""Which test items a mutant's changed lines are touched by, and in what order they are worth a try.

A changed line that runs is looked up in the record. One that does not (a macro, a constant, a declaration), or runs
while its module is imported, is there for those that mention its names: lines with these names count instead.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import durations
from coverage_store import Store, bits_of
from mutant_patch import Mutant
from source_copy import ROOT

SOURCE: Final = ROOT / "src" / "sidestep"
UNKNOWN_S: Final = 1.0  # of an item that was never measured
_DEFINED: Final = re.compile(
    r"#\s*define\s+(\w+)|^\s*(\w+)\s*(?:=|:\s*\w[^=]*=)|\b(\w+)\s*(?:\[[^]]*\]\s*)?(?:=[^=]|;)"
)


@cache
def _lines(file: str) -> list[str]:
    return (ROOT / file).read_text(encoding="utf-8").splitlines()


@cache
def _sources() -> tuple[str, ...]:
    return tuple(str(path.relative_to(ROOT)) for end in ("py", "c", "h") for path in sorted(SOURCE.rglob(f"*.{end}")))


@cache
def _inside_functions(file: str) -> frozenset[int]:
    """Lines of a Python file that run when a function is called, its head counted too."""
    found: set[int] = set()
    for node in ast.walk(ast.parse("\n".join(_lines(file)))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.end_lineno:
            first = node.lineno if isinstance(node, ast.Lambda) else node.body[0].lineno
            found.update(range(first, node.end_lineno + 1))
    return frozenset(found)


def _headed(file: str, line: int) -> set[int]:
    """The body of the Python function in whose head or decorators a line is."""
    for node in ast.walk(ast.parse("\n".join(_lines(file)))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first <= line < node.body[0].lineno:
                return set(range(node.body[0].lineno, node.end_lineno + 1))
    return set()


def _running(store: Store, file: str, line: int) -> int:
    """The line as a set, or of a statement that began above it; empty if it is in no function."""
    can = store.executable(file)
    for above in range(line, max(line - 12, 0), -1):
        if can >> above & 1:
            return 1 << above
        if above < line and _lines(file)[above - 1 : above] == ["}"]:
            return 0
    return 0


def _mentions(store: Store, names: set[str], file: str, lines: Iterable[int]) -> set[str]:
    """Items that run a line with one of the names, other than the changed ones."""
    if not names:
        return set()
    word = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b")
    changed = set(lines)
    found: set[str] = set()
    for other in _sources():
        bits = 0
        for number, text in enumerate(_lines(other), 1):
            if word.search(text) and not (other == file and number in changed):
                if other.endswith(".py") and number not in _inside_functions(other):
                    continue
                bits |= _running(store, other, number)
        found |= store.touching(other, bits) if bits else set()
    return found


def _names(text: str) -> set[str]:
    code = re.sub(r"/\*.*?\*/|//.*|#(?!\s*define).*", "", text)
    return {name for match in _DEFINED.finditer(code) for name in match.groups() if name and len(name) > 2}


def touching(store: Store, mutant: Mutant) -> set[str]:
    """Items whose record has one of the changed lines."""
    found: set[str] = set()
    for file, lines in mutant.changed.items():
        running, resting = 0, set()
        for line in lines:
            if file.endswith(".py") and line not in _inside_functions(file):
                bits = bits_of(_headed(file, line)) & store.executable(file)
            else:
                bits = _running(store, file, line)
            running |= bits
            if not bits:
                resting.add(line)
        direct = store.touching(file, running) if running else set()
        if not running:  # else the rest are comments and braces beside what runs
            names = {name for line in resting for text in _lines(file)[line - 1 : line] for name in _names(text)}
            direct = _mentions(store, names, file, resting) or store.touching(file, store.executable(file))
        found |= direct
    return found


def function(nodeid: str) -> str:
    """The test function of an item."""
    return nodeid.partition("[")[0]


def chosen(store: Store, mutant: Mutant, available: Sequence[str]) -> list[str]:
    """Items to run for a mutant, of those at hand, in the order of trial.

    First those that the mutant names, then the cheapest of each test function, then the second of each, and so on. An
    item without a record touches what another of its function does.
    """
    recorded, touched = store.items(), touching(store, mutant)
    functions = {function(nodeid) for nodeid in touched}
    costs = {nodeid: spent.wall_s for nodeid, spent in durations.kept().items()}

    def cost(nodeid: str) -> float:
        return costs.get(nodeid, recorded.get(nodeid, UNKNOWN_S))

    wanted = {nodeid for nodeid in available if _is_wanted(nodeid, recorded, touched, functions)}
    first = [nodeid for nodeid in available if _is_named(nodeid, mutant.likely, wanted)]
    rounds: Counter[str] = Counter()
    turns: dict[int, list[str]] = defaultdict(list)
    for nodeid in sorted(wanted - set(first), key=cost):
        turns[rounds[function(nodeid)]].append(nodeid)
        rounds[function(nodeid)] += 1
    return [*sorted(first, key=cost), *(nodeid for turn in sorted(turns) for nodeid in turns[turn])]


def _is_wanted(nodeid: str, recorded: dict[str, float], touched: set[str], functions: set[str]) -> bool:
    return nodeid in touched or (nodeid not in recorded and function(nodeid) in functions)


def _is_named(nodeid: str, likely: list[str], wanted: set[str]) -> bool:
    """A function or an item is named for itself, by a star for some words; a file for those that touch the lines."""
    for name in likely:
        begin, star, end = name.partition("*")
        if name in (nodeid, function(nodeid)) or (star and nodeid.startswith(begin) and nodeid.endswith(end)):
            return True
    place = Path(nodeid.partition("::")[0])
    return nodeid in wanted and any(place.is_relative_to(name) for name in likely if "::" not in name)


def still_needed(wanted: dict[str, list[str]], killers: Container[str], done: Container[str]) -> list[str]:
    """Items that have not run, of those sets in which nothing has found the mutant; what several have comes once."""
    unfound = (items for items in wanted.values() if not any(nodeid in killers for nodeid in items))
    return list(dict.fromkeys(nodeid for items in unfound for nodeid in items if nodeid not in done))


def seconds(store: Store, nodeids: Iterable[str]) -> dict[str, float]:
    """What each item takes, as far as anybody knows."""
    recorded, costs = store.items(), durations.kept()
    return {nodeid: costs[nodeid].wall_s if nodeid in costs else recorded.get(nodeid, UNKNOWN_S) for nodeid in nodeids}
