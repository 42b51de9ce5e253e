"""Fixtures of the tests that need several users and network namespaces, and so root."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import needed
import pytest
from common import PATIENCE_S
from tenants import End, Namespace, System, ip, udp_beside


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is here needs several users."""
    if os.geteuid() == 0:
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="it takes root to be several users and to make namespaces"))


@pytest.fixture(scope="session", autouse=True)
def _open_tree() -> None:
    """Other users run programs of this tree."""
    here = Path(__file__).resolve()
    for place in here.parents:
        if not place.stat().st_mode & stat.S_IXOTH:
            pytest.fail(
                f"{place} lets no other user in\nhint: chmod o+x {place}, or clone to another place", pytrace=False
            )


@pytest.fixture
def system(closing: ExitStack) -> System:
    """A system-wide provider whose offers do not expire while a test is held up."""
    return System(closing)


@pytest.fixture
def namespaces(closing: ExitStack) -> Callable[..., tuple[Namespace, Namespace]]:
    """Makes two namespaces joined by a cable, with an address each."""
    needed.program("ip")

    def make(one: str = "10.77.0.1/24", other: str = "10.77.0.2/24") -> tuple[Namespace, Namespace]:
        mark = secrets.token_hex(4)
        made = Namespace(f"sst-{mark}a"), Namespace(f"sst-{mark}b")
        for namespace in made:
            ip("netns", "add", namespace.name)
            closing.callback(ip, "netns", "del", namespace.name)
            ip("-n", namespace.name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", made[0].name, "type", "veth", "peer", "name", "eth0", "netns", made[1].name)
        for namespace, address in zip(made, (one, other), strict=True):
            words = ["-6"] if ":" in address else []
            ip(*words, "-n", namespace.name, "addr", "add", address, "dev", "eth0", *(["nodad"] if words else []))
            ip("-n", namespace.name, "link", "set", "eth0", "up")
        return made

    return make


@pytest.fixture
def join(closing: ExitStack) -> Callable[..., tuple[End, End]]:
    """Connects two namespaces by TCP, from port to port; the end that connected comes first."""

    def make(
        pair: tuple[Namespace, Namespace], port: int = 7000, source: int = 7001, host: str = "10.77.0.2"
    ) -> tuple[End, End]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def connected() -> socket.socket:
            made = socket.socket(family)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("", source))
            made.settimeout(PATIENCE_S)
            made.connect((host, port))
            return made

        with pair[1].run(lambda: socket.create_server((host, port), family=family)) as server:
            active = closing.enter_context(pair[0].run(connected))
            passive = closing.enter_context(server.accept()[0])
        return tuple(  # type: ignore[return-value]
            End(tcp, closing.enter_context(namespace.run(lambda tcp=tcp: udp_beside(tcp))), namespace.cookie)  # type: ignore[misc]
            for tcp, namespace in zip((active, passive), pair, strict=True)
        )

    return make
