"""PostgreSQL under sidestep over TCP, with checksums: pgbench, dump and restore; COPY and a standby.

PostgreSQL refuses to run as root, so this is a program of its own: test_postgresql.py runs it as another user, and the
provider, the server and the clients are all started from here as that user.

usage: postgresql_case.py MODE WORKDIR BINDIR books|standby
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stage import Mode, Program, Stage, payload, sha256, staged, wait_until

CHECKSUM = """
select 'accounts', count(*), md5(string_agg(t::text, '|' order by aid)) from pgbench_accounts t
union all select 'history', count(*), md5(string_agg(t::text, '|' order by t::text)) from pgbench_history t
union all select 'blobs', count(*), md5(string_agg(md5(body), '|' order by id)) from blobs
order by 1;
"""
COPIED_SUM = "select count(*), md5(string_agg(md5(body), '|' order by id)) from copied"
# A digest that the server computes from what it holds must equal one computed here from what was sent.
BLOBS = """
create table blobs (id int primary key, body text);
insert into blobs select n, repeat(md5(n::text), n * 97) from generate_series(1, 200) n;
"""
TRANSACTIONS = 250
CLIENTS = 4
COPIED = 20_000  # rows of a KiB and more, as text that the server's log of changes cannot shorten


class Postgres:
    """A server on a cluster, and the clients that talk to it."""

    def __init__(self, stage: Stage, bindir: Path, data: Path, side: str = "server") -> None:
        self.stage = stage
        self.bindir = bindir
        self.server, self.port = stage.serve(lambda port: [
            str(bindir / "postgres"), "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", "",
            "-c", "fsync=off", "-c", "max_connections=40", "-c", "autovacuum=off",
        ], side=side)  # fmt: skip
        ready = "database system is ready to accept"  # a standby: read-only connections
        wait_until(lambda: ready in self.server.log.read_text(), "the server to be ready")

    def client(self, program: str, *args: str) -> list[str]:
        """Command line of a client program."""
        return [str(self.bindir / program), "-h", "127.0.0.1", "-p", str(self.port), "-U", "tester", *args]

    def run(self, program: str, *args: str) -> str:
        """Output of a client program that must succeed."""
        return self.stage.run("client", self.client(program, *args), deadline_s=60).decode()

    def query(self, database: str, sql: str) -> str:
        """Result of a query, unaligned."""
        return self.run("psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", database, "-c", sql)


def load(db: Postgres) -> None:
    """Fill the database through COPY; a session that stays open shows the path."""
    db.run("createdb", "first")
    db.run("pgbench", "-i", "-q", "-s", "1", "first")
    db.query("first", BLOBS)
    accounts = db.query("first", "select count(*), sum(aid) from pgbench_accounts").strip()
    assert accounts == f"100000|{100_000 * 100_001 // 2}", accounts


def interactive(db: Postgres) -> None:
    """One psql session, held open: many small queries, one large answer, LISTEN and NOTIFY."""
    stage = db.stage
    psql = stage.converse("client", db.client("psql", "-X", "-q", "-A", "-t", "-d", "first"))
    for number in range(200):
        psql.tell(f"select {number} * {number};")
        assert psql.line() == str(number * number)
    psql.tell("select length(string_agg(body, '' order by id)) from blobs;")
    assert psql.line() == str(sum(32 * 97 * n for n in range(1, 201)))
    psql.tell("listen news; notify news, 'hello';")
    assert "hello" in psql.until("hello")

    def again() -> None:
        psql.tell("select 1;")
        assert psql.line() == "1"

    stage.check_path(db.port, nudge=again)
    psql.rest()


def bench(db: Postgres) -> None:
    """pgbench, read-write by count and read-only by time: no transaction fails, and the books balance."""
    report = db.run("pgbench", "-n", "-c", str(CLIENTS), "-j", "2", "-t", str(TRANSACTIONS), "first")
    done = f"number of transactions actually processed: {CLIENTS * TRANSACTIONS}/{CLIENTS * TRANSACTIONS}"
    assert done in report, report
    assert failures(report) == 0, report
    with db.stage.watching(db.port, CLIENTS):
        report = db.run("pgbench", "-n", "-S", "-M", "prepared", "-c", str(CLIENTS), "-j", "2", "-T", "2", "first")
    assert failures(report) == 0, report
    books = db.query("first", """
        select (select sum(abalance) from pgbench_accounts), (select sum(bbalance) from pgbench_branches),
               (select sum(tbalance) from pgbench_tellers), (select sum(delta) from pgbench_history),
               (select count(*) from pgbench_history)""").strip().split("|")  # fmt: skip
    assert len(set(books[:4])) == 1, books
    assert books[4] == str(CLIENTS * TRANSACTIONS), books


def failures(report: str) -> int:
    """Failed transactions according to pgbench."""
    found = re.search(r"number of failed transactions: (\d+)", report)
    assert found, report
    return int(found[1])


def dump_and_restore(db: Postgres) -> None:
    """Dump one database and restore it into another, as SQL and in the archive format: the same rows."""
    expected = db.query("first", CHECKSUM)
    assert expected.count("\n") == 3, expected
    sql = db.stage.workdir / "first.sql"
    sql.write_text(db.run("pg_dump", "first"))
    db.run("createdb", "second")
    db.run("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", "second", "-f", str(sql), "-o", os.devnull)
    assert db.query("second", CHECKSUM) == expected
    archive = db.stage.workdir / "first.dump"
    db.run("pg_dump", "-Fc", "-f", str(archive), "first")
    db.run("createdb", "third")
    db.run("pg_restore", "-j", "2", "-d", "third", str(archive))
    assert db.query("third", CHECKSUM) == expected


def books(db: Postgres) -> None:
    """Load, interactive session, pgbench, dump and restore; the backends end without a close."""
    load(db)
    interactive(db)
    bench(db)
    dump_and_restore(db)
    db.stage.check_ended(db.port)


def copy_in(db: Postgres) -> None:
    """Rows go in by COPY in one session, and come out in another as they were."""
    stage, there, back = db.stage, db.stage.workdir / "there", db.stage.workdir / "back"
    there.write_text("".join(f"{row}\t{payload(512, seed=row).hex()}\n" for row in range(COPIED)))
    db.query("first", "create table copied (id int primary key, body text)")
    for command in (f"\\copy copied from '{there}'", f"\\copy (select * from copied order by id) to '{back}'"):
        psql = stage.converse("client", db.client("psql", "-X", "-q", "-A", "-t", "-d", "first"))

        def again(psql: Program = psql) -> None:
            psql.tell("select 1;")
            assert psql.line() == "1"

        stage.check_path(db.port, 2, nudge=again)  # the standby's, and this one
        psql.tell(command)
        again()
        psql.rest()
    assert back.stat().st_size > 20_000_000
    assert sha256(back.read_bytes()) == sha256(there.read_bytes())


def standby(db: Postgres) -> None:
    """A standby is made of a base backup, follows COPY and pgbench as they happen, and has the same rows."""
    stage, data = db.stage, db.stage.workdir / "standby"
    db.run("createdb", "first")
    db.run("pgbench", "-i", "-q", "-s", "1", "first")
    db.query("first", BLOBS)
    db.run("pg_basebackup", "-D", str(data), "-R", "-X", "stream", "-c", "fast", "--no-sync")
    other = Postgres(stage, db.bindir, data, "client")
    copy_in(db)
    db.run("pgbench", "-n", "-c", str(CLIENTS), "-j", "2", "-t", str(TRANSACTIONS), "first")

    def nudge() -> None:
        db.query("first", "insert into blobs select max(id) + 1, 'more' from blobs")

    stage.check_path(db.port, ring_bytes_min=20_000_000, nudge=nudge)  # the standby's, which alone is there still
    end = db.query("first", "select pg_current_wal_lsn()").strip()
    arrived = f"select pg_last_wal_replay_lsn() >= '{end}'"
    wait_until(lambda: other.query("first", arrived).strip() == "t", "the standby to have it all")
    assert other.query("first", "select pg_is_in_recovery()").strip() == "t"
    for sums in (COPIED_SUM, CHECKSUM):
        assert other.query("first", sums) == db.query("first", sums)
    assert other.server.stop(signal.SIGINT) == 0, other.server.complaint("did not shut down")
    if stage.mode is Mode.BOTH:
        share = stage.ring_share(db.port)
        print(f"{share:.4f} of the bytes went by ring")
        assert share > 0.8


def main() -> None:
    """Run one of the two scenarios."""
    mode, workdir, bindir, scenario = Mode(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    os.environ["HOME"] = str(workdir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # leave through the context managers: no orphans
    shutil.copytree(workdir / "cluster", workdir / "data")
    with staged(mode, workdir) as stage:
        db = Postgres(stage, bindir, workdir / "data")
        {"books": books, "standby": standby}[scenario](db)
        assert db.server.stop(signal.SIGINT) == 0, db.server.complaint("did not shut down")
    print("all is well")


if __name__ == "__main__":
    main()
