"""Ends in different network namespaces: paired when both prove that they are the two ends of one connection."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from common import PATIENCE_S
from shim_client import Channel, ShimClient
from tenants import ALICE, BOB, End, Namespace, System, answer, ip

from sidestep.native.layout import Refusal, Rpc

MakeChannel = Callable[..., Channel]
MakeNamespaces = Callable[..., tuple[Namespace, Namespace]]
Join = Callable[..., tuple[End, End]]


def of(system: System, end: End, uid: int = ALICE) -> ShimClient:
    """A client that holds this end."""
    return system.client(uid, end.netns)


@pytest.mark.parametrize(
    ("addresses", "host"), [((), "10.77.0.2"), (("fd77::1/64", "fd77::2/64"), "fd77::2")], ids=["IPv4", "IPv6"]
)
def test_two_namespaces_are_paired(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel, addresses: tuple[str, ...], host: str
) -> None:
    active, passive = join(namespaces(*addresses), host=host)
    assert active.netns != passive.netns
    offerer, claimer = of(system, active), of(system, passive)
    offerer.offer(active.tcp, channel(), token=1, way=active.way)
    claimer.wait_offer(passive.tcp)
    claimer.claim(passive.tcp, channel(None), token=1, way=passive.way)
    assert answer(claimer) is Rpc.ATTACH
    assert answer(offerer) is Rpc.CLAIMED


def test_one_foreign_namespace_is_enough(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    """Both ends in a namespace that the provider is not in, over its loopback; no datagrams are needed."""
    namespace, _ = namespaces()
    active, passive = join((namespace, namespace), host="127.0.0.1")
    offerer, claimer = of(system, active), of(system, passive)
    offerer.offer(active.tcp, channel(), token=1)
    claimer.wait_offer(passive.tcp)
    claimer.claim(passive.tcp, channel(None), token=1)
    assert (answer(claimer), answer(offerer)) == (Rpc.ATTACH, Rpc.CLAIMED)


def test_equal_addresses_are_told_apart(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    """Two pairs of namespaces with the same addresses and ports, at the same time: each finds its own."""
    worlds = [join(namespaces()) for _ in range(2)]
    offers = []
    for number, (active, _) in enumerate(worlds):
        offerer, made = of(system, active), channel()
        offerer.offer(active.tcp, made, token=number, way=active.way)
        offers.append((offerer, made))
    for (_, passive), (offerer, made) in reversed(list(zip(worlds, offers, strict=True))):
        claimer = of(system, passive)
        claimer.wait_offer(passive.tcp)
        claimer.claim(passive.tcp, channel(None), token=7, way=passive.way)
        with claimer.receive().descriptors as passed:
            assert made.segment is not None
            assert os.path.sameopenfile(passed.numbers[0], made.segment)
        assert answer(offerer) is Rpc.CLAIMED
    assert system.counter("claim_matched") == 2


def test_an_equal_four_tuple_elsewhere_is_no_proof(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    """A third namespace shows the same addresses and ports, and its own true connection: the offer is not its."""
    active, passive = join(namespaces())
    _, thief = join(namespaces())
    offerer, claimer = of(system, active), of(system, thief)
    offerer.offer(active.tcp, channel(), token=1, way=active.way)
    claimer.wait_offer(thief.tcp)
    claimer.claim(thief.tcp, channel(None), token=1, way=thief.way)
    assert answer(claimer) is Refusal.NOT_PROVEN
    assert system.counter("claim_refused{NOT_PROVEN}") == 1
    rightful = of(system, passive)  # the offer is still there for whom it was made
    rightful.claim(passive.tcp, channel(None), token=2, way=passive.way)
    assert (answer(rightful), answer(offerer)) == (Rpc.ATTACH, Rpc.CLAIMED)


def test_a_forged_offer_does_not_catch_a_claim(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    active, passive = join(namespaces())
    thief, _ = join(namespaces())
    forger, offerer, claimer = of(system, thief), of(system, active), of(system, passive)
    forger.offer(thief.tcp, channel(), token=1, way=thief.way)
    offerer.offer(active.tcp, channel(), token=1, way=active.way)
    claimer.wait_offer(passive.tcp)
    claimer.claim(passive.tcp, channel(None), token=1, way=passive.way)
    assert (answer(claimer), answer(offerer)) == (Rpc.ATTACH, Rpc.CLAIMED)
    forger.sock.settimeout(0)
    with pytest.raises(BlockingIOError):
        forger.receive()


def test_counts_that_differ_are_no_proof(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    """The other end has seen less than was acknowledged: it is another connection, whatever the network says."""
    active, _ = join(namespaces())
    _, thief = join(namespaces())
    active.tcp.sendall(b"x" * 1000)
    offerer, claimer = of(system, active), of(system, thief)
    wait_acknowledged(active.tcp, 1000)
    offerer.offer(active.tcp, channel(), token=1, way=active.way)
    claimer.wait_offer(thief.tcp)
    claimer.claim(thief.tcp, channel(None), token=1, way=thief.way)
    assert answer(claimer) is Refusal.NOT_PROVEN


def wait_acknowledged(tcp: socket.socket, size: int) -> None:
    """Returns once the other end's kernel has `size` bytes."""
    deadline = time.monotonic() + PATIENCE_S
    while int.from_bytes(tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)[120:128], "little") < size:
        assert time.monotonic() < deadline


def test_without_a_way_there_is_no_proof(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    active, passive = join(namespaces())
    offerer, claimer = of(system, active), of(system, passive)
    offerer.offer(active.tcp, channel(), token=1)
    claimer.wait_offer(passive.tcp)
    claimer.claim(passive.tcp, channel(None), token=1, way=passive.way)
    assert answer(claimer) is Refusal.NOT_PROVEN


def test_root_started_servers_are_not_paired_across_namespaces(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    active, passive = join(namespaces())
    offerer, claimer = of(system, active, BOB), of(system, passive, 0)
    offerer.offer(active.tcp, channel(), token=1, way=active.way)
    claimer.wait_offer(passive.tcp)
    claimer.claim(passive.tcp, channel(None), token=1, way=passive.way)
    assert (answer(claimer), answer(offerer)) == (Refusal.FOREIGN_USER, Refusal.FOREIGN_USER)


def offered_over_a_cut_path(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> tuple[ShimClient, End]:
    """Who may claim the offer, and its end of the connection: nothing passes between the two any more."""
    pair = namespaces()
    active, passive = join(pair)
    ip("-n", pair[0].name, "link", "set", "eth0", "down")
    offerer, claimer = of(system, active), of(system, passive)
    offerer.offer(active.tcp, channel(), token=1, way=active.way)
    claimer.wait_offer(passive.tcp)
    return claimer, passive


def test_a_path_that_is_cut_is_no_proof(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    claimer, passive = offered_over_a_cut_path(system, namespaces, join, channel)
    claimer.claim(passive.tcp, channel(None), token=1, way=passive.way)
    assert answer(claimer) is Refusal.NOT_PROVEN


def test_a_claimer_that_leaves_during_the_proof_leaves_nothing(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    claimer, passive = offered_over_a_cut_path(system, namespaces, join, channel)
    before = descriptors(system)
    claimer.claim(passive.tcp, channel(None), token=1, way=passive.way)
    claimer.withdraw(1)
    claimer.claim(passive.tcp, channel(None), token=2, way=passive.way)
    claimer.close()
    deadline = time.monotonic() + PATIENCE_S
    while descriptors(system) > before - 2:  # its connection and its arena
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert system.counter("internal_error{message}") == system.counter("internal_error{callback}") == 0


def descriptors(system: System) -> int:
    """Open in the provider."""
    return sum(1 for _ in Path(f"/proc/{system.pid}/fd").iterdir())
