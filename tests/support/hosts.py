"""Hosts for tests: network namespaces, each with an interface on one bridge and a provider of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Self

import needed
import pytest

from sidestep.errors import Unavailable
from sidestep.observe.namespaces import Namespace, NetworkBridge, ip, thread_in_netns
from sidestep.settings import RemoteSettings
from sidestep.testing import Sidestep

NETWORK: Final = "198.18.7.0/24"
NETWORK6: Final = "2001:db8:7::/64"
ENGINE: Final = os.environ.get("SIDESTEP_TEST_ENGINE", "on") == "on"  # off: all of these tests by Python alone
TRANSPORTS: Final = os.environ.get("SIDESTEP_TEST_TRANSPORTS", "")  # roce: all of these tests over the software HCA
START_S: Final = 60.0
SEARCH_PATH: Final = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class Host:
    """One host; its provider carries connections with the others."""

    def __init__(self, number: int, bridge: NetworkBridge, *, workers_work: bool = True, **options: Any) -> None:
        self.number = number
        self.address = f"198.18.7.{number}"
        self.address6 = f"2001:db8:7::{number}"
        self.namespace = Namespace()
        self._bridge = bridge
        bridge.join(number, self.namespace, f"{self.address}/24", f"{self.address6}/64")
        options.setdefault(
            "remote", RemoteSettings.parse(f"{NETWORK},{NETWORK6}", engine=ENGINE, transports=TRANSPORTS)
        )
        self._workers_awaited: int = options.get("workers", 0) if workers_work else 0
        self.sidestep = Sidestep(**options)

    def __enter__(self) -> Self:
        with self.namespace.inside():
            self.sidestep.__enter__()
        try:
            self.workers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.sidestep.__exit__(None, None, None)
        self.namespace.close()

    # ---- programs ----

    def popen(self, argv: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
        """Starts a program under the shim, here."""
        with self.namespace.inside():
            return self.sidestep.popen(argv, **options)

    def run(self, argv: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Runs a program under the shim, here, to its end."""
        with self.namespace.inside():
            return self.sidestep.run(argv, **options)

    def plain(self, argv: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Runs a program without the shim, here."""
        with self.namespace.inside():
            return subprocess.run(argv, check=True, timeout=60, **options)

    def restart_provider(self) -> None:
        """Ends the provider and starts a new one, here."""
        with self.namespace.inside():
            self.sidestep.restart_provider()
        self.workers()

    def workers(self, wanted: Callable[[dict[int, int]], bool] = lambda _: True) -> dict[int, int]:
        """Connections of each worker by its process, once all work and that is so."""
        found: dict[int, int] = {}

        def work() -> bool:
            found.clear()
            try:
                workers = self.sidestep.status()["workers"]
            except Unavailable:  # it is starting, and the machine has other things to do
                return False
            found.update({each["pid"]: each["connections"] for each in workers})
            return len(found) >= self._workers_awaited and wanted(found)

        self.wait_for(work)
        return found

    def wait_for(self, happened: Callable[[], object]) -> None:
        """Waits until that is so, which nothing tells."""
        deadline = time.monotonic() + START_S
        while not happened():
            assert time.monotonic() < deadline, self.sidestep.status()
            time.sleep(0.02)

    # ---- the network ----

    def link(self, state: str) -> None:
        """Sets its port of the bridge up or down: what a cable is."""
        with self._bridge.inside():
            ip(f"link set port{self.number} {state}")

    @contextmanager
    def losing(self, *matches: str) -> Iterator[None]:
        """What comes to this host is lost while the block runs, if it matches (nftables' language; "" is all)."""
        rules = "; ".join(f"{match} drop" for match in matches or ("",))
        table = f"table inet lost {{ chain lost {{ type filter hook prerouting priority -300; {rules}; }}; }}"
        self.plain(["nft", table])
        try:
            yield
        finally:
            self.plain(["nft", "delete table inet lost"])

    def ip(self, command: str) -> None:
        """Runs iproute2's `ip`, here."""
        with self.namespace.inside():
            ip(command)

    def cut_rdma(self, *, spared_port: int, also_spared: Sequence[int] = ()) -> None:
        """Destroys the TCP connections that this host's device has, not those of services at the spared ports."""
        ports = (spared_port, *also_spared)
        others = " and ".join(f"sport != :{port} and dport != :{port}" for port in ports)
        self.plain(["ss", "-K", "-t", "state", "established", others], stdout=subprocess.DEVNULL)

    # ---- looking ----

    def joined(self, how: str) -> int:
        """Connections with other hosts that have got a link."""
        return int(self.sidestep.status()["counters"].get(f"remote_joined{{{how}}}", 0))

    def counter(self, name: str) -> int:
        """Of the provider."""
        counters = self.sidestep.status()["counters"]
        return sum(int(value) for key, value in counters.items() if key == name or key.startswith(name + "{"))


def need_namespaces() -> None:
    """Skips the test where there can be none; without `ip` it fails."""
    if os.geteuid() != 0:
        pytest.skip("making a network namespace needs root")
    needed.program("ip")
    try:
        with thread_in_netns(None):
            pass
    except PermissionError as error:
        pytest.skip(f"this root may not make a network namespace: {error}")


@contextmanager
def hosts(count: int, **options: Any) -> Iterator[list[Host]]:
    """So many hosts on one bridge; `options` are those of their `Sidestep`."""
    with ExitStack() as stack:
        bridge = NetworkBridge()
        stack.callback(bridge.close)
        yield [stack.enter_context(Host(number, bridge, **options)) for number in range(1, count + 1)]


Make = Callable[..., list[Host]]


def command(host: Host, *args: str) -> str:
    """What `sidestep ARGS` tells of a host."""
    argv = [sys.executable, "-m", "sidestep", *args, "--socket", str(host.sidestep.socket)]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
