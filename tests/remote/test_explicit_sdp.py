"""Connections of programs that begin with SDP: the program names it, or a rule of the policy does."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import toolchain
from common import PATIENCE_S, standing_still
from hosts import NETWORK, Host, Make
from sdp_connects import IPPROTO_SDP
from talking import PORT, TALKERS, ends_well, line, listening, talking

from sidestep.settings import RemoteSettings

pytestmark = pytest.mark.slow

REACHING = [sys.executable, str(Path(__file__).with_name("sdp_connects.py"))]
REFUSED = os.strerror(111)
TIMED_OUT = os.strerror(110)


def program(host: Host, *words: object) -> subprocess.Popen[str]:
    """One of `pending_connects.py`, under the shim."""
    argv = [*REACHING, *map(str, words)]
    return host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serving(host: Host, address: str, protocol: int = 0) -> subprocess.Popen[str]:
    """An echo server under the shim that listens."""
    server = program(host, "serve", address, PORT, protocol)
    assert line(server) == "listens"
    return server


def call(host: Host, address: str, protocol: int = IPPROTO_SDP, size: int = 0) -> list[str]:
    """What a client says."""
    return said(host, "call", address, PORT, protocol, size)


def said(host: Host, *words: object) -> list[str]:
    """What a program says, from its beginning to its end."""
    argv = [*REACHING, *map(str, words)]
    output: str = host.run(argv, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    return output.splitlines()


def go_on(waiting: subprocess.Popen[str]) -> None:
    """Lets a program go on that waits for a line."""
    assert waiting.stdin is not None
    waiting.stdin.write("\n")
    waiting.stdin.flush()


@contextmanager
def asleep(host: Host) -> Iterator[None]:
    """The provider of a host does nothing."""
    with standing_still(host.sidestep.provider_pid):
        yield


@pytest.fixture
def make_first(make_hosts: Make, tmp_path: Path) -> Make:
    """Hosts whose policy has SDP tried first."""
    rules = tmp_path / "first.conf"
    rules.write_text(f"use sdp connect * {NETWORK}:*\n")
    return lambda count, **options: make_hosts(count, **{"policy": rules} | options)


# ---- named by the program ----


@pytest.mark.parametrize("address", ["specific", "wildcard"])
@pytest.mark.parametrize("version", [4, 6])
def test_each_end_sees_the_other_one(two: tuple[Host, Host], address: str, version: int) -> None:
    one, other = two
    mine, there = (one.address, other.address) if version == 4 else (one.address6, other.address6)
    anywhere = "0.0.0.0" if version == 4 else "::"
    server = serving(other, there if address == "specific" else anywhere)
    seen, end = call(one, there, size=3_000_000)
    assert end == "right"
    words = seen.split()
    assert words[:5] == ["connected", there, str(PORT), "from", mine]
    assert line(server) == f"accepted {mine} {words[5]} at {there} {PORT}"
    assert one.counter("reach_opened") == other.counter("visit_accepted") == 1


def test_an_ipv6_socket_reaches_ipv4(two: tuple[Host, Host]) -> None:
    one, other = two
    server = serving(other, "::")
    seen, end = call(one, f"::ffff:{other.address}", size=10)
    assert end == "right"
    words = seen.split()
    assert words[:5] == ["connected", f"::ffff:{other.address}", str(PORT), "from", f"::ffff:{one.address}"]
    assert line(server) == f"accepted ::ffff:{one.address} {words[5]} at ::ffff:{other.address} {PORT}"


def test_whoever_holds_the_socket_sees_the_same(two: tuple[Host, Host]) -> None:
    one, other = two
    server = serving(other, other.address, IPPROTO_SDP)
    told = said(one, "heirs", other.address, PORT, IPPROTO_SDP)
    assert [each.split()[0] for each in told] == ["connected", "copied", "forked", "passed", "executed"]
    assert len({each.partition(" ")[2] for each in told}) == 1, told
    assert line(server).split()[1:3] == told[0].split()[3:5]


@pytest.mark.parametrize("version", [4, 6])
def test_c_programs_of_both_families(two: tuple[Host, Host], version: int) -> None:
    one, other = two
    source = Path(__file__).parent / "programs" / "begin.c"
    begin = toolchain.build("begin", [source], [*toolchain.WARNINGS, "-O2", "-D_GNU_SOURCE", f"-I{toolchain.HEADERS}"])
    mine, there = (one.address, other.address) if version == 4 else (one.address6, other.address6)
    server = other.popen([begin, "serve", there, str(PORT)], stdout=subprocess.PIPE, text=True)
    assert line(server) == "listens"
    told = one.run([begin, "call", there, str(PORT)], stdout=subprocess.PIPE, text=True, timeout=60).stdout
    assert told.splitlines() == [f"connected {there}", "right"]
    assert line(server) == f"peer {mine}"
    assert server.wait(PATIENCE_S) == 0
    assert one.counter("reach_opened") == 1


def test_nobody_listens(two: tuple[Host, Host]) -> None:
    one, other = two
    assert call(one, other.address) == [REFUSED]
    assert call(one, other.address) == [REFUSED]
    serving(other, other.address)
    assert call(one, other.address, size=10)[1] == "right"  # a refusal is not remembered by who insists


def test_a_listener_that_is_not_under_the_shim_is_let_in_by_a_rule_only(make_hosts: Make, tmp_path: Path) -> None:
    rules = tmp_path / "let-in.conf"
    rules.write_text("")
    one, other = make_hosts(2, policy=rules)
    with other.namespace.inside():
        listener = socket.create_server((other.address, PORT))
    with listener:
        assert call(one, other.address) == [REFUSED]
    assert other.counter("visit_refused") == 1


def test_no_provider_there(two: tuple[Host, Host]) -> None:
    one, other = two
    other.sidestep.kill_provider()
    assert call(one, other.address) == [TIMED_OUT]
    other.restart_provider()
    serving(other, other.address)
    assert call(one, other.address, size=10)[1] == "right"  # nor is silence


def test_the_link_is_down(two: tuple[Host, Host]) -> None:
    one, other = two
    other.link("down")
    assert call(one, other.address) == [TIMED_OUT]


def test_a_queue_that_is_full(two: tuple[Host, Host]) -> None:
    one, other = two
    server = program(other, "full", other.address, PORT)
    assert line(server) == "listens"
    assert call(one, other.address) == [REFUSED]
    go_on(server)
    assert line(server) == "emptied"
    assert call(one, other.address)[0].startswith("connected")
    assert line(server) == f"accepted {one.address}"


def test_a_connect_that_does_not_block_is_in_progress_until_there_is_a_verdict(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other, other.address)
    assert call(one, other.address, size=10)[1] == "right"  # so the provider there is known
    with asleep(other):
        client = program(one, "slow", other.address, PORT, IPPROTO_SDP)
        assert line(client) == "EINPROGRESS"
        assert line(client) == "EALREADY ENOTCONN []"
    go_on(client)
    assert line(client) == f"0 True False {other.address} {PORT} 0"  # the kernel says so once, then EISCONN


def test_a_connect_that_is_in_progress_can_be_refused(two: tuple[Host, Host]) -> None:
    one, other = two
    server = serving(other, other.address)
    assert call(one, other.address, size=10)[1] == "right"
    with asleep(other):
        client = program(one, "slow", other.address, PORT, IPPROTO_SDP)
        assert line(client) == "EINPROGRESS"
        assert line(client) == "EALREADY ENOTCONN []"
        server.kill()
        server.wait()
    go_on(client)
    assert line(client).startswith("ECONNREFUSED True True ENOTCONN")


def test_a_stranger_is_not_taken_for_the_program(two: tuple[Host, Host]) -> None:
    """Anybody here can connect to the place where a program's socket is awaited: that one socket is taken in."""
    one, other = two
    server = serving(other, other.address)
    assert call(one, other.address, size=10)[1] == "right"
    line(server)
    with asleep(other):
        client = program(one, "slow", other.address, PORT, IPPROTO_SDP)
        assert line(client) == "EINPROGRESS"
        line(client)
        shown = one.plain(["ss", "-Htln", "src", "127.83.68.80"], stdout=subprocess.PIPE, text=True).stdout
        place = int(shown.split()[3].rpartition(":")[2])
        with one.namespace.inside():
            strangers = [socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(3)]
        for stranger in strangers:
            assert stranger.connect_ex(("127.83.68.80", place)) == errno.EINPROGRESS
    go_on(client)
    assert line(client) == f"0 True False {other.address} {PORT} 0"
    assert line(server).startswith("accepted")
    for stranger in strangers:
        stranger.settimeout(PATIENCE_S)
        with pytest.raises((ConnectionResetError, ConnectionRefusedError)):  # of its connection, or of its SYN
            stranger.recv(1)
        stranger.close()


def test_a_timeout_of_the_socket_is_kept(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other, other.address)
    assert call(one, other.address, size=10)[1] == "right"
    with asleep(other):
        assert said(one, "block", other.address, PORT, IPPROTO_SDP, 0.4) == ["EINPROGRESS kept"]
    assert said(one, "block", other.address, PORT, IPPROTO_SDP, 5.5) == ["0 kept"]


def test_a_provider_that_is_killed_resets_and_nothing_else(two: tuple[Host, Host]) -> None:
    one, other = two
    server = serving(other, other.address)
    client = program(one, "slow", other.address, PORT, IPPROTO_SDP)
    assert line(client) == "EINPROGRESS"
    line(client)
    assert line(server).startswith("accepted")
    one.sidestep.kill_provider()
    go_on(client)
    assert line(client).startswith("ECONNRESET")


def test_on_the_same_host_it_is_tcp_and_then_shared_memory(two: tuple[Host, Host]) -> None:
    one, _ = two
    server = serving(one, one.address, IPPROTO_SDP)
    assert call(one, one.address, size=100_000)[1] == "right"
    assert line(server).startswith(f"accepted {one.address}")
    assert one.counter("reach_opened") == 0


def test_hosts_that_are_none_of_ours(two: tuple[Host, Host]) -> None:
    one, _ = two
    assert call(one, "203.0.113.9") == [os.strerror(101)]  # ENETUNREACH


def test_with_a_key(make_hosts: Make, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("k" * 40)
    one, other = make_hosts(2, remote=RemoteSettings.parse(NETWORK, str(key)))
    serving(other, other.address)
    assert call(one, other.address, size=10)[1:] == ["right"]


def test_a_gateway_knows_the_service_and_nothing_of_providers(two: tuple[Host, Host]) -> None:
    one, other = two
    other.sidestep.kill_provider()
    with other.namespace.inside():
        server = subprocess.Popen([*TALKERS, "serve", "127.0.0.1", "7001"], stdout=subprocess.PIPE, text=True)
        assert line(server) == "listens"
        gateway = subprocess.Popen(
            [sys.executable, "-m", "sidestep", "gateway", f"sdp {other.address}:{PORT} to tcp 127.0.0.1:7001"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        line(gateway)
    with server, gateway:
        try:
            assert call(one, other.address, size=300_000)[1:] == ["right"]
        finally:
            gateway.kill()
            server.kill()


# ---- first, by a rule ----


def test_a_rule_has_sdp_tried_first(make_first: Make) -> None:
    one, other = make_first(2)
    server = serving(other, "0.0.0.0")
    seen, end = call(one, other.address, 0, size=300_000)
    assert end == "right"
    assert line(server).split()[1:3] == [one.address, seen.split()[5]]
    assert one.counter("reach_opened") == other.counter("visit_accepted") == 1


def test_where_sdp_is_refused_tcp_comes_at_once_and_first_for_a_while(make_first: Make) -> None:
    one, other = make_first(2)
    with other.namespace.inside():
        plain = subprocess.Popen([*TALKERS, "serve", other.address, str(PORT)], stdout=subprocess.PIPE, text=True)
    with plain:
        assert line(plain) == "listens"
        assert call(one, other.address, 0, size=300_000)[1:] == ["right"]
        assert call(one, other.address, 0, size=300_000)[1:] == ["right"]
        plain.kill()
    assert one.counter("reach_opened") == 0
    assert one.counter("reach_refused") == 2
    assert other.counter("visit_refused") == 1  # the second one was not even tried


@pytest.mark.parametrize("silent", ["none", "asleep"])
def test_where_nobody_answers_tcp_comes(make_first: Make, silent: str) -> None:
    one, other = make_first(2)
    if silent == "none":
        other.sidestep.kill_provider()
        with other.namespace.inside():
            server = subprocess.Popen([*TALKERS, "serve", other.address, str(PORT)], stdout=subprocess.PIPE, text=True)
        with server:
            assert line(server) == "listens"
            assert call(one, other.address, 0, size=10)[1:] == ["right"]
            server.kill()
    else:
        serving(other, other.address)
        assert call(one, other.address, 0, size=10)[1:] == ["right"]
        assert one.counter("reach_opened") == 1
        with asleep(other):
            assert call(one, other.address, 0, size=10)[1:] == ["right"]
        assert one.counter("reach_opened") == 1


def test_a_socket_that_does_not_block_goes_to_tcp_soon(make_first: Make) -> None:
    one, other = make_first(2)
    serving(other, other.address)
    assert call(one, other.address, 0, size=10)[1:] == ["right"]
    with asleep(other):
        client = program(one, "slow", other.address, PORT, 0)
        assert line(client) == "EINPROGRESS"
        line(client)
        go_on(client)
        assert line(client) == f"0 True False {other.address} {PORT} EISCONN"
    assert one.counter("reach_opened") == 1


def test_a_host_that_is_late_once_is_asked_again(make_first: Make) -> None:
    one, other = make_first(2)
    serving(other, other.address)
    for late, opened in ((1, 2), (2, 3)):
        assert call(one, other.address, 0, size=10)[1:] == ["right"]
        with asleep(other):
            for _ in range(late):
                assert call(one, other.address, 0, size=10)[1:] == ["right"]
        assert call(one, other.address, 0, size=10)[1:] == ["right"]
        assert one.counter("reach_opened") == opened


def test_redis(make_first: Make) -> None:
    one, other = make_first(2)
    other.popen(["redis-server", "--port", "6379", "--save", "", "--appendonly", "no", "--protected-mode", "no"],
                stdout=subprocess.DEVNULL)  # fmt: skip
    listening(other, 6379)
    cli = ["redis-cli", "-h", other.address, "client", "list"]
    told = one.run(cli, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    assert f" addr={one.address}:" in told
    assert f" laddr={other.address}:6379 " in told
    bench = one.run(
        ["redis-benchmark", "-h", other.address, "-t", "set,get", "-n", "2000", "-c", "10", "-d", "1000", "--csv"],
        stdout=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    assert '"GET"' in bench.stdout
    assert one.counter("reach_opened") >= 11


def test_what_carries_it_is_told(make_first: Make) -> None:
    one, other = make_first(2)
    server = serving(other, other.address)
    client = talking(one, other.address)
    assert line(server).startswith("accepted")
    for host in (one, other):
        (found,) = host.sidestep.wait_for(lambda all_of: any(each.reason == "BY_SDP" for each in all_of))
        assert {found.local.split(":")[0], found.remote.split(":")[0]} == {one.address, other.address}
        assert found.link is not None
        assert (found.link["protocol"], found.link["state"]) == ("sdp", "established")
        assert found.link["peer"] == found.remote.split(":")[0]
        words = host.plain(
            [sys.executable, "-m", "sidestep", "explain", "--socket", str(host.sidestep.socket), f":{PORT}"],
            stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip
        assert f"is carried by sdp (over {found.link['device']} to {found.link['peer']})" in words
        assert "messages may go" in words
    ends_well(client)
