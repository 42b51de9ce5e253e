"""The documents say what the code does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest

from sidestep import config, limits
from sidestep.cli import COMMANDS
from sidestep.native import layout, reasons
from sidestep.observe.sockets import Outside

ROOT = Path(layout.__file__).parents[3]


def test_the_reference_is_what_the_code_says() -> None:
    subprocess.run([sys.executable, ROOT / "docs/reference/make.py", "--check"], check=True)


def test_the_scoreboard_is_what_the_scenes_say() -> None:
    subprocess.run([sys.executable, ROOT / "docs/reference/make_scoreboard.py", "--check"], check=True)


def test_the_reference_names_every_limit_and_variable() -> None:
    text = (ROOT / "docs/reference/limits.md").read_text()
    names = {name for name in vars(limits) if name.isupper()}
    names |= {value for name, value in vars(config).items() if name.startswith("ENV_")}
    assert {name for name in names if f"| `{name}` |" not in text} == set()


@pytest.mark.parametrize("codes", [layout.State, layout.Reason, layout.Refusal])
def test_every_code_in_the_reference_is_given_somewhere(codes: type[IntEnum]) -> None:
    sources = [*(ROOT / "src").rglob("*.c"), *(ROOT / "src").rglob("*.py")]
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


def test_every_command_that_a_remedy_names_exists() -> None:
    remedies = [*reasons.REMEDY.values(), *(one.remedy for one in Outside)]
    named = {name for text in remedies for name in re.findall(r"sidestep ([a-z]+)", text)}
    assert named <= set(COMMANDS) | {"policy", "promote"}
    options = {option for text in remedies for option in re.findall(r"--[a-z][a-z-]+", text)}
    page = (ROOT / "docs/reference/commands.md").read_text()
    assert {option for option in options if option not in page} == set()


def test_the_readme_names_every_command_and_no_other() -> None:
    found = set(re.findall(r"\| `sidestep (\w+)", (ROOT / "README.md").read_text()))
    assert found == set(COMMANDS)


def test_what_the_documents_point_to_exists() -> None:
    for document in (ROOT / "README.md", ROOT / "docs/internals/architecture.md"):
        text = document.read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
        for path in re.findall(r"`((?:tests|src|docs|bench)/[\w/.*]+)`", text):
            assert list(ROOT.glob(path.rstrip("/"))), f"{document.name}: {path}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis is not installed; run tests/setup")
def test_the_sample_of_the_tutorial_works() -> None:
    (sample,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/start/tutorial.md").read_text(), re.S)
    subprocess.run([sys.executable, "-c", sample], stdout=subprocess.DEVNULL, timeout=60, check=True)


def test_the_modules_import_only_from_below() -> None:
    order = ["native", "policy", "switch", "provider", "remote", "observe", "cli"]
    for layer, name in enumerate(order):
        for module in (ROOT / "src/sidestep" / name).rglob("*.py"):
            imported = set(re.findall(r"^\s*(?:from|import) sidestep\.(\w+)", module.read_text(), re.M))
            assert not imported & set(order[layer + 1 :]), f"{module}: {imported}"


def test_the_switch_and_the_policy_do_no_io() -> None:
    sources = ROOT / "src/sidestep"
    disk = sources / "policy/disk.py"  # whose job it is
    for module in {*(sources / "switch").rglob("*.py"), *(sources / "policy").rglob("*.py")} - {disk}:
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", module.read_text(), re.M))
        assert not imported & {"socket", "os", "time", "random", "threading", "asyncio", "select", "selectors"}
