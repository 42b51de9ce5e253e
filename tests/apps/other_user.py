"""Scenarios of servers that refuse to run as root: programs that another user runs with a provider of its own.

The interpreter and this tree may lie under a home directory closed to that user, so it keeps the right to pass
directories; that is an ambient capability, which LD_PRELOAD survives.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import needed


def command_of(user: str) -> list[str]:
    """Command that runs another as that user, where we are root."""
    if os.geteuid() != 0:
        return []
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        needed.missing(f"the user {user}")
    if found.pw_uid == 0:
        return []
    capabilities = "+dac_override"
    return [
        needed.program("setpriv"), f"--reuid={found.pw_uid}", f"--regid={found.pw_gid}", "--clear-groups",
        f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", "--",
    ]  # fmt: skip


def own(root: Path, user: str) -> None:
    """Give `root` and all below it to the user, where we are root."""
    if os.geteuid() == 0:
        found = pwd.getpwnam(user)
        for path in (root, *root.rglob("*")):
            os.chown(path, found.pw_uid, found.pw_gid)


def run_case(case: Path, user: str, home: Path, *words: str) -> None:
    """Runs the scenario to its good end; what it says is shown with the logs that it leaves in `home`."""
    run = subprocess.Popen(
        [*command_of(user), sys.executable, str(case), *words],
        cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        report, _ = run.communicate(timeout=150)
    finally:
        run.terminate()
        run.wait()
    print(report)
    logs = "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in sorted(home.glob("*.log")))
    assert run.returncode == 0, logs
    assert report.endswith("all is well\n")
