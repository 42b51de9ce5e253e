"""What `make release` leaves in dist/, the changelog that it takes the notes from, and the line that installs it."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sidestep import __version__

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "packaging"))
import release  # noqa: E402  the script behind `make release`

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
KINDS = ["Added", "Changed", "Fixed"]
# What may stand behind `pip install` besides the files of a release: names of registries.
REGISTERED = {re.split("[=<>]", line)[0] for line in (ROOT / "requirements.lock").read_text().splitlines()} | {
    "pre-commit"
}


def test_every_release_has_its_kinds_of_changes_in_order_and_the_package_is_the_newest() -> None:
    releases = re.findall(r"(?ms)^## (.*?)\n(.*?)(?=^## |\Z)", CHANGELOG)
    assert [re.fullmatch(r"[\d.]+ - \d{4}-\d\d-\d\d", heading) is not None for heading, _ in releases] == [True, True]
    assert [heading.split()[0] for heading, _ in releases] == [__version__, "0.1.0"]
    for heading, body in releases:
        assert re.findall(r"(?m)^### (.*)$", body) == (KINDS[:1] if heading.startswith("0.1.0") else KINDS)  # the first


def test_a_change_says_what_is_so_now() -> None:
    """Of a new thing nothing was so before."""
    for kind, body in re.findall(r"(?ms)^### (\w+)\n(.*?)(?=^##|\Z)", CHANGELOG):
        lines = re.findall(r"(?ms)^- (.*?)(?=\n- |\n\n|\Z)", body)
        assert lines
        assert kind == "Added" or [line for line in lines if not re.search(r"(?i)\b(now|no\s+longer)\b", line)] == []


def test_the_notes_are_of_this_version_alone_and_no_link_leads_nowhere() -> None:
    notes = release.changes(CHANGELOG, __version__)
    assert re.findall(r"(?m)^#+ (.*)$", notes) == KINDS
    assert "](" not in notes
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", CHANGELOG)
    assert notes in plain
    before = plain.rpartition("\n## ")[2]
    assert before.startswith("0.1.0")
    assert len(notes) < len(plain) - len(before)


@pytest.mark.parametrize(
    "text", ["## Unreleased\n\n- One.\n\n## 1.0 - 2026-01-01\n\n- Two.\n", "## 0.9 - 2026-01-01\n\n- One.\n", ""]
)
def test_changes_of_another_version_are_not_released(text: str) -> None:
    with pytest.raises(ValueError, match=r"stands first, not 1\.0"):
        release.changes(text, "1.0")


def test_the_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.whl", "b.deb")]
    for path in files:
        path.write_text(path.name)
    (tmp_path / release.SUMS).write_text(release.checksums(files))
    check = ["sha256sum", "--check", "--strict", release.SUMS]
    subprocess.run(check, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("document", ["README.md", "docs/start/installation.md"])
def test_the_line_that_installs_names_the_wheel_of_the_release(document: str) -> None:
    first_screen = (ROOT / document).read_text().split("\n")[:50]
    line = f"pip install dist/{release.wheel_name('x86_64')}"
    assert [one for one in first_screen if one.startswith("make release")]
    assert [one for one in first_screen if one.startswith(line)]


def test_pip_is_never_given_a_name_that_no_registry_has() -> None:
    """A stranger could register it."""
    files = subprocess.run(
        ["git", "ls-files", "*.md", "src", "examples"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {}
    for name in files.stdout.split():
        text = (ROOT / name).read_text(errors="ignore")
        for words in re.findall(r"(?:-m |/|\b)pip install ([^`;&#\n]+)", text):
            for word in re.sub(r"\"[^\"]*/[^\"]*\"|--\w[\w-]*(?: /\S+)?|\\$", "", words).split():
                given = word.strip("'\"")
                if not re.search(r"[./{$]", given) and re.split("[=<>]", given)[0] not in REGISTERED:
                    found[name] = given
    assert found == {}
