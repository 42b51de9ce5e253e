"""Promotion by gain: what TCP does faster than the way to the other host stays there, or goes back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from hosts import NETWORK, Host, Make, command
from talking import PORT, line, promoted

from sidestep import gain
from sidestep.demo import profile
from sidestep.errors import Misuse
from sidestep.gain import Profile, Traffic
from sidestep.native.layout import Reason
from sidestep.remote.transports import Iwarp, Roce, Verbs
from sidestep.settings import RemoteSettings
from sidestep.switch.protocol import OffloadTransport

TURNING: Final = [sys.executable, str(Path(__file__).with_name("turning.py"))]
PROFILE: Final = "7:300:80"


# ---- figures ----


SMALL: Final = Traffic(1000, 64_000, 0)  # a stream of small messages
TALK: Final = Traffic(1000, 64_000, 500)  # a conversation
BATCHES: Final = Traffic(1000, 64_000, 10)  # ... whose messages go in batches
PAGES: Final = Traffic(1000, 1000 << 12, 0)  # a stream of pieces of 4 KiB
LARGE: Final = Traffic(1000, 1000 << 16, 0)  # ... of 64 KiB
EACH: Final = {SMALL, TALK, BATCHES, PAGES, LARGE}


@pytest.mark.parametrize(
    ("transport", "engine", "gains"),
    [
        (Iwarp, True, {SMALL, BATCHES, PAGES}),
        (Iwarp, False, {SMALL}),
        (Roce, True, {SMALL, BATCHES, PAGES}),
        (Roce, False, set()),
        (Verbs, True, EACH),
        (Verbs, False, EACH),
    ],
)
def test_what_gains(transport: type[OffloadTransport], engine: bool, gains: set[Traffic]) -> None:
    settings = RemoteSettings.parse(NETWORK, engine=engine, promote=gain.BY_GAIN)
    profile = settings.profile(transport.profiles)
    found = {each for each in EACH if profile is None or profile.gain_us(each) > 0}
    assert found == gains


@pytest.mark.parametrize("transport", [Iwarp, Roce, Verbs])
def test_what_a_user_says_counts_for_all_transports(transport: type[OffloadTransport]) -> None:
    assert RemoteSettings.parse(NETWORK, promote="1:2:3").profile(transport.profiles) == Profile(1, 2, 3)
    assert RemoteSettings.parse(NETWORK, promote=gain.ALWAYS).profile(transport.profiles) is None


def test_a_profile_as_it_is_written() -> None:
    assert Profile.parse(PROFILE) == gain.IWARP.engine
    assert str(gain.IWARP.engine) == PROFILE
    assert Profile.parse(PROFILE).nanoseconds == (7000, 300_000, 80_000)


@pytest.mark.parametrize("text", ["", "often", "1:2", "1:2:3:4", "1:-2:3", "1:2:nan", "1e9:1:1"])
def test_what_is_no_profile(text: str) -> None:
    with pytest.raises(Misuse, match=r"^'"):
        RemoteSettings.parse(NETWORK, promote=text)


@pytest.mark.parametrize("promote", [gain.ALWAYS, gain.BY_GAIN, "1:2.5:3"])
@pytest.mark.parametrize("engine", [True, False])
def test_a_provider_is_told_the_same(promote: str, engine: bool) -> None:
    settings = RemoteSettings.parse(NETWORK, engine=engine, promote=promote)
    told = dict(argument.removeprefix("--").split("=", 1) for argument in settings.arguments())
    again = RemoteSettings.parse(told["remote"], engine=told.get("engine") != "off", promote=told["remote-promote"])
    assert again == settings


# ---- two hosts ----


@pytest.fixture
def two(make_hosts: Make) -> tuple[Host, Host]:
    one, other = make_hosts(2, remote=RemoteSettings.parse(NETWORK, promote=PROFILE))
    return one, other


@contextmanager
def turning(one: Host, other: Host) -> Iterator[subprocess.Popen[str]]:
    """A client that does as it is told, with a server; at the end all answers were right."""
    server = other.popen([*TURNING, "serve", other.address, str(PORT)], stdout=subprocess.PIPE, text=True)
    assert line(server) == "listens"
    client = one.popen([*TURNING, "turn", other.address, str(PORT)],
                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)  # fmt: skip
    try:
        yield client
        assert client.communicate(timeout=60) == ("right\n", None)
        assert line(server) == "over"
    finally:
        for program in (client, server):
            program.kill()
            program.communicate()


def do(client: subprocess.Popen[str], what: str) -> None:
    assert client.stdin is not None
    client.stdin.write(what + "\n")


def stays(one: Host) -> None:
    """The client's end is on TCP, as it would lose."""
    one.sidestep.wait_for(lambda found: [each.reason for each in found] == [Reason.LATENCY.name])


@pytest.mark.slow
def test_a_conversation_stays_on_tcp(two: tuple[Host, Host]) -> None:
    one, other = two
    with turning(one, other) as client:
        do(client, "talk")
        stays(one)
        (before,) = one.sidestep.connections()
        one.sidestep.wait_for(lambda found: found[0].tx.tcp_msgs > before.tx.tcp_msgs + 2000)
        (found,) = json.loads(command(one, "explain", f"{other.address}:{PORT}", "--json"))["explanations"]
        assert (found["verdict"], found["reason"]) == ("tcp", "LATENCY")
        assert "TCP is faster for what it does now" in found["cause"]
        assert "messages of" in found["cause"]
        assert "--remote-promote always" in found["hint"]
        assert not one.joined("connect")
        assert one.counter("offer_refused{LATENCY}") < 5  # the program looks for itself


@pytest.mark.slow
def test_a_stream_goes_and_a_conversation_comes_back(two: tuple[Host, Host]) -> None:
    one, other = two
    with turning(one, other) as client:
        for promotions in (1, 2):
            do(client, "stream")
            promoted(one, other)
            assert [each.promotions for each in one.sidestep.connections()] == [promotions]
            do(client, "talk")
            stays(one)
    assert one.joined("connect") == 1


@pytest.mark.slow
def test_a_profile_is_measured_and_can_be_given() -> None:
    told: list[str] = []
    found = profile.measure(rounds=1, seconds=1, tell=told.append)
    assert told == ["round 1 of 1"]
    assert Profile.parse(str(found)) == found
    assert found.message_us > 0  # a ring takes 64 bytes faster than a system call does
