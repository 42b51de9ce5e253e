"""sidestep's Python API, without LD_PRELOAD: each check of programs/checks.py in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needed
import pytest
import toolchain
from common import PATIENCE_S

from sidestep.testing import Sidestep, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
CHECKS = Path(__file__).parent / "programs/checks.py"
DEADLINE_S = PATIENCE_S

ALONE = [
    "asyncio", "asyncio_errors", "asyncio_install", "asyncio_loop", "asyncio_loop_datagrams_and_unix", "bulk",
    "by_name", "children", "create_connection", "create_connection_arguments", "disabled", "explicit",
    "explicit_by_number", "files", "fork", "in_place_on_tcp", "install", "install_waiting_thread", "nonblocking",
    "opt_in", "peek", "peer_resets_under_a_view", "reserve", "reserve_fork", "reserve_full",
    "reserve_other_senders", "rings_wrap", "scatter", "settings", "stand_in", "threads", "timeout", "unavailable",
    "views_outlive_sockets",
]  # fmt: skip
UVLOOP = ["uvloop", "uvloop_opt_in"]
TLS = ["tls", "asyncio_tls"]
LIBRARIES = {"late_library": [], "no_thread_local_memory": ["-DHOG"]}  # check -> flags of programs/late_library.c


@pytest.fixture(scope="module")
def provider() -> Iterator[Sidestep]:
    with Sidestep(promote_after="0") as private:
        yield private


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        [needed.program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def bare(provider: Sidestep) -> dict[str, str]:
    """An environment with the settings of the shim, and without the shim."""
    env = provider.env(LD_PRELOAD=None, PYTHONFAULTHANDLER="1")
    assert "LD_PRELOAD" not in env
    return env


def run(name: str, *arguments: str, env: dict[str, str]) -> None:
    """Runs a check to its end."""
    done = subprocess.run(
        [sys.executable, CHECKS, name, *arguments], env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_check(name: str, provider: Sidestep) -> None:
    run(name, env=bare(provider))


@pytest.mark.slow
@pytest.mark.parametrize("name", UVLOOP)
def test_uvloop(name: str, provider: Sidestep) -> None:
    run(name, env=bare(provider))


@pytest.mark.slow
@pytest.mark.parametrize("name", TLS)
def test_tls(name: str, provider: Sidestep, certificate: tuple[str, str]) -> None:
    run(name, *certificate, env=bare(provider))


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_library(name: str, provider: Sidestep) -> None:
    source = CHECKS.with_name("late_library.c")
    library = toolchain.build("late-library.so", [source], ["-shared", "-fPIC", "-O1", *LIBRARIES[name]])
    run(name, str(library), env=bare(provider))


@pytest.mark.least("ci")
@pytest.mark.slow
@pytest.mark.parametrize("ring_size", [None, 4096], ids=["ring-default", "ring-4096"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("SIDESTEP_CHAOS_SEEDS", "1"))))
def test_in_place_under_demotion(seed: int, ring_size: int | None) -> None:
    with Sidestep(promote_after="0", ring_size=ring_size) as private:
        run("in_place_under_demotion", str(seed), env=bare(private))


@pytest.mark.slow
def test_under_sidestep_run(provider: Sidestep) -> None:
    """Everything is tracked already; the API does nothing and works."""
    run("preloaded", env=provider.env())
    for name in ("bulk", "nonblocking", "asyncio_install"):
        run(name, env=provider.env())


@pytest.mark.slow
@pytest.mark.parametrize("preloaded", ["server", "client", "neither"])
def test_the_other_end_is_another_program(preloaded: str, provider: Sidestep) -> None:
    """The API on one side or on both, `sidestep run` on the other."""
    port = str(free_port())

    def start(side: str) -> subprocess.Popen[Any]:
        env = provider.env() if preloaded == side else bare(provider)
        return provider.popen(
            [sys.executable, CHECKS, f"echo_{side}", port], env=env, stdout=subprocess.PIPE, text=True
        )

    server = start("server")
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    client, _ = start("client").communicate(timeout=DEADLINE_S)
    assert client == '["promoted"]\n'
    assert server.stdout.readline() == '["promoted"]\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("echo_blocking", "10000 lines came back\n"),
        ("echo_asyncio", "10000 lines came back\n"),
        ("zero_copy", "100000000 bytes, and the checksum is right\n"),
    ],
)
def test_example(name: str, said: str, provider: Sidestep) -> None:
    """The examples do what they say, and their connections are promoted."""
    port = str(free_port())
    program = [sys.executable, str(EXAMPLES / f"{name}.py")]
    before = provider.status()["counters"].get("claim_matched", 0)
    server = provider.popen([*program, "server", port], env=bare(provider), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    client = provider.popen([*program, "client", port], env=bare(provider), stdout=subprocess.PIPE, text=True)
    assert client.communicate(timeout=DEADLINE_S)[0] == said
    assert provider.status()["counters"]["claim_matched"] > before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [("sdp_blocking", "4000000 numbers came back\n"), ("sdp_asyncio", "16 blocks came back, pipelined\n")],
)
def test_example_of_sdp(name: str, said: str) -> None:
    """They need no provider."""
    port = str(free_port())
    program = [sys.executable, str(EXAMPLES / f"{name}.py")]
    with subprocess.Popen([*program, "server", port], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            done = subprocess.run(
                [*program, "client", port], capture_output=True, text=True, timeout=DEADLINE_S, check=True
            )
            assert done.stdout == said
        finally:
            server.kill()


@pytest.mark.slow
def test_a_provider_is_started_on_demand(tmp_path: Path) -> None:
    """And leaves when it is told to."""
    path = tmp_path / "private" / "provider"
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        run("opt_in", env={**env, "SIDESTEP_SOCKET": str(path), "SIDESTEP_PROMOTE_AFTER": "0"})
    finally:
        subprocess.run([sys.executable, "-m", "sidestep", "provider", "stop", "--socket", str(path)], check=True)


def test_every_check_is_run() -> None:
    names = {
        line.split("(")[0].removeprefix("def check_")
        for line in CHECKS.read_text().splitlines()
        if "def check_" in line
    }
    assert names == {
        *ALONE,
        *UVLOOP,
        *TLS,
        "preloaded",
        "echo_client",
        "echo_server",
        "in_place_under_demotion",
        *LIBRARIES,
    }


def test_the_package_imports_nothing_of_the_api() -> None:
    """`sidestep run` must start quickly."""
    look = (
        "import sys, sidestep.cli; print({'asyncio', 'ctypes', 'sidestep.socket', 'sidestep.embed'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
