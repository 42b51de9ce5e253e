"""`sidestep gateway` between hosts that know only TCP, or only SDP."""

from __future__ import annotations

import json
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from common import PATIENCE_S
from hosts import Host, Make
from standard_peer import StandardPeer
from talking import PORT, TALKERS, ends_well, line

from sidestep import limits
from sidestep.api.sockets import MSG_WAITALL, SHUT_WR
from sidestep.cli.gateway import gateway as command
from sidestep.errors import Misuse
from sidestep.provider import control
from sidestep.remote.gateway_rules import Rule, check_rules, read_rules
from sidestep.settings import RemoteSettings

SIDESTEP = Path(sys.executable).with_name("sidestep")


class Running:
    """A gateway on a host; each line that it prints is a state."""

    def __init__(self, host: Host, *arguments: str) -> None:
        with host.namespace.inside():
            self._process = subprocess.Popen(
                [SIDESTEP, "gateway", "--json", *arguments], stdout=subprocess.PIPE, text=True
            )
        self.first = self._read()

    def _read(self) -> dict[str, Any]:
        said = json.loads(line(self._process))
        assert isinstance(said, dict)
        return said

    def status(self) -> dict[str, Any]:
        """What it says of itself now: of its only rule."""
        self._process.send_signal(signal.SIGUSR1)
        return self._only(self._read())

    def reloaded(self, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What it says of itself once it has read its rules anew."""
        self._process.send_signal(signal.SIGHUP)
        while True:  # nothing tells that it has
            self._process.send_signal(signal.SIGUSR1)
            if done(found := self._read()):
                return found

    @staticmethod
    def _only(status: dict[str, Any]) -> dict[str, Any]:
        (rule,) = status["rules"]
        assert isinstance(rule, dict)
        return rule

    def told_to_end(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def ended(self, code: int = 0) -> dict[str, Any]:
        """Waits for its end; what it has counted."""
        last = self._read()
        assert self._process.wait(PATIENCE_S) == code
        return self._only(last)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process:
            """Waits, and closes the pipe."""


@contextmanager
def plainly(host: Host, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A program of the tests without the shim, that has said its first word."""
    with host.namespace.inside():
        program = subprocess.Popen([*TALKERS, *words], stdout=subprocess.PIPE, text=True)
    with program:
        try:
            assert line(program) in ("listens", "talks")
            yield program
        finally:
            program.kill()


def talk(host: Host, address: str, size: int = 3000, seconds: float = 1) -> None:
    """A TCP client checks every byte of its echo."""
    with plainly(host, "talk", address, str(PORT), str(seconds), str(size), "0.001") as client:
        ends_well(client)


@pytest.fixture
def make_hosts(make_hosts: Make, tmp_path: Path) -> Make:
    """Other hosts are let in everywhere, unless a test has a policy of its own."""
    rules = tmp_path / "let-in.conf"
    rules.write_text("use both listen * *:*\n")
    return lambda count, **options: make_hosts(count, **{"policy": rules} | options)


@pytest.fixture
def three(make_hosts: Make) -> tuple[Host, Host, Host]:
    """A client, a gateway and a server; the gateway has no provider."""
    client, middle, server = make_hosts(3)
    control.stop(middle.sidestep.socket)
    return client, middle, server


@contextmanager
def serving(server: Host, resync: Host) -> Iterator[None]:
    """An echo server that knows only TCP, at a host whose port mapper answers."""
    with plainly(server, "serve", server.address, str(PORT)):
        with resync.namespace.inside(), ExitStack() as closing:
            StandardPeer(closing, resync.address).ask(server.address, PORT)
        yield


def from_tcp(middle: Host, server: Host, more: str = "") -> str:
    return f"tcp {middle.address}:{PORT} to sdp {server.address}:{PORT} {more}"


def from_sdp(middle: Host, server: Host, more: str = "") -> str:
    return f"sdp {middle.address}:{PORT} to tcp {server.address}:{PORT} {more}"


@pytest.mark.slow
def test_a_tcp_client_reaches_a_server_by_sdp(three: tuple[Host, Host, Host]) -> None:
    client, middle, server = three
    with serving(server, client), Running(middle, from_tcp(middle, server)) as gateway:
        assert gateway.first["rules"][0]["listening"] == f"{middle.address}:{PORT}"
        for size in (1, 3000, 200_000):
            talk(client, middle.address, size)
        gateway.told_to_end()
        last = gateway.ended()
    assert (last["joined"], last["fell_back"], last["active"], last["reset"]) == (3, 0, 0, 0)
    assert last["to_target"] == last["to_client"] > 200_000
    assert server.counter("visit_accepted") == 3


@pytest.mark.slow
def test_an_sdp_client_reaches_a_server_by_tcp(three: tuple[Host, Host, Host]) -> None:
    client, middle, server = three
    size = 3_000_000
    data, room = random.Random(1).randbytes(size), bytearray(size)
    with ExitStack() as closing:
        closing.enter_context(plainly(server, "serve", server.address, str(PORT)))
        gateway = closing.enter_context(Running(middle, from_sdp(middle, server)))
        closing.enter_context(client.namespace.inside())
        peer = StandardPeer(closing, client.address)
        answer = peer.ask(middle.address, PORT)
        assert answer.ap_port == gateway.first["rules"][0]["rdma_port"]
        sock = closing.enter_context(peer.connect(middle.address, answer.ap_port))
        for start in range(0, size, 100_000):
            sock.sendall(data[start : start + 100_000])
            assert sock.recv_into(memoryview(room)[start : start + 100_000], flags=MSG_WAITALL) == 100_000
        now = gateway.status()
        assert (now["active"], now["to_target"], now["to_client"]) == (1, size, size)  # while it runs
        sock.shutdown(SHUT_WR)
        assert sock.recv(1) == b""
        assert room == data
        gateway.told_to_end()
        last = gateway.ended()
    assert (last["joined"], last["to_target"], last["to_client"], last["reset"]) == (1, size, size, 0)


@pytest.mark.slow
def test_both_gateways_in_a_row(make_hosts: Make) -> None:
    """TCP, SDP between the two gateways, TCP again."""
    client, one, other, server = make_hosts(4)
    control.stop(one.sidestep.socket)
    control.stop(other.sidestep.socket)
    with ExitStack() as closing:
        closing.enter_context(plainly(server, "serve", server.address, str(PORT)))
        closing.enter_context(Running(other, from_sdp(other, server, f"from {one.address}")))
        first = closing.enter_context(Running(one, from_tcp(one, other)))
        talk(client, one.address, 50_000)
        first.told_to_end()
        assert first.ended()["joined"] == 1


@pytest.mark.slow
def test_it_falls_back_to_tcp_where_that_is_wanted(make_hosts: Make) -> None:
    client, middle, server = make_hosts(3, remote=RemoteSettings.parse("198.18.7.99"))
    with plainly(server, "serve", server.address, str(PORT)):
        with Running(middle, from_tcp(middle, server, "else tcp")) as gateway:
            talk(client, middle.address, 100_000)
            gateway.told_to_end()
            last = gateway.ended()
        assert (last["joined"], last["fell_back"]) == (1, 1)
        assert last["to_target"] == last["to_client"] > 100_000
        with Running(middle, from_tcp(middle, server)) as gateway, client.namespace.inside():
            with socket.create_connection((middle.address, PORT)) as sock, pytest.raises(ConnectionResetError):
                sock.recv(1)
            assert gateway.status()["failed"] == 1


@pytest.mark.slow
def test_urgent_bytes_also_where_tcp_carries_on(make_hosts: Make) -> None:
    client, middle, server = make_hosts(3, remote=RemoteSettings.parse("198.18.7.99"))
    with ExitStack() as closing:
        with server.namespace.inside():
            listener = closing.enter_context(socket.create_server((server.address, PORT)))
        closing.enter_context(Running(middle, from_tcp(middle, server, "else tcp")))
        closing.enter_context(client.namespace.inside())
        one = closing.enter_context(socket.create_connection((middle.address, PORT), 10))
        listener.settimeout(PATIENCE_S)
        other = closing.enter_context(listener.accept()[0])
        for sender, receiver in ((one, other), (other, one)):
            receiver.settimeout(PATIENCE_S)
            sender.sendall(b"ab")
            sender.send(b"!", socket.MSG_OOB)
            sender.sendall(b"cd")
            assert select.select([], [], [receiver], PATIENCE_S)[2]
            assert receiver.recv(1, socket.MSG_OOB) == b"!"
            got = b""
            while len(got) < 4:
                got += receiver.recv(10)
            assert got == b"abcd"


@pytest.mark.slow
def test_it_drains(three: tuple[Host, Host, Host]) -> None:
    client, middle, server = three
    with serving(server, client), Running(middle, from_tcp(middle, server)) as gateway:
        with client.namespace.inside(), socket.create_connection((middle.address, PORT), 10) as sock:
            sock.sendall(b"a")
            assert sock.recv(1) == b"a"
            gateway.told_to_end()
            assert gateway.status()["active"] == 1
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((middle.address, PORT), 10)
            sock.sendall(b"b")
            assert sock.recv(1) == b"b"
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
        assert gateway.ended()["joined"] == 1


@pytest.mark.slow
def test_rules_that_change_end_no_connection(three: tuple[Host, Host, Host], tmp_path: Path) -> None:
    client, middle, server = three
    rules = tmp_path / "rules"
    kept = from_tcp(middle, server).strip()
    gone = f"tcp {middle.address}:7801 to sdp {server.address}:{PORT}"
    new = f"tcp {middle.address}:7802 to sdp {server.address}:{PORT}"
    twice = f"tcp {middle.address}:{PORT} to sdp {server.address}:9"
    rules.write_text(f"{kept}\n{gone}\n")
    with ExitStack() as closing:
        closing.enter_context(serving(server, client))
        gateway = closing.enter_context(Running(middle, f"--rules={rules}"))
        closing.enter_context(client.namespace.inside())

        def opened(port: int) -> socket.socket:
            return closing.enter_context(socket.create_connection((middle.address, port), 10))

        def all_talk() -> None:
            for sock in talks:
                sock.sendall(b"a")
                assert sock.recv(1) == b"a"

        talks = [opened(PORT), opened(7801)]
        all_talk()
        rules.write_text(f"{kept}\n{new}\n")
        found = gateway.reloaded(lambda said: len(said["rules"]) == 2 and said["rules"][1]["rule"] == new)
        assert (found["rules"][0]["rule"], found["active"]) == (kept, 2)
        talks.append(opened(7802))
        all_talk()
        with pytest.raises(ConnectionRefusedError):
            opened(7801)
        for wrong in ("nonsense\n", f"{kept}\n{twice}\n", ""):
            rules.write_text(wrong)
            found = gateway.reloaded(lambda _said: True)
            assert [rule["rule"] for rule in found["rules"]] == [kept, new]
        all_talk()


@pytest.mark.slow
def test_what_does_not_end_in_time_is_reset(three: tuple[Host, Host, Host]) -> None:
    client, middle, server = three
    rule = from_tcp(middle, server)
    with serving(server, client), Running(middle, rule, "--drain=0") as gateway:
        with client.namespace.inside(), socket.create_connection((middle.address, PORT), 10) as sock:
            sock.sendall(b"a")
            assert sock.recv(1) == b"a"
            gateway.told_to_end()
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
        gateway.ended(1)


@pytest.mark.slow
def test_a_rule_that_is_full(three: tuple[Host, Host, Host]) -> None:
    """TCP clients wait, SDP clients are rejected, until there is room."""
    client, middle, server = three
    with ExitStack() as closing:
        closing.enter_context(serving(server, client))
        closing.enter_context(client.namespace.inside())
        with Running(middle, from_tcp(middle, server, "max 1")) as gateway:
            first, second = (socket.create_connection((middle.address, PORT), 10) for _ in range(2))
            with first, second:
                second.sendall(b"2")
                first.sendall(b"1")
                assert first.recv(1) == b"1"
                assert gateway.status()["active"] == 1
                first.shutdown(socket.SHUT_WR)
                assert first.recv(1) == b""
                assert second.recv(1) == b"2"
        peer = StandardPeer(closing, client.address)
        with Running(middle, from_sdp(middle, server, "max 1 at 7999")) as gateway:
            with peer.connect(middle.address, 7999) as sock:
                sock.sendall(b"1")
                assert sock.recv(1) == b"1"
                with pytest.raises(ConnectionRefusedError):
                    peer.connect(middle.address, 7999)
            assert gateway.status()["refused"] == 1


@pytest.mark.slow
def test_only_hosts_of_the_rule_may_come(three: tuple[Host, Host, Host]) -> None:
    client, middle, server = three
    with ExitStack() as closing:
        closing.enter_context(client.namespace.inside())
        with Running(middle, from_tcp(middle, server, "from 198.18.7.9,2001:db8::/32")) as gateway:
            with pytest.raises(ConnectionResetError), socket.create_connection((middle.address, PORT), 10) as sock:
                sock.recv(1)  # if it does not come even sooner
            assert gateway.status()["refused"] == 1
        peer = StandardPeer(closing, client.address)
        with Running(middle, from_sdp(middle, server, "from 198.18.7.9")) as gateway:
            with pytest.raises(ConnectionRefusedError):
                peer.connect(middle.address, gateway.first["rules"][0]["rdma_port"])
            assert gateway.status()["refused"] == 1


# ---- rules ----


@pytest.mark.parametrize(
    "text",
    [
        "tcp 0.0.0.0:8080 to sdp 192.0.2.7:80",
        "tcp [::]:0 to sdp [2001:db8::7]:80 via 4000 else tcp",
        "sdp 192.0.2.1:80 to tcp 192.0.2.9:8080 at 4000",
    ],
)
def test_a_rule_is_what_it_says(text: str) -> None:
    assert str(Rule.parse(f"  {text}  # a comment")) == text


def test_all_words_of_a_rule() -> None:
    rule = Rule.parse("tcp 0.0.0.0:1 to sdp 192.0.2.7:80 from 10.0.0.0/8,2001:db8::/32 max 7 via 9 else tcp")
    assert (rule.connections_max, rule.rdma_port, rule.falls_back, len(rule.hosts)) == (7, 9, True, 2)
    assert Rule.parse("tcp 0.0.0.0:1 to sdp 192.0.2.7:80").connections_max == limits.GATEWAY_CONNECTIONS


@pytest.mark.parametrize(
    "text",
    [
        "", "tcp 0.0.0.0:1 to tcp 192.0.2.7:80", "sdp 192.0.2.1:1 to sdp 192.0.2.7:80",
        "tcp 0.0.0.0:1 sdp 192.0.2.7:80",
        "tcp 0.0.0.0 to sdp 192.0.2.7:80", "tcp 0.0.0.0:65536 to sdp 192.0.2.7:80", "tcp host:1 to sdp 192.0.2.7:80",
        "tcp 0.0.0.0:1 to sdp 192.0.2.7:0", "tcp 0.0.0.0:1 to sdp 0.0.0.0:80", "sdp 0.0.0.0:1 to tcp 192.0.2.7:80",
        "sdp 192.0.2.1:0 to tcp 192.0.2.7:80", "tcp 0.0.0.0:1 to sdp 192.0.2.7:80 at 7",
        "tcp ::1:1 to sdp 192.0.2.7:80",
        "sdp 192.0.2.1:1 to tcp 192.0.2.7:80 else tcp", "tcp 0.0.0.0:1 to sdp 192.0.2.7:80 else sdp",
        "tcp 0.0.0.0:1 to sdp 192.0.2.7:80 max 0", "tcp 0.0.0.0:1 to sdp 192.0.2.7:80 max 1 max 2",
        "tcp 0.0.0.0:1 to sdp 192.0.2.7:80 from 10.0.0.1/8", "tcp 0.0.0.0:1 to sdp 192.0.2.7:80 max",
        "tcp [192.0.2.1]:1 to sdp 192.0.2.7:80",
    ],
)  # fmt: skip
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(Misuse):
        Rule.parse(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("tcp 0.0.0.0:80 to sdp 192.0.2.7:80 els tcp", "els"),
        ("tcp 0.0.0.0:80 to sdp 192.0.2.7 else tcp", "192.0.2.7"),
        ("udp 0.0.0.0:80 to sdp 192.0.2.7:80", "udp"),
        ("tcp 0.0.0.0:80 to sdp 192.0.2.7:80 max many", "many"),
    ],
)
def test_the_word_that_is_wrong_is_pointed_at(text: str, word: str) -> None:
    with pytest.raises(Misuse) as found:
        Rule.parse(text)
    _, line, marks = found.value.message.splitlines()
    start = marks.index("^")
    assert line[start : start + len(marks.strip())] == word
    argv = [sys.executable, "-m", "sidestep", "gateway", text]
    told = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert marks in told.stderr


def test_a_file_of_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules"
    path.write_text("# mine\n\ntcp 0.0.0.0:1 to sdp 192.0.2.7:80  # web\nsdp 192.0.2.1:2 to tcp 192.0.2.7:80\n")
    rules = read_rules(path)
    assert [rule.listen.port for rule in rules] == [1, 2]
    with pytest.raises(Misuse, match="two rules"):
        check_rules([*rules, rules[0]])
    path.write_text("\nnonsense\n")
    with pytest.raises(Misuse, match="line 2"):
        read_rules(path)
    with pytest.raises(Misuse, match="nothing to relay"):
        check_rules([])


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = CliRunner().invoke(command, [f"tcp 127.0.0.1:{server.getsockname()[1]} to sdp 192.0.2.7:80"])
    assert result.exit_code == 1
    assert "nobody can listen" in str(result.exception)
