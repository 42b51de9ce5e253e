"""Write requirements.lock: a version of each Python package that `make` installs, found by pip alone.

usage: packaging/lock.py    by `make lock`; LOCK= make test tries the newest versions instead
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LOCK: Final = ROOT / "requirements.lock"
HEAD: Final = "# Versions of what the Makefile installs, and of whatever that needs in turn. By `make lock`.\n"


def required() -> list[str]:
    """The requirements of the package and of all its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [extra for name, extra in project["optional-dependencies"].items() if name != "all"]
    return [*project["dependencies"], *(line for extra in extras for line in extra)]


def resolved(requirements: list[str]) -> dict[str, str]:
    """Package -> version, as pip would install them into an empty environment."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", report, *requirements], check=True)
        found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"] for one in found}


if __name__ == "__main__":
    LOCK.write_text(HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(resolved(required()).items())))
