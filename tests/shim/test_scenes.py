"""The same socket calls over kernel TCP and under the shim: the same results.

Each scene is a C program (programs/); each runs under several conditions, which differ in where the peer lives, which
end connects, whether the connection is promoted before the scene or in its midst, in family, ring size and the names of
the C library used. A row of the run decides which of them a scene gets (see selection.py).
"""

# mypy: disable-error-code="arg-type,import-not-found,misc"
from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from foreign_programs import loader_missing
from scene_runner import (
    KNOWN_DIFFERENCES,
    LOADED,
    Build,
    Run,
    Sockets,
    Variant,
    difference,
    difference_known,
    run,
    scene_names,
)
from selection import at_least, rotate

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Mode:
    """A variant, and how the shim is set."""

    variant: Variant
    promote_after: str
    ring_size: int | None = None

    def __str__(self) -> str:
        ring = f"-ring{self.ring_size}" if self.ring_size else ""
        return f"{self.variant}-after{self.promote_after}{ring}"


MODES = [
    Mode(Variant(), "0"),
    Mode(Variant(peer_process=True, active=False, family="6", build=Build.FORTIFIED), "4"),
    Mode(Variant(peer_process=True, warm=False, family="m"), "4"),
    Mode(Variant(active=False, warm=False, build=Build.FORTIFIED), "0"),
    Mode(Variant(peer_process=True, family="m"), "0", ring_size=4096),
    # so late that only what is opened as explicit is promoted
    Mode(Variant(peer_process=True, active=False, family="6", sockets=Sockets.EXPLICIT), "1000000:1000000000"),
    Mode(Variant(warm=False, sockets=Sockets.DIRECT), "0"),
    Mode(Variant(peer_process=True, shaken=True), "0"),
    Mode(Variant(build=Build.STATIC), "4"),
    Mode(Variant(peer_process=True, build=Build.MUSL), "0"),
    Mode(Variant(active=False, family="m", build=Build.STATIC, shaken=True), "4", ring_size=4096),
    Mode(Variant(peer_process=True, active=False, warm=False, family="6", build=Build.MUSL), "4", ring_size=4096),
]


def _plays() -> Iterator[object]:
    for at, scene in enumerate(scene_names()):
        for mode in rotate(MODES, at, test=1, ci=4):
            reason = difference_known(scene, mode)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            yield pytest.param(scene, mode, id=f"{scene}-{mode}", marks=marks)


def test_known_differences_name_scenes() -> None:
    assert KNOWN_DIFFERENCES.keys() <= set(scene_names())


@pytest.mark.parametrize(("scene", "mode"), list(_plays()))
def test_same_as_kernel_tcp(
    scene: str,
    mode: Mode,
    scene_program: Callable[[Build], Path],
    native_run: Callable[[str, Variant], Run],
    provider: Callable[[str, int | None], Sidestep],
) -> None:
    native = native_run(scene, mode.variant.native())
    assert native.failure is None, f"over kernel TCP: {native.failure}\n{native.transcript}"
    sidestep = provider(mode.promote_after, mode.ring_size)
    if mode.variant.build in LOADED and (why := loader_missing()):
        pytest.skip(why)  # such a program stays on TCP on this machine, as `sidestep check` says
    known = bool(difference_known(scene, mode))
    shimmed = run(scene_program(mode.variant.build), scene, mode.variant, sidestep, differs=known)
    different = difference(native.transcript, shimmed.transcript)
    assert shimmed.failure is None, f"under the shim: {shimmed.failure}\n{different or shimmed.transcript}"
    assert not different, different
    if mode.variant.shaken and shimmed.promotions_seen:
        assert shimmed.demoted, "nothing was demoted"


@pytest.mark.parametrize("variant", [Variant(), Variant(peer_process=True, active=False)], ids=str)
@pytest.mark.parametrize("scene", list(scene_names()) if at_least("full") else ["connect_refused"])
def test_scene_is_deterministic(scene: str, variant: Variant, scene_program: Callable[[Build], Path]) -> None:
    """Of the scenes themselves, without the shim."""
    program = scene_program(variant.build)
    first = run(program, scene, variant)
    for _ in range(3):
        assert difference(first.transcript, run(program, scene, variant).transcript) == ""


def test_every_scene_is_in_the_program(scene_program: Callable[[Build], Path]) -> None:
    listed = subprocess.run([scene_program(Build.PLAIN)], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(listed) == sorted(scene_names())
    assert len(set(listed)) == len(listed) > 150


def test_fortified_build_calls_the_checked_names(scene_program: Callable[[Build], Path]) -> None:
    """Otherwise nothing would say that the shim hooks them."""
    symbols = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", scene_program(Build.FORTIFIED)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    called = {line.split()[-1].split("@")[0] for line in symbols.splitlines()}
    wanted = {
        "__read_chk", "__recv_chk", "__recvfrom_chk", "__poll_chk", "__ppoll_chk", "__fdelt_chk", "__fgets_chk",
        "__fread_chk", "__fprintf_chk", "__dprintf_chk", "sendfile64", "fcntl64", "preadv64", "pwritev64", "freopen64",
    }  # fmt: skip
    assert wanted <= called, wanted - called
