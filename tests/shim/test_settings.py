"""What the environment tells the shim, and what of it the commands take, is the same; its log ends no program."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from told_ends import End, join, promote

from sidestep.config import ENV_PROMOTE_AFTER, ENV_RING_SIZE, ENV_SPIN_US
from sidestep.errors import Misuse
from sidestep.native import defaults
from sidestep.settings import PromoteAfter
from sidestep.testing import Connection, Sidestep

THRESHOLDS = (
    "",
    "0",
    "8",
    "8:",
    ":8",
    "8:abc",
    "8:4096",
    "8:40x",
    "8 ",
    " 8",
    "+8",
    "-8",
    "0x8",
    "8:-1",
    "4194304",
    "4194303:1",
)


def _said(sidestep: Sidestep, name: str, value: str) -> str:
    """What a program says whose environment has that."""
    env = sidestep.env(**{name: value})
    return str(sidestep.run(["/bin/true"], env=env, stderr=subprocess.PIPE, text=True).stderr)


@pytest.mark.parametrize("text", THRESHOLDS)
def test_the_shim_takes_the_thresholds_that_the_commands_take(sidestep: Sidestep, text: str) -> None:
    said = _said(sidestep, ENV_PROMOTE_AFTER, text)
    if not text:
        assert said == "", "as if it were not there"
        return
    try:
        PromoteAfter.parse(text)
    except Misuse:
        assert said == f"sidestep: {ENV_PROMOTE_AFTER}={text} is not CALLS or CALLS:BYTES; using {PromoteAfter()}\n"
    else:
        assert said == ""


def test_a_number_has_nothing_behind_it(sidestep: Sidestep) -> None:
    assert "is not a number" in _said(sidestep, ENV_RING_SIZE, "4096:x")


@pytest.mark.parametrize("spin_us", [defaults.SPIN_US_MAX, defaults.SPIN_US_MAX + 1])
def test_the_shim_spins_as_long_as_the_commands_allow(sidestep: Sidestep, spin_us: int) -> None:
    told = "is not a number" in _said(sidestep, ENV_SPIN_US, str(spin_us))
    assert told is (spin_us > defaults.SPIN_US_MAX)


@pytest.mark.slow
def test_a_program_that_no_provider_has_answered_yet_counts_as_the_others_do() -> None:
    with Sidestep(promote_after=None) as sidestep:
        a, b = End(sidestep), End(sidestep)
        join(a, b)

        def offered() -> bool:
            return any(c.role == "active" and c.state == "offered" for c in sidestep.connections())

        for _ in range(PromoteAfter().calls - 1):
            a.ask("s.sendall(b'x')")
            assert not offered()
        a.ask("s.sendall(b'x')")
        assert offered()


@pytest.mark.slow
@pytest.mark.parametrize(("address", "here"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
def test_the_address_that_leads_here_by_itself_is_this_hosts(sidestep: Sidestep, address: str, here: str) -> None:
    """The kernel takes the unspecified address of connect() for loopback."""
    a, b = End(sidestep), End(sidestep)
    join(a, b)
    promote(sidestep, a, b)  # the provider has told both what it can reach
    port = b.ask(f"serve('near', {here!r})")
    a.ask(f"connect({port}, 'near', {address!r})")
    b.ask("accept('near')")
    promote(sidestep, a, b, "near", count=4)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGXFSZ, signal.SIGPIPE], ids=lambda number: number.name)
def test_a_log_that_cannot_be_written_ends_no_program(
    sidestep: Sidestep, tmp_path: Path, number: signal.Signals
) -> None:
    """The file is at the limit that the program has set itself, or is a pipe whose reader has gone."""
    log = tmp_path / "log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    if number == signal.SIGXFSZ:
        log.unlink()
    a, b = End(sidestep, log), End(sidestep)
    join(a, b)
    promote(sidestep, a, b)
    a.ask(f"int(__import__('signal').signal({number.value}, {signal.SIG_DFL.value}))")  # Python ignores both
    if number == signal.SIGXFSZ:
        assert log.stat().st_size
        a.ask("__import__('resource').setrlimit(1, (0, 0))")  # RLIMIT_FSIZE
    os.close(reader)
    sidestep.demote(timeout_s=0)

    def heard(found: list[Connection]) -> bool:
        """Whether it has, which is a line."""
        a.ask("s.sendall(b'x')")
        return any((c.role, c.state) == ("active", "pinned") for c in found)

    sidestep.wait_for(heard)
    assert b.ask("s.recv(1)") == b"x"
    assert a.ask("len(__import__('signal').sigpending())") == 0
