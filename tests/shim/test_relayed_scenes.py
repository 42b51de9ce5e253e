"""The same scenes with a protocol between the two ends: what the provider hands on later than TCP its own is not heard.

Each connection goes through the relay of examples/, installed as a distribution of its own.
"""

# mypy: disable-error-code="arg-type,import-not-found,misc"
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from scene_runner import Build, Run, Variant, difference, difference_known, run, scene_names
from selection import rotate

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

VARIANTS: Final = [
    (Variant(), "0"),
    (Variant(peer_process=True, active=False, family="6", build=Build.FORTIFIED), "4"),
]


def _plays() -> Iterator[object]:
    never_again = set(scene_names("demote"))  # a direction that has left the provider for TCP stays there
    for at, scene in enumerate(name for name in scene_names() if name not in never_again):
        for variant, promote_after in rotate(VARIANTS, at):
            reason = difference_known(scene, variant)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            yield pytest.param(scene, variant, promote_after, id=f"{scene}-{variant}-after{promote_after}", marks=marks)


@pytest.mark.parametrize(("scene", "variant", "promote_after"), list(_plays()))
def test_same_as_kernel_tcp_through_the_provider(
    scene: str,
    variant: Variant,
    promote_after: str,
    scene_program: Callable[[Build], Path],
    native_run: Callable[[str, Variant], Run],
    relaying: Callable[[str], Sidestep],
) -> None:
    native = native_run(scene, variant)
    assert native.failure is None, f"over kernel TCP: {native.failure}\n{native.transcript}"
    sidestep = relaying(promote_after)
    before = sidestep.status()["counters"].get("relay_opened", 0)
    played = run(scene_program(variant.build), scene, variant, sidestep)
    different = difference(native.transcript, played.transcript)
    assert played.failure is None, f"through the provider: {played.failure}\n{different or played.transcript}"
    assert not different, different
    opened = sidestep.status()["counters"].get("relay_opened", 0) - before
    assert opened or not played.promotions_seen, "promoted without the provider"
