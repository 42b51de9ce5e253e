"""Random programs of sends, receives, cancels and timeouts: every byte that arrives is accounted for.

Each send has bytes of its own kind (the high half of each says which one), so what has arrived of it can be told
however it was cut. Buffers are scribbled over as soon as their call has ended: a device that still read one would send
scribble, and one that still wrote into one would show.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from sdp_pairs import WAIT_S, Running, pair

import sidestep
from sidestep.api.sockets import SdpSocket
from sidestep.api.streams import SdpReader, SdpWriter
from sidestep.socket import MSG_WAITALL, SHUT_WR

_SENDS_MAX = 14
_SCRIBBLE = 0xFF
_SMALL_S = 0.02

sizes = st.one_of(
    st.integers(1, 70_000),
    st.sampled_from([(256 << 10) - 1, 256 << 10, (256 << 10) + 1, 300_000, 1 << 20, (1 << 20) + 13, 2_000_003]),
)


@dataclass
class Step:
    """A send, or a receive, and when it is taken back: after so many turns of the loop, or so many seconds."""

    size: int
    waitall: bool
    taken_back: float | None


def steps(taken_back: st.SearchStrategy[float | None], count: int) -> st.SearchStrategy[list[Step]]:
    return st.lists(st.builds(Step, sizes, st.booleans(), taken_back), min_size=1, max_size=count)


def block(number: int, size: int) -> bytearray:
    """Bytes whose high half is the number."""
    low = Random(number).randbytes(size).translate(bytes(each & 0x0F for each in range(256)))
    return bytearray(low.translate(bytes(each | number << 4 for each in range(256))))


@dataclass
class Sent:
    """What a send has come to."""

    number: int
    size: int
    count: int | None  # bytes that went; None: not known


def check(got: bytes, sent: list[Sent]) -> None:
    """Of each send, in their order: all, a known part, or some part of it from its beginning."""
    at = 0
    for each in sent:
        whole = block(each.number, each.size)
        end = at
        while end < len(got) and end - at < each.size and got[end] >> 4 == each.number:
            step = min(1 << 16, each.size - (end - at))
            piece = got[end : end + step]
            same = len(piece) if piece == whole[end - at : end - at + len(piece)] else 0
            if not same:
                while got[end : end + same + 1] == whole[end - at : end - at + same + 1] and same < len(piece):
                    same += 1
                end += same
                break
            end += same
        if each.count is not None:
            assert end - at == each.count, f"{end - at} bytes of send {each.number} arrived, not {each.count}"
        at = end
    assert at == len(got), f"{len(got) - at} bytes are nobody's"


class Scribbled:
    """Buffers that are nobody's business any more."""

    def __init__(self) -> None:
        self._kept: list[tuple[bytearray, str]] = []

    def add(self, room: bytearray) -> None:
        room[:] = bytes([_SCRIBBLE]) * len(room)
        self._kept.append((room, hashlib.sha256(room).hexdigest()))

    def check(self) -> None:
        for room, was in self._kept:
            assert hashlib.sha256(room).hexdigest() == was, "a device wrote after the end of the call"
            room.append(0)  # nobody has it


# --- asyncio: cancelled tasks, several sends at a time ---

turns = st.one_of(st.none(), st.integers(0, 60))


async def cancelled_after(work: Awaitable[int | None], count: float | None) -> int | None:
    """What it gives; -1 if it was cancelled in time."""
    task = asyncio.ensure_future(work)
    if count is not None:
        for _ in range(int(count)):
            await asyncio.sleep(0)  # a turn of the loop: the unit by which the moment of the cancel is chosen
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return -1


@settings(max_examples=25, deadline=None)
@given(steps(turns, _SENDS_MAX), steps(turns, 20), st.integers(1, 6))
def test_cancelled_tasks(sends: list[Step], receives: list[Step], at_a_time: int) -> None:
    sent: list[Sent] = []
    got: list[bytes] = []
    scribbled = Scribbled()

    async def send(writer: SdpWriter) -> None:
        room = asyncio.Semaphore(at_a_time)

        async def one(number: int, step: Step) -> None:
            data = block(number, step.size)
            entry = Sent(number, step.size, None)
            sent.append(entry)
            try:
                if await cancelled_after(writer.sendall(data), step.taken_back) is None:
                    entry.count = step.size
            finally:
                room.release()
            scribbled.add(data)

        tasks = []
        for number, step in enumerate(sends):
            await room.acquire()
            tasks.append(asyncio.create_task(one(number, step)))
        await asyncio.gather(*tasks)
        writer.write_eof()

    async def receive(reader: SdpReader) -> None:
        at = 0
        while True:
            step = receives[at % len(receives)] if at < 3 * len(receives) else Step(1 << 20, False, None)
            at += 1
            room = bytearray(step.size)
            count = await cancelled_after(reader.recv_into(room, waitall=step.waitall), step.taken_back)
            assert count is not None
            if count >= 0:
                got.append(bytes(memoryview(room)[:count]))
            scribbled.add(room)
            if not count:
                return

    run_both(send, receive)
    check(b"".join(got), sent)
    scribbled.check()


def run_both(send: Callable[[SdpWriter], Awaitable[None]], receive: Callable[[SdpReader], Awaitable[None]]) -> None:
    async def main() -> None:
        arrived: asyncio.Future[tuple[SdpReader, SdpWriter]] = asyncio.get_running_loop().create_future()

        def connected(*ends: SdpReader | SdpWriter) -> None:
            arrived.set_result(ends)  # type: ignore[arg-type]

        async with await sidestep.start_server(connected, "127.0.0.1", 0, protocol="sdp") as server:
            port = server.sockets[0].getsockname()[1]
            _, writer = await sidestep.open_connection("127.0.0.1", port, protocol="sdp", rdma_port=port)
            reader, other = await arrived
            await asyncio.gather(send(writer), receive(reader))
            writer.close()
            other.close()
            await writer.wait_closed()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


# --- blocking: timeouts ---

seconds = st.one_of(st.none(), st.sampled_from([0.0, 0.0001, 0.001, 0.005, _SMALL_S]))


@settings(max_examples=25, deadline=None)
@given(steps(seconds, _SENDS_MAX), steps(seconds, 20))
def test_timeouts(sends: list[Step], receives: list[Step]) -> None:
    sent: list[Sent] = []
    got: list[bytes] = []
    scribbled, received = Scribbled(), Scribbled()

    def send(end: SdpSocket) -> None:
        for number, step in enumerate(sends):
            data = block(number, step.size)
            end.settimeout(WAIT_S if step.taken_back is None else step.taken_back)
            count = 0
            with suppress(TimeoutError, BlockingIOError):
                count = end.send(data)
            sent.append(Sent(number, step.size, count))
            scribbled.add(data)
        end.shutdown(SHUT_WR)

    def receive(end: SdpSocket) -> None:
        at = 0
        while True:
            step = receives[at % len(receives)] if at < 3 * len(receives) else Step(1 << 20, False, None)
            at += 1
            room = bytearray(step.size)
            end.settimeout(WAIT_S if step.taken_back is None else step.taken_back)
            try:
                count = end.recv_into(room, 0, MSG_WAITALL if step.waitall else 0)
            except (TimeoutError, BlockingIOError):
                count = -1
            if count > 0:
                got.append(bytes(memoryview(room)[:count]))
            received.add(room)
            if not count:
                return

    with pair() as (client, server):
        sending, receiving = Running(lambda: send(client)), Running(lambda: receive(server))
        sending.result()
        receiving.result()
    check(b"".join(got), sent)
    scribbled.check()
    received.check()
