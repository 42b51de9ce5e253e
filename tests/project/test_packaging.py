"""What pip installs is what the tree holds, and it runs from there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from sidestep import __version__, installation
from sidestep.cli import COMMANDS
from sidestep.native import layout

CORE = ("click",)  # what is installed with it
INSTALLED_MAX = 15_000_000  # bytes, with these
ROOT = Path(layout.__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_holds_all_modules_and_the_shim_and_runs_with_little_else(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("sidestep-*.whl")
    assert wheel.name.split("-")[2:4] == ["cp311", "abi3"]
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    extensions = (f"{name}.abi3.so" for name in ("_channel", "_engine", "_framing"))
    loader = ("sidestep-loader",) if os.uname().machine in installation.LOADER_MACHINES else ()
    native = {f"sidestep/native/{name}" for name in ("libsidestep.so", *loader, *extensions)}
    units = {f"sidestep-{__version__}.data/data/sidestep/systemd/sidestep.{kind}" for kind in ("socket", "service")}
    assert names == sources | native | units | {"sidestep/py.typed", "sidestep/include/sidestep.h"}

    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)
    for library in CORE:
        (target / library).symlink_to(Path(sysconfig.get_path("purelib")) / library)
    # -S keeps the checkout and what is installed here out of sys.path.
    code = "import sys, sidestep; print(sidestep.native_library()); from sidestep.cli import main; main()"
    argv = [sys.executable, "-S", "-c", code]
    env = os.environ | {"PYTHONPATH": str(target), "XDG_RUNTIME_DIR": str(tmp_path)}
    found = subprocess.run([*argv, "doctor", "--json", "sh"], env=env, capture_output=True, text=True, check=True)
    place, _, document = found.stdout.partition("\n")
    assert place == str(target / "sidestep/native/libsidestep.so")
    assert {one["subject"]: one["level"] for one in json.loads(document)["findings"]}["shim"] == "ok"

    (facts,) = target.glob("sidestep-*.dist-info")
    required = [one for one in importlib.metadata.PathDistribution(facts).requires or () if "extra ==" not in one]
    assert {re.split(r"\W", one)[0] for one in required} == {*CORE}
    installed = [*target.rglob("*"), *(path for library in CORE for path in (target / library).rglob("*"))]
    assert sum(path.stat().st_size for path in installed) < INSTALLED_MAX
    asked = env | {"_SIDESTEP_COMPLETE": "bash_complete", "COMP_WORDS": "sidestep ", "COMP_CWORD": "1"}
    offered = subprocess.run(argv, env=asked, capture_output=True, text=True, check=True)  # loads every command
    assert offered.stdout.splitlines()[1:] == [f"plain,{name}" for name in COMMANDS]
    for args, library in (
        (["top"], "textual>=1"), (["metrics"], "prometheus-client>=0.20"),
        (["capture", "-w", os.devnull], "python-pcapng>=2.1.1,<3"),
    ):  # fmt: skip
        master, terminal = os.openpty()
        lacking = subprocess.run(
            [*argv, *args], env=env, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, text=True, check=False
        )
        os.close(terminal)
        os.close(master)
        assert (lacking.returncode, lacking.stderr.count("\n")) == (2, 2)
        assert lacking.stderr.endswith(f"\nhint: {sys.executable} -m pip install '{library}'\n")


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Folders of tests are no packages: of two modules with one name the second would be taken for the first."""
    tests = ROOT / "tests"
    packages = {path.parent for path in tests.rglob("__init__.py")}
    paths = [path for path in tests.rglob("*.py") if path.parent not in packages and path.name != "conftest.py"]
    names = Counter(path.name for path in paths)
    assert len(paths) > 100
    assert not [str(path.relative_to(tests)) for path in paths if names[path.name] > 1]


def test_wheels_take_the_header_that_debian_has_for_each_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that its Python names includes that of the machine, so a copy in that one's place includes itself."""
    pyconfig = runpy.run_path(str(ROOT / "packaging/wheels.py"))["pyconfig"]
    version = f"python{sysconfig.get_python_version()}"
    named, of_machine = (tmp_path / place / version / "pyconfig.h" for place in (".", "some-machine"))
    monkeypatch.setattr(sysconfig, "get_config_h_filename", lambda: str(named))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: "some-machine")
    assert pyconfig() == named
    of_machine.parent.mkdir(parents=True)
    of_machine.touch()
    assert pyconfig() == of_machine
