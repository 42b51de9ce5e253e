"""A promoted peer that writes random words into the shared segment: only its own connection may die.

The victim is an echo server under the shim, built with ASan, in each way of waiting. A neighbour, two promoted
connections of an honest client that checks every answer, goes on all the while.
"""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import toolchain
from common import PATIENCE_S
from hostile import HostilePeer, block
from selection import rotate
from shim_client import ShimClient
from toolchain import ADDRESS

from sidestep.native import layout
from sidestep.native.layout import Back, Notice
from sidestep.testing import Connection, Sidestep

BENCH = toolchain.ROOT / "bench" / "c"
ATTACKS = 40
NEIGHBOURS = 2
WITHIN_S = PATIENCE_S
FIRST_BACK, FIRST_RECALLED = 1 << 2 | Back.BACK, 1 << 2 | Back.RECALLED  # of the first round

pytestmark = pytest.mark.slow


def pingpong() -> Path:
    sources = [BENCH / f"{name}.c" for name in ("pingpong", "pingpong_events", "waiter", "bench")]
    flags = [*ADDRESS.flags, "-D_GNU_SOURCE", f"-I{BENCH}"]
    return toolchain.build("pingpong-address", sources, flags)


def echo_blocking() -> Path:
    return toolchain.build("echo-blocking", [toolchain.NATIVE_TESTS / "programs" / "echo_blocking.c"], ADDRESS.flags)


class Scene:
    """A victim under the sanitized shim, and a provider's client for the peers that attack it."""

    def __init__(self, sidestep: Sidestep, directory: Path, mode: list[str], *, spins: bool = True) -> None:
        self.sidestep = sidestep
        self.mode = mode
        self.shim = toolchain.SanitizedShim(ADDRESS, sidestep, directory)
        if not spins:  # every wait sleeps, so every message rings
            self.shim.env["SIDESTEP_SPIN_US"] = "0"
        # the benchmark's blocking server gives up at the first reset; this one must not
        server: list[str | Path] = [echo_blocking()] if "blocking" in mode else [pingpong(), "server", *mode]
        self.victim = sidestep.popen(server, env=self.shim.env, stdout=subprocess.PIPE, text=True)
        assert self.victim.stdout is not None
        self.port = int(self.victim.stdout.readline().split()[1])

    def of_victim(self) -> list[Connection]:
        """The victim's live connections."""
        return [c for c in self.sidestep.connections() if c.pid == self.victim.pid]

    @contextmanager
    def neighbours(self) -> Iterator[dict[str, int]]:
        """Beside an honest client with promoted connections, which checks every answer; yields `answered()`.

        In the end that client goes on unharmed, until it is told to end, and so does the victim: see `end`.
        """
        options = ["-p", str(self.port), "-n", str(NEIGHBOURS), "-w", "0", "-c", "1000000000"]
        client: list[str | Path] = [pingpong(), "client", *self.mode, *options]
        started = self.sidestep.popen(client, env=self.shim.env, stdout=subprocess.PIPE)
        self.sidestep.wait_for(lambda found: sum(c.promoted for c in found) == 2 * NEIGHBOURS)
        yield self.answered()
        assert started.poll() is None
        started.terminate()
        assert started.wait(WITHIN_S) == -signal.SIGTERM
        self.end()

    def answered(self) -> dict[str, int]:
        """How many messages of each promoted connection the victim has read by ring."""
        return {c.remote: c.rx.ring_msgs for c in self.of_victim() if c.promoted}

    def wait_answered(self, remotes: Collection[str], more: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits until each of the connections has been answered `more` times."""
        deadline = time.monotonic() + WITHIN_S
        before = self.answered()
        while True:
            meanwhile()
            now = self.answered()
            if all(now[remote] > before[remote] + more for remote in remotes):
                return
            assert time.monotonic() < deadline, f"the neighbour stands still: {before}, now {now}"

    def end(self) -> None:
        """All connections of the victim are gone; it ends when told to, and the sanitizer had nothing to say."""
        self.sidestep.wait_for(lambda _: not self.of_victim(), WITHIN_S)
        self.victim.terminate()
        assert self.victim.wait(WITHIN_S) == -signal.SIGTERM
        self.shim.check()


MODES = [["-m", "blocking"], ["-m", "poll"], ["-m", "epoll"], ["-m", "epoll", "-e"]]
WORDS = ["producer[0].tail", "consumer[1].head", "side[0].tx_back_at", "side[0].rx_frozen"]


def _named(value: object) -> str:
    return "".join(value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize(("mode", "seed"), rotate(list(product(MODES, [1, 1_000_001])), ci=4), ids=_named)
def test_only_its_own_connection_dies(sidestep: Sidestep, tmp_path: Path, mode: list[str], seed: int) -> None:
    scene = Scene(sidestep, tmp_path, mode)
    with scene.neighbours() as before:
        with ShimClient(sidestep.socket) as client:
            client.hello()
            for number in range(ATTACKS):
                with HostilePeer(client, scene.port) as peer:
                    peer.promote()
                    moves = peer.attack(seed + number)
                assert scene.victim.poll() is None, f"the victim ended with {scene.victim.returncode} after {moves}"
        # the victim has closed every hostile connection, and no other
        sidestep.wait_for(lambda _: len(scene.of_victim()) == NEIGHBOURS, WITHIN_S)
        # the neighbour's connections are the same as before, promoted, and alive
        after = scene.answered()
        assert after.keys() == before.keys()
        scene.wait_answered(after, 100)


@pytest.mark.parametrize(("mode", "word"), rotate(list(product(MODES, WORDS)), test=4, ci=8), ids=_named)
def test_an_impossible_count_ends_the_connection(
    sidestep: Sidestep, tmp_path: Path, mode: list[str], word: str
) -> None:
    scene = Scene(sidestep, tmp_path, mode)
    with ShimClient(sidestep.socket) as client:
        client.hello()
        for value in (1 << 62, layout.CHANNEL_SPILL + 1):
            with HostilePeer(client, scene.port) as peer:
                peer.promote()
                if word == "consumer[1].head":
                    # the victim looks at it when what it knows to be free is used up
                    peer.flood()
                peer.poke(word, peer.peek("producer[0].tail") + value)
                if word == "side[0].tx_back_at":
                    peer.poke("side[0].tx_back", FIRST_BACK)
                elif word == "side[0].rx_frozen":
                    peer.poke("side[1].tx_back", FIRST_RECALLED)
                    peer.poke("side[0].notice", Notice.RECALL)
                assert peer.wait_end() is ConnectionResetError
    scene.end()


@pytest.mark.parametrize(
    ("how", "word"),
    [
        *((f"receive {how}", "producer[0].tail") for how in ("poll", "epoll", "count", "peek")),
        *((f"send {how}", "consumer[1].head") for how in ("poll", "epoll")),
    ],
)
def test_what_a_program_was_told_is_not_taken_back(sidestep: Sidestep, how: str, word: str) -> None:
    """Bytes, or room: it may then make a call that would wait for ever."""
    program = toolchain.build("promised", [toolchain.NATIVE_TESTS / "programs" / "promised.c"], [])
    victim = sidestep.popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert victim.stdin is not None
    assert victim.stdout is not None
    port = int(victim.stdout.readline().split()[1])
    with ShimClient(sidestep.socket) as client:
        client.hello()
        with HostilePeer(client, port) as peer:
            peer.poke("consumer[1].room_max", 1)
            peer.promote()
            victim.stdin.write(f"{how}\n")
            assert victim.stdout.readline() == "asking 0\n"
            before = peer.peek(word)
            if how.startswith("send"):
                assert 0 < peer.end.avail < peer.end.rx_size
                time.sleep(0.05)  # as long as it takes to see that a reader stands still
                peer.end.read(peer.end.rx_size)
            else:
                peer.end.write(b"x")
            peer.ring()
            assert victim.stdout.readline() == "promised 0\n"
            peer.poke(word, before)
            victim.stdin.write("\n")
            assert peer.wait_end() is ConnectionResetError
            assert victim.stdout.readline() == f"result {-errno.ECONNRESET}\n"


@pytest.mark.parametrize("mode", rotate(MODES, ci=2), ids="".join)
def test_a_switch_before_what_was_read_is_told(sidestep: Sidestep, tmp_path: Path, mode: list[str]) -> None:
    """And not only to the peer: the program would ask for bytes for ever."""
    scene = Scene(sidestep, tmp_path, mode)
    with ShimClient(sidestep.socket) as client:
        client.hello()
        with HostilePeer(client, scene.port) as peer:
            peer.tcp_sent = -1  # it will say that it moved to the ring a byte before it did
            with pytest.raises(ConnectionResetError):
                peer.promote()
    scene.end()


def test_a_recall_that_was_none_hides_no_end(sidestep: Sidestep, tmp_path: Path) -> None:
    """The peer says that what it sends by TCP was recalled, and fills TCP's buffers, so that its FIN stays behind."""
    scene = Scene(sidestep, tmp_path, ["-m", "epoll"])
    with ShimClient(sidestep.socket) as client:
        client.hello()
        with HostilePeer(client, scene.port) as peer:
            peer.promote()
            peer.poke("side[0].tx_back", FIRST_RECALLED)
            try:
                while True:
                    peer.tcp.send(bytes(65536))
            except BlockingIOError:
                assert peer.wait_end() is ConnectionResetError
            except ConnectionResetError:  # the victim was faster than TCP's buffers were full
                pass
    scene.end()


@pytest.mark.parametrize("mode", rotate(MODES, ci=2), ids="".join)
def test_a_doorbell_that_would_block_holds_nobody_up(sidestep: Sidestep, tmp_path: Path, mode: list[str]) -> None:
    """A peer has its own doorbell block whoever writes to it; the victim rings it, and goes on."""
    scene = Scene(sidestep, tmp_path, mode, spins=False)
    with scene.neighbours() as neighbours, ShimClient(sidestep.socket) as client:
        client.hello()
        with HostilePeer(client, scene.port) as peer:
            peer.promote()
            for _ in range(3):
                block(peer.mine.doorbell)
                peer.seem_asleep()
                peer.exchange()
            scene.wait_answered(neighbours, 100)
            assert [c.doorbells for c in scene.of_victim() if c.remote not in neighbours] >= [3]


@pytest.mark.parametrize("mode", rotate(MODES, ci=2), ids="".join)
def test_no_peer_can_silence_a_shared_doorbell(sidestep: Sidestep, tmp_path: Path, mode: list[str]) -> None:
    """A peer empties, fills and blocks the victim's doorbell all the while; every ring is heard."""
    scene = Scene(sidestep, tmp_path, mode, spins=False)
    dice = random.Random(1)
    with scene.neighbours() as neighbours, ShimClient(sidestep.socket) as client:
        client.hello()
        with HostilePeer(client, scene.port) as peer:
            peer.promote()

            def attack() -> None:
                for _ in range(1000):
                    peer.attack_doorbell(dice)

            scene.wait_answered(neighbours, 5000, attack)
            assert peer.doorbell is not None
            block(peer.doorbell)
            # the victim goes back to TCP, and wakes its own threads, which may wait for room
            deadline = time.monotonic() + WITHIN_S
            while not peer.peek("side[1].tx_back"):
                sidestep.demote(lambda c: c.pid == scene.victim.pid and c.remote not in neighbours, 0)
                assert time.monotonic() < deadline, "the victim does not go back to TCP"
            scene.wait_answered(neighbours, 100)
