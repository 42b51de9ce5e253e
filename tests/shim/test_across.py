"""A call that reads or writes where the stream goes from one path to the other does all that one on kernel TCP does.

Programs rely on it: who waits for edges stops at a short read (epoll(7), "Questions and answers" 9), libuv takes a
short read with HUP for the end of the stream, and a blocking send() is short for nobody who does not handle signals.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import toolchain
from told_ends import End, join, promote

from sidestep.testing import Connection, Sidestep

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
READS = {
    "recv": "len(s.recv({}))",
    "readv": "os.readv(s.fileno(), [bytearray(5), bytearray({})])",
    "recvmsg": "len(s.recvmsg({})[0])",
    "peek": "len(s.recv({}, socket.MSG_PEEK))",
}


@pytest.fixture
def stage() -> Iterator[Sidestep]:
    with Sidestep(promote_after="0") as sidestep:
        yield sidestep


@pytest.fixture
def ends(stage: Sidestep) -> tuple[End, End]:
    """Who connects, and who accepts."""
    a, b = End(stage), End(stage)
    join(a, b)
    return a, b


def _received(stage: Sidestep) -> Connection:
    """The end that accepted."""
    (found,) = [c for c in stage.connections() if c.role == "passive"]
    return found


@pytest.mark.parametrize("how", READS)
def test_a_read_goes_on_by_tcp_where_the_ring_ends(stage: Sidestep, ends: tuple[End, End], how: str) -> None:
    a, b = ends
    promote(stage, a, b)
    b.ask("s.shutdown(socket.SHUT_WR)")
    assert a.ask("s.recv(1)") == b""
    sent = 300_000
    a.ask(f"s.sendall(bytes({sent}))")  # whose peer has ended its direction goes back to TCP when the ring is full
    a.ask("s.shutdown(socket.SHUT_WR)")
    events = dict(b.ask("waited('select.poll', select.POLLIN, 20)"))
    assert [told & 0x10 for told in events.values()] == [0x10], "no HUP: more might come"
    assert b.ask(READS[how].format(2 * sent)) == sent
    if how != "peek":
        assert _received(stage).rx.ring_bytes > 1
        assert _received(stage).rx.tcp_bytes > 1


def test_a_wait_that_is_too_short_to_sleep_hears_the_end(stage: Sidestep, ends: tuple[End, End]) -> None:
    """Of one that is killed the kernel alone tells."""
    a, b = ends
    promote(stage, a, b)
    b.kill()
    stage.wait_for(lambda _: a.ask("polled_for_a_nanosecond(select.POLLIN)") & 1)


@pytest.mark.parametrize("how", READS)
def test_a_read_goes_on_by_ring_where_tcp_ends(stage: Sidestep, ends: tuple[End, End], how: str) -> None:
    a, b = ends
    promote(stage, a, b)
    stage.demote(timeout_s=0)
    promote(stage, a, b, count=0)  # to and fro until none is
    before = _received(stage).rx
    stage.promote(timeout_s=0)
    a.ask("s.sendall(b'x' * 10)")  # by TCP; then it hears of that
    b.ask("s.sendall(b'y')")  # so does this end, and consents, with those bytes unread

    def sends(found: list[Connection]) -> bool:
        a.ask("s.sendall(b'x' * 10)")
        return any(c.role == "active" and c.tx.ring_bytes > before.ring_bytes for c in found)

    stage.wait_for(sends)
    (active,) = [c for c in stage.connections() if c.role == "active"]
    sent = active.tx.ring_bytes + active.tx.tcp_bytes - before.ring_bytes - before.tcp_bytes
    assert b.ask(f"arrived({sent})")
    assert b.ask(READS[how].format(2 * sent)) == sent
    if how != "peek":
        after = _received(stage).rx
        assert after.tcp_bytes > before.tcp_bytes
        assert after.ring_bytes > before.ring_bytes


def test_a_blocking_send_goes_on_by_tcp(stage: Sidestep, ends: tuple[End, End]) -> None:
    a, b = ends
    promote(stage, a, b)
    b.ask("s.shutdown(socket.SHUT_WR)")
    a.tell("s.send(bytes(3_000_000))")
    assert b.ask("len(get(3_000_000))") == 3_000_000
    assert a.answer() == "3000000"


def test_all_that_is_ready_is_told_at_once(stage: Sidestep, ends: tuple[End, End]) -> None:
    """One of two connections in a set is promoted, of the other the kernel has the bytes."""
    a, b = ends
    join(a, b, "near")
    b.ask("watch()")
    promote(stage, a, b)
    promote(stage, a, b, "near", count=4)
    port = a.ask("near.getsockname()[1]")
    stage.demote(lambda c: str(port) in (c.local + c.remote), timeout_s=0)
    promote(stage, a, b, "near", count=2)  # to and fro until it is not
    stage.promote(timeout_s=0)
    a.ask("near.sendall(b'x')")  # by TCP; then it hears of that
    b.ask("near.sendall(b'y')")  # so does this end, and consents to the ring again
    a.ask("s.sendall(b'x')")
    assert b.ask("arrived(1)")
    assert b.ask("arrived(1, near)")
    assert b.ask("[len(watched.poll(0)) for _ in range(100)]") == [2] * 100


def test_a_level_is_told_to_every_thread_that_waits(stage: Sidestep, ends: tuple[End, End]) -> None:
    """Who is told first may read a part and not come back, as Erlang's schedulers do."""
    a, b = ends
    b.ask("watch()")
    b.ask("watched.unregister(near)")
    promote(stage, a, b)
    b.ask("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})")
    assert b.ask("watched.poll(4)") == []  # while rings may have to be trimmed, who sleeps looks once a second
    for _ in range(8):
        b.ask("Later.of(lambda: later(lambda: watched.poll(60)))")
        assert b.ask("Later.last.waits(0.05)")
        b.tell("looked()")
        a.ask("s.sendall(b'xx')")
        assert b.answer() == "1"
        assert b.ask("s.recv(1)") == b"x"
        b.ask("hurry()")
        assert b.ask("Later.last.waits(20)") is False, "it sleeps, with a byte to be read"
        assert b.ask("s.recv(1)") == b"x"


def test_a_reset_is_not_lost_behind_the_bytes_before_it(stage: Sidestep, ends: tuple[End, End]) -> None:
    a, b = ends
    promote(stage, a, b)
    b.ask("Later.of(lambda: s.recv(100, socket.MSG_WAITALL))")
    a.ask("s.sendall(b'x' * 10)")
    a.ask("s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))")
    a.ask("s.close()")
    assert b.ask("eval(Later.last.result())") == b"x" * 10
    assert b.ask("s.recv(1)") == "ECONNRESET"


def test_who_stops_at_a_short_read_hears_of_all_that_follows() -> None:
    """Before reads went across, one round of ten hung: in a hundred a miss is less likely than 1 in 10,000."""
    program = toolchain.build("short_reads", [HERE / "programs" / "short_reads.c"], ["-O2"])
    with Sidestep() as sidestep:
        ended = sidestep.run([program, "100"], stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stdout
    assert int(ended.stdout.split()[-1]) > 100, "hardly a read was short"
