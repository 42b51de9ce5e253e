"""PostgreSQL: pgbench, dump and restore. The scenario itself is postgresql_case.py, run as a user other than root."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import needed
import pytest
from stage import Mode

CASE = Path(__file__).resolve().parent / "postgresql_case.py"


@pytest.fixture(scope="module")
def bindir() -> Path:
    """Directory of the newest PostgreSQL's programs: Debian keeps them off the PATH."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"),
        key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.parent.name)],
    )
    return found[-1].parent if found else Path(needed.missing("PostgreSQL"))


@pytest.fixture(scope="module")
def as_user() -> list[str]:
    """Command that runs another as the postgres user, where we are root.

    The interpreter and this tree may lie under a home directory closed to that user, so it keeps the right to pass
    directories; that is an ambient capability, which LD_PRELOAD survives.
    """
    if os.geteuid() != 0:
        return []
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        needed.missing("the user postgres")
    capabilities = "+dac_override"
    return [
        needed.program("setpriv"), f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups",
        f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", "--",
    ]  # fmt: skip


@pytest.fixture
def home(bindir: Path, as_user: list[str], cluster: Path) -> Iterator[Path]:
    """A directory of that user with a copy of the cluster; pytest's own directories are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="sidestep-pg-") as made:
        home = Path(made)
        shutil.copytree(cluster, home / "cluster", copy_function=shutil.copy2)
        own(home, as_user)
        yield home


@pytest.fixture(scope="module")
def cluster(bindir: Path, as_user: list[str]) -> Iterator[Path]:
    """An empty database cluster, made once."""
    with tempfile.TemporaryDirectory(prefix="sidestep-pg-") as made:
        own(Path(made), as_user)
        path = Path(made) / "cluster"
        subprocess.run(
            [*as_user, str(bindir / "initdb"), "-D", str(path), "-U", "tester", "-A", "trust", "-E", "UTF8",
             "--locale=C", "--no-sync", "--no-instructions"],
            check=True, cwd="/", stdout=subprocess.DEVNULL,
        )  # fmt: skip
        yield path


def own(root: Path, as_user: list[str]) -> None:
    """Give `root` and all below it to the user that `as_user` stands for."""
    if as_user:
        for path in (root, *root.rglob("*")):
            shutil.chown(path, "postgres", "postgres")


@pytest.mark.parametrize("mode", list(Mode), ids=str)
def test_pgbench_dump_restore(mode: Mode, bindir: Path, as_user: list[str], home: Path) -> None:
    """Load, interactive session, pgbench, dump and restore: every checksum and balance is right."""
    case = subprocess.Popen(
        [*as_user, sys.executable, str(CASE), mode, str(home), str(bindir)],
        cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        report, _ = case.communicate(timeout=100)
    finally:
        case.terminate()
        case.wait()
    logs = "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in sorted(home.glob("*.log")))
    assert case.returncode == 0, f"{report}{logs}"
    assert report.endswith("all is well\n")
