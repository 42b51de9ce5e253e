"""The wheels of `make wheels` where no compiler has been: `make test-fresh`. Slow, so `make test` leaves it out.

aarch64 is emulated (Debian: qemu-user, libc6-arm64-cross, libgcc-s1-arm64-cross). qemu-user has no preadv2, by which
doorbells are rung, so connections stay on TCP there; that the shim comes up, is known to the provider and carries bytes
is what can be seen. The fresh system is made by debootstrap, as root.
"""

from __future__ import annotations

import platform
import random
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from built import ROOT, wheel, with_all_it_needs
from fresh_debian import run_in

from sidestep.config import ENV_PROMOTE_AFTER, ENV_SOCKET
from sidestep.testing import Sidestep

GLIBC = Path("/usr/aarch64-linux-gnu")
GLIBC_OLDEST = "2.28"  # packaging/wheels.py
SIZE = 4 << 20  # bytes each way that show enough
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def other_end(tmp_path: Path, sidestep: Sidestep) -> Iterator[int]:
    """The port of an echo on aarch64, under the shim of its wheel."""
    if shutil.which("qemu-aarch64") is None or not (GLIBC / "lib/libgcc_s.so.1").exists():
        pytest.skip("there is no aarch64 here; apt-get install qemu-user libc6-arm64-cross libgcc-s1-arm64-cross")
    library = zipfile.ZipFile(wheel("aarch64")).extract("sidestep/native/libsidestep.so", tmp_path)
    program = tmp_path / "echo"
    source = ROOT / "tests/native/programs/echo_blocking.c"
    zig: list[str | Path] = [sys.executable, "-m", "ziglang", "cc", "-target", f"aarch64-linux-gnu.{GLIBC_OLDEST}"]
    subprocess.run([*zig, "-O2", "-pthread", "-o", program, source], check=True)
    inside = {"LD_PRELOAD": library, ENV_SOCKET: str(sidestep.socket), ENV_PROMOTE_AFTER: "0"}
    set_there = [word for name, value in inside.items() for word in ("-E", f"{name}={value}")]
    argv: list[str | Path] = ["qemu-aarch64", "-L", GLIBC, *set_there, program]
    with subprocess.Popen(argv, env=sidestep.env(LD_PRELOAD=None), stdout=subprocess.PIPE, text=True) as echo:
        assert echo.stdout is not None
        yield int(echo.stdout.readline().removeprefix("listening "))
        echo.kill()


def test_the_shim_comes_up_on_aarch64_and_carries_bytes(sidestep: Sidestep, other_end: int) -> None:
    rng = random.Random(1)
    with socket.create_connection(("127.0.0.1", other_end)) as sock:
        sent = got = b""
        while len(got) < SIZE:
            piece = rng.randbytes(rng.randrange(1, 60_000))
            sock.sendall(piece)
            sent += piece
            while len(got) < len(sent):
                got += sock.recv(1 << 16)
        (one,) = sidestep.connections()
    assert got == sent
    assert one.program == "qemu-aarch64"
    assert (one.rx.tcp_bytes, one.tx.tcp_bytes) == (len(sent), len(sent))


IN_FRESH = """
if command -v cc gcc clang; then exit 1; fi
python3 -m venv /venv
/venv/bin/pip install --quiet --no-index --find-links /wheels sidestep
cd /tmp
test "$(/venv/bin/sidestep run -- echo works 2>&1)" = works
/venv/bin/sidestep run --promote-after 0 -- redis-server --port 7001 --save '' >/dev/null &
until redis-cli -p 7001 ping >/dev/null 2>&1; do sleep 0.1; done
/venv/bin/sidestep run --promote-after 0 -- redis-benchmark -p 7001 -t ping -n 1000000000 >/dev/null 2>&1 &
until /venv/bin/sidestep ss --state promoted | grep redis-server; do sleep 0.1; done
"""


@pytest.fixture
def fresh(tmp_path: Path, debian: Path) -> Path:
    """A Debian of this test's own."""
    subprocess.run(["cp", "-a", debian, tmp_path], check=True)
    return tmp_path / debian.name


def test_a_fresh_debian_runs_redis_promoted(fresh: Path) -> None:
    with_all_it_needs(platform.machine(), fresh / "wheels")
    assert "promoted" in run_in(fresh, IN_FRESH)
