"""What a route lookup costs: `python bench/routes.py`, as root, in a network namespace of its own.

Lookups of the kernel's route: of one destination, answered from memory; of destinations that were never asked for; and
while an announcement waits that nobody has taken in. Then the share of a CPU that 2,000 lookups a second take, and what
a snapshot of many routes costs.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import IPv4Address, IPv6Address

from sidestep import limits
from sidestep.demo.machine import Machine
from sidestep.provider.network.routes import Network
from sidestep.routing import Address, Route

_CLONE_NEWNET = 0x40000000


def ip(*commands: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


def timed(label: str, count: int, call: Callable[[], object], repeats: int, before: Callable[[], None]) -> None:
    """Prints the median CPU time of some runs, and how far they lie apart; `before` comes before each."""
    costs = []
    for _ in range(repeats):
        before()
        began = time.process_time()
        for _ in range(count):
            call()
        costs.append((time.process_time() - began) / count)
    cost = statistics.median(costs)
    spread = (max(costs) - min(costs)) / cost
    print(f"{label:<32} {cost * 1e6:9.1f} us of CPU {1 / cost:10,.0f} a second   spread {spread:4.0%}")


def take_in(network: Network) -> None:
    """What has been announced, so that it is not in the way of what is remembered."""
    quiet = select.poll()
    quiet.register(network, select.POLLIN)
    while quiet.poll(0):
        network.handle_readable()
    time.sleep(limits.ROUTE_SETTLE_S)


def destinations(six: bool) -> Iterator[Address]:
    """Never the same twice."""
    for number in itertools.count(1):
        yield IPv6Address((0x20010DB8_00090000 << 64) + number) if six else IPv4Address(0x0A090000 + number)


def ask_next(network: Network, fresh: Iterator[Address]) -> Route:
    return network.route(next(fresh))


def steady(label: str, rate: int, seconds: float, network: Network, call: Callable[[], object]) -> None:
    """Prints the share of a CPU that `rate` calls a second take."""
    take_in(network)
    began, cpu, done = time.perf_counter(), time.process_time(), 0
    while (now := time.perf_counter() - began) < seconds:
        while done < now * rate:
            call()
            done += 1
        time.sleep(0.005)
    print(f"{label:<32} {(time.process_time() - cpu) / seconds:9.1%} of a CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="lookups in a run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--routes", type=int, default=4000, help="routes of which a snapshot is taken")
    given = parser.parse_args()
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
        sys.exit("bench/routes.py: a network namespace of its own needs root")
    ip(
        "link set lo up", "link add left type veth peer name right", "link set left up", "link set right up",
        "address add 10.1.0.1/24 dev left", "address add 2001:db8:1::1/64 dev left nodad",
        "route add 10.8.0.0/13 via 10.1.0.2", "route add 2001:db8:9::/48 via 2001:db8:1::2",
    )  # fmt: skip
    began = time.perf_counter()
    network = Network(lambda event: None)
    print(f"{Machine.now()}; first use {(time.perf_counter() - began) * 1e3:.0f} ms")
    settle = partial(take_in, network)
    for six in (False, True):
        family, fresh = ("IPv6" if six else "IPv4"), destinations(six)
        timed(f"{family}, from memory", given.count, partial(network.route, next(fresh)), given.repeats, settle)
        timed(f"{family}, never asked before", given.count, partial(ask_next, network, fresh), given.repeats, settle)
    known, fresh = IPv4Address("10.9.0.1"), destinations(six=False)
    steady("2,000 a second of one", 2000, 3, network, partial(network.route, known))
    steady("2,000 a second, always new", 2000, 3, network, partial(ask_next, network, fresh))
    waiting = partial(ip, "route replace blackhole 10.250.0.0/16")
    timed("an announcement waits", given.count, partial(network.route, known), given.repeats, waiting)
    began = time.perf_counter()
    subprocess.run(["ip", "route", "get", str(known)], stdout=subprocess.DEVNULL, check=True)
    print(f"for scale: a process `ip route get` takes {(time.perf_counter() - began) * 1e3:.1f} ms")
    ip(*(f"route add 11.{n // 256}.{n % 256}.0/24 via 10.1.0.2" for n in range(given.routes)))
    network.close()
    began = time.process_time()
    network = Network(lambda event: None)
    print(f"a snapshot of {given.routes} routes takes {(time.process_time() - began) * 1e3:.0f} ms of CPU")
    turns: list[float] = []
    network._begin_snapshot("bench", whole=True)
    while network._snapshot:
        began = time.process_time()
        network.handle_readable()
        turns.append(time.process_time() - began)
    print(f"  the longest turn of the provider's loop is {max(turns) * 1e3:.0f} ms, of {len(turns)} turns")
    network.close()


if __name__ == "__main__":
    main()
