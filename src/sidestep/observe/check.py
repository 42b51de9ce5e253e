"""Prediction of a program's connections under sidestep, here, before anything is deployed.

The program is judged by its file (`preload_check`), this place by trying what the shim would do in it. Run it where the
program will run: in its container, as its user, with its limits. Statements about a program's code are guesses from its
bytes, and are marked as such.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sidestep import config, limits
from sidestep.errors import SidestepError
from sidestep.observe import doctor, other_users, preload_check
from sidestep.observe.doctor import Finding, Level
from sidestep.provider import control
from sidestep.provider.proof import lookup as proof

_OF_THE_LIBC: Final = ("ld-linux", "libc.so", "libpthread", "libsidestep", "linux-vdso")  # make system calls for others
_CHANNELS_COMFORTABLE: Final = 64  # fewer than so many in the memory of a container are worth a word
_CGROUP: Final = Path("/sys/fs/cgroup")


def check_program(name: str) -> Iterator[Finding]:
    """Findings about the program that `name` would run: whether the shim reaches it, and its calls past the shim."""
    try:
        program = preload_check.inspect(preload_check.find(name))
    except SidestepError as error:
        yield Finding(name, Level.FAIL, error.message, error.remedy)
        return
    for obstacle in program.obstacles:
        yield Finding(name, Level.FAIL, obstacle.verdict, obstacle.remedy)
    if program.obstacles:
        return
    chain = " -> ".join(program.chain)
    if program.loader:
        yield Finding(name, Level.OK, f"sidestep's loader starts it, with all its system calls replaced: {chain}")
        return
    yield Finding(name, Level.OK, f"the shim reaches it: {chain}")
    try:
        loaded, missing = preload_check.libraries(program.chain[-1])
    except SidestepError as error:
        yield Finding(name, Level.NOTE, error.message, error.remedy)
        return
    if missing:
        yield Finding(
            name, Level.FAIL, f"cannot be executed: {', '.join(missing)} not found", "install the libraries it needs"
        )
    yield from _own_calls(name, [Path(program.chain[-1]), *loaded])


def _own_calls(name: str, files: list[Path]) -> Iterator[Finding]:
    """Notes of system calls that go past the C library, and so past the shim."""
    rings, sockets = [], []
    for file in files:
        if file.name.startswith(_OF_THE_LIBC):
            continue
        try:
            found = preload_check.calls(file)
        except OSError:  # a file hidden from this user, though the loader is let in
            continue
        if found.io_uring:
            rings.append(file.name)
        if found.sockets:
            sockets.append(file.name)
    if rings:
        yield Finding(
            name, Level.NOTE, f"may move socket bytes by io_uring, past the shim ({', '.join(rings)}); a guess",
            "if so, switch io_uring off in its settings; sockets in rings of liburing.so.2 stay on TCP, and all where "
            "rings are made in other ways",
        )  # fmt: skip
    if sockets:
        yield Finding(
            name, Level.NOTE, f"may make socket calls of its own, past the C library ({', '.join(sockets)}); a guess",
            "try it: 'sidestep explain' names COUNT_MISMATCH where it is so",
        )  # fmt: skip


def check_place(socket_path: Path) -> Iterator[Finding]:
    """Findings about this container and its limits: whether a program started here could be promoted."""
    yield from doctor.run_checks((
        *doctor.kernel_checks(),
        ("descriptors", doctor.descriptors),
        ("shim", doctor.shim),
        ("provider", lambda: doctor.provider(socket_path)),
        ("namespace", lambda: _namespace(socket_path)),
        ("memory", lambda: _memory(socket_path)),
        *doctor.log_checks(),
    ))  # fmt: skip


def _status(socket_path: Path) -> dict[str, object]:
    if not config.answers(socket_path):
        return {}
    with control.ControlConnection(socket_path) as connection:
        return connection.status()


def _namespace(socket_path: Path) -> Finding:
    status = _status(socket_path)
    mine, theirs = proof.netns_cookie(), status.get("netns_cookie")
    if theirs is None:
        return Finding("namespace", Level.OK, "the provider will be in this network namespace")
    if mine == theirs:
        return Finding("namespace", Level.OK, "the provider is in this network namespace")
    text = f"the provider is in another network namespace ({theirs}; this one is {mine}), and serves both"
    if status.get("proves_paths"):
        return Finding("namespace", Level.OK, text)
    return Finding(
        "namespace", Level.NOTE, f"{text}; connections between the two stay on TCP",
        f"{other_users.remedy()}; or one with --remote and a --socket of its own in each",
    )  # fmt: skip


def _memory(socket_path: Path) -> Finding:
    limit, file = memory_limit()
    status = _status(socket_path)
    if limit is None:
        return Finding("memory", Level.OK, "no limit of a container")
    ring_size = status.get("ring_size")
    ring_size = ring_size if isinstance(ring_size, int) else limits.RING_SIZE_DEFAULT
    channel_len = limits.CHANNEL_HEADER_SIZE + 2 * ring_size
    channels = limit // channel_len
    text = f"{file} is {limit:,} bytes: room for {channels:,} channels of {channel_len:,}, if nothing else took any"
    if channels >= _CHANNELS_COMFORTABLE:
        return Finding("memory", Level.OK, text)
    return Finding("memory", Level.NOTE, text, "smaller rings: sidestep run --ring-size 16K, or a higher limit")


def memory_limit() -> tuple[int | None, Path | None]:
    """The tightest limit of memory on this process's way up the control groups, in bytes, and the file that says it."""
    found: list[tuple[int, Path]] = []
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        # Version 1 has a tree of its own for memory.
        base, name = (_CGROUP / "memory", "memory.limit_in_bytes") if controllers else (_CGROUP, "memory.max")
        place = base / group.lstrip("/")
        for level in (place, *place.parents):
            if not level.is_relative_to(base):
                break
            try:
                text = (level / name).read_text(encoding="ascii").strip()
            except OSError:  # a level that this container does not see, or the root, which has none
                continue
            if text.isdigit() and int(text) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                found.append((int(text), level / name))
    return min(found, default=(None, None), key=lambda one: one[0])
