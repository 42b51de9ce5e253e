"""A Debian in which nothing has been installed: made by debootstrap, entered or booted as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = """\
[Unit]
SuccessAction=exit-force
FailureAction=exit-force
FailureActionExitStatus=1
[Service]
Type=oneshot
ExecStart=/bin/sh -c "exec sh -e /script >/output 2>/errors"
WorkingDirectory=/root
Environment=HOME=/root
"""
BOOT = """
mount --make-rprivate /
mount --bind "$0" "$0"
cd "$0"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for place in run tmp dev/shm; do mount -t tmpfs tmpfs $place; done
ip link set lo up
pivot_root . mnt
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
    sh -c "umount --lazy /mnt; exec /lib/systemd/systemd --unit=script.service --log-target=null"
"""


def fresh_debian(root: Path, release: str, *packages: str) -> None:
    """Puts one there, with these packages besides; from where this machine's packages come."""
    if shutil.which("debootstrap") is None or os.getuid() != 0:
        pytest.skip("debootstrap makes the system, as root; apt-get install debootstrap")
    lines = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    known = [line.split() for line in subprocess.check_output(lines, text=True).splitlines()]
    mirrors = [place for name, place in known if name == "bookworm"]
    if not mirrors:
        pytest.skip("this machine's packages are not those of Debian 12")
    include = f"--include={','.join(packages)}"
    subprocess.run(["debootstrap", "--variant=minbase", include, release, root, mirrors[0]], check=True)
    root.chmod(0o755)  # pytest's directories are for one user


def run_in(root: Path, script: str) -> str:
    """What a shell script prints there, in a PID namespace of its own, which ends what it started; it must succeed."""
    argv: list[str | Path] = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "chroot", root, "sh", "-e", "-c"]
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    script = f"mount -t proc proc /proc\n{script}"
    return subprocess.run([*argv, script], env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout


def run_booted(root: Path, script: str) -> str:
    """What it prints there as a service, where systemd is process 1; it must succeed."""
    (root / "script").write_text(script)
    (root / "etc/systemd/system/script.service").write_text(UNIT)
    alone = [
        "unshare",
        *(f"--{kind}" for kind in ("mount", "pid", "ipc", "uts", "net", "cgroup", "fork", "kill-child")),
    ]
    ended = subprocess.run([*alone, "sh", "-e", "-c", BOOT, root], timeout=300)
    assert ended.returncode == 0, (root / "errors").read_text()
    return (root / "output").read_text()
