"""The scenes under the shim built with ASan and UBSan, and with TSan: no report, and the transcript of kernel TCP.

What the programs of tests/native/test_sanitized_shim.py never do, scenes do: fork, exec, pass descriptors, close under
readers, demote by options, recall, nest epoll sets. All scenes run but those that a table here names with the reason.
For TSan the scenes are built with it too, so that it knows how their threads are ordered; a peer in the same process
shows it both ends of a ring.
"""

# mypy: disable-error-code="arg-type,import-not-found,misc"
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from scene_runner import (
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
from toolchain import ADDRESS, PLAIN, THREAD, SanitizedShim, Sanitizer

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

TOO_LONG = "sits waiting for many seconds, between calls that other scenes make as well"
BEGINS_WITH_ERRNO = "prints the errno the program began with; a runtime with log_path leaves EEXIST there"

# what is not played, mostly for what the sanitizers' own runtimes do over kernel TCP as well
WITH_ANY = {
    "calls_past_the_library": TOO_LONG,
    "promoted_then_quiet": TOO_LONG,
    "stdio_both_ways": BEGINS_WITH_ERRNO,
    "stdio_standard": BEGINS_WITH_ERRNO,
}
WITH_THREAD = {
    **WITH_ANY,
    "everything_closed": "beside the runtime's own thread, CLOSE_RANGE_UNSHARE leaves the shim's table as it is",
    "close_under_reader": "to TSan, close() while another thread sits in the kernel's recv is a race",
    "epoll_made_by_parent": "TSan does not see that the shim's locks begin anew in a forked child that has threads",
}
WITH_THREAD_ON_TCP = {
    **WITH_THREAD,
    "handler_writes": "TSan holds a signal back from a thread that sits in the kernel's recv",
}


@dataclass(frozen=True, slots=True)
class Mode:
    """A sanitizer, the conditions of the run, and the scenes that cannot be played so."""

    sanitizer: Sanitizer
    variant: Variant
    promote_after: str
    left_out: Mapping[str, str] = field(hash=False)
    tables: tuple[str, ...] = ("*",)
    relayed: bool = False  # a provider stands between the two ends

    def __str__(self) -> str:
        way = "relayed-" if self.relayed else ""
        return f"{way}{self.sanitizer.name}-{self.variant}-after{self.promote_after}"

    def scenes(self) -> Iterator[str]:
        """What is played."""
        for scene in itertools.chain.from_iterable(map(scene_names, self.tables)):
            if scene not in self.left_out and not difference_known(scene, self.variant):
                yield scene


LATE = "1000000:1000000000"
TABLES = ("explicit", "connect", "process", "fd")
MODES = [
    Mode(ADDRESS, Variant(), "0", WITH_ANY),
    Mode(ADDRESS, Variant(peer_process=True, active=False, family="m"), "4", WITH_ANY),
    Mode(THREAD, Variant(), "0", WITH_THREAD),
    Mode(THREAD, Variant(warm=False), "4", WITH_THREAD_ON_TCP),
    # what is opened, bound and listened on otherwise; bytes and waits are the same
    Mode(
        ADDRESS,
        Variant(sockets=Sockets.EXPLICIT),
        LATE,
        WITH_ANY,
        TABLES,
    ),
    Mode(
        THREAD,
        Variant(sockets=Sockets.EXPLICIT),
        LATE,
        WITH_THREAD,
        TABLES,
    ),
    # a provider in between: what it hands on later than TCP its own, and what has to wait for that
    Mode(ADDRESS, Variant(), "0", WITH_ANY, ("end", "thread", "wait"), relayed=True),
    Mode(ADDRESS, Variant(peer_process=True, active=False), "4", WITH_ANY, ("process", "option"), relayed=True),
    Mode(THREAD, Variant(), "0", WITH_THREAD, ("end", "thread", "wait"), relayed=True),
    Mode(ADDRESS, Variant(warm=False, sockets=Sockets.DIRECT), "0", WITH_ANY, ("explicit", "connect")),
]


THREADED = ("thread", "wait", "epoll", "nest", "interest", "process", "signal")  # where the order of threads matters


def _runs() -> Iterator[object]:
    """Under ASan every scene in a mode that the row decides; under TSan those where threads matter."""
    played = {mode: set(mode.scenes()) for mode in MODES}
    threaded = set(itertools.chain.from_iterable(map(scene_names, THREADED)))
    for at, scene in enumerate(scene_names()):
        for sanitizer in (ADDRESS, THREAD):
            if sanitizer is ADDRESS or scene in threaded or at_least("full"):
                modes = [mode for mode in MODES if mode.sanitizer is sanitizer and scene in played[mode]]
                for mode in rotate(modes, at):
                    yield pytest.param(mode, scene, id=f"{mode}-{scene}")


def test_what_is_left_out_are_scenes() -> None:
    assert {scene for mode in MODES for scene in mode.left_out} <= set(scene_names())


@pytest.mark.parametrize(("mode", "scene"), list(_runs()))
def test_no_report(
    mode: Mode,
    scene: str,
    scene_program: Callable[..., Path],
    native_run: Callable[[str, Variant], Run],
    provider: Callable[[str, int | None], Sidestep],
    relaying: Callable[[str], Sidestep],
    tmp_path: Path,
) -> None:
    native = native_run(scene, mode.variant.native())
    assert native.failure is None, f"over kernel TCP: {native.failure}\n{native.transcript}"
    sidestep = relaying(mode.promote_after) if mode.relayed else provider(mode.promote_after, None)
    before = sidestep.status()["counters"].get("relay_opened", 0)
    shim = SanitizedShim(mode.sanitizer, sidestep, tmp_path)
    program = scene_program(Build.PLAIN, THREAD if mode.sanitizer is THREAD else PLAIN)
    shimmed = run(program, scene, mode.variant, sidestep, shim.env)
    shim.check()
    different = difference(native.transcript, shimmed.transcript)
    assert shimmed.failure is None, f"under the shim: {shimmed.failure}\n{different or shimmed.transcript}"
    assert not different, different
    if mode.relayed and shimmed.promotions_seen:
        assert sidestep.status()["counters"]["relay_opened"] > before, "promoted without the provider"
