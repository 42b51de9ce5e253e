"""Two programs with a provider between them that stops, or stands still: what it does to the calls of either end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from common import PATIENCE_S, standing_still
from relay_example import relayed
from told_ends import End, join, promote

from sidestep.provider import control
from sidestep.testing import Connection, Sidestep

pytestmark = pytest.mark.slow


@pytest.fixture
def stage() -> Iterator[Sidestep]:
    """A provider that has only the relay."""
    with relayed(Sidestep(promote_after="0")) as sidestep:
        yield sidestep


@pytest.fixture
def ends(stage: Sidestep) -> tuple[End, End]:
    """Who connects, and who accepts; both directions go through the provider."""
    a, b = End(stage), End(stage)
    join(a, b)
    promote(stage, a, b)
    assert stage.status()["counters"]["relay_opened"] == 1
    return a, b


def prefer_local(stage: Sidestep) -> None:
    """Connections that are made from now on go through nobody."""
    with control.ControlConnection(stage.socket) as connection:
        answer, descriptors = connection.request("module_add", name="local")
        descriptors.close()
    assert answer == {"done": True}, answer


@contextmanager
def unheard(stage: Sidestep, log: Path) -> Iterator[tuple[End, End]]:
    """Who connects has just moved to the ring, and the provider cannot tell the other."""
    a, b = End(stage, log), End(stage)
    join(a, b)
    b.ask("s.sendall(b'x')")
    a.ask("s.recv(1)")
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with standing_still(stage.provider_pid):  # it makes no call at any other time
            a.ask("s.sendall(b'x')")
            if "sends by ring" in log.read_text(encoding="utf-8"):
                yield a, b
                return
        assert b.ask("s.recv(1)") == b"x"
    raise AssertionError("it does not move to the ring")


def test_a_provider_that_stands_still_does_not_reset_a_full_ring(stage: Sidestep, tmp_path: Path) -> None:
    """Who has heard the end goes on where there is room, and waits where there is none."""
    with unheard(stage, tmp_path / "log") as (a, b):
        a.ask("s.shutdown(socket.SHUT_RD)")
        sent = a.ask("put_until_full()")
        assert sent > 0
        a.ask("Later.of(lambda: s.sendall(b'f' * 2000000))")
    assert b.ask(f"len(get({1 + sent + 2_000_000}))") == 1 + sent + 2_000_000
    assert a.ask("Later.last.result()") == "None"
    a.ask("s.sendall(b'more')")
    assert b.ask("get(4)") == b"more"


def test_a_call_that_must_go_by_tcp_waits_for_the_provider_alone(stage: Sidestep, tmp_path: Path) -> None:
    """It can last, but nothing else on the connection is held up, and nothing is reset."""
    with unheard(stage, tmp_path / "log") as (a, b):
        a.ask("Later.of(lambda: s.send(b'!', socket.MSG_OOB))")
        for call in ("s.recv(1, socket.MSG_DONTWAIT)", "s.send(b'y')", "select.select([s], [], [], 0.1)"):
            assert a.ask(f"timed(lambda: {call})") < PATIENCE_S / 2
        assert a.ask("Later.last.waits(1.5)") is True
    assert a.ask("Later.last.result()") == "1"
    a.ask("s.sendall(b'more')")
    assert b.ask("get(6)") == b"xymore"


@pytest.mark.parametrize("way", ["linger", "unread"])
def test_a_reset_does_not_overtake_the_bytes(stage: Sidestep, ends: tuple[End, End], way: str) -> None:
    """What was sent before it is read before it, however long it is with the provider."""
    a, b = ends
    if way == "linger":
        a.ask("s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))")
    else:
        b.ask("s.sendall(b'unread')")
        assert a.ask("len(select.select([s], [], [])[0])") == 1
    with standing_still(stage.provider_pid):
        a.ask("s.sendall(b'a' * 5000)")
        a.ask("s.close()")
        for call in ("s.recv(1, socket.MSG_DONTWAIT)", "s.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)"):
            assert b.ask(call) == "EAGAIN"
        assert b.ask("select.select([s], [], [], 0.1)") == ([], [], [])
        assert b.ask("polled(0.1)") == []
        b.ask("Later.of(lambda: get(5000) == b'a' * 5000)")
        assert b.ask("Later.last.waits(0.1)") is True
    assert b.ask("Later.last.result()") == "True"
    assert b.ask("s.recv(1)") == "ECONNRESET"
    assert b.ask("s.recv(1)") == b""


def test_only_bytes_that_can_be_read_are_counted(stage: Sidestep, ends: tuple[End, End]) -> None:
    """Who sends is back on TCP, of which the provider has not told who reads: it does not know what comes first."""
    a, b = ends
    sender = a.ask("s.getsockname()[1]")
    stage.demote(lambda end: end.local.endswith(f":{sender}"), timeout_s=0)
    with standing_still(stage.provider_pid):
        assert a.ask("polled(0.1)") == []  # it hears of the order in a call that sends nothing
        a.ask("s.sendall(b'x')")
        assert b.ask("s.recv(1, socket.MSG_DONTWAIT)") == "EAGAIN"
        assert b.ask("queued()") == 0
    assert b.ask("get(1)") == b"x"


def test_the_end_is_heard_though_tcp_told_it_before_the_provider_was_done(stage: Sidestep, tmp_path: Path) -> None:
    """A reader asleep has heard TCP's; then the last bytes, their end, and that the provider is done come at once."""
    with unheard(stage, tmp_path / "log") as (a, b):
        b.ask("s.shutdown(socket.SHUT_WR)")
        b.ask("Later.of(lambda: (get(100), s.recv(1)))")
        assert b.ask("Later.last.waits(0.1)") is True
        a.ask("s.close()")
        assert b.ask("Later.last.waits(0.1)") is True
    assert b.ask("Later.last.waits(5)") is False
    assert b.ask("Later.last.result()") == "(b'x', b'')"


def test_what_a_stopped_provider_counted_as_unread_is_no_reset(stage: Sidestep, ends: tuple[End, End]) -> None:
    """All has arrived, though its room was never given back: how the other ends is then the kernel's to tell."""
    a, b = ends
    a.ask("s.sendall(b'a' * 5000)")
    a.tell("s.recv(1)")
    b.ask("s.sendall(b'b')")
    assert a.answer() == "b'b'"
    a.tell("s.recv(1)")  # both sit in a call, and hear that they are asked back
    stage.kill_provider(signal.SIGTERM)
    assert b.ask("get(5000)") == b"a" * 5000
    b.ask("s.shutdown(1)")
    assert a.answer() == "b''"
    a.ask("s.sendall(b'and by TCP')")
    a.ask("s.close()")
    assert b.ask("get(100)") == b"and by TCP"


def test_a_program_that_makes_no_call_is_not_waited_for_in_vain(stage: Sidestep, ends: tuple[End, End]) -> None:
    """Where all it sent has arrived, a provider that stops takes nothing with it."""
    a, b = ends
    a.ask("s.sendall(b'a' * 5000)")
    stage.kill_provider(signal.SIGTERM)
    a.ask("s.sendall(b'c' * 3000)")
    assert b.ask("get(8000)") == b"a" * 5000 + b"c" * 3000
    b.ask("s.sendall(b'd' * 3000)")
    assert a.ask("get(3000)") == b"d" * 3000
    a.ask("s.shutdown(1)")
    assert b.ask("s.recv(1)") == b""


def test_bytes_that_died_with_the_provider_do_not_end_as_if_all_had_come(
    stage: Sidestep, ends: tuple[End, End]
) -> None:
    """Behind a FIN a reset is EPIPE to the kernel, and no reader hears of it; but the FIN stands behind those bytes."""
    a, b = ends
    with standing_still(stage.provider_pid):
        b.ask("s.sendall(b'b' * 5000)")
        b.ask("s.shutdown(socket.SHUT_WR)")
        assert a.ask("select.select([s], [], [], 0.1)") == ([], [], [])
        stage.kill_provider(signal.SIGKILL)
    assert b.ask("s.recv(1)") == "ECONNRESET"
    assert a.ask("s.recv(1)") == "ECONNRESET"


def test_who_sends_much_before_it_reads_stays_on_the_ring(stage: Sidestep, ends: tuple[End, End]) -> None:
    """Both send more than the rings hold, and less than TCP would; nobody waits, and nobody leaves."""
    for end in ends:
        end.tell("(s.sendall(b'f' * 3000000), len(get(3000000)))")
    assert [end.answer() for end in ends] == ["(None, 3000000)", "(None, 3000000)"]
    assert [c.tx.path for c in stage.connections() if c.role in ("active", "passive")] == ["ring", "ring"]


def join_nearer(stage: Sidestep, ends: tuple[End, End]) -> None:
    """Gives the two another connection, `near`, that goes through nobody."""
    a, b = ends
    prefer_local(stage)
    join(b, a, "near")
    promote(stage, a, b, "near", count=4)


def test_the_end_of_a_provider_is_heard_though_a_set_met_it_first(stage: Sidestep, ends: tuple[End, End]) -> None:
    """It held none of its connections then; one that comes back there is not left waiting."""
    a, _ = ends
    join_nearer(stage, ends)
    a.ask("watch()")
    assert a.ask("watched.poll(0.1)") == []
    a.ask("watched.unregister(s)")
    stage.kill_provider(signal.SIGKILL)
    assert a.ask("watched.poll(0.5)") == []
    a.ask("watched.register(s, 1)")
    assert a.ask("[event & 1 for _, event in watched.poll(5)]") == [1]
    assert a.ask("s.recv(1)") == "ECONNRESET"


@pytest.mark.parametrize("call", ["near_waits()", "near_polled()"])
def test_the_end_of_a_provider_is_heard_though_another_call_met_it_first(
    stage: Sidestep, ends: tuple[End, End], call: str
) -> None:
    """It was on a connection without the provider; the next one, on its own, is not left waiting."""
    a, b = ends
    mine = {"near_waits()": "s.recv(1)", "near_polled()": "s_polled()"}[call]
    join_nearer(stage, ends)
    a.ask(f"Later.of(lambda: ({mine}, {call}, {mine}))")
    assert a.ask("Later.last.waits(0.2)") is True
    b.ask("s.sendall(b'1')")
    assert a.ask("Later.last.waits(4)") is True  # all rings are trimmed: nothing else wakes it
    stage.kill_provider(signal.SIGKILL)
    assert a.ask("Later.last.waits(0.3)") is True
    b.ask("near.sendall(b'2')")
    assert a.ask("Later.last.waits(5)") is False
    assert "ECONNRESET" in str(a.ask("Later.last.result()")) or a.ask("s.recv(2)") == "ECONNRESET"


@pytest.mark.parametrize("seconds", [0.1, 1.5])
def test_bytes_that_cannot_be_recalled_go_on_with_their_ring(
    stage: Sidestep, ends: tuple[End, End], seconds: float
) -> None:
    """Who has sent them has closed. Who is given the socket gets the ring with it, which has all of them."""
    a, b = ends
    with standing_still(stage.provider_pid):
        a.ask("s.sendall(b'a' * 5000)")
        a.ask("s.close()")
        b.ask("Later.of(pass_on)")
        b.ask(f"Later.last.waits({seconds})")
    assert b.ask("Later.last.result()") == "None"
    assert b.ask("given()") == b"a" * 5000


@contextmanager
def staying_on_tcp(stage: Sidestep) -> Iterator[tuple[End, End]]:
    """Who accepts has consented; who connects has a thread asleep in the kernel, and does not move to the ring."""
    a, b = End(stage), End(stage)
    join(a, b)
    a.ask("Later.of(lambda: s.recv(1))")

    def talk(found: list[Connection]) -> bool:
        a.ask("s.sendall(b'x')")
        assert b.ask("s.recv(1)") == b"x"
        ends = [c.state for c in found if c.role in ("active", "passive")]
        return ends == ["attached", "attached"] and "WAITER_IN_KERNEL" in [c.reason for c in found]

    stage.wait_for(talk)
    assert b.ask("s.recv(1, socket.MSG_DONTWAIT)") == "EAGAIN"
    yield a, b


@pytest.mark.parametrize("how", ["select.poll", "select.epoll"])
@pytest.mark.parametrize("events", [0, 0x2000], ids=["nothing", "RDHUP"])
def test_an_end_that_cannot_be_told_yet_costs_no_time(stage: Sidestep, how: str, events: int) -> None:
    """It stands behind bytes that the program does not ask for."""
    with staying_on_tcp(stage) as (a, b), standing_still(stage.provider_pid):
        a.ask("s.sendall(b'y')")
        a.ask("s.shutdown(socket.SHUT_WR)")
        b.ask("s.shutdown(socket.SHUT_WR)")
        before = b.ask("time.process_time()")
        assert b.ask(f"waited('{how}', {events}, 1)") == []
        assert b.ask("time.process_time()") - before < 0.5


@pytest.mark.parametrize("how", ["select.poll", "select.epoll"])
def test_room_is_told_while_an_end_is_not(stage: Sidestep, how: str) -> None:
    """The peer has ended its direction, ours goes on by TCP; room is true at every look."""
    with staying_on_tcp(stage) as (a, b), standing_still(stage.provider_pid):
        a.ask("s.shutdown(socket.SHUT_WR)")
        assert b.ask(f"waited_twice('{how}', 5)") == [4, 4]


def test_a_wait_that_is_too_short_to_sleep_asks_the_kernel(stage: Sidestep) -> None:
    with staying_on_tcp(stage) as (a, b), standing_still(stage.provider_pid):
        a.ask("s.shutdown(socket.SHUT_WR)")
        assert [b.ask("polled_for_a_nanosecond(5)") for _ in range(50)] == [4] * 50


@pytest.mark.parametrize("told_first", [False, True], ids=["reader", "sender"])
@pytest.mark.parametrize("call", ["s.recv(1)", "s_polled()", "s_watched()"])
def test_a_reset_that_lost_what_precedes_the_ring_is_heard(stage: Sidestep, call: str, told_first: bool) -> None:
    """Nobody will read the ring's bytes then, and so the provider never gets to their end."""
    with staying_on_tcp(stage) as (a, b):
        a.ask("s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes(b'\\1\\0\\0\\0\\0\\0\\0\\0'))")
        assert a.ask("put_until_full()") > 0
        b.ask("s.send(b'x')")
        assert a.ask("Later.last.result()") == "b'x'"
        stage.wait_for(lambda _: a.ask("put_until_full()") > 0)  # by ring, whose bytes come behind those of TCP
        a.kill()
        assert b.ask("get_queued()") > 0
        if told_first:
            b.ask("Later.of(send_on)")
            assert b.ask("Later.last.waits(5)") is False
            assert b.ask("Later.last.result()") == "'ECONNRESET'"
        b.ask(f"Later.of(lambda: {call})")
        assert b.ask("Later.last.waits(5)") is False
        # TCP tells a reset once; the provider, which had bytes of the sender's, may tell it again
        assert b.ask("Later.last.result()") in {"'ECONNRESET'", *(["b''"] if told_first else [])}
        if told_first and b.ask("passed"):  # by ring, and nobody reads them: the provider tells of a reset as well
            stage.wait_for(lambda _: "relay_reset{unread}" in stage.status()["counters"])  # and the end stays the end
        assert b.ask("s.recv(1)") == b""
