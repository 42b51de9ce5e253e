"""The sets of tests: nothing falls out of all of them, and rows together take everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import durations
import pytest
import selection
from selection import ROWS, TESTS, Part, Selection, Set, Table, rotate


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Selection:
    """A selection of this test's own."""
    own = Selection()
    monkeypatch.setattr(selection, "NOW", own)
    return own


@pytest.mark.parametrize(("count", "share"), [(12, 1), (12, 4), (15, 4), (2, 1), (7, 3), (4, 4), (3, 9)])
def test_rows_together_take_everything(now: Selection, count: int, share: int) -> None:
    now.set = Set.CI
    values, seen = range(count), set[int]()
    for now.row in range(-(-count // share) if count % share == 0 else count):
        taken = rotate(values, ci=share)
        assert len(taken) == min(count, share)
        seen.update(taken)
    assert seen == set(values)


def test_each_value_is_taken_in_each_row_by_some_group(now: Selection) -> None:
    now.set = Set.CI
    for now.row in range(ROWS):
        assert {value for group in range(30) for value in rotate(range(15), group, ci=4)} == set(range(15))


def test_all_values_are_taken_in_full(now: Selection) -> None:
    now.set = Set.FULL
    assert rotate("abc", 1) == ["a", "b", "c"]


def test_the_table_names_files_and_folders_that_exist() -> None:
    table = Table.read()
    assert [
        place
        for place in (*table.first, *table.alone, *table.long, *table.one_in)
        if not (TESTS / place.partition("::")[0]).exists()
    ] == []


def test_the_table_names_tests_that_exist() -> None:
    tests = [line.partition("::") for line in Table.read().one_in if "::" in line]
    assert tests
    assert [name for file, _, name in tests if f"def {name.partition('[')[0]}" not in (TESTS / file).read_text()] == []


def test_every_file_stands_in_a_set() -> None:
    """One that stood nowhere would only be run by `make test-full`."""
    table = Table.read()
    placed = tuple(table.first)
    files = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    assert [file for file in files if not file.startswith(placed)] == []


def test_the_longest_path_decides() -> None:
    table = Table(
        {"a/": Set.CI, "a/test_b.py": Set.TEST},
        frozenset(),
        one_in={"a/": 2, "a/test_b.py": 1, "a/test_c.py::test_d": 1},
    )
    assert [table.set_of(file) for file in ("a/test_b.py", "a/test_c.py", "b/test_c.py")] == [
        Set.TEST, Set.CI, Set.FULL,
    ]  # fmt: skip
    tests = ("a/test_b.py::test_d", "a/test_c.py::test_de", "a/test_c.py::test_e", "b/")
    assert [table.share_of(test) for test in tests] == ["a/test_b.py", "a/test_c.py::test_d", "a/", None]


def test_a_run_takes_what_its_set_says(tmp_path: Path) -> None:
    """By pytest itself: whole files, single tests, what runs alone, and the line that repeats a failure."""
    (tmp_path / "test_early.py").write_text(
        "import pytest\ndef test_a(): assert 0\n@pytest.mark.least('ci')\ndef test_b(): pass\n"
    )
    for name in ("late", "lonely"):
        (tmp_path / f"test_{name}.py").write_text("def test_c(): pass\n")
    (tmp_path / "test_half.py").write_text("def test_d(): pass\ndef test_e(): pass\ndef test_f(): pass\n")
    (tmp_path / "sets.toml").write_text(
        'check = []\ntest = ["test_early.py", "test_lonely.py"]\nci = ["test_half.py", "test_late.py"]\nfull = []\n'
        'alone = ["test_lonely.py"]\n[one_in]\n"test_half.py" = 2\n'
    )
    (tmp_path / "conftest.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(selection.__file__).parent)!r})\n"
        "import selection\nselection.TESTS = Path(__file__).parent\n"
        "pytest_addoption = selection.pytest_addoption\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'least(set)')\n"
        "    config.pluginmanager.register(selection.Selecting(config))\n"
    )

    def said(*options: str) -> str:
        argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:sidestep", str(tmp_path), *options]
        return subprocess.run(argv, capture_output=True, text=True, timeout=240, cwd=tmp_path).stdout

    early = said("--set=test", "--row=7")
    assert "set test, row 7 (again: ROW=7)" in early
    assert "1 failed, 1 passed, 1 deselected" in early
    assert "again: .venv/bin/pytest 'test_early.py::test_a'" in early
    assert "1 failed, 4 passed, 2 deselected" in said("--set=ci", "--row=1")
    assert "1 failed, 5 passed, 1 deselected" in said("--set=ci", f"--row={ROWS - 1}")
    assert "1 failed, 6 passed" in said("--set=full")
    assert "1 failed, 3 passed" in said("--set=ci", "--row=1", f"--part={Part.BESIDE.name.lower()}")
    assert "1 passed" in said("--set=test", f"--part={Part.ALONE.name.lower()}")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_an_early_end_is_kept_with_the_test_that_ran(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A signal to a worker ends the run, and counts as no test's failure."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tests / "sets.toml").write_text("check = []\ntest = []\nci = []\nfull = []\nalone = []\n")
    (tests / "test_these.py").write_text(  # its sleep is what the signal ends, and nobody waits for it
        "import os, signal, time\ndef test_ends():\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    )
    (tests / "conftest.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(selection.__file__).parent)!r})\n"
        "import selection\nselection.TESTS = Path(__file__).parent\n"
        "selection.FAILURES = selection.TESTS.with_name('failures.txt')\n"
        "pytest_addoption = selection.pytest_addoption\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(selection.Selecting(config))\n"
    )
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:sidestep", *options, str(tests)]
    assert subprocess.run(argv, capture_output=True, timeout=240, cwd=tmp_path).returncode == 2
    kept = (tmp_path / "failures.txt").read_text()
    assert "pytest ended early, in tests/test_these.py::test_ends" in kept
    assert "tests/test_these.py:3: in test_ends" in kept


def test_each_folder_of_the_ci_has_a_budget() -> None:
    table, given = Table.read(), durations.budgets_of("ci")
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    taken = {
        folder
        for folder in folders
        if any(table.set_of(f"{folder}/{path.name}") <= Set.CI for path in (TESTS / folder).rglob("test_*.py"))
    }
    assert set(given) == taken


def test_a_folder_over_its_budget_is_named() -> None:
    sums = {"a": durations.Spent(1, 25), "b": durations.Spent(1, 11), "c": durations.Spent(1, 99)}
    assert durations.over(sums, {"a": 10, "b": 10}, 1.2) == {"a": 2.5}
    items = {"tests/a/test_x.py::test_y[1]": sums["a"], "tests/a/b/test_z.py::test_y": sums["b"]}
    assert durations.by_folder(items) == {"a": durations.Spent(2, 36)}
