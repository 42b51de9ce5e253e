"""PostgreSQL: pgbench, dump and restore; COPY and a standby. postgresql_case.py does it, as a user other than root."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import needed
import pytest
from other_user import command_of, own, run_case
from selection import rotate
from stage import Mode

pytestmark = pytest.mark.usefixtures("load")

CASE = Path(__file__).resolve().parent / "postgresql_case.py"
USER = "postgres"


@pytest.fixture(scope="module")
def bindir() -> Path:
    """Directory of the newest PostgreSQL's programs: Debian keeps them off the PATH."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"),
        key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.parent.name)],
    )
    return found[-1].parent if found else Path(needed.missing("PostgreSQL"))


@pytest.fixture
def home(cluster: Path) -> Iterator[Path]:
    """A directory of that user with a copy of the cluster; pytest's own directories are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="sidestep-pg-") as made:
        home = Path(made)
        shutil.copytree(cluster, home / "cluster", copy_function=shutil.copy2)
        own(home, USER)
        yield home


@pytest.fixture(scope="module")
def cluster(bindir: Path) -> Iterator[Path]:
    """An empty database cluster, made once."""
    with tempfile.TemporaryDirectory(prefix="sidestep-pg-") as made:
        own(Path(made), USER)
        path = Path(made) / "cluster"
        subprocess.run(
            [*command_of(USER), str(bindir / "initdb"), "-D", str(path), "-U", "tester", "-A", "trust", "-E", "UTF8",
             "--locale=C", "--no-sync", "--no-instructions"],
            check=True, cwd="/", stdout=subprocess.DEVNULL,
        )  # fmt: skip
        yield path


@pytest.mark.parametrize("mode", list(Mode), ids=str)
def test_pgbench_dump_restore(mode: Mode, bindir: Path, home: Path) -> None:
    """Load, interactive session, pgbench, dump and restore: every checksum and balance is right."""
    run_case(CASE, USER, home, mode, str(home), str(bindir), "books")


@pytest.mark.parametrize("mode", rotate(list(Mode), test=2), ids=str)
def test_copy_and_standby(mode: Mode, bindir: Path, home: Path) -> None:
    """More than 20 MB go in by COPY and come out, and the standby that follows has the same rows."""
    run_case(CASE, USER, home, mode, str(home), str(bindir), "standby")
