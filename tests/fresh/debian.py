"""A Debian 12 of its own, and the wheels of `make wheels`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("python3", "python3-venv", "redis-server", "systemd-sysv", "dbus")


def wheel(machine: str) -> Path:
    found = sorted((ROOT / "dist").glob(f"sidestep-*manylinux*{machine}.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("there are no wheels; make test-fresh builds them")
    return found[-1]


def with_all_it_needs(machine: str, place: Path) -> None:
    """Puts the wheel, and those of what it depends on, into a directory."""
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--only-binary=:all:", "--dest", str(place)]
    subprocess.run([*pip, str(wheel(machine))], check=True)


def bootstrap(place: Path) -> None:
    """Makes the root of a Debian 12 with Python, redis and systemd, and with no compiler.

    Its packages come from where this machine's do.
    """
    if shutil.which("debootstrap") is None or os.getuid() != 0:
        pytest.skip("debootstrap makes the system, as root; apt-get install debootstrap")
    lines = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    known = [line.split() for line in subprocess.check_output(lines, text=True).splitlines()]
    mirrors = [uri for release, uri in known if release == "bookworm"]
    if not mirrors:
        pytest.skip("this machine's packages are not those of Debian 12")
    packages = f"--include={','.join(PACKAGES)}"
    subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", place, mirrors[0]], check=True)
