"""One guest for all tests of a run; without it they are skipped with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from guest_verbs import Bench, RxeBench, start_agents
from lab_guest import BUILD_TIMEOUT_S, START_TIMEOUT_S, Background, Lab, Unusable

from sidestep.rdma.iwarp.device import IwarpDevice, IwarpSettings
from sidestep.rdma.roce.udp_link import UdpRoceDevice

pytest.register_assert_rewrite("moves")

_FIRST_TIMEOUT_S = BUILD_TIMEOUT_S + START_TIMEOUT_S + 300  # the first test waits for the guest
ROUGH = {
    "perfect": "",
    "loss": "loss 1%",
    "disorder": "delay 2ms reorder 95% 50%",
    "both": "loss 1% delay 1ms reorder 98% 25% duplicate 1%",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever needs the guest may have to wait for it."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.lab)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(_FIRST_TIMEOUT_S))


@pytest.fixture(scope="session")
def booted() -> Iterator[Lab | Unusable]:
    """The guest, or why there is none: asked once, and told by every test."""
    try:
        lab = Lab.started()
    except Unusable as reason:
        yield reason
        return
    yield lab
    lab.stop()


@pytest.fixture
def lab(booted: Lab | Unusable) -> Lab:
    """The guest."""
    if isinstance(booted, Unusable):
        pytest.skip(str(booted))
    return booted


@pytest.fixture(scope="session")
def second(booted: Lab | Unusable) -> Lab | Unusable:
    """Another guest in the same network."""
    if isinstance(booted, Unusable):
        return booted
    try:
        return booted.beside()
    except Unusable as reason:
        return reason


@pytest.fixture(scope="session")
def agents(booted: Lab | Unusable) -> Background | None:
    """The program in the guest that makes consumers of verbs."""
    return None if isinstance(booted, Unusable) else start_agents(booted, booted.siw_address)


@pytest.fixture(scope="session")
def rxe_agents(booted: Lab | Unusable) -> Background | None:
    """The same on rxe."""
    return None if isinstance(booted, Unusable) else start_agents(booted, booted.rxe_address)


@pytest.fixture
def settings() -> IwarpSettings:
    """Of our device; a test may have others."""
    return IwarpSettings()


@pytest.fixture
def bench(lab: Lab, agents: Background | None, settings: IwarpSettings) -> Iterator[Bench]:
    """Our device in the lab's network, and so is this thread."""
    with lab.network():
        bench = Bench(lab, IwarpDevice(lab.host_address, settings=settings), lab.siw_address)
        try:
            yield bench
        finally:
            bench.close()


@pytest.fixture
def rxe_bench(lab: Lab, rxe_agents: Background | None) -> Iterator[RxeBench]:
    """Our HCA in the lab's network, and so is this thread."""
    with lab.network():
        bench = RxeBench(lab, UdpRoceDevice(lab.rxe_host_address), lab.rxe_address)
        try:
            yield bench
        finally:
            bench.close()


@pytest.fixture(params=ROUGH)
def link(lab: Lab, request: pytest.FixtureRequest) -> Iterator[str]:
    """What `tc netem` of the guest does to packets, both ways: those that come go through another interface first."""
    how = ROUGH[request.param]
    if how:
        lab.run(
            "modprobe -a sch_netem ifb act_mirred cls_matchall; ip link add ifb0 type ifb; set -e; ip link set ifb0 up;"
            "tc qdisc add dev eth1 ingress;"
            "tc filter add dev eth1 parent ffff: matchall action mirred egress redirect dev ifb0;"
            f"tc qdisc add dev eth1 root netem {how}; tc qdisc add dev ifb0 root netem {how}"
        )
    yield how
    if how:
        lab.run("tc qdisc del dev eth1 root; tc qdisc del dev eth1 ingress; tc qdisc del dev ifb0 root")
