"""The faults of tests/mutants can be put back into the tree as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutant_choice import still_needed
from mutant_patch import KEYS, LINES_MAX, MUTANTS, Mutant
from source_copy import ROOT

PATCHES = sorted(MUTANTS.glob("*.patch"))


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_mutant_fits_the_tree(path: Path) -> None:
    mutant = Mutant.read(path)
    assert [key for key in KEYS if not mutant.header.get(key)] == []
    assert mutant.changed
    assert all(file.startswith("src/sidestep/") for file in mutant.changed)
    assert 1 <= mutant.size <= LINES_MAX
    mutant.apply(ROOT, "--check")


def test_what_a_mutant_names_is_there() -> None:
    named = {name.partition("::")[0] for path in PATCHES for name in Mutant.read(path).likely}
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_a_patch_is_read_as_git_reads_it(tmp_path: Path) -> None:
    """Old lines that are taken away; of an insertion its neighbours."""
    patch = tmp_path / "both.patch"
    patch.write_text(
        "fault: a\nlikely: tests/one.py, tests/two.py::test_it\n\n"
        "diff --git a/src/a.c b/src/a.c\n--- a/src/a.c\n+++ b/src/a.c\n"
        "@@ -10,4 +10,3 @@ int f(void)\n one\n-two\n-three\n+four\n five\n@@ -20,2 +19,3 @@\n six\n+seven\n eight\n"
    )
    mutant = Mutant.read(patch)
    assert mutant.changed == {"src/a.c": frozenset({11, 12, 20, 21})}
    assert mutant.size == 4
    assert mutant.likely == ["tests/one.py", "tests/two.py::test_it"]


def test_what_one_row_has_found_is_looked_for_in_the_others_alone() -> None:
    """What several rows have runs once; what only a row has that is done does not run."""
    rows = {"ci 1": ["both", "first"], "ci 2": ["both", "second"], "ci 3": ["third", "more"]}
    assert still_needed(rows, {}, set()) == ["both", "first", "second", "third", "more"]
    assert still_needed(rows, {"first": "it failed"}, {"both", "third"}) == ["second", "more"]
    assert still_needed(rows, {"both": "it failed"}, set()) == ["third", "more"]


def test_a_patch_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    patch = tmp_path / "stale.patch"
    patch.write_text(
        "fault: a\n\ndiff --git a/src/sidestep/limits.py b/src/sidestep/limits.py\n--- a/src/sidestep/limits.py\n"
        "+++ b/src/sidestep/limits.py\n@@ -1,2 +1,2 @@\n-no such line\n+another\n nor this\n"
    )
    with pytest.raises(ValueError, match="does not fit the tree"):
        Mutant.read(patch).apply(ROOT, "--check")
