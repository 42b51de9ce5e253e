"""One guest for all tests of a run; without it they are skipped with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from guest_verbs import Bench, RxeBench, start_agents
from lab_guest import BUILD_TIMEOUT_S, START_TIMEOUT_S, Background, Lab, Unusable

from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.rdma.iwarp.settings import IwarpSettings
from sidestep.rdma.roce.udp_link import UdpRoceDevice

_FIRST_TIMEOUT_S = BUILD_TIMEOUT_S + START_TIMEOUT_S + 300  # the first test waits for the guest


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
