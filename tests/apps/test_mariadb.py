"""MariaDB as Debian has it, whose InnoDB reads and writes files by io_uring: rows, a replica, and their paths."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import needed
import pytest
from stage import SEARCH_PATH, Mode, Program, Stage, wait_until

pytestmark = pytest.mark.usefixtures("load")

ROWS = 600
LENGTH = 20_000  # more than the buffer pool holds of all of them: InnoDB reads and writes pages all the time


def body(row: int) -> str:
    """Value of a row."""
    return hashlib.sha256(str(row).encode()).hexdigest() * (LENGTH // 64)


def has_ring(pid: int) -> bool:
    """Whether a process has an io_uring."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    return any(str(file.readlink()) == "anon_inode:[io_uring]" for file in files if file.is_symlink())


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database, made once."""
    place = tmp_path_factory.mktemp("mariadb")
    words = ["--auth-root-authentication-method=normal", "--skip-test-db"]
    install = [needed.program("mariadb-install-db"), *options(place), *words]
    subprocess.run(install, check=True, timeout=100, stdout=subprocess.DEVNULL, env=os.environ | {"PATH": SEARCH_PATH})
    return place / "data"


def options(place: Path) -> list[str]:
    """What server and installation have in common; beside others in one folder each may remove their tables."""
    (temporary := place / "temporary").mkdir(parents=True)
    user = ["--user=root"] if os.geteuid() == 0 else []
    return ["--no-defaults", f"--datadir={place}/data", f"--tmpdir={temporary}", *user]


def mariadb_server(stage: Stage, database: Path, *words: str, side: str = "server") -> int:
    """Port of a server on a copy of that database."""
    place = stage.workdir / side
    common = options(place)
    shutil.copytree(database, place / "data")
    allow = place / "allow.sql"
    rights = "create user tester@'127.0.0.1';\ngrant all on *.* to tester@'127.0.0.1';\n"
    allow.write_text(rights + "create database test;\n")
    program, port = stage.serve(lambda port: [
        needed.program("mariadbd"), *common, f"--socket={place}/local", f"--port={port}", "--bind-address=127.0.0.1",
        f"--init-file={allow}", "--innodb-buffer-pool-size=6M", "--innodb-flush-log-at-trx-commit=0", *words,
    ], side=side)  # fmt: skip
    wait_until(lambda: "ready for connections" in program.log.read_text(), "the server to be ready")
    if not has_ring(program.pid):
        pytest.skip("this kernel lets nobody have an io_uring")
    return port


def session(stage: Stage, port: int) -> Program:
    """A client that stays."""
    return stage.converse("client", [
        needed.program("mariadb"), "--no-defaults", "-utester", "-h127.0.0.1", f"-P{port}", "-N", "-B", "-r", "-n",
        "--max-allowed-packet=64M", "test",
    ])  # fmt: skip


def insert(client: Program) -> None:
    """All rows."""
    client.tell("create table t (id int primary key, body mediumtext);")
    for row in range(ROWS):
        client.tell(f"insert into t values ({row}, '{body(row)}');")


def test_rows(stage: Stage, database: Path) -> None:
    """Every row comes back as it was sent, while the server's ring moves pages of its files."""
    port = mariadb_server(stage, database)
    client = session(stage, port)
    insert(client)
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


def test_replica(stage: Stage, database: Path) -> None:
    """A second server follows the first and has the same rows, those of before and those that come meanwhile."""
    source = mariadb_server(stage, database, "--server-id=1", "--log-bin=log", "--binlog-format=row")
    client = session(stage, source)
    insert(client)
    client.tell("select @@gtid_current_pos;")
    assert client.line()
    replica = session(stage, mariadb_server(stage, database, "--server-id=2", side="client"))
    replica.tell("drop user tester@'127.0.0.1'; drop database test;")  # they come from the source
    replica.tell(f"change master to master_host='127.0.0.1', master_port={source}, master_user='tester', "
                 "master_use_gtid=slave_pos, master_connect_retry=1; start slave;")  # fmt: skip
    for row in range(0, ROWS, 3):
        client.tell(f"update t set body = concat(body, body) where id = {row};")
    client.tell("select @@gtid_current_pos;")
    replica.tell(f"select master_gtid_wait('{client.line()}', 100);")
    assert replica.line() == "0"

    def again() -> None:
        client.tell("insert into t select max(id) + 1, 'more' from t; select @@gtid_current_pos;")
        replica.tell(f"select master_gtid_wait('{client.line()}', 100);")
        assert replica.line() == "0"

    stage.check_path(source, 2, ring_bytes_min=ROWS * LENGTH // 2, nudge=again)  # promoted in the midst of it
    sums = []
    for end in (client, replica):
        end.tell("checksum table test.t; select count(*) from test.t;")
        sums.append((end.line(), end.line()))
    assert sums[0] == sums[1]
    assert int(sums[0][1]) >= ROWS
    if stage.mode is Mode.BOTH:
        share = stage.ring_share(source)
        print(f"{share:.4f} of the bytes went by ring")
        assert share > 0.5
    for end in (replica, client):
        end.rest()
