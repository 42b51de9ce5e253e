"""More real programs on two hosts: PostgreSQL and uvloop go by SDP, rsync and ssh stay on TCP; all is right."""

from __future__ import annotations

import getpass
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import needed
import pytest
from common import PATIENCE_S
from hosts import SEARCH_PATH, Host
from talking import listening, promoted, random_file, sha256_of

pytestmark = [pytest.mark.slow, pytest.mark.app]

Argv: TypeAlias = list[str | os.PathLike[str]]
ECHO = Path(__file__).parents[1] / "apps" / "programs" / "echo.py"
AS_NOBODY = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--"]  # in the program's eyes; root in ours


def tell(program: subprocess.Popen[str], text: str) -> str:
    """A line for a program, and the one that it answers."""
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(text + "\n")
    program.stdin.flush()
    return program.stdout.readline().strip()


def talk_until_promoted(talk: Callable[[], object], *hosts: Host, ends: int) -> None:
    """A connection on which nobody says anything stays where it is."""
    while any(sum(found.promoted for found in host.sidestep.connections()) < ends for host in hosts):
        talk()
    promoted(*hosts, ends=ends)


def test_uvloop(two: tuple[Host, Host]) -> None:
    needed.module("uvloop")
    one, other = two
    env = {"ECHO_ADDRESS": other.address}
    other.popen([sys.executable, ECHO, "uvloop", "server", "7001"], env=other.sidestep.env(**env))
    listening(other, 7001)
    client = one.popen(
        [sys.executable, ECHO, "uvloop", "client", "7001", "5"],
        env=one.sidestep.env(**env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    assert json.loads(client.stdout.readline())["verdicts"] == ["whole"] * 5

    def nudge() -> None:
        assert tell(client, "nudge") == "nudged"

    talk_until_promoted(nudge, one, other, ends=5)
    nudge()
    output, _ = client.communicate(timeout=PATIENCE_S)
    assert json.loads(output) == "closed"
    assert client.returncode == 0


@pytest.fixture
def bindir() -> Path:
    """Of the newest PostgreSQL: Debian keeps its programs off the PATH."""
    return needed.postgresql()


def test_postgresql(two: tuple[Host, Host], bindir: Path, tmp_path: Path) -> None:
    one, other = two
    data = tmp_path / "data"
    how = ["-U", "tester", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"]
    initdb: Argv = [*AS_NOBODY, bindir / "initdb", "-D", data, *how]
    other.plain(initdb, stdout=subprocess.DEVNULL)
    with (data / "pg_hba.conf").open("a") as rules:
        rules.write(f"host all all {one.address}/24 trust\n")
    argv: Argv = [
        *AS_NOBODY,
        bindir / "postgres",
        "-D",
        data,
        "-p",
        "5432",
        "-h",
        other.address,
        "-k",
        "",
        "-c",
        "fsync=off",
    ]
    with (tmp_path / "log").open("wb") as log:
        server = other.popen(argv, stdout=log, stderr=log)
    where = ["-h", other.address, "-p", "5432", "-U", "tester"]

    def ready() -> bool:
        with other.namespace.inside():
            return subprocess.run([bindir / "pg_isready", *where, "-q"], check=False).returncode == 0

    other.wait_for(ready)  # it listens before that, and turns away who comes
    one.run([bindir / "pgbench", *where, "-i", "-q", "-s", "1", "postgres"], check=True, stderr=subprocess.DEVNULL)
    psql = one.popen([bindir / "psql", *where, "-X", "-q", "-A", "-t", "postgres"],
                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    numbers = itertools.count()

    def ask() -> None:
        number = next(numbers)
        assert tell(psql, f"select {number} * {number};") == str(number * number)

    talk_until_promoted(ask, one, other, ends=1)
    asked = "select md5(string_agg(md5(n::text), '')) from generate_series(1, 20000) n;"
    whole = "select string_agg(md5(n::text), '') from generate_series(1, 20000) n;"
    digest, text = tell(psql, asked), tell(psql, whole)
    assert digest == md5(text.encode())
    psql.communicate(timeout=PATIENCE_S)
    bench = one.popen([bindir / "pgbench", *where, "-n", "-c", "4", "-j", "2", "-t", "300", "postgres"],
                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    promoted(one, other, ends=4)
    report, _ = bench.communicate(timeout=60)
    assert "number of transactions actually processed: 1200/1200" in report, report
    books = one.run(
        [bindir / "psql", *where, "-X", "-A", "-t", "postgres", "-c",
         "select (select sum(abalance) from pgbench_accounts), (select sum(bbalance) from pgbench_branches), "
         "(select sum(tbalance) from pgbench_tellers), (select sum(delta) from pgbench_history), "
         "(select count(*) from pgbench_history)"],
        check=True, stdout=subprocess.PIPE, text=True,
    ).stdout.strip().split("|")  # fmt: skip
    assert len(set(books[:4])) == 1, books
    assert books[4] == "1200"
    assert server.poll() is None


def md5(data: bytes) -> str:
    """As PostgreSQL says it."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def test_rsync_has_every_byte(two: tuple[Host, Host], tmp_path: Path) -> None:
    """Whoever receives becomes two processes with one socket; before that it may have been promoted."""
    needed.programs("rsync")
    one, other = two
    (got := tmp_path / "got").mkdir()
    (config := tmp_path / "rsyncd.conf").write_text(
        f"use chroot = no\nlog file = {tmp_path}/log\n[got]\npath = {got}\nread only = no\nuid = 0\ngid = 0\n"
    )
    other.popen(["rsync", "--daemon", "--no-detach", f"--config={config}", f"--address={other.address}", "--port=8730"])
    listening(other, 8730)
    blob, digest = random_file(tmp_path / "blob", 40)
    done = one.run(["rsync", "--port=8730", blob, f"{other.address}::got/"])
    assert done.returncode == 0, (tmp_path / "log").read_text()
    assert sha256_of(got / blob.name) == digest


def test_ssh(two: tuple[Host, Host], tmp_path: Path) -> None:
    """sshd has the connection as its standard input when it executes itself anew, and in a sandbox after that.

    The sandboxed child goes on by TCP; whether a ring was there before is a matter of who was quicker.
    """
    needed.programs("sshd", "ssh", "ssh-keygen", "rsync")
    one, other = two
    for name in ("host", "user"):
        one.plain(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name])
    sshd = shutil.which("sshd", path=SEARCH_PATH)
    assert sshd is not None
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # it wants to have it, whatever it is told
    config = tmp_path / "sshd_config"
    config.write_text(
        f"Port 2222\nListenAddress {other.address}\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
    )
    log = tmp_path / "log"
    with log.open("wb") as errors:
        other.popen([sshd, "-D", "-e", "-f", config], stderr=errors)
    listening(other, 2222)
    blob, digest = random_file(tmp_path / "blob", 20)
    ssh = (f"ssh -i {tmp_path}/user -p 2222 -l {getpass.getuser()} -o StrictHostKeyChecking=no -o BatchMode=yes "
           f"-o UserKnownHostsFile={tmp_path}/known")  # fmt: skip
    got = tmp_path / "got"
    with log.open("ab") as errors:
        done = one.run(["rsync", "-e", ssh, blob, f"{other.address}:{got}"], stderr=errors)
    assert done.returncode == 0, log.read_text()
    assert sha256_of(got) == digest
