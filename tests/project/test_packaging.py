"""What pip installs is what the tree holds, and it runs from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from sidestep import __version__
from sidestep.native import layout

ROOT = Path(layout.__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_holds_all_modules_and_the_shim_and_runs(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("sidestep-*.whl")
    assert wheel.name.split("-")[2:4] == ["cp311", "abi3"]
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    extensions = (f"{name}.abi3.so" for name in ("_channel", "_framing", "_ring"))
    native = {f"sidestep/native/{name}" for name in ("libsidestep.so", *extensions)}
    units = {f"sidestep-{__version__}.data/data/sidestep/systemd/sidestep.{kind}" for kind in ("socket", "service")}
    assert names == sources | native | units | {"sidestep/py.typed", "sidestep/include/sidestep.h"}

    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)
    # -S keeps the checkout out of sys.path; click and rich come from where they are installed here.
    paths = [str(target), *(path for path in sys.path if path.endswith("site-packages"))]
    code = "import sys, sidestep; print(sidestep.native_library()); from sidestep.cli import main; main()"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code, "doctor", "--json", "sh"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    library, _, document = found.stdout.partition("\n")
    assert library == str(target / "sidestep/native/libsidestep.so")
    assert {one["subject"]: one["level"] for one in json.loads(document)["findings"]}["shim"] == "ok"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Folders of tests are no packages: of two modules with one name the second would be taken for the first."""
    tests = ROOT / "tests"
    packages = {path.parent for path in tests.rglob("__init__.py")}
    paths = [path for path in tests.rglob("*.py") if path.parent not in packages and path.name != "conftest.py"]
    names = Counter(path.name for path in paths)
    assert len(paths) > 100
    assert not [str(path.relative_to(tests)) for path in paths if names[path.name] > 1]
