"""What a wait by ring asks the kernel: one call that wakes, one that sleeps."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
from told_ends import End, join, promote
from traced import calls_until_output

from sidestep.testing import Connection, Sidestep

ROUNDS = 40
FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
LATE_S = 0.001  # an answer that is slept for, and comes long before a brief wait ends
FIRST = 12  # calls of the first wait, the provider's, and of one answer in 64
WAITS = {
    # ring, sleep; before: and whether it blocks, how long, and whose the number is
    "recv": ("s.recv(1)", 2),
    # ring, what has come by TCP, sleep; before: and whether it blocks, whose the number is, and what the set has
    "epoll": ("tried(lambda: s.recv(1)) == 'EAGAIN' and watched.poll() and s.recv(1)", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", WAITS)
def test_a_message_that_is_slept_for(how: str) -> None:
    wait, calls_each = WAITS[how]
    with Sidestep() as stage:
        a, b = End(stage, SIDESTEP_SPIN_US="0"), End(stage, SIDESTEP_SPIN_US="0")
        for name in "s", "near":
            join(a, b, name)
        promote(stage, a, b)
        a.ask("watch()")
        if how == "epoll":
            a.ask("s.setblocking(False)")

        port = a.ask("s.getsockname()[1]")

        def slept(found: list[Connection]) -> int:
            return sum(c.sleeps for c in found if c.local.endswith(f":{port}"))

        def few(found: list[Connection]) -> bool:
            """Whether one end, which the other answers late, has slept each time, and made so few calls."""
            # not luck: the answer is late so that the read sleeps, which is counted
            b.ask(f"Later.of(lambda: [s.recv(1) and time.sleep({LATE_S}) or s.sendall(b'x') for _ in range({ROUNDS})])")
            talk = f"[s.sendall(b'x') or {wait} for _ in range({ROUNDS})] and 1"
            calls = calls_until_output(a.pid, lambda: a.tell(talk))
            assert a.answer() == "1"
            b.ask("Later.last.result()")
            assert how != "recv" or calls[FUTEX] > ROUNDS // 2
            return slept(stage.connections()) - slept(found) >= ROUNDS and calls.total() <= calls_each * ROUNDS + FIRST

        # on a machine that is busy one wait may last longer, or find an answer: not each time
        stage.wait_for(few)


BY_A_CHILD = "os.waitpid(os.fork() or ({}, os._exit(0)), 0) and 1"  # which ends: nobody here has seen it
CHANGES = {
    "nonblocking": "os.set_blocking(s.fileno(), False)",
    "limit": "s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(8) + (50000).to_bytes(8, 'little'))",
}


Pair = tuple[Sidestep, End, End]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a promoted connection."""
    with Sidestep() as stage:
        a, b = End(stage), End(stage)
        join(a, b)
        promote(stage, a, b)
        yield stage, a, b


def brief(a: End, b: End) -> None:
    """Waits that were brief: the next asks nothing."""
    # not luck: the answer is late so that each read sleeps, and is brief
    b.ask(f"Later.of(lambda: [s.recv(1) and time.sleep({LATE_S}) or s.sendall(b'x') for _ in range({ROUNDS})])")
    a.ask(f"[s.sendall(b'x') or s.recv(1) for _ in range({ROUNDS})]")


ENDINGS = {
    # what ends a sleep on a futex, which hears neither TCP nor the provider: the peer's word, and what read() returns
    "sends": ("s.sendall(b'y')", "b'y'"),
    "shuts down": ("s.shutdown(socket.SHUT_WR)", "b''"),
    "closes": ("s.close()", "b''"),
    "resets": ("s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\\1' + bytes(7)) or s.close()", "'ECONNRESET'"),
    "ends unheard": ("os.kill(os.getpid(), 9)", "b''"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_brief_wait_ends_as_the_peer(pair: Pair, ending: str) -> None:
    """It is in a sleep on a futex, or in the one that follows."""
    word, result = ENDINGS[ending]
    _, a, b = pair
    brief(a, b)
    a.ask("Later.of(lambda: tried(lambda: s.recv(1)))")
    b.tell(word)
    assert a.ask("Later.last.result()") in {result, repr(result)}


def test_a_brief_wait_ends_with_the_ring(pair: Pair) -> None:
    stage, a, b = pair
    brief(a, b)
    a.ask("Later.of(lambda: s.recv(1))")
    stage.demote(timeout_s=0.1)  # the peer waits for its input, and hears of it once it sends
    b.ask("s.sendall(b'y')")
    assert a.ask("Later.last.result()") == "b'y'"


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_a_wait_has_not_seen_ends_it(pair: Pair, change: str) -> None:
    _, a, b = pair
    brief(a, b)
    assert a.ask(BY_A_CHILD.format(CHANGES[change])) == 1
    assert a.ask("tried(lambda: s.recv(1))") == "'EAGAIN'"


def test_a_read_waits_once_a_child_has_made_the_socket_block(pair: Pair) -> None:
    _, a, b = pair
    a.ask("os.set_blocking(s.fileno(), False)")
    assert a.ask("{tried(lambda: s.recv(1)) for _ in range(3)}") == "{'EAGAIN'}"
    assert a.ask(BY_A_CHILD.format("os.set_blocking(s.fileno(), True)")) == 1
    a.tell("s.recv(1)")
    b.ask("time.sleep(0.1) or s.sendall(b'y')")  # not luck: what does not wait answers before
    assert a.answer() == "b'y'"


def test_a_wait_goes_on_when_the_socket_stops_blocking(pair: Pair) -> None:
    """recv(2) has read O_NONBLOCK as it began."""
    _, a, b = pair
    brief(a, b)
    a.ask("Later.of(lambda: s.recv(1))")
    assert a.ask("Later.last.waits(0.005) and os.set_blocking(s.fileno(), False)") is None
    assert a.ask("Later.last.waits(0.1)")
    b.ask("s.sendall(b'y')")
    assert a.ask("Later.last.result()") == "b'y'"


def test_who_waited_as_the_socket_stopped_blocking_does_not_wait_again(pair: Pair) -> None:
    """The wait began before, and was brief; the next begins behind it."""
    _, a, b = pair
    for _ in range(10):  # on a machine that is busy a wait may last longer, which tries nothing
        a.ask("s.setblocking(True)")
        a.ask("Later.of(lambda: s.recv(1))")
        a.ask("Later.last.waits(0.002)")
        a.ask("os.set_blocking(s.fileno(), False)")
        b.ask("s.sendall(b'y')")
        assert a.ask("Later.last.result()") == "b'y'"
        assert a.ask("tried(lambda: s.recv(1))") == "'EAGAIN'"


def test_what_a_child_made_block_and_another_did_not(pair: Pair) -> None:
    """This process has last said that it does not block."""
    _, a, b = pair
    a.ask("os.set_blocking(s.fileno(), False)")
    assert a.ask(BY_A_CHILD.format("os.set_blocking(s.fileno(), True)")) == 1
    brief(a, b)
    assert a.ask(BY_A_CHILD.format("os.set_blocking(s.fileno(), False)")) == 1
    assert a.ask("tried(lambda: s.recv(1))") == "'EAGAIN'"
