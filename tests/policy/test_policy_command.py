"""`sidestep policy` as a user types it, and a policy that real programs meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from common import eventually, run_command

from sidestep.cli.group import cli
from sidestep.cli.policy import parse_endpoint, trace_line, verdict_lines
from sidestep.errors import Misuse
from sidestep.policy import Problem
from sidestep.policy.grammar import parse
from sidestep.policy.review import review
from sidestep.testing import Connection, Sidestep

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path) -> Run:
    """Runs `sidestep policy ARGS` with files and a provider's place of its own."""
    return partial(run_command, tmp_path, "policy")


# ---- check ----


def test_check_tells_bad_lines_and_fails(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.conf"
    path.write_text("use tcp conect * *:*\nuse tcp connect * *:*\nuse tcp connect * *:80\n")
    found = command("check", path)
    assert found.returncode == 1
    assert found.stdout.splitlines()[:3] == [
        f"{path}:1:9: error: 'conect' is not a role", "    use tcp conect * *:*", "            ^~~~~~",
    ]  # fmt: skip
    assert f"{path}:3:1: warning: this rule never decides: line 2 comes first" in found.stdout
    assert found.stdout.splitlines()[-1] == "1 error, 1 warning; 2 rules and 0 pairs"
    document = json.loads(command("check", "--json", path).stdout)
    assert [(one["level"], one["line"], one["word"]) for one in document["problems"]] == [
        ("error", 1, "conect"), ("warning", 3, "use"),
    ]  # fmt: skip
    assert (document["errors"], document["warnings"], document["files"]) == (1, 1, [str(path)])


def test_check_tells_problems_in_the_order_of_their_lines(tmp_path: Path) -> None:
    path, other = tmp_path / "p.conf", tmp_path / "other.conf"
    path.write_text(
        "use tcp connect * *:* user nobody-of-that-name\nlog\nnonsense\ninclude other.conf\ninclude gone.conf\noh\n"
    )
    other.write_text("pair nobody-of-that-name *\nbad\n")
    document = json.loads(CliRunner().invoke(cli, ["policy", "check", "--json", str(path)]).stdout)
    places = [(Path(one["file"]).name, one["line"]) for one in document["problems"]]
    assert places == [("p.conf", line) for line in (1, 2, 3, 5, 6)] + [("other.conf", 1), ("other.conf", 2)]


def test_check_takes_warnings_for_errors_when_strict(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.conf"
    path.write_text("log\n")
    assert command("check", path).returncode == 0
    assert command("check", "--strict", path).returncode == 1
    path.write_text("pair * *\n")
    found = command("check", "--strict", path)
    assert (found.returncode, found.stdout) == (0, "0 errors, 0 warnings; 0 rules and 1 pair\n")


def test_check_reads_what_a_provider_would_read(command: Run, tmp_path: Path) -> None:
    found = command("check")
    assert (found.returncode, found.stdout) == (0, "0 errors, 0 warnings; 0 rules and 0 pairs\n")
    assert f"there is no {tmp_path}/sidestep/policy.conf" in found.stderr
    (tmp_path / "sidestep").mkdir()
    (tmp_path / "sidestep/policy.conf").write_text("use tcp connect * *:*")
    assert "1 rule and" in command("check").stdout
    found = command("check", SIDESTEP_POLICY=str(tmp_path / "gone"))
    assert found.returncode == 1
    assert f"{tmp_path}/gone does not exist" in found.stdout


def warnings_of(text: str) -> list[Problem]:
    return list(review(parse(text.encode(), "p").statements, ["local"]))


@pytest.mark.parametrize(("text", "word", "message"), [
    ("use sdp connect * *:*", "sdp", "no protocol 'sdp' is installed"),
    ("use local connect /usr/bin/java *:*", "/usr/bin/java", "by their names alone"),
    ("log min-level 9", "log", "no effect"),
])  # fmt: skip
def test_what_is_probably_not_meant_is_warned_of(text: str, word: str, message: str) -> None:
    (found,) = warnings_of(text)
    assert (found.word, found.column) == (word, text.index(word) + 1)
    assert message in found.message
    assert found.remedy


@pytest.mark.parametrize(("earlier", "later", "never"), [
    ("connect * *:*", "connect a 10.0.0.0/8:80 user b group c", True),
    ("connect a 10.0.0.0/8:80-90", "connect a 10.1.0.0/16:80-90", True),
    ("connect a 10.0.0.0/8:80-90", "connect a 10.0.0.0/8:85", True),
    ("connect a 10.0.0.0/8:80-90", "connect a 10.0.0.0/8:85-91", False),
    ("connect a 10.0.0.0/8:80-90", "connect a 10.0.0.0/7:80", False),
    ("connect a *:*", "connect b *:*", False),
    ("connect a *:*", "listen a *:*", False),
    ("connect a *:* user b", "connect a *:*", False),
    ("connect a *:* user b", "connect a *:80 user b group c", True),
    ("connect a *:* user b", "connect a *:80 user c", False),
    ("connect a [::]/0:*", "connect a [2001:db8::]/32:80", True),
    ("connect a [::]/0:*", "connect a 10.0.0.1:80", False),
    ("connect a [::]/0:*", "connect a *:80", False),
])  # fmt: skip
def test_a_rule_that_never_decides_is_found(earlier: str, later: str, never: bool) -> None:
    found = warnings_of(f"use tcp connect other *:81\nuse tcp {earlier}\nuse tcp {later}")
    assert [problem.line for problem in found] == ([3] if never else [])
    assert not never or "line 2 comes first" in found[0].message


# ---- test ----


def test_a_connection_is_tried_without_a_provider(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.conf"
    path.write_text("use tcp connect redis-* 127.0.0.0/8:*\nuse both listen * *:* user nobody\n")
    found = command("test", "connect", "/usr/bin/redis-cli", "127.0.0.5:6379", SIDESTEP_POLICY=str(path))
    assert found.returncode == 0
    assert "no provider runs" in found.stderr
    assert found.stdout.splitlines() == [
        f"redis-cli of uid {os.geteuid()}, connecting to 127.0.0.5:6379: tcp",
        f"  why    it stays on TCP: {path}, line 1 says so: use tcp connect redis-* 127.0.0.0/8:*",
        f"  rule   {path}:1: use tcp connect redis-* 127.0.0.0/8:*",
        "  route  this host, by lo, from 127.0.0.1",
    ]
    found = command("test", "--json", "--file", path, "server", "sshd", "[::]:22", "--user", "nobody")
    document = json.loads(found.stdout)
    assert (document["role"], document["protocol"], document["rule"]["line"]) == ("listen", "local", 2)
    assert "no provider runs" not in found.stderr


def test_a_running_provider_is_asked(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.conf"
    path.write_text("use tcp connect a *:* user 12345\nuse other connect b *:*")
    with Sidestep(policy=path) as private:

        def ask(*args: str) -> dict[str, Any]:
            found = command("test", "--json", f"--socket={private.socket}", *args)
            assert (found.returncode, found.stderr) == (0, "")
            document = json.loads(found.stdout)
            assert isinstance(document, dict)
            return document

        found = ask("connect", "a", "127.0.0.1:80")
        assert (found["target"], found["protocol"], found["rule"]) == ("both", "local", None)
        assert (found["route"]["interface"], found["route"]["local"], found["device"]) == ("lo", True, None)
        assert found["note"] is None
        found = ask("connect", "a", "198.51.100.7:80")
        assert found["protocol"] is None
        assert "pairs only within its own network namespace" in found["why"]
        found = ask("connect", "a", "127.0.0.1:80", "--user=12345")
        assert (found["target"], found["protocol"]) == ("tcp", None)
        assert found["rule"] == {
            "file": str(path), "line": 1, "text": "use tcp connect a *:* user 12345",
        }  # fmt: skip
        found = ask("connect", "b", "127.0.0.1:80")
        assert (found["target"], found["protocol"]) == ("other", None)
        assert "other is not installed" in found["why"]


def test_the_answer_is_the_same_without_a_provider(tmp_path: Path) -> None:
    path = tmp_path / "p.conf"
    path.write_text("use tcp connect a *:* user 12345\nuse other connect b *:*\nuse sdp connect c *:*\n")
    asked = [
        ("connect", "x", "127.0.0.1:80"), ("connect", "x", "198.51.100.7:80"), ("listen", "x", "0.0.0.0:80"),
        ("connect", "b", "127.0.0.1:80"), ("connect", "c", "198.51.100.7:80"),
        ("connect", "a", "127.0.0.1:80", "--user=12345"),
    ]  # fmt: skip
    with Sidestep(policy=path) as private:
        for words in asked:
            running, alone = (
                CliRunner().invoke(cli, ["policy", "test", "--json", given, *words]).stdout
                for given in (f"--socket={private.socket}", f"--file={path}")
            )
            assert json.loads(alone) == json.loads(running)


def test_what_leaves_this_host_is_told_to() -> None:
    found = {
        "role": "connect", "program": "x", "uid": 0, "endpoint": "10.0.0.5:80", "protocol": "local", "why": "so",
        "rule": None, "route": {"interface": "eth0", "first_hop": None, "source": "10.0.0.1", "local": False},
        "device": "rxe0", "note": "not here",
    }  # fmt: skip
    assert verdict_lines(found)[2:] == [
        "  rule   none matches: both",
        "  route  on the link, by eth0, from 10.0.0.1",
        "  device rxe0",
        "  note   not here",
    ]  # fmt: skip
    found["route"] = {"interface": "eth0", "first_hop": "10.0.0.254", "source": None, "local": False}
    assert verdict_lines(found)[3] == "  route  over 10.0.0.254, by eth0"
    found["device"] = None
    assert "one in software stands in its place" in verdict_lines(found)[4]
    found["protocol"] = None
    assert "no RDMA device sends there" in verdict_lines(found)[4]


@pytest.mark.parametrize("args", [
    ("10.0.0.1",), ("10.0.0.1:http",), (":80",), ("::1:65536",), ("no.such.host.invalid:80",), ("*:80",),
    ("1.1.1.1:1", "--user=no such"),
])  # fmt: skip
def test_what_cannot_be_tried_is_told(command: Run, args: tuple[str, ...]) -> None:
    found = command("test", "connect", "a", *args)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("sidestep: ")


def test_endpoints_are_read() -> None:
    assert str(parse_endpoint("[::1]:80")) == "[::1]:80"
    assert str(parse_endpoint("10.0.0.1:0")) == "10.0.0.1:0"
    assert parse_endpoint("localhost:80").address.is_loopback
    with pytest.raises(Misuse):
        parse_endpoint("10.0.0.1:-1")


# ---- trace, and real programs ----

DECISION = {
    "sequence": 3, "time": 0.25, "role": "connect", "program": "redis\x1b[0m", "uid": 1000, "endpoint": "10.0.0.5:6379",
    "target": "local", "rule": {"file": "/p.conf", "line": 2, "text": "use local client * *:*"}, "route": None,
    "protocol": "local", "why": "local carries it",
}  # fmt: skip


def test_a_decision_is_one_line_whatever_the_program_calls_itself() -> None:
    at, _, line = trace_line(DECISION).partition(" ")
    assert at.endswith(".250")
    assert line == "redis?[0m(1000) -> 10.0.0.5:6379 local: local carries it [/p.conf:2: use local client * *:*]"
    stays = DECISION | {"role": "listen", "protocol": None, "why": "it stays on TCP: use local client * *:*"}
    assert trace_line(stays).endswith("<- 10.0.0.5:6379 tcp: it stays on TCP: use local client * *:*")


SERVER = """
import socket, sys, threading
def serve(conn):
    while data := conn.recv(65536):
        conn.sendall(data)
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
"""
CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as conn:
    for line in sys.stdin:
        for n in range(int(line)):
            conn.sendall(b"%09d\\n" % n)
            got = b""
            while len(got) < 10:
                got += conn.recv(10 - len(got))
            assert got == b"%09d\\n" % n
        print("done", flush=True)
"""


class Client:
    """A program that sends so many messages and gets them back, as often as it is asked."""

    def __init__(self, private: Sidestep, port: int) -> None:
        self._private = private
        self.process: subprocess.Popen[str] = private.popen(
            [sys.executable, "-c", CLIENT, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def talk(self, messages: int) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{messages}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def talk_until(self, condition: Callable[[Connection], bool]) -> None:
        """Until one of the two ends is so; who says nothing hears nothing from the provider either."""

        def holds() -> bool:
            self.talk(10)
            mine = self.connection()
            return any(condition(one) for one in self._private.connections() if mine.local in (one.local, one.remote))

        eventually(holds)

    def connection(self) -> Connection:
        (found,) = (one for one in self._private.connections() if one.pid == self.process.pid)
        return found


def start_server(private: Sidestep) -> int:
    """A program that sends everything back; its port."""
    server: subprocess.Popen[str] = private.popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    return int(server.stdout.readline())


@pytest.mark.slow
def test_a_new_policy_holds_at_once_and_disturbs_no_promoted_connection(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.conf"
    with Sidestep("8", policy=path) as private:
        port = start_server(private)

        def generation() -> int:
            return int(private.status()["policy"]["generation"])

        def rewrite(text: str) -> None:
            before = generation()
            path.write_text(text)
            eventually(lambda: generation() > before)

        first = Client(private, port)
        first.talk_until(lambda one: one.promoted)
        rewrite(f"use tcp connect python* 127.0.0.1:{port}\n")
        second = Client(private, port)
        second.talk_until(lambda one: one.reason == "POLICY")
        rewrite(f"use tcp listen python* 127.0.0.1:{port}\n")
        third = Client(private, port)
        third.talk_until(lambda one: one.reason == "POLICY")
        rewrite("use both connect * *:*\nnonsense\n")  # the one before stays in force
        assert private.status()["policy"]["errors"] == 1
        fourth = Client(private, port)
        fourth.talk_until(lambda one: one.reason == "POLICY")
        assert {client.connection().tx.ring_bytes for client in (second, third, fourth)} == {0}

        tcp_msgs = first.connection().tx.tcp_msgs
        first.talk(1000)
        found = first.connection()
        assert found.promoted
        assert found.tx.tcp_msgs == tcp_msgs  # all on the ring: it was promoted before, and is left alone
        rewrite("# nothing\n")
        for client in (second, third, fourth, Client(private, port)):
            client.talk_until(lambda one: one.promoted)

        told = command("trace", "--no-follow", "--json", f"--socket={private.socket}").stdout.splitlines()
        decisions = [json.loads(line) for line in told]
        ruled = {
            (one["role"], one["protocol"], one["rule"]["text"] if one["rule"] else None) for one in decisions
        }  # fmt: skip
        assert ruled == {
            ("connect", "local", None), ("listen", "local", None),
            ("connect", None, f"use tcp connect python* 127.0.0.1:{port}"),
            ("listen", None, f"use tcp listen python* 127.0.0.1:{port}"),
        }  # fmt: skip
        assert [one["sequence"] for one in decisions] == list(range(1, len(decisions) + 1))
        lines = command("trace", "--no-follow", f"--socket={private.socket}").stdout.splitlines()
        assert len(lines) == len(decisions)
        assert f"-> 127.0.0.1:{port} local: local carries it" in lines[0]


def test_trace_goes_on_until_the_provider_ends(tmp_path: Path) -> None:
    with Sidestep() as private:
        tracing = subprocess.Popen(
            [sys.executable, "-m", "sidestep", "policy", "trace", "--json", f"--socket={private.socket}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert tracing.stdout
        client = Client(private, start_server(private))
        client.talk_until(lambda one: one.promoted)
        assert json.loads(tracing.stdout.readline())["role"] == "connect"
        private.kill_provider()
        _, told = tracing.communicate(timeout=60)
        assert tracing.returncode == 1
        assert "provider" in told
