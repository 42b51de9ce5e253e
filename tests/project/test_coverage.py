"""What instrumented code notes of itself, also when it is killed; and how that follows its source."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from coverage_build import DIRECTORY, compile_flags, runtime
from coverage_items import Maps
from coverage_lines import PYTHON, Statements, by_file, c_lines, python_lines
from coverage_store import Store, bits_of, members

MODULE = '''\
"""Text."""

from __future__ import annotations


class Some:
    """Of a class."""

    a: int = 1

    def f(self, x: int) -> int:
        """Of a function."""
        if x > 1:
            return (
                x
                + 1
            )
        else:
            return x


def end() -> None:
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
    print("never")
'''
CALLER = """\
import sidestep.mod as m
some = m.Some()
assert (m.__doc__, m.Some.f.__doc__) == ("Text.", "Of a function.")
assert some.f(4) == 5
m.end()
"""
PROGRAM = """\
#include <signal.h>
#include <stdio.h>
int main(int count, char **words)
{
	if (count > 1)
		puts(words[1]);
	else
		puts("none");
	raise(SIGKILL);
	return count > 2;
}
"""


def test_statements_that_ran_are_known_of_a_process_that_was_killed(tmp_path: Path) -> None:
    source = tmp_path / "src" / "sidestep"
    source.mkdir(parents=True)
    (source / "__init__.py").touch()
    (source / "mod.py").write_text(MODULE)
    maps = tmp_path / "maps"
    Statements(tmp_path, maps).write()
    env = os.environ | {"PYTHONPATH": str(tmp_path / "src"), "PYTEST_XDIST_WORKER": "gw3"}
    env.pop("PYTHONPYCACHEPREFIX", None)
    done = subprocess.run([sys.executable, "-S", "-c", CALLER], env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    ran, can = _python(maps / "gw3", tmp_path)
    assert {*range(14, 18), 13, 23, 24} <= ran
    assert can - ran == {19, 25}
    assert not _python(maps / "gw3", tmp_path)[0]  # the maps were cleared


def _python(worker: Path, root: Path) -> tuple[set[int], set[int]]:
    lines = python_lines(root / "statements.json")
    seen = Maps(worker).take().get(PYTHON, b"")
    ran = by_file({at: lines[at] for at, byte in enumerate(seen) if byte})
    name = "src/sidestep/mod.py"
    return ran.get(name, set()), by_file(lines)[name]


@pytest.mark.parametrize("optimized", ["-O0", "-O2"])
def test_blocks_that_ran_are_known_of_a_process_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimized: str
) -> None:
    native = tmp_path / "src" / "sidestep" / "native"
    native.mkdir(parents=True)
    (native / "prog.c").write_text(PROGRAM)
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "maps"))
    (tmp_path / "maps").mkdir()
    made = tmp_path / "prog"
    flags = ["-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", optimized, *compile_flags("prog"), *runtime()]
    subprocess.run(["gcc", native / "prog.c", *flags, "-o", made], check=True)
    done = subprocess.run([made, "word"], env={"PYTEST_XDIST_WORKER": "gw1"}, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    lines = c_lines(made, tmp_path)
    seen = Maps(tmp_path / "maps" / "gw1").take()["prog"]
    ran = by_file({at: lines[at] for at, byte in enumerate(seen) if byte})["src/sidestep/native/prog.c"]
    assert {5, 6, 9} <= ran
    assert 8 not in ran
    assert 8 in by_file(lines)["src/sidestep/native/prog.c"]


def test_what_is_kept_moves_along_with_the_lines(tmp_path: Path) -> None:
    store = Store(tmp_path / "items.sqlite")
    file = tmp_path / "a.c"
    file.write_text("one\ntwo\nthree\nfour\n")
    store.may_have({"a.c": {1, 2, 4}})
    for nodeid, lines in (("first", {1, 2}), ("second", {2, 4})):
        store.put(nodeid, 1.0, "passed", {"a.c": bits_of(lines)})
    store.follow(tmp_path)
    file.write_text("zero\none\nthree\nchanged\nadded\n")  # without two; four is two lines now
    store.follow(tmp_path)
    assert set(members(store.executable("a.c"))) == {2, 4, 5}
    assert store.touching("a.c", 1 << 2) == {"first"}
    assert store.touching("a.c", 1 << 5) == {"second"}
    assert [(row.lines, row.covered) for row in store.report()] == [(3, 3)]
