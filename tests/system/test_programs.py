"""Real programs of different users and in different namespaces, under the shim and a system-wide provider."""

from __future__ import annotations

import hashlib
import io
import pwd
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import needed
import pytest
from common import PATIENCE_S
from tenants import ALICE, BOB, Namespace, System

from sidestep import native_library
from sidestep.native.layout import REASON_TEXT, Reason
from sidestep.testing import free_port

BODY_SIZE = 24 << 20
NGINX = """
daemon off;
worker_processes 1;
{user}
pid {root}/nginx.pid;
error_log {root}/error.log notice;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
    uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
    server {{ listen {host}:{port}; root {root}/www; }}
}}
"""


@pytest.fixture
def workdir() -> Iterator[Path]:
    """A directory that all users can write."""
    with tempfile.TemporaryDirectory(prefix="sidestep-users-") as made:
        Path(made).chmod(0o777)
        yield Path(made)


class Programs:
    """Starts programs under the shim, and ends them after the test."""

    def __init__(self, closing: ExitStack, system: System) -> None:
        self.closing = closing
        self.system = system

    def start(self, argv: Sequence[str], uid: int, **changes: str) -> subprocess.Popen[bytes]:
        """A program of that user, its output a pipe."""
        started = subprocess.Popen(
            argv, env=self.system.env(**changes), stdout=subprocess.PIPE, user=uid, group=uid, extra_groups=[], cwd="/"
        )
        self.closing.callback(self._end, started)
        return started

    @staticmethod
    def _end(program: subprocess.Popen[bytes]) -> None:
        program.terminate()
        try:
            program.wait(5)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
        if program.stdout:
            program.stdout.close()


@pytest.fixture
def programs(workdir: Path, closing: ExitStack) -> Programs:
    """Programs under a provider with ordinary expiry; they end before their directory goes."""
    return Programs(closing, System(closing, offer_expiry_s=2))


@pytest.fixture
def nginx(programs: Programs, workdir: Path) -> Callable[..., int]:
    """Starts nginx, whose workers serve a body of BODY_SIZE at /large; returns the port."""

    def start(
        uid: int, host: str = "127.0.0.1", wrap: Callable[[list[str]], list[str]] = lambda argv: argv, **env: str
    ) -> int:
        (workdir / "www").mkdir()
        (workdir / "www" / "large").write_bytes(random.Random(1).randbytes(BODY_SIZE))
        port = free_port()
        configuration = workdir / "nginx.conf"
        user = "user nobody nogroup;" if uid == 0 else ""
        configuration.write_text(NGINX.format(user=user, root=workdir, host=host, port=port))
        argv = [needed.program("nginx"), "-p", str(workdir), "-e", str(workdir / "error.log"), "-c", str(configuration)]
        programs.start(wrap(argv), uid, **env)
        until(lambda: "start worker process " in (workdir / "error.log").read_text(), workdir / "error.log")
        return port

    return start


def until(condition: Callable[[], object], log: Path) -> None:
    """Waits; the log is shown if it was in vain."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
        except FileNotFoundError:
            pass  # the program has not made it yet
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.02)


def fetch(programs: Programs, url: str, uid: int, wrap: Callable[[list[str]], list[str]] = lambda argv: argv) -> str:
    """Fetches while we look: the states of the connection's two ends, and what is said of them; the body is whole."""
    curl = programs.start(wrap([needed.program("curl"), "-sSf", url]), uid)
    assert isinstance(curl.stdout, io.BufferedReader)
    digest, size, ends = hashlib.sha256(), 0, ""
    while piece := curl.stdout.read1(1 << 18):
        digest.update(piece)
        size += len(piece)
        if size < BODY_SIZE * 3 // 4 and not settled(ends):
            ends = look(programs, url.split("/")[2].rpartition(":")[2])
            time.sleep(0.002)  # the body must last until the two have come together
    assert curl.wait(PATIENCE_S) == 0
    assert (size, digest.digest()) == (BODY_SIZE, hashlib.sha256(random.Random(1).randbytes(BODY_SIZE)).digest())
    return ends


def look(programs: Programs, port: str) -> str:
    """State and reason of each end."""
    found = [one for one in programs.system.connections() if port in (one.local + " " + one.remote).replace(":", " ")]
    return "; ".join(sorted({f"{one.state} {one.why}".strip() for one in found}))


def settled(ends: str) -> bool:
    return ends == "promoted" or REASON_TEXT[Reason.FOREIGN_USER] in ends


def test_nginx_that_root_started_serves_all_users(programs: Programs, nginx: Callable[..., int]) -> None:
    port = nginx(0)
    assert fetch(programs, f"http://127.0.0.1:{port}/large", ALICE) == "promoted"


def test_two_users_stay_on_tcp(programs: Programs, nginx: Callable[..., int]) -> None:
    port = nginx(BOB)
    assert REASON_TEXT[Reason.FOREIGN_USER] in fetch(programs, f"http://127.0.0.1:{port}/large", ALICE)
    assert programs.system.counter("claim_matched") == 0


def test_one_user_is_promoted(programs: Programs, nginx: Callable[..., int]) -> None:
    port = nginx(ALICE)
    assert fetch(programs, f"http://127.0.0.1:{port}/large", ALICE) == "promoted"


def test_two_namespaces_are_promoted(
    programs: Programs, nginx: Callable[..., int], namespaces: Callable[..., tuple[Namespace, Namespace]]
) -> None:
    client, server = namespaces()
    port = nginx(0, "10.77.0.2", server.command)
    assert fetch(programs, f"http://10.77.0.2:{port}/large", 0, client.command) == "promoted"


def test_two_containers_are_promoted(
    programs: Programs, nginx: Callable[..., int], namespaces: Callable[..., tuple[Namespace, Namespace]], workdir: Path
) -> None:
    """Namespaces of network, processes and mounts; the provider's socket is seen through one bind mount."""
    client, server = namespaces()
    mounted = workdir / "run"
    mounted.mkdir()

    def contained(argv: list[str]) -> list[str]:
        script = f'mount --bind {programs.system.directory} {mounted} && exec "$@"'
        return server.command(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh", *argv]
        )

    port = nginx(0, "10.77.0.2", contained, SIDESTEP_SOCKET=str(mounted / "provider"))
    assert fetch(programs, f"http://10.77.0.2:{port}/large", 0, client.command) == "promoted"


@pytest.fixture
def postgres_user() -> pwd.struct_passwd:
    """As which PostgreSQL runs."""
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        needed.missing("the user postgres", "/usr/lib/postgresql/*/bin/postgres")


@pytest.mark.parametrize("starter", ["setpriv", "pg_ctl"])
def test_postgresql_that_root_started_serves_all_users(
    programs: Programs, workdir: Path, postgres_user: pwd.struct_passwd, starter: str
) -> None:
    """Root drops its privileges before the exec of the server, or of what then forks and starts the server."""
    bindir, data, port = needed.postgresql(), workdir / "data", free_port()
    drop = [
        needed.program("setpriv"),
        f"--reuid={postgres_user.pw_uid}",
        f"--regid={postgres_user.pw_gid}",
        "--clear-groups",
    ]
    initdb = [*drop, str(bindir / "initdb"), "-D", str(data), "-A", "trust", "-U", "tester", "--no-sync"]
    subprocess.run(initdb, check=True, capture_output=True, cwd="/", timeout=60)
    options = ["-p", str(port), "-h", "127.0.0.1", "-k", "", "-c", "fsync=off"]
    if starter == "setpriv":
        programs.start([*drop, str(bindir / "postgres"), "-D", str(data), *options], 0)
    else:
        words = " ".join(option or "''" for option in options)
        command = [
            *drop,
            str(bindir / "pg_ctl"),
            "-D",
            str(data),
            "-l",
            str(workdir / "log"),
            "-w",
            "-o",
            words,
            "start",
        ]
        subprocess.run(command, check=True, env=programs.system.env(), cwd="/", timeout=60, stdout=subprocess.DEVNULL)
        stop = [*drop, str(bindir / "pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop"]
        programs.closing.callback(subprocess.run, stop, check=True, capture_output=True, cwd="/", timeout=60)
    psql = [
        needed.program("psql"),
        "-X",
        "-q",
        "-A",
        "-t",
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
        "-U",
        "tester",
        "postgres",
    ]

    def answers() -> bool:
        return (
            subprocess.run([*psql, "-c", "select 1"], capture_output=True, cwd="/", timeout=PATIENCE_S).returncode == 0
        )

    until(answers, workdir / "log")
    session = subprocess.Popen(
        psql, env=programs.system.env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=ALICE, group=ALICE,
        extra_groups=[], cwd="/",
    )  # fmt: skip
    assert session.stdin is not None
    assert session.stdout is not None
    ends: list[str] = []
    with session:
        for turn in range(400):
            session.stdin.write(f"select {turn} * {turn};\n".encode())
            session.stdin.flush()
            assert int(session.stdout.readline()) == turn * turn
            ends = [f"{one.state} {one.why}" for one in programs.system.connections() if one.pid == session.pid]
            if ends == ["promoted "]:
                break
        session.stdin.close()
        assert session.wait(PATIENCE_S) == 0
    assert ends == ["promoted "]
    assert programs.system.counter("claim_matched") == 1


DOVECOT = """
base_dir = {root}/run
log_path = {root}/log
protocols = imap
listen = 127.0.0.1
ssl = no
disable_plaintext_auth = no
mail_location = maildir:{root}/mail/%u
first_valid_uid = 1
service imap-login {{
    inet_listener imap {{
        port = {port}
    }}
}}
passdb {{
    driver = static
    args = password=secret
}}
userdb {{
    driver = static
    args = uid=nobody gid=nogroup home={root}/mail/%u
}}
"""
IMAP = """
import imaplib, sys
mail = imaplib.IMAP4("127.0.0.1", int(sys.argv[1]))
mail.login("someone", "secret")
mail.select()
print("in", flush=True)
while sys.stdin.readline():
    mail.append("INBOX", "", None, b"Subject: a\\r\\n\\r\\n" + b"y" * 20000 + b"\\r\\n")
    print("put", flush=True)
mail.logout()
"""


@pytest.mark.least("ci")
def test_dovecot_hands_its_processes_a_short_environment(programs: Programs, workdir: Path) -> None:
    """They are under the shim all the same. The one that serves a mailbox has got its connection from another."""
    port = free_port()
    (workdir / "mail").mkdir()
    (workdir / "mail").chmod(0o777)
    (workdir / "dovecot.conf").write_text(DOVECOT.format(root=workdir, port=port))
    server = programs.start([needed.program("dovecot"), "-F", "-c", str(workdir / "dovecot.conf")], 0)
    until(lambda: "starting up" in (workdir / "log").read_text(), workdir / "log")
    argv = [sys.executable, "-c", IMAP, str(port)]
    client = subprocess.Popen(argv, env=programs.system.env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with client:
        assert client.stdout is not None
        assert client.stdout.readline() == "in\n"
        found = _children(server.pid)
        client.communicate("\n\n", timeout=PATIENCE_S)
    assert client.returncode == 0
    assert found["imap"]
    assert all(found.values()), found


def _children(pid: int) -> dict[str, bool]:
    """The processes that it has started, by name: whether they all have the shim."""
    found: dict[str, bool] = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        name = Path(f"/proc/{child}/comm").read_text().strip()
        found[name] = found.get(name, True) and native_library().name in Path(f"/proc/{child}/maps").read_text()
    return found
