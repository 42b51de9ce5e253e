"""The same scenes with the peer on another host: two providers, and a link of SDP over iWARP between them.

What they are compared with is kernel TCP between the same two hosts. Scenes that have both ends of a connection in one
process cannot be played so.
"""

# mypy: disable-error-code="arg-type,import-not-found,misc"
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from scene_runner import (
    Apart,
    Build,
    Run,
    Variant,
    difference,
    difference_known,
    run,
    scene_names,
)
from selection import rotate

pytestmark = pytest.mark.slow

VARIANTS: Final = [
    (Variant(peer_process=True), "0"),
    (Variant(peer_process=True, active=False, family="6", build=Build.FORTIFIED), "4"),
]
# Beside those of one host; under both variants.
REMOTE_DIFFERENCES: Final = {
    "demoted_in_send": "a provider between takes more than SO_SNDBUF says: nobody sleeps in send and hears the order",
    "lent_for_a_while": "a direction whose bytes were recalled stays on TCP",
}


def _plays() -> Iterator[object]:
    for at, scene in enumerate(scene_names()):
        for variant, promote_after in rotate(VARIANTS, at):
            reason = difference_known(scene, variant) or REMOTE_DIFFERENCES.get(scene)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            yield pytest.param(scene, variant, promote_after, id=f"{scene}-{variant}-after{promote_after}", marks=marks)


@pytest.mark.parametrize(("scene", "variant", "promote_after"), list(_plays()))
def test_same_as_kernel_tcp_between_two_hosts(
    scene: str,
    variant: Variant,
    promote_after: str,
    scene_program: Callable[[Build], Path],
    apart_native: Callable[[str, Variant, str], Run],
    apart: Callable[[str], Apart],
) -> None:
    native = apart_native(scene, variant, promote_after)
    if native.needs_one_host:
        pytest.skip("it has both ends of a connection in one process")
    assert native.failure is None, f"over kernel TCP: {native.failure}\n{native.transcript}"
    place = apart(promote_after)
    before = _joined(place)
    differs = scene in REMOTE_DIFFERENCES
    played = run(scene_program(variant.build), scene, variant, place, apart=place, differs=differs)
    different = difference(native.transcript, played.transcript)
    assert played.failure is None, f"between two hosts: {played.failure}\n{different or played.transcript}"
    assert not different, different
    assert _joined(place) != before or not played.promotions_seen, "promoted without the providers"


def _joined(place: Apart) -> int:
    """How many connections the two have carried."""
    return sum(host.joined(how) for host in (place.one, place.other) for how in ("connect", "accept"))


def test_known_differences_name_scenes() -> None:
    assert REMOTE_DIFFERENCES.keys() <= set(scene_names())
