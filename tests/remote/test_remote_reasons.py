"""Why a connection to another host stays on TCP, and what would change it: in `policy trace` and `explain`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from common import PATIENCE_S
from hosts import NETWORK, Host, Make, command
from talking import PORT, TALKERS, line

from sidestep.remote.promotion import why_not, why_not_in
from sidestep.sdp.portmapper import UDP_PORT
from sidestep.settings import RemoteSettings

pytestmark = pytest.mark.slow

OF_PROVIDER_ITSELF = f"udp dport {UDP_PORT} @th,96,32 0"  # both ports of the request: PROVIDER_ITSELF


@contextmanager
def refused(one: Host, other: Host, *, plain_server: bool = False) -> Iterator[None]:
    """A connection that the other end's provider does not take."""
    argv = [*TALKERS, "serve", other.address, str(PORT)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    if plain_server:
        with other.namespace.inside():
            server = subprocess.Popen(argv, **pipes)
    else:
        server = other.popen(argv, **pipes)
    assert line(server) == "listens"
    client = one.popen([*TALKERS, "tell", other.address, str(PORT), "10", "10"], stdin=subprocess.PIPE, **pipes)
    try:
        assert line(client) == "talks"
        yield
        client.communicate("go\n", timeout=60)
    finally:
        for program in (client, server):
            program.kill()
            program.communicate()


def expect(one: Host, other: Host, cause: str, hint: str) -> None:
    """Both commands say so."""
    one.sidestep.wait_for(lambda _: cause in command(one, "policy", "trace", "--no-follow"), timeout_s=PATIENCE_S)
    assert hint in command(one, "policy", "trace", "--no-follow")
    (found,) = json.loads(command(one, "explain", f"{other.address}:{PORT}", "--json"))["explanations"]
    assert (found["verdict"], found["reason"]) == ("tcp", "NO_PROTOCOL")
    assert cause in found["cause"]
    assert hint in found["hint"]


def test_no_provider_there(make_hosts: Make) -> None:
    one, other = make_hosts(2)
    other.sidestep.kill_provider()
    with refused(one, other, plain_server=True):
        expect(one, other, f"no provider answers at {other.address}", "start one there with 'sidestep provider start")


def test_a_provider_that_is_not_heard_in_time_is_not_taken_for_one_without_the_device(make_hosts: Make) -> None:
    """It would carry the connection by another one for good; on TCP it is asked again."""
    one, other = make_hosts(2, remote=RemoteSettings.parse(NETWORK, transports="roce,iwarp"))
    with other.losing(OF_PROVIDER_ITSELF), refused(one, other):
        expect(one, other, f"no provider answers at {other.address}", "start one there with 'sidestep provider start")
    assert not one.counter("relay_opened")


def test_another_key(make_hosts: Make, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("1" * 40)
    key.chmod(0o600)
    one, other = make_hosts(2, remote=RemoteSettings.parse(NETWORK, str(key)))
    key.write_text("2" * 40)
    other.restart_provider()
    with refused(one, other):
        expect(one, other, "its key is another one", "the same file with --remote-key")


def test_the_other_end_is_not_under_sidestep(two: tuple[Host, Host]) -> None:
    one, other = two
    with refused(one, other, plain_server=True):
        expect(one, other, "nobody under sidestep has claimed it there", "start that end with 'sidestep run'")


def test_what_another_provider_says_cannot_move_the_cursor() -> None:
    assert why_not_in(why_not("it is \x1b[2J full: wait" + "x" * 500)).startswith("it is ?[2J full: wait")
    assert len(why_not("x" * 500)) < 512
    assert why_not_in(b"sidestep") == why_not_in(b"") == ""
    assert "\ufffd" in why_not_in(why_not("") + b"\xff")
