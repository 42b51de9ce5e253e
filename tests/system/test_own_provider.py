"""A user's own provider and several network namespaces: each is served within itself, and another host to the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from shim_client import Channel, ShimClient
from tenants import End, Namespace, answer

from sidestep.native.layout import Refusal, Rpc, Welcome
from sidestep.settings import RemoteSettings
from sidestep.testing import Sidestep

MakeChannel = Callable[..., Channel]
MakeNamespaces = Callable[..., tuple[Namespace, Namespace]]
Join = Callable[..., tuple[End, End]]
EXCHANGE = Path(__file__).parent / "programs" / "exchange.py"


@pytest.fixture
def inside(sidestep: Sidestep, closing: ExitStack) -> Callable[[Namespace], ShimClient]:
    """Makes clients of the provider that run in a namespace, and have said HELLO."""

    def make(namespace: Namespace) -> ShimClient:
        client = closing.enter_context(namespace.run(lambda: ShimClient(sidestep.socket)))
        client.hello()
        return client

    return make


def test_another_namespace_is_served_within_itself(
    inside: Callable[[Namespace], ShimClient], namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    """Two of them, with equal addresses and ports at the same time: each finds its own."""
    worlds = namespaces()
    pairs = [join((each, each), host="127.0.0.1") for each in worlds]
    offerers = [inside(each) for each in worlds]
    for offerer, (active, _) in zip(offerers, pairs, strict=True):
        assert offerer.wants == Welcome.POSSESSION
        offerer.offer(active.tcp, channel(), token=1)
    for world, offerer, (_, passive) in zip(worlds, offerers, pairs, strict=True):
        claimer = inside(world)
        claimer.wait_offer(passive.tcp)
        claimer.claim(passive.tcp, channel(None), token=1)
        assert (answer(claimer), answer(offerer)) == (Rpc.ATTACH, Rpc.CLAIMED)


def test_two_namespaces_are_two_hosts(
    inside: Callable[[Namespace], ShimClient], namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    """They reach each other by a cable, and nothing proves that the two ends are those of one connection."""
    worlds = namespaces()
    active, passive = join(worlds)
    offerer, claimer = (inside(each) for each in worlds)
    offerer.offer(active.tcp, channel(), token=1)
    claimer.wait_offer(passive.tcp)
    claimer.claim(passive.tcp, channel(None), token=1)
    assert answer(claimer) is Refusal.NOT_PROVEN


def test_an_equal_connection_of_the_providers_own_namespace_is_not_met(
    sidestep: Sidestep,
    inside: Callable[[Namespace], ShimClient],
    shim_client: Callable[[], ShimClient],
    namespaces: MakeNamespaces,
    join: Join,
    tcp_pair: Callable[..., tuple[Any, Any]],
    channel: MakeChannel,
) -> None:
    """One end is looked up here, the other brings a duplicate from there; the addresses and ports mirror each other."""
    active, passive = tcp_pair()
    (port, source) = (passive.getsockname()[1], active.getsockname()[1])
    world, _ = namespaces()
    _, other = join((world, world), port=port, source=source, host="127.0.0.1")
    offerer, claimer, rightful = shim_client(), inside(world), shim_client()
    assert offerer.wants == Welcome(0)
    offerer.offer(active, channel(), token=1)
    claimer.wait_offer(other.tcp)
    claimer.claim(other.tcp, channel(None), token=1)
    assert answer(claimer) is Refusal.NOT_PROVEN
    rightful.claim(passive, channel(None), token=1)
    assert (answer(rightful), answer(offerer)) == (Rpc.ATTACH, Rpc.CLAIMED)
    assert sidestep.status()["counters"]["claim_matched"] == 1


def test_other_hosts_are_the_providers_namespaces_own(closing: ExitStack, namespaces: MakeNamespaces) -> None:
    """One in another namespace is not told that connections with them can be carried: its network is another."""
    private = closing.enter_context(Sidestep(remote=RemoteSettings.parse("192.0.2.0/24")))
    near = closing.enter_context(ShimClient(private.socket))
    far = closing.enter_context(namespaces()[0].run(lambda: ShimClient(private.socket)))
    assert Welcome(near.hello().flags) == Welcome.REMOTE | Welcome.SERVES | Welcome.NEW_DOORBELLS | Welcome.JOINS
    assert Welcome(far.hello().flags) == Welcome.POSSESSION | Welcome.SERVES | Welcome.NEW_DOORBELLS | Welcome.JOINS


def test_sidestep_run_in_another_namespace_promotes(
    sidestep: Sidestep, namespaces: MakeNamespaces, closing: ExitStack
) -> None:
    """While a provider runs in the first: nothing is set up. A connection over the cable stays on TCP, and is whole."""
    here, there = namespaces()
    run = [sys.executable, "-m", "sidestep", "run", f"--socket={sidestep.socket}", "--promote-after=0", "--"]

    def start(namespace: Namespace, *words: str) -> subprocess.Popen[str]:
        argv = namespace.command([*run, sys.executable, str(EXCHANGE), *words])
        started = closing.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        closing.callback(started.kill)
        return started

    server = start(there, "serve", "0.0.0.0")
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    for namespace, host, expected in ((there, "127.0.0.1", {"promoted"}), (here, "10.77.0.2", {"native", "pinned"})):
        client = start(namespace, "talk", host, port)
        assert client.stdout is not None
        told = json.loads(client.stdout.readline())
        assert told["equal"]
        states = {one.state for one in sidestep.connections() if one.pid == client.pid}
        assert states, [str(one) for one in sidestep.connections()]
        assert states <= expected
        client.kill()
        client.wait()
