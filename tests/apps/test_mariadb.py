"""MariaDB as Debian has it, whose InnoDB reads and writes files by io_uring: rows, and the path of connections."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import needed
import pytest
from stage import Mode, Stage, wait_until

ROWS = 600
LENGTH = 20_000  # more than the buffer pool holds of all of them: InnoDB reads and writes pages all the time


def body(row: int) -> str:
    """Value of a row."""
    return hashlib.sha256(str(row).encode()).hexdigest() * (LENGTH // 64)


def has_ring(pid: int) -> bool:
    """Whether a process has an io_uring."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    return any(str(file.readlink()) == "anon_inode:[io_uring]" for file in files if file.is_symlink())


def mariadb_server(stage: Stage) -> int:
    """Port of a server on a fresh database."""
    install, server = needed.program("mariadb-install-db"), needed.program("mariadbd")
    data, local, temporary = stage.workdir / "data", stage.workdir / "local", stage.workdir / "temporary"
    temporary.mkdir()  # beside others in one folder each may remove their tables
    user = ["--user=root"] if os.geteuid() == 0 else []
    options = ["--no-defaults", f"--datadir={data}", f"--tmpdir={temporary}", *user]
    stage.run("nobody", [install, *options, "--auth-root-authentication-method=normal", "--skip-test-db"])
    allow = stage.workdir / "allow.sql"
    rights = "create user tester@'127.0.0.1';\ngrant all on *.* to tester@'127.0.0.1';\n"
    allow.write_text(rights + "create database test;\n")
    program, port = stage.serve(lambda port: [
        server, *options, f"--socket={local}", f"--port={port}", "--bind-address=127.0.0.1", f"--init-file={allow}",
        "--innodb-buffer-pool-size=6M", "--innodb-flush-log-at-trx-commit=0",
    ])  # fmt: skip
    wait_until(lambda: "ready for connections" in program.log.read_text(), "the server to be ready")
    if not has_ring(program.pid):
        pytest.skip("this kernel lets nobody have an io_uring")
    return port


def test_rows(stage: Stage) -> None:
    """Every row comes back as it was sent, while the server's ring moves pages of its files."""
    port = mariadb_server(stage)
    client = stage.converse("client", [
        needed.program("mariadb"), "--no-defaults", "-utester", "-h127.0.0.1", f"-P{port}", "-N", "-B", "-r", "-n",
        "--max-allowed-packet=64M", "test",
    ])  # fmt: skip
    client.tell("create table t (id int primary key, body mediumtext);")
    for row in range(ROWS):
        client.tell(f"insert into t values ({row}, '{body(row)}');")
    client.tell("select count(*), sum(length(body)) from t;")
    assert client.line() == f"{ROWS}\t{ROWS * len(body(0))}"
    for row in (*range(ROWS), *range(0, ROWS, 7)):
        client.tell(f"select sha2(body, 256), body from t where id = {row};")
        digest, value = client.line().split("\t")
        assert value == body(row)
        assert digest == hashlib.sha256(body(row).encode()).hexdigest()

    def again() -> None:
        client.tell("select 1;")
        assert client.line() == "1"

    stage.check_path(port, ring_bytes_min=ROWS * LENGTH, nudge=again)
    if stage.mode is Mode.BOTH:
        ends = stage.connections()
        assert sum(end.rx.ring_msgs for end in ends) > 0.99 * sum(end.rx.ring_msgs + end.rx.tcp_msgs for end in ends)
    client.rest()
