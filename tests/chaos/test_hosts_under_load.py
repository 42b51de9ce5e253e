"""Three hosts under load while everything between them is lost, at random: every byte is accounted for.

The first and the third drive load at the second. What may be lost without the programs noticing anything but time is
lost in an order that the seed decides; docs/guides/two-hosts.md tells of each loss. SIDESTEP_CHAOS_SEEDS is how many
orders.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import needed
import pytest
from hosts import Host, hosts, need_namespaces
from load import (
    ENDED,
    Entry,
    Load,
    faults_of_survivor,
    faults_of_whole,
    faults_where_some_were_reset,
    loaded,
    reached,
)

from sidestep import limits
from sidestep.provider import control
from sidestep.rdma.iwarp.startup.frame import ENHANCED_LEN, MpaRole, StartFrame
from sidestep.remote.promotion import Purpose
from sidestep.remote.protocol import HELLO_LEN
from sidestep.testing import Connection

SEEDS: Final = range(int(os.environ.get("SIDESTEP_CHAOS_SEEDS", "1")))
PROMOTED_S: Final = limits.PEER_ABSENT_S + 20  # until new connections are, also to a host that has just said no
END_S: Final = 90.0
_TCP_HEADER_LEN: Final = 32  # bytes; Linux sends no option but timestamps with data


# Bytes a connection may carry: long enough to be promoted in its midst. By TCP a core carries 20 MB/s of each of 16
# connections, and while the providers have hardly any of the processor, a link takes a second to come up.
MOST: Final = 40_000_000


class World:
    """Hosts, and the load between them."""

    def __init__(self, stack: ExitStack, load_program: Path, directory: Path, seed: int, promote_after: str) -> None:
        self.dice = random.Random(seed)
        self.hosts = stack.enter_context(hosts(3, promote_after=promote_after))
        one, two, three = self.hosts
        self.loads: list[Load] = []
        for number, places in enumerate([(one, two), (three, two)]):
            where = directory / str(number)
            where.mkdir()
            self.loads.append(load := stack.enter_context(loaded(load_program, where, None, places=places)))
            load.drive(seed + number, most=MOST)

    @property
    def ports(self) -> str:
        """Those of the programs, as nftables writes a set of them."""
        return "{ " + ", ".join(str(load.port) for load in self.loads) + " }"

    def carried(self) -> bool:
        """Whether each load has a connection now that goes over a link both ways; some time is given for it."""
        return all(reached(partial(self._carries, load), PROMOTED_S) for load in self.loads)

    def _carries(self, load: Load) -> bool:
        def carried(found: Connection) -> bool:
            at = f":{load.port}"
            return found.promoted and found.local.endswith(at) and bool(found.tx.ring_bytes and found.rx.ring_bytes)

        return any(carried(found) for found in self.hosts[1].sidestep.connections())

    def pause(self, most_s: float) -> None:
        """So long something is lost, or nothing is: the seed decides."""
        time.sleep(self.dice.uniform(0.1, most_s))

    def some(self) -> Host:
        """One of the hosts."""
        return self.dice.choice(self.hosts)

    def links_opened(self) -> int:
        """In all, at the second host's provider."""
        return self.hosts[1].joined("accept")


@pytest.fixture
def world(request: pytest.FixtureRequest, load_program: Path, tmp_path: Path) -> Iterator[Callable[[int], World]]:
    """Makes a world from a seed."""
    need_namespaces()
    needed.programs("nft", "ss")
    with ExitStack() as stack:
        yield lambda seed: World(stack, load_program, tmp_path, seed, ("0", "4:50000", "30")[seed % 3])


Loss: TypeAlias = Callable[[World], None]

# ---- what may be lost ----


@contextmanager
def _stopped(hosts: list[Host]) -> Iterator[None]:
    for host in hosts:
        os.kill(host.sidestep.provider_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for host in hosts:
            os.kill(host.sidestep.provider_pid, signal.SIGCONT)


def a_provider_stands_still(world: World) -> None:
    with _stopped([world.some()]):
        world.pause(1.5)


def all_providers_stand_still(world: World) -> None:
    with _stopped(world.hosts):
        world.pause(1)


def a_cable_is_pulled(world: World) -> None:
    host = world.some()
    host.link("down")
    world.pause(2)
    host.link("up")


def an_interface_is_set_down(world: World) -> None:
    """Its addresses of IPv4 stay, its routes go; those of IPv6 go, but the load has none."""
    host = world.some()
    host.ip("link set eth0 down")
    world.pause(1.5)
    host.ip("link set eth0 up")


def an_address_goes(world: World) -> None:
    host = world.some()
    host.ip(f"addr del {host.address}/24 dev eth0")
    world.pause(1.5)
    host.ip(f"addr add {host.address}/24 dev eth0")


def a_route_goes(world: World) -> None:
    host, other = world.dice.sample(world.hosts, 2)
    host.ip(f"route add blackhole {other.address}/32")
    world.pause(1.5)
    host.ip(f"route del blackhole {other.address}/32")


def nothing_arrives(world: World) -> None:
    with world.some().losing():
        world.pause(2)


def some_packets_are_lost(world: World) -> None:
    with world.some().losing("numgen random mod 100 < 4"):
        world.pause(3)


def rdma_does_not_arrive(world: World) -> None:
    with world.some().losing(f"tcp sport != {world.ports} tcp dport != {world.ports}"):
        world.pause(3)


def tcp_does_not_arrive(world: World) -> None:
    with world.some().losing(f"tcp sport {world.ports}", f"tcp dport {world.ports}"):
        world.pause(2)


def the_port_mapper_does_not_arrive(world: World) -> None:
    with world.some().losing("udp dport 3935"):
        world.pause(2)


def rdma_is_cut(world: World) -> None:
    _cut(world, world.some())


def _cut(world: World, host: Host) -> None:
    first, *others = (load.port for load in world.loads)
    host.cut_rdma(spared_port=first, also_spared=others)


def rdma_is_cut_and_no_answer_arrives(world: World) -> None:
    """Of the questions about where TCP goes on, those of one phase are not answered for a while."""
    _cut_and_lose(world, MpaRole.REPLY, world.dice.choice([Purpose.ARRIVED, Purpose.HEARD]))


def rdma_is_cut_and_no_question_arrives(world: World) -> None:
    _cut_and_lose(world, MpaRole.REQUEST, world.dice.choice([Purpose.RESYNC, Purpose.RESYNCED]))


def _cut_and_lose(world: World, role: MpaRole, purpose: Purpose) -> None:
    first = _TCP_HEADER_LEN + StartFrame.LENGTH + ENHANCED_LEN + (HELLO_LEN if role is MpaRole.REQUEST else 0)
    words = b"sidestep\x01" + bytes([purpose])
    with ExitStack() as stack:
        for host in world.hosts:
            stack.enter_context(host.losing(f"@th,{8 * first},{8 * len(words)} 0x{words.hex()}"))
        _cut(world, world.some())
        world.pause(3)


def the_protocol_goes_and_comes(host: Host) -> None:
    for change in ("module_remove", "module_add"):
        with control.ControlConnection(host.sidestep.socket) as connection:
            connection.request(change, name="sdp")[1].close()


THE_LINK_LIVES: Final[tuple[Loss, ...]] = (
    a_provider_stands_still, all_providers_stand_still, a_cable_is_pulled, an_interface_is_set_down, an_address_goes,
    a_route_goes, nothing_arrives, some_packets_are_lost, rdma_does_not_arrive, tcp_does_not_arrive,
    the_port_mapper_does_not_arrive,
)  # fmt: skip
THE_LINK_IS_LOST: Final[tuple[Loss, ...]] = (
    rdma_is_cut, rdma_is_cut_and_no_answer_arrives, rdma_is_cut_and_no_question_arrives,
)  # fmt: skip
CHOSEN: Final = os.environ.get("SIDESTEP_CHAOS_LOSSES", "")  # by hand: the names of some, with commas


def _lose(made: World, losses: tuple[Loss, ...]) -> None:
    chosen = [loss for loss in losses if not CHOSEN or loss.__name__ in CHOSEN.split(",")]
    made.dice.shuffle(chosen)
    for loss in chosen:
        promoted = made.carried()
        print(f"{loss.__name__}, {'of links' if promoted else 'without links'}: {made.links_opened()} opened so far")
        loss(made)
        made.pause(0.3)
    assert made.links_opened() >= len(chosen)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", SEEDS)
def test_programs_notice_nothing_but_time(world: Callable[[int], World], seed: int) -> None:
    made = world(seed)
    _lose(made, THE_LINK_LIVES)
    for load in made.loads:
        assert faults_of_whole(load.enough(END_S)) == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", SEEDS)
def test_links_are_lost(world: Callable[[int], World], seed: int) -> None:
    made = world(seed)
    _lose(made, THE_LINK_IS_LOST)
    for load in made.loads:
        assert _faults_where_some_had_ended(load.enough(END_S)) == []


def _faults_where_some_had_ended(entries: list[Entry]) -> list[str]:
    """All is whole, unless an end had ended its direction, or gone back to TCP by itself, when its link broke.

    TCP takes no more then (docs/guides/two-hosts.md). Who has a full ring on its way, and more, has gone back.
    """
    found = []
    for entry in entries:
        ends = ((entry.driver, entry.server), (entry.server, entry.driver))
        lost = any(s.write_end == ENDED or s.taken - o.received > limits.RING_SIZE_DEFAULT for s, o in ends)
        found += faults_where_some_were_reset([entry]) if lost else faults_of_whole([entry])
    return found


@pytest.mark.parametrize("killed", ["driver", "server"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_is_killed(world: Callable[[int], World], seed: int, killed: str) -> None:
    made = world(seed)
    assert made.carried()
    made.pause(0.3)
    load = made.loads[0]
    assert load.driver is not None
    victim, survivor = (load.driver, load.server) if killed == "driver" else (load.server, load.driver)
    victim.kill()
    victim.wait()

    def ended() -> bool:
        if killed == "server":
            return survivor.poll() is not None
        return all(entry.server.done for entry in load.entries() if entry.server.begun)

    reached(ended, END_S / 2)  # if it is not, the ledger below says where
    assert faults_of_survivor(load.entries(), killed=killed) == []
    assert faults_of_whole(made.loads[1].enough(END_S)) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_providers_go(world: Callable[[int], World], seed: int, how: signal.Signals) -> None:
    """What they reset never ends as if it were whole."""
    made = world(seed)
    assert made.carried()
    made.pause(0.3)
    struck = ([1, 0, 2], [1], [0])[seed % 3]  # all, the one that accepts, one that opens
    for number in struck:
        os.kill(made.hosts[number].sidestep.provider_pid, how)
    for number in struck:
        made.hosts[number].restart_provider()
    made.pause(2)
    for load in made.loads:
        assert faults_where_some_were_reset(load.enough(END_S)) == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_protocol_is_removed_and_added(world: Callable[[int], World], seed: int) -> None:
    made = world(seed)
    for host in made.dice.sample(made.hosts, 3):
        assert made.carried()
        made.pause(0.3)
        the_protocol_goes_and_comes(host)
    made.pause(2)
    for load in made.loads:
        assert faults_where_some_were_reset(load.enough(END_S)) == []
