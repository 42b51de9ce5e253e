"""The documents say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import needed
import pytest

from sidestep import config, limits
from sidestep.cli import COMMANDS
from sidestep.native import layout, reasons
from sidestep.observe.sockets import Outside

ROOT = Path(layout.__file__).parents[3]
DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
WORDS_MAX = 45_000  # by `wc -w`, over all documents that are kept
NEWCOMER_MAX = 9_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of the documentation site, with those that are made from the code, as they lie in the repository."""
    place = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, ROOT / "docs/reference/make_site.py", "--stage", place], check=True)
    return place


def words(path: Path) -> int:
    return len(path.read_text().split())


def test_documents_stay_short() -> None:
    kept = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    count = sum(words(ROOT / name) for name in kept.stdout.split())
    assert count <= WORDS_MAX, f"the documents have {count:,} words, {count - WORDS_MAX:,} too many: shorten some"


def test_the_path_of_a_newcomer_stays_short() -> None:
    start = [ROOT / f"docs/start/{name}.md" for name in ("tutorial", "installation", "commands")]
    others = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/reference/support.md"]
    pages = [*start, *others, ROOT / "docs/guides/performance.md"]
    count = sum(map(words, pages)) + words(ROOT / "docs/internals/architecture.md") // 2
    assert count <= NEWCOMER_MAX, f"a newcomer reads {count:,} words, {count - NEWCOMER_MAX:,} too many: shorten some"


def test_the_schemas_are_what_the_code_says() -> None:
    subprocess.run([sys.executable, ROOT / "docs/reference/make.py", "--check"], check=True)


def test_the_scoreboard_is_what_the_scenes_say() -> None:
    subprocess.run([sys.executable, ROOT / "docs/reference/make_scoreboard.py", "--check"], check=True)


def test_the_reference_names_every_limit_and_variable(site: Path) -> None:
    text = (site / "docs/reference" / "limits.md").read_text()
    names = {name for name in vars(limits) if name.isupper()}
    names |= {value for name, value in vars(config).items() if name.startswith("ENV_")}
    assert {name for name in names if f"| `{name}` |" not in text} == set()


@pytest.mark.parametrize("codes", [layout.State, layout.Reason, layout.Refusal])
def test_every_code_in_the_reference_is_given_somewhere(codes: type[IntEnum]) -> None:
    sources = [path for kind in ("c", "h", "py") for path in (ROOT / "src").rglob(f"*.{kind}")]
    tables = {Path(layout.__file__), Path(reasons.__file__)}
    text = "\n".join(path.read_text() for path in sources if path not in tables)
    name = codes.__name__
    unused = {code.name for code in codes if not re.search(rf"\b({name}\.|{name.upper()}_){code.name}\b", text)}
    assert not unused


def test_every_reason_says_what_it_is_and_what_would_change_it() -> None:
    assert set(layout.REASON_TEXT) == set(reasons.REMEDY) == set(layout.Reason)
    assert set(reasons.REFUSAL_TEXT) == set(layout.Refusal)
    sentences = [*reasons.REFUSAL_TEXT.values(), *(text for one in Outside for text in (one.text, one.remedy))]
    for reason in set(layout.Reason) - {layout.Reason.NONE}:
        sentences += [layout.REASON_TEXT[reason], reasons.REMEDY[reason]]
    assert [text for text in sentences if not text or text.endswith(".") or "\n" in text] == []
    assert layout.REASON_TEXT[layout.Reason.NONE] == reasons.REMEDY[layout.Reason.NONE] == ""


def test_every_option_that_a_remedy_names_exists(site: Path) -> None:
    remedies = [*reasons.REMEDY.values(), *(one.remedy for one in Outside)]
    options = {option for text in remedies for option in re.findall(r"--[a-z][a-z-]+", text)}
    page = (site / "docs/reference" / "commands.md").read_text()
    assert {option for option in options if option not in page} == set()


def test_the_list_of_commands_names_every_command_and_no_other() -> None:
    found = set(re.findall(r"(?m)^- `sidestep (\w+)", (ROOT / "docs/start/commands.md").read_text()))
    assert found == set(COMMANDS)


def test_the_gains_that_the_readme_shows_were_measured() -> None:
    measured = (ROOT / "docs/guides/performance.md").read_text()
    rows = re.findall(r"(?m)^(\|.*\*\*[\d.]+x\*\*) \|$", (ROOT / "README.md").read_text())
    assert len(rows) > 5
    assert [row for row in rows if row not in measured] == []


def test_all_that_is_said_to_be_supported_names_its_proof() -> None:
    tables = re.findall(r"\| what \| proved by \|\n.*\n((?:\|.*\n)+)", (ROOT / "docs/reference/support.md").read_text())
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 20
    assert [row for row in rows if not re.search(r"`tests/[\w/.*]+` \|$|`make soak` \|$", row)] == []


def headings(document: Path) -> set[str]:
    """What a link may name behind '#', as a forge makes it of the headings."""
    text = re.sub(r"(?s)```.*?```", "", document.read_text())
    titles = (re.sub(r"\]\(.*?\)", "", title) for title in re.findall(r"(?m)^#+ (.*)$", text))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.least("ci")
def test_the_picture_of_a_capture_is_what_wireshark_shows() -> None:
    needed.program("tshark")
    subprocess.run([sys.executable, ROOT / "docs/reference/make_capture.py", "--check"], check=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_the_documents_point_to_exists(document: Path) -> None:
    text = document.read_text()
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", text):
        place = document.parent / target if target else document
        assert place.exists(), target
        assert not anchor or anchor in headings(place), f"{target}#{anchor}"
    for path in re.findall(r"`((?:tests|src|docs|bench|examples)/[\w/.*-]+)`", text):
        assert list(ROOT.glob(path.rstrip("/"))), path


def test_links_between_the_pages_of_the_site_hold(site: Path) -> None:
    pages = sorted(site.rglob("*.md"))
    assert len(pages) > len(DOCUMENTS)
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            place = page.parent / target if target else page
            assert place.is_file(), f"{page}: {target}"
            assert not anchor or anchor in headings(place), f"{page}: {target}#{anchor}"


def test_the_pages_that_the_code_names_exist() -> None:
    files = [path for place in ("src", "tests", "bench", "systemd") for path in (ROOT / place).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in {".py", ".c", ".h", ".md", ".build", ".socket"}]
    named = set(re.findall(r"\bdocs/[\w/-]+\.(?:md|svg|py)\b", "".join(texts)))
    assert len(named) > 15
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_document_has_its_place_in_the_index() -> None:
    index = ROOT / "docs/index.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)\)", index.read_text())}
    assert {path for path in (ROOT / "docs").rglob("*.md") if path != index} <= linked


def test_what_the_guide_for_changes_names_is_there() -> None:
    """`path` or `path::name`; the path is one below src/sidestep, or below the root."""
    named = re.findall(r"`([a-z][\w/]*\.(?:py|c|h|build))(?:::(\w+))?`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 40
    for path, name in named:
        places = [base / path for base in (ROOT / "src/sidestep", ROOT) if (base / path).is_file()]
        assert path == "cli/NAME.py" or places, path
        assert not name or re.search(rf"\b{name}\b", places[0].read_text()), f"{path}::{name}"


@pytest.mark.slow
def test_the_sample_of_the_tutorial_works() -> None:
    needed.program("redis-server")
    (sample,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/start/tutorial.md").read_text(), re.S)
    subprocess.run([sys.executable, "-c", sample], stdout=subprocess.DEVNULL, timeout=60, check=True)


def test_the_switch_and_the_policy_do_no_io() -> None:
    sources = ROOT / "src/sidestep"
    disk = sources / "policy/disk.py"  # whose job it is
    for module in {*(sources / "switch").rglob("*.py"), *(sources / "policy").rglob("*.py")} - {disk}:
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", module.read_text(), re.M))
        assert not imported & {"socket", "os", "time", "random", "threading", "asyncio", "select", "selectors"}
