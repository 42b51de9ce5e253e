"""Two hosts, as network namespaces with a cable between them, and a provider on each. Needs root, else skips."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from namespaces import thread_in_netns
from sidestep.config import RemoteSettings
from sidestep.observe.demotion import Outcome
from sidestep.testing import WAIT_TIMEOUT_S, Connection, Sidestep

NETWORKS: Final = ("10.98.7.0/24", "fd98:7::/64")
_IP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Host:
    """One of them."""

    namespace: Path
    ipv4: str
    ipv6: str

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread and the programs that it starts are on that host."""
        with thread_in_netns(self.namespace):
            yield

    def address(self, family: str) -> str:
        """Its address for sockets of family 4, 6, or m (IPv4 by sockets of IPv6)."""
        return self.ipv6 if family == "6" else self.ipv4


class TwoHosts:
    """Two hosts that nobody else sees; they go with the stack."""

    def __init__(self, stack: ExitStack) -> None:
        if os.geteuid() != 0:
            pytest.skip("two network namespaces need root")
        if shutil.which("ip") is None:
            pytest.skip("iproute2 is not installed; run tests/setup")
        try:
            first, second = _namespace(stack), _namespace(stack)
        except PermissionError as error:
            pytest.skip(f"this root may not make a network namespace: {error}")
        self.first = Host(first, "10.98.7.1", "fd98:7::1")
        self.second = Host(second, "10.98.7.2", "fd98:7::2")
        with self.first.entered():
            _ip(f"link add eth0 type veth peer name eth0 netns {second}")
        for host in (self.first, self.second):
            with host.entered():
                for command in (
                    "link set lo up", f"addr add {host.ipv4}/24 dev eth0", f"addr add {host.ipv6}/64 dev eth0 nodad",
                    "link set eth0 up",
                ):  # fmt: skip
                    _ip(command)

    def arguments(self, family: str, *, providers: Providers | None) -> list[str]:
        """How a scene on the first hears of the second, and of the provider there."""
        return [
            f"--here={self.first.address(family)}",
            f"--there={self.second.address(family)}",
            f"--apart={self.second.namespace}",
            *([f"--apart-socket={providers.second.socket}"] if providers else []),
        ]


class Providers:
    """One on each host, which carry connections between them; what is asked of both is asked here."""

    def __init__(self, stack: ExitStack, hosts: TwoHosts, promote_after: str) -> None:
        remote = RemoteSettings.parse(",".join(NETWORKS))
        both = []
        for host in (hosts.first, hosts.second):
            with host.entered():
                both.append(stack.enter_context(Sidestep(promote_after=promote_after, remote=remote)))
        self.hosts = hosts
        self.first, self.second = both

    def env(self) -> dict[str, str]:
        """Of a program on the first host."""
        return self.first.env()

    def connections(self) -> list[Connection]:
        """Those of both hosts."""
        return self.first.connections() + self.second.connections()

    def demote(
        self, wanted: Callable[[Connection], bool] = lambda _: True, timeout_s: float = WAIT_TIMEOUT_S
    ) -> list[Outcome]:
        """Sends connections of both hosts back to TCP."""
        return self.first.demote(wanted, timeout_s) + self.second.demote(wanted, timeout_s)

    def promote(
        self, wanted: Callable[[Connection], bool] = lambda _: True, timeout_s: float = WAIT_TIMEOUT_S
    ) -> list[Outcome]:
        """Takes `demote` back."""
        return self.first.promote(wanted, timeout_s) + self.second.promote(wanted, timeout_s)

    def counters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those of both providers."""
        return self.first.status()["counters"], self.second.status()["counters"]


def _namespace(stack: ExitStack) -> Path:
    """A new one, which lives as long as the stack."""
    with thread_in_netns(None):
        held = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, held)
    return Path(f"/proc/{os.getpid()}/fd/{held}")


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, timeout=_IP_S, capture_output=True)
