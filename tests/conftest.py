"""Fixtures that all tests share, beside that of `sidestep.pytest_plugin`: connected sockets, clients, channels."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import coverage_build
import coverage_items
import durations
import hypothesis
import pytest
import selection
import stuck
from shim_client import Channel, ShimClient

from sidestep.testing import Sidestep

# An example that takes long says something of the machine, not of the code: time limits are those of whole tests.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# A direction of a connection that is moved as its table does not have it is a fault of the shim's: see state_move().
os.environ["SIDESTEP_CHECKED"] = "1"

pytest_addoption = selection.pytest_addoption

_MARK_BY_FOLDER = {"apps": pytest.mark.app, "chaos": pytest.mark.chaos}
TcpPair = tuple[socket.socket, socket.socket]


def pytest_configure(config: pytest.Config) -> None:
    """Each run takes a set of tests, and keeps what they cost; one that is asked to, what they touch."""
    config.pluginmanager.register(durations.Durations(), "durations")
    config.pluginmanager.register(selection.Selecting(config), "selection")
    if watch := stuck.plugin(config, durations.KEPT.with_name("running")):
        config.pluginmanager.register(watch, "stuck")
    if maps := os.environ.get(coverage_build.DIRECTORY):
        config.pluginmanager.register(coverage_items.Recorder(Path(maps)), "coverage_items")
    _reset_ignored_signals()


def _reset_ignored_signals() -> None:
    """Has the programs of tests begin with the default, and this process go on as it was started.

    A shell's background job ignores both signals, and so would all that it executes: sidestep keeps what it inherits.
    """
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # execve() resets a handler, and keeps SIG_IGN


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in tests/apps and tests/chaos carry the marker of that name."""
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        if mark := _MARK_BY_FOLDER.get(folder):
            item.add_marker(mark)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """What a test enters here is closed after it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def tcp_pair(closing: ExitStack) -> Callable[..., TcpPair]:
    """Makes a TCP connection over loopback: the end that connected, and the end that accepted."""

    def make(host: str = "127.0.0.1", family: socket.AddressFamily = socket.AF_INET) -> TcpPair:
        with socket.create_server((host, 0), family=family) as server:
            active = closing.enter_context(socket.create_connection((host, server.getsockname()[1])))
            passive = closing.enter_context(server.accept()[0])
        return active, passive

    return make


@pytest.fixture
def shim_client(closing: ExitStack, sidestep: Sidestep) -> Callable[[], ShimClient]:
    """Makes clients of the private provider that have said HELLO."""

    def make() -> ShimClient:
        client = closing.enter_context(ShimClient(sidestep.socket))
        client.hello()
        return client

    return make


@pytest.fixture
def channel(closing: ExitStack) -> Callable[..., Channel]:
    """Makes channels that are closed after the test."""

    def make(ring_size: tuple[int, int] | None = (4096, 4096)) -> Channel:
        made = Channel.make(ring_size)
        closing.callback(made.close)
        return made

    return make
