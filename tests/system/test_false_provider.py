"""Who may be a provider: another user must not pair what others say, wherever the socket is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from common import PATIENCE_S
from tenants import ALICE, BOB, PROGRAMS, SERVICE

from sidestep import config
from sidestep.settings import PromoteAfter

ROOT = 0
Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def serve(closing: ExitStack) -> Serve:
    """Starts a provider of BOB's at a socket that `listener` listens at."""

    def start(path: Path, listener: int, wrap: Sequence[str] = ()) -> subprocess.Popen[str]:
        argv = [*wrap, sys.executable, str(PROGRAMS / "false_provider.py"), str(path), str(listener), str(BOB)]
        started = closing.enter_context(
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
        )
        closing.callback(started.kill)
        assert started.stdout is not None
        assert started.stdout.readline() == "listening\n"
        return started

    return start


def talk(path: Path, wrap: Sequence[str] = ()) -> str:
    """A program of ALICE's says a secret under the shim; whether its Python believes the provider, and why not."""
    env = config.ShimSettings(path, PromoteAfter(0)).environment(os.environ)
    found = subprocess.run(
        [*wrap, sys.executable, str(PROGRAMS / "secret.py"), str(ALICE)], env=env,
        capture_output=True, text=True, timeout=60, check=True, cwd="/",
    )  # fmt: skip
    return found.stdout.strip()


def seen(provider: subprocess.Popen[str]) -> str:
    return provider.communicate(timeout=PATIENCE_S)[0].strip()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which all users can make things, as /tmp."""
    with tempfile.TemporaryDirectory(prefix="sidestep-false-") as made:
        Path(made).chmod(0o1777)
        yield Path(made)


@pytest.mark.parametrize(
    ("owner", "mode", "listener"),
    [
        pytest.param(BOB, 0o755, BOB, id="his own place"),
        pytest.param(ALICE, 0o777, BOB, id="a place of the victim's that is open"),
        pytest.param(ROOT, 0o1777, BOB, id="among all others' things"),
        pytest.param(ROOT, 0o755, BOB, id="a place of root's"),
        pytest.param(BOB, 0o755, ROOT, id="his own place, with a socket that root handed him"),
        pytest.param(BOB, 0o755, ALICE, id="his own place, with a socket of the victim's"),
        pytest.param(ALICE, 0o775, ALICE, id="a place that a group can change"),
    ],
)
def test_another_user_is_told_nothing(serve: Serve, shared: Path, owner: int, mode: int, listener: int) -> None:
    (place := shared / "place").mkdir()
    os.chown(place, owner, owner)
    place.chmod(mode)
    provider = serve(place / "provider", listener)
    verdict = talk(place / "provider")
    assert f"{place}/provider is not believed" in verdict
    clients, what = seen(provider).split(", ")
    assert what == "nothing"
    assert int(clients.removesuffix(" clients")) > 0  # they came, looked at him, and went without a word


@pytest.mark.parametrize(("owner", "listener"), [(ALICE, ALICE), (ROOT, ROOT), (ROOT, ALICE), (ALICE, ROOT)])
def test_ones_own_and_roots_are_believed(serve: Serve, shared: Path, owner: int, listener: int) -> None:
    """And so the test above would see what is told: this provider serves as BOB, too."""
    (place := shared / "place").mkdir(mode=0o755)
    os.chown(place, owner, owner)
    provider = serve(place / "provider", listener)
    assert talk(place / "provider") == "believed"
    assert seen(provider).endswith("read")


@pytest.mark.parametrize(
    ("owner", "mode", "listener", "believed"),
    [
        (SERVICE, 0o755, SERVICE, True),
        (ROOT, 0o755, ROOT, True),
        (SERVICE, 0o755, ROOT, True),
        (SERVICE, 0o755, BOB, False),
        (ROOT, 0o755, SERVICE, False),
        (SERVICE, 0o775, SERVICE, False),
    ],
)
def test_whom_root_gave_the_systems_place_to_is_believed(
    serve: Serve, owner: int, mode: int, listener: int, believed: bool
) -> None:
    """In a /run of their own."""
    path = config.SYSTEM_SOCKET
    script = f"mount -t tmpfs none /run && mkdir {path.parent} && chown {owner} {path.parent}"
    script += f' && chmod {mode:o} {path.parent} && exec "$@"'
    provider = serve(path, listener, ["unshare", "--mount", "sh", "-c", script, "sh"])
    verdict = talk(path, ["nsenter", f"--target={provider.pid}", "--mount", "--"])
    assert (verdict == "believed") is believed
    assert seen(provider).endswith("read" if believed else "nothing")
