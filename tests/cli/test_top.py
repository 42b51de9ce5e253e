"""`sidestep top`: the text of a frame, and the live screen, over real connections."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from chatting import Started, ended, promoted_chat
from common import PATIENCE_S, slot
from shim_client import ShimClient
from textual.pilot import Pilot

from sidestep.cli.explain import explanation_text
from sidestep.cli.shown import percent, short
from sidestep.cli.top_app import ExplanationScreen, TopApp
from sidestep.cli.top_view import HEAD_LINES, SORTS, frame, headings, ordered, row
from sidestep.native.layout import REASON_TEXT, Reason, State
from sidestep.observe.explain import Explainer, Query
from sidestep.observe.traffic import Sample, View, compare, take_sample
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow  # real programs, and commands as processes

DEADLINE_S = PATIENCE_S
STREAM = """
import socket, sys
ends = socket.create_server(("127.0.0.1", 0)), None
one = socket.create_connection(ends[0].getsockname())
other = ends[0].accept()[0]
while True:
    one.sendall(bytes(100))
    left = 100
    while left:
        left -= len(other.recv(left))
    other.sendall(b"x")
    one.recv(1)
"""


@pytest.fixture
def busy(sidestep: Sidestep, closing: ExitStack) -> Started:
    """A program that talks to itself without end, by ring."""
    program = closing.enter_context(ended(sidestep.popen([sys.executable, "-c", STREAM])))
    sidestep.wait_for(lambda found: sum(one.promoted for one in found) == 2)
    return program


@pytest.fixture
def crowd(sidestep: Sidestep) -> Iterator[ShimClient]:
    """Five thousand connections."""
    with ShimClient(sidestep.socket, slots_max=5000) as client:
        client.hello()
        client.write_arena([
            slot(1 + number, born_ns=1 + number, state=State.PINNED if number % 5 else State.PROMOTED,
                 reason=Reason.KERNEL_TLS if number % 5 else Reason.NONE, tx_ring_bytes=number)
            for number in range(5000)
        ])  # fmt: skip
        yield client


def top(sidestep: Sidestep, *args: str) -> subprocess.CompletedProcess[str]:
    """`sidestep top ARGS`, not on a terminal."""
    argv = [sys.executable, "-m", "sidestep", "top", f"--socket={sidestep.socket}", "--interval=0.2", *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


# ---- text ----


def test_rates_are_those_of_the_interval(sidestep: Sidestep, busy: Started) -> None:
    found = json.loads(top(sidestep, "--json").stdout)
    assert [one["pid"] for one in found["connections"]] == [busy.pid] * 2
    for one in found["connections"]:
        assert one["rate"]["messages_per_s"] > 0
        # 101 bytes in two messages here, and a message may be read in two pieces
        assert 20 < one["rate"]["bytes_per_s"] / one["rate"]["messages_per_s"] <= 51
        assert one["rate"]["ring_share"] == 1
    assert found["total"]["messages_per_s"] == pytest.approx(
        sum(one["rate"]["messages_per_s"] for one in found["connections"])
    )
    assert found["states"] == {"promoted": 2}
    assert found["provider"]["pid"] == sidestep.provider_pid


def test_what_rests_has_no_rate(sidestep: Sidestep, closing: ExitStack) -> None:
    promoted_chat(sidestep, closing)
    found = json.loads(top(sidestep, "--json").stdout)
    assert len(found["connections"]) == 2
    assert found["total"]["messages_per_s"] == found["total"]["bytes_per_s"] == 0
    assert found["total"]["ring_share"] is None


def test_one_frame_as_text(sidestep: Sidestep, busy: Started) -> None:
    found = top(sidestep, "--once")
    lines = found.stdout.splitlines()
    assert f"provider {sidestep.provider_pid} at {sidestep.socket}" in lines[0]
    assert lines[1] == "ends: 2: 2 promoted"
    assert "100% ring" in lines[2]
    assert lines[3].startswith("offers: 1, 1 claimed")
    assert lines[HEAD_LINES].split()[:4] == ["PROGRAM", "PID", "CONNECTION", "STATE"]
    assert len(lines) == HEAD_LINES + 3
    assert all(str(busy.pid) in line and "promoted" in line and "100%" in line for line in lines[HEAD_LINES + 1 :])


def test_without_a_provider_or_a_terminal_it_says_so(sidestep: Sidestep) -> None:
    assert top(sidestep).returncode == 2
    sidestep.kill_provider()
    found = top(sidestep, "--once")
    assert (found.returncode, found.stdout) == (1, "")
    assert "sidestep provider start" in found.stderr


@pytest.fixture
def view(sidestep: Sidestep, crowd: ShimClient) -> View:
    """Of the crowd, in which connection 8 has sent a kilobyte."""
    before = take_sample(sidestep.socket)
    changed = {(os.getpid(), 8): slot(8, born_ns=8, tx_ring_bytes=7 + 1024, tx_ring_msgs=4 + 2)}
    crowd.write_arena([changed[os.getpid(), 8], slot(1, born_ns=1, tx_ring_bytes=0)])
    after = take_sample(sidestep.socket)
    return compare(before, Sample(before.at_s + 2, {**before.connections, **after.connections}, after.status))


def test_the_busiest_come_first_and_others_rest(view: View) -> None:
    first, second, *_ = ordered(view, "messages", "")
    assert (first.connection.born_ns, first.rate.messages, first.rate.payload_len) == (8, 1, 512)
    assert second.rate.messages == 0
    assert ordered(view, "messages", "", reverse=True)[-1] == first
    assert ordered(view, "total", "")[0].connection.born_ns == 5000
    assert ordered(view, "state", "")[0].connection.promoted
    assert all(len(ordered(view, name, "")) == 5000 for name in SORTS)


def test_rows_are_filtered_by_any_word(view: View) -> None:
    assert len(ordered(view, "messages", "kernel_tls")) == len(ordered(view, "messages", "PINNED")) == 3999
    assert [one.connection.local for one in ordered(view, "messages", "127.0.0.1:4999")] == ["127.0.0.1:4999"]
    assert ordered(view, "messages", "no such thing") == []


@pytest.mark.parametrize("width", [40, 80, 99, 100, 200])
def test_frames_fit_any_width(view: View, width: int) -> None:
    rows = ordered(view, "messages", "")[:50]
    lines = frame(view, rows, "/run/user/1000/sidestep/provider", width)
    assert len(lines) == HEAD_LINES + 1 + 50
    assert max(map(len, lines)) <= width
    if width >= 80:
        assert ":8 -> 127.0.0." in lines[HEAD_LINES + 1]
        assert lines[2] == "1 msg/s, 512B/s, 100% ring, 0 bells/s; 0.00 sleeps, 0.00 spins a msg"
    if width >= 100:
        assert any(line.endswith(" KERNEL_TLS") for line in lines)


def test_a_program_cannot_write_to_the_terminal_by_its_name(sidestep: Sidestep) -> None:
    program = sidestep.popen([sys.executable, "-c", "open('/proc/self/comm', 'w').write('\\x1b[31mred')\n" + STREAM])
    sidestep.wait_for(lambda found: any(one.program and "red" in one.program for one in found))
    sample = take_sample(sidestep.socket)
    view = compare(sample, Sample(sample.at_s + 1, sample.connections, sample.status))
    found = "".join(frame(view, view.activities, "here", 80))
    assert f" {program.pid} " in found
    assert found.isprintable()
    explained = [explanation_text(one) for one in Explainer(sidestep.socket).explain(Query(pid=program.pid))]
    assert len(explained) >= 2
    assert "\x1b" not in "".join(explained)


@pytest.mark.parametrize(("width", "expected"), [
    (100, "PROGRAM PID CONNECTION STATE MSG/S B/S RING BELL/S SLEEP SPIN WHY"),
    (80, "PROGRAM PID CONNECTION STATE MSG/S B/S RING BELL/S SLEEP SPIN"),
    (72, "PROGRAM PID CONNECTION STATE MSG/S B/S RING BELL/S"),
    (60, "PROGRAM PID CONNECTION STATE MSG/S B/S RING"),
    (40, "PROGRAM CONNECTION STATE"),
])  # fmt: skip
def test_what_costs_too_much_room_is_left_out_whole(view: View, width: int, expected: str) -> None:
    assert headings(width).split() == expected.split()
    line = row(ordered(view, "messages", "")[0], width)
    assert len(line) <= width
    assert ":8 -> 127.0.0" in line
    assert "promoted" in line


def test_a_narrow_frame_on_a_terminal(sidestep: Sidestep, busy: Started) -> None:
    """As a program that draws the terminal has it: nothing is wider, so nothing wraps."""
    master, terminal = pty.openpty()
    argv = [sys.executable, "-m", "sidestep", "top", f"--socket={sidestep.socket}", "--interval=0.2", "--once"]
    subprocess.run(argv, env=os.environ | {"COLUMNS": "60"}, stdin=terminal, stdout=terminal, timeout=60, check=True)
    lines = os.read(master, 65536).decode().splitlines()
    os.close(master)
    os.close(terminal)
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith(f"provider {sidestep.provider_pid}, up ")
    assert lines[HEAD_LINES] == headings(60)
    rows = lines[HEAD_LINES + 1 :]
    assert len(rows) == 2
    assert all(str(busy.pid) in line and " promoted " in line and line.endswith(" 100%") for line in rows)


def test_numbers_are_short() -> None:
    assert [short(number) for number in (0, 7, 0.25, 99.44, 999, 999.5, 1500, 12345678, 1e30)] == [
        "0", "7", "0.2", "99.4", "999", "1.0K", "1.5K", "12.3M", "1000000000000E",
    ]  # fmt: skip
    assert [percent(share) for share in (None, 0, 0.0001, 0.5, 0.9999, 1)] == ["", "0%", "1%", "50%", "99%", "100%"]


# ---- the screen ----


def on_screen(
    sidestep: Sidestep, steps: Callable[[TopApp, Pilot[None]], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> None:
    """Runs the app without a terminal, and does these steps."""

    async def run() -> None:
        app = TopApp(sidestep.socket, interval_s=0.1, sort="program", wanted="")
        async with app.run_test(size=size) as pilot:
            await steps(app, pilot)

    asyncio.run(run())


def shown(app: TopApp) -> list[str]:
    """The lines of the screen."""
    return ["".join(segment.text for segment in strip).rstrip() for strip in app.screen._compositor.render_strips()]


async def until(app: TopApp, pilot: Pilot[Any], condition: Callable[[list[str]], object]) -> list[str]:
    """The lines, once the condition holds for them."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition(lines := shown(app)):
        if time.monotonic() > deadline:
            pytest.fail("never seen on the screen:\n" + "\n".join(lines))
        await pilot.pause(0.01)
    return lines


def test_the_screen_follows_sorts_filters_and_explains(sidestep: Sidestep, busy: Started) -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(app, pilot, lambda lines: "2 promoted" in lines[2])
        lines = await until(app, pilot, lambda lines: lines[0].startswith("every 0.1 s, by program"))
        assert max(map(len, lines)) <= 80
        await until(app, pilot, lambda lines: sum(f" {busy.pid} " in line for line in lines) == 2)
        await pilot.press("s", "r", "plus")
        await until(app, pilot, lambda lines: lines[0].startswith("every 0.5 s, by age (reversed)"))
        await pilot.press("slash", *"zzz")
        await until(app, pilot, lambda lines: not any(f" {busy.pid} " in line for line in lines))
        await pilot.press("escape")
        await until(app, pilot, lambda lines: any(f" {busy.pid} " in line for line in lines))
        await pilot.press("enter")
        await until(app, pilot, lambda lines: any("since:" in line for line in lines))
        await pilot.press("escape")
        await until(app, pilot, lambda lines: not any("since:" in line for line in lines))

    on_screen(sidestep, steps)


def test_a_narrow_screen_is_readable(sidestep: Sidestep, busy: Started) -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        def readable(lines: list[str]) -> bool:
            rows = [line for line in lines if f" {busy.pid} " in line]
            whole = all(" promoted " in line and line.endswith(" 100%") for line in rows)
            return len(rows) == 2 and whole and all(key in lines[-1] for key in ("Quit", "Sort", "Filter", "Explain"))

        lines = await until(app, pilot, readable)
        assert headings(60) in lines
        assert max(map(len, lines)) <= 60

    on_screen(sidestep, steps, (60, 20))


def test_a_pause_keeps_the_picture(sidestep: Sidestep, busy: Started) -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(app, pilot, lambda lines: "2 promoted" in lines[2])
        await pilot.press("space")
        await until(app, pilot, lambda lines: "PAUSED" in lines[0])
        busy.kill()
        busy.wait()
        sidestep.wait_for(lambda found: not found)
        await pilot.pause(0.3)  # three times as long as between two looks
        assert "2 promoted" in shown(app)[2]
        await pilot.press("space")
        await until(app, pilot, lambda lines: lines[2] == "ends: 0")

    on_screen(sidestep, steps)


def test_the_screen_outlives_the_provider(sidestep: Sidestep, busy: Started) -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(app, pilot, lambda lines: "2 promoted" in lines[2])
        sidestep.kill_provider()
        lines = await until(app, pilot, lambda lines: "no provider answers" in lines[0])
        assert "2 promoted" in lines[2]  # the last picture stays
        sidestep.restart_provider()
        await until(
            app, pilot, lambda lines: "no provider" not in lines[0] and f"provider {sidestep.provider_pid} " in lines[1]
        )

    on_screen(sidestep, steps)


def test_it_waits_for_a_provider(sidestep: Sidestep) -> None:
    sidestep.kill_provider()

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(app, pilot, lambda lines: "no provider answers" in lines[0])
        await pilot.press("down", "enter", "s", "pagedown")
        sidestep.restart_provider()
        await until(app, pilot, lambda lines: f"provider {sidestep.provider_pid} " in lines[1])

    on_screen(sidestep, steps)


def test_a_look_that_ends_with_the_screen_is_nothing(sidestep: Sidestep) -> None:
    """The thread that looks may have found something when the screen is already being taken down."""

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(app, pilot, lambda lines: f"provider {sidestep.provider_pid} " in lines[1])
        await app.query("#head").remove()
        app._tick()
        await app.workers.wait_for_complete()

    on_screen(sidestep, steps)


@pytest.mark.least("ci")
@pytest.mark.parametrize("size", [(80, 24), (132, 43)])
def test_of_thousands_the_visible_ones_are_shown(sidestep: Sidestep, crowd: ShimClient, size: tuple[int, int]) -> None:
    def ports(lines: list[str]) -> list[int]:
        rows = [line for line in lines if f" {os.getpid()} " in line and "->" in line]
        return [int(line.split("->")[0].rsplit(":", 1)[1]) for line in rows]

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        page = size[1] - 8  # the status, the totals, the headings, the keys
        # The head is drawn before the rows.
        await until(app, pilot, lambda lines: "5,000" in lines[2] and ports(lines) == list(range(1, 1 + page)))
        await pilot.press("end")
        await until(app, pilot, lambda lines: ports(lines) == list(range(5001 - page, 5001)))
        await pilot.press("pageup", "up")
        await until(app, pilot, lambda lines: ports(lines)[:1] == [5001 - page - 2])
        await pilot.press("home", "pagedown")
        await until(app, pilot, lambda lines: ports(lines) == list(range(2, 2 + page)))
        await until(app, pilot, lambda lines: any(f"why not: KERNEL_TLS {4000:,}" in line for line in lines))

    on_screen(sidestep, steps, size)


@pytest.mark.least("ci")
def test_an_explanation_of_what_has_ended_says_so(sidestep: Sidestep, crowd: ShimClient) -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(app, pilot, lambda lines: "5,000" in lines[2])
        await pilot.press("space")
        crowd.write_arena([])
        await pilot.press("enter")
        await until(app, pilot, lambda lines: any("it has ended" in line for line in lines))
        assert isinstance(app.screen, ExplanationScreen)

    on_screen(sidestep, steps)


def test_a_reason_is_explained_from_the_screen(sidestep: Sidestep) -> None:
    with ShimClient(sidestep.socket) as client:
        client.hello()
        client.write_arena([slot(1000, state=State.PINNED, reason=Reason.ASYNC_SIGNAL_IO)])

        async def steps(app: TopApp, pilot: Pilot[None]) -> None:
            await until(app, pilot, lambda lines: "1 pinned" in lines[2])
            await pilot.press("enter")
            await until(app, pilot, lambda lines: any(REASON_TEXT[Reason.ASYNC_SIGNAL_IO] in line for line in lines))

        on_screen(sidestep, steps, (120, 30))


def test_it_runs_on_a_terminal_and_quits_by_q(sidestep: Sidestep, busy: Started) -> None:
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    argv = [sys.executable, "-m", "sidestep", "top", f"--socket={sidestep.socket}", "--interval=0.2"]
    env = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(argv, env=env, stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True)
    os.close(terminal)
    try:
        seen = b""
        while b"2 promoted" not in seen:
            seen += os.read(master, 65536)
        os.write(master, b"q")
        while True:
            try:
                seen += os.read(master, 65536)
            except OSError:  # the terminal's other end is closed: the program has gone
                break
        assert process.wait(DEADLINE_S) == 0
        assert b"Traceback" not in seen
        assert b"\x1b[?1049l" in seen  # the screen from before is back
    finally:
        process.kill()
        process.wait()
        os.close(master)
