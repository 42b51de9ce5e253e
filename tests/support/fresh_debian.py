"""A Debian 12 in which nothing has been installed: made by debootstrap, entered as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def fresh_debian(root: Path, *packages: str) -> None:
    """Puts one there, with these packages besides; from where this machine's packages come."""
    if shutil.which("debootstrap") is None or os.getuid() != 0:
        pytest.skip("debootstrap makes the system, as root; apt-get install debootstrap")
    lines = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    known = [line.split() for line in subprocess.check_output(lines, text=True).splitlines()]
    mirrors = [place for release, place in known if release == "bookworm"]
    if not mirrors:
        pytest.skip("this machine's packages are not those of Debian 12")
    include = f"--include={','.join(packages)}"
    subprocess.run(["debootstrap", "--variant=minbase", include, "bookworm", root, mirrors[0]], check=True)


def run_in(root: Path, script: str) -> str:
    """What a shell script prints there, in a PID namespace of its own, which ends what it started; it must succeed."""
    argv: list[str | Path] = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "chroot", root, "sh", "-e", "-c"]
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    script = f"mount -t proc proc /proc\n{script}"
    return subprocess.run([*argv, script], env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout
