"""Spins that are lost time and again are given up: who is to answer may wait for the very CPU that spins."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from busy import busy
from told_ends import End, join, promote
from traced import calls_until_output

from sidestep.native import defaults
from sidestep.testing import Sidestep

SETAFFINITY = {"x86_64": 203, "aarch64": 122}[os.uname().machine]
ROUNDS = 60
LATE_S = 1.2e-6 * defaults.SPIN_US_MAX  # an answer that spinning a little longer seems to catch, and never does
LOST_MAX = ROUNDS // 4  # four, then one for each rest, which lasts as long as 64 spins
WAITS = {
    "recv": "s.recv(1)",
    "poll": "s_polled()",
    "epoll": "watched.poll() and s.recv(1)",
}

REFUSED = 5000  # reads of nothing
LOOKS_MAX = 16  # as each look in vain is followed by twice as many refusals without one, up to 1,024


@contextmanager
def on_cpus(cpus: set[int]) -> Iterator[None]:
    """What is started in the block runs there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_spins_that_are_always_lost_are_given_up(wait: str) -> None:
    longest = str(defaults.SPIN_US_MAX)
    cpus = os.sched_getaffinity(0)
    ours = {min(cpus)}  # whoever is busy elsewhere is counted among those who want it, and takes none of it
    with Sidestep() as sidestep, ExitStack() as stack:
        with on_cpus(cpus - ours or ours):
            stack.enter_context(busy(1))
        with on_cpus(ours):
            a, b = End(sidestep, SIDESTEP_SPIN_US=longest), End(sidestep, SIDESTEP_SPIN_US=longest)
        join(a, b)
        join(a, b, "near")  # what watch() puts into the set beside it
        promote(sidestep, a, b, count=2)
        a.ask("watch()")

        before = lost(sidestep, a)
        # the pause is the answer's lateness, which is what is tried; nothing waits for luck in it
        # not luck: the answer is late so that the read sleeps
        b.ask(f"Later.of(lambda: [s.recv(1) and time.sleep({LATE_S}) or s.sendall(b'x') for _ in range({ROUNDS})])")
        a.ask(f"[s.sendall(b'x') or {WAITS[wait]} for _ in range({ROUNDS})]")
        assert lost(sidestep, a) - before <= LOST_MAX


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: each pair is on it")
def test_a_pair_in_turns_comes_onto_one_cpu(tmp_path: Path) -> None:
    """On two CPUs that others want, each message would interrupt one of them."""
    cpus, log, rounds = os.sched_getaffinity(0), tmp_path / "log", 500
    one, other = sorted(cpus)[:2]
    with Sidestep() as sidestep, busy(2 * len(cpus)):
        a, b = End(sidestep, log, SIDESTEP_SPIN_US="0"), End(sidestep, SIDESTEP_SPIN_US="0")
        join(a, b)
        promote(sidestep, a, b)
        os.sched_setaffinity(b.pid, {other})

        def came(_: object) -> bool:
            os.sched_setaffinity(a.pid, {one})
            b.ask(f"Later.of(lambda: [s.recv(1) and s.sendall(b'x') for _ in range({2 * rounds})])")
            a.ask(f"[s.sendall(b'x') or s.recv(1) for _ in range({rounds})]")
            os.sched_setaffinity(a.pid, cpus)
            a.ask(f"[s.sendall(b'x') or s.recv(1) for _ in range({rounds})]")
            b.ask("Later.last.result()")
            return f"goes to CPU {other}" in log.read_text()

        sidestep.wait_for(came)  # the kernel may be first


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: no thread is moved")
def test_a_thread_that_is_moved_keeps_its_cpus() -> None:
    """A mask would keep it from CPUs that its cpuset gets later; who has the widest follows the cpuset."""
    cpus, masks, rounds = os.sched_getaffinity(0), list[bytes](), 200
    one, other = sorted(cpus)[:2]
    with Sidestep() as sidestep, busy(2 * len(cpus)):
        a, b = End(sidestep, SIDESTEP_SPIN_US="0"), End(sidestep, SIDESTEP_SPIN_US="0")
        join(a, b)
        promote(sidestep, a, b)
        os.sched_setaffinity(b.pid, {other})

        def seen(number: int, arguments: Sequence[int]) -> None:
            if number == SETAFFINITY:
                with Path(f"/proc/{a.pid}/mem").open("rb", buffering=0) as memory:
                    memory.seek(arguments[2])
                    masks.append(memory.read(arguments[1]))

        def moved(_: object) -> bool:
            os.sched_setaffinity(a.pid, {one})
            b.ask(f"Later.of(lambda: [s.recv(1) and s.sendall(b'x') for _ in range({2 * rounds})])")
            a.ask(f"[s.sendall(b'x') or s.recv(1) for _ in range({rounds})]")
            os.sched_setaffinity(a.pid, cpus)
            calls_until_output(
                a.pid, lambda: a.tell(f"[s.sendall(b'x') or s.recv(1) for _ in range({rounds})] and 1"), seen
            )
            assert a.answer() == "1"
            b.ask("Later.last.result()")
            return bool(masks)

        sidestep.wait_for(moved)  # the kernel may be first
        assert os.sched_getaffinity(a.pid) == cpus
    assert all(byte == 0xFF for byte in masks[-1])


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: each pair is on it")
def test_who_only_reads_is_left_where_it_is(tmp_path: Path) -> None:
    """It sleeps for each message, and works beside the other end."""
    cpus, log = os.sched_getaffinity(0), tmp_path / "log"
    one, other = sorted(cpus)[:2]
    with Sidestep() as sidestep, busy(2 * len(cpus)):
        a, b = End(sidestep, log, SIDESTEP_SPIN_US="0"), End(sidestep, SIDESTEP_SPIN_US="0")
        join(a, b)
        promote(sidestep, a, b)
        os.sched_setaffinity(b.pid, {other})
        os.sched_setaffinity(a.pid, {one})
        answered(a, b)
        b.tell("[time.sleep(0.03) or s.sendall(b'x') for _ in range(2)] and 1")
        a.ask("[s.recv(1) for _ in range(2)]")  # an idle end that does not answer any more
        assert b.answer() == "1"
        before = log.read_text()
        # a sender that is slow: each read is to sleep before its byte comes
        b.ask("Later.of(lambda: [time.sleep(0.001) or s.sendall(b'x') for _ in range(400)])")
        a.ask("[s.recv(1) for _ in range(100)]")
        os.sched_setaffinity(a.pid, cpus)
        a.ask("[s.recv(1) for _ in range(300)]")
        assert "goes to CPU" not in log.read_text().removeprefix(before)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: each pair is on it")
def test_an_idle_pair_comes_onto_one_cpu(tmp_path: Path) -> None:
    """A message after a pause would wake a halted CPU, and its answer another one."""
    cpus, log = os.sched_getaffinity(0), tmp_path / "log"
    one, other = sorted(cpus)[:2]
    with Sidestep() as sidestep:
        a, b = End(sidestep, log), End(sidestep)
        join(a, b)
        promote(sidestep, a, b)
        os.sched_setaffinity(b.pid, {other})

        def came(_: object) -> bool:
            os.sched_setaffinity(a.pid, {one})
            answered(a, b)
            os.sched_setaffinity(a.pid, cpus)
            answered(a, b, count=3)
            return f"goes to CPU {other}" in log.read_text()

        sidestep.wait_for(came)  # the kernel may be first


def answered(a: End, b: End, count: int = 2) -> None:
    """Lets `a` answer messages of `b` that come after a pause."""
    # not luck: the pause makes `a` idle
    b.tell(f"[time.sleep(0.03) or s.sendall(b'x') or s.recv(1) for _ in range({count})] and 1")
    a.ask(f"[s.recv(1) and s.sendall(b'x') for _ in range({count})]")
    assert b.answer() == "1"


def lost(sidestep: Sidestep, end: End) -> int:
    """Spins of the connection `s`, at one end."""
    port = end.ask("s.getsockname()[1]")
    return sum(c.spins_lost for c in sidestep.connections() if c.local.endswith(f":{port}"))


def refused(calls: str, stage: Sidestep) -> int:
    """How often a program that reads nothing, without waiting, was kept by a look for it."""
    a, b = End(stage), End(stage)
    for name in "s", "near":
        join(a, b, name)
    promote(stage, a, b, count=2)
    promote(stage, a, b, "near", count=4)
    a.ask("[each.setblocking(False) for each in (s, near)]")
    before = lost(stage, a)
    assert a.ask(f"{{told for _ in range({REFUSED}) for told in ({calls})}}") == "{'EAGAIN'}"
    kept = lost(stage, a) - before
    b.ask("s.sendall(b'y')")
    a.ask("s.setblocking(True)")
    assert a.ask("s.recv(2)") == b"y"
    return kept


def test_reads_of_nothing_are_hardly_ever_kept() -> None:
    with Sidestep() as stage:
        assert refused("tried(lambda: s.recv(1)),", stage) <= LOOKS_MAX


def test_reads_of_nothing_of_several_connections_are_never_kept() -> None:
    """The program has other work."""
    with Sidestep() as stage:
        assert refused("tried(lambda: s.recv(1)), tried(lambda: near.recv(1))", stage) == 0
