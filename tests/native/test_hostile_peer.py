"""A promoted peer that writes random words into the shared segment: only its own connection may die.

The victim is an echo server under the shim, built with ASan, in each way of waiting. A neighbour, two promoted
connections of an honest client that checks every answer, goes on all the while.
"""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import toolchain
from hostile import HostilePeer
from toolchain import ADDRESS

from sidestep.testing import ShimClient, Sidestep

BENCH = toolchain.ROOT / "bench" / "c"
ATTACKS = 40
NEIGHBOURS = 2
WITHIN_S = 20

pytestmark = pytest.mark.slow


def pingpong() -> Path:
    sources = [BENCH / f"{name}.c" for name in ("pingpong", "pingpong_events", "waiter", "bench")]
    headers = "".join(path.read_text() for path in sorted(BENCH.glob("*.h")))
    flags = [*ADDRESS.flags, "-D_GNU_SOURCE", f"-DHEADERS={len(headers)}", f"-I{BENCH}"]
    return toolchain.build("pingpong-address", sources, flags)


def echo_blocking() -> Path:
    return toolchain.build("echo-blocking", [toolchain.HERE / "programs" / "echo_blocking.c"], ADDRESS.flags)


@pytest.mark.parametrize("seed", [1, 1_000_001])
@pytest.mark.parametrize(
    "mode", [["-m", "blocking"], ["-m", "poll"], ["-m", "epoll"], ["-m", "epoll", "-e"]], ids="".join
)
def test_only_its_own_connection_dies(sidestep: Sidestep, tmp_path: Path, mode: list[str], seed: int) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    env = sidestep.env(
        LD_PRELOAD=toolchain.preload(ADDRESS, toolchain.build_shim(ADDRESS)), **ADDRESS.env(reports / "report")
    )
    program = pingpong()
    # the benchmark's blocking server gives up at the first reset; this one must not
    server: list[str | Path] = [echo_blocking()] if "blocking" in mode else [program, "server", *mode]
    victim = sidestep.popen(server, env=env, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    port = int(victim.stdout.readline().split()[1])
    options = ["-p", str(port), "-n", str(NEIGHBOURS), "-w", "0", "-c", "1000000000"]
    neighbour = sidestep.popen([program, "client", *mode, *options], env=env, stdout=subprocess.PIPE, text=True)
    sidestep.wait_for(lambda found: sum(c.promoted for c in found) == 2 * NEIGHBOURS)

    def answered() -> dict[str, int]:
        return {c.remote: c.rx.ring_msgs for c in sidestep.connections() if c.pid == victim.pid and c.promoted}

    before = answered()
    made = []
    with ShimClient(sidestep.socket) as client:
        client.hello()
        for number in range(ATTACKS):
            with HostilePeer(client, port) as peer:
                peer.promote()
                made.append(peer.attack(seed + number))
            assert victim.poll() is None, f"the victim ended with {victim.returncode} after {made[-1]}"
    # the victim has closed every hostile connection, and no other
    sidestep.wait_for(lambda found: sum(c.pid == victim.pid for c in found) == NEIGHBOURS, WITHIN_S)
    assert victim.poll() is None
    assert neighbour.poll() is None
    # the neighbour's connections are the same as before, promoted, and alive
    after = answered()
    assert after.keys() == before.keys()
    deadline = time.monotonic() + WITHIN_S
    while any(answered()[remote] <= count + 100 for remote, count in after.items()):
        assert time.monotonic() < deadline, f"the neighbour stands still: {after}, now {answered()}"
    neighbour.terminate()
    assert neighbour.wait(WITHIN_S) == -signal.SIGTERM
    sidestep.wait_for(lambda found: not any(c.pid == victim.pid for c in found), WITHIN_S)
    victim.terminate()
    assert victim.wait(WITHIN_S) == -signal.SIGTERM
    found = [toolchain.symbolized(path.read_text()) for path in reports.iterdir()]
    assert not found, found[0][:6000]
