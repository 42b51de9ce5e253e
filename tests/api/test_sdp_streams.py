"""SDP for asyncio in a Python program: Pipelined mode from and into user memory, cancelling, and every way to end."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from common import digest, pattern
from sdp_pairs import LARGE, WAIT_S, moved

import sidestep
from sidestep import limits
from sidestep.api import engine
from sidestep.api.streams import SdpReader, SdpWriter
from sidestep.errors import Misuse
from sidestep.sdp.strategy import Strategy

End = tuple[SdpReader, SdpWriter]
Talk = Callable[[End, End], Awaitable[None]]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """To its end; nothing of SDP is left in the event loop then."""

    async def whole() -> None:
        await asyncio.wait_for(main(), WAIT_S)
        await asyncio.sleep(0)  # the last one turns off the light in its own turn
        assert engine._engines == {}

    asyncio.run(whole())


@asynccontextmanager
async def both() -> AsyncIterator[tuple[End, End]]:
    """The client's end and the server's."""
    arrived: asyncio.Future[End] = asyncio.get_running_loop().create_future()
    async with await sidestep.start_server(
        lambda *end: arrived.set_result(end), "127.0.0.1", 0, protocol="sdp"
    ) as server:
        port = server.sockets[0].getsockname()[1]
        client = await sidestep.open_connection("127.0.0.1", port, protocol="sdp", rdma_port=port)
        yield client, await arrived
    for _, writer in (client, await arrived):
        writer.close()
    for _, writer in (client, await arrived):
        await writer.wait_closed()


def talk(program: Talk) -> None:
    async def main() -> None:
        async with both() as (client, server):
            await program(client, server)

    run(main)


class Watch:
    """What a half-connection is like while something goes on."""

    def __init__(self, writer: SdpWriter) -> None:
        self._writer = writer
        self.modes: set[object] = set()
        self.adverts = 0

    async def run(self) -> None:
        while True:
            found = self._writer.get_extra_info("details")
            self.modes.add(found["send_mode"])
            self.adverts = max(self.adverts, found["adverts"])
            await asyncio.sleep(0)  # looks once in each turn of the loop


async def watched(writer: SdpWriter, work: Awaitable[object]) -> Watch:
    watch = Watch(writer)
    task = asyncio.create_task(watch.run())
    try:
        await work
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return watch


# --- data ---


@pytest.mark.parametrize("size", [1, 1000, 40_000, (256 << 10) + 1, LARGE])
def test_bytes_arrive(size: int) -> None:
    data = pattern(size, size)

    async def program(client: End, server: End) -> None:
        for (reader, _), (_, writer) in ((client, server), (server, client)):
            room = bytearray(size)
            sending = asyncio.create_task(writer.sendall(data))
            assert await reader.recv_into(room, waitall=True) == size
            await sending
            assert digest(room) == digest(data)

    talk(program)


def test_several_outstanding_are_pipelined_from_user_memory_to_user_memory() -> None:
    count = 12
    blocks = [bytearray(pattern(LARGE, seed)) for seed in range(count)]
    rooms = [bytearray(LARGE) for _ in range(count)]

    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        before = moved(writer.get_extra_info("details"), "bytes_sent{send}")
        tracemalloc.start()
        try:
            both_ways = asyncio.gather(
                *(writer.sendall(block) for block in blocks),
                *(reader.recv_into(room, waitall=True) for room in rooms),
            )
            watch = await watched(writer, both_ways)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert "pipelined" in watch.modes, "the half-connection was in that mode"
        assert watch.adverts > 1, "of several advertisements at a time"
        found = writer.get_extra_info("details")
        assert found["send_mode"] == "pipelined"
        placed = moved(found, "bytes_sent{read_response}") + moved(found, "bytes_sent{write}")
        assert placed >= count * LARGE - 64, "all by RDMA, but what went along with a SrcAvail in Combined mode"
        assert moved(found, "bytes_sent{send}") - before < 10_000
        assert peak < LARGE, f"somebody has copied {peak} bytes of them"

    talk(program)
    assert list(map(digest, rooms)) == list(map(digest, blocks))


def test_receives_that_wait_are_written_into() -> None:
    """Write Zcopy: in Pipelined mode the receiver shows its buffers, and the sender writes."""
    count = 8
    blocks = [pattern(LARGE, seed) for seed in range(count)]
    rooms = [bytearray(LARGE) for _ in range(count)]

    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        await asyncio.gather(writer.sendall(blocks[0]), writer.sendall(blocks[1]), *(
            reader.recv_into(room, waitall=True) for room in rooms[:2]
        ))  # fmt: skip
        assert writer.get_extra_info("details")["send_mode"] == "pipelined"
        receiving = asyncio.gather(
            *(reader.recv_into(room) for room in rooms[2:])
        )  # one that waits for all is not shown
        while not writer.get_extra_info("details")["remote_adverts"]:
            await asyncio.sleep(0)  # lets the loop turn until that is so; nothing announces it
        await asyncio.gather(*(writer.sendall(block) for block in blocks[2:]))
        assert await receiving == [LARGE] * (count - 2)
        assert moved(writer.get_extra_info("details"), "bytes_sent{write}") == (count - 2) * LARGE

    talk(program)
    assert list(map(digest, rooms)) == list(map(digest, blocks))


def test_write_and_drain_keep_several_outstanding() -> None:
    blocks = [pattern(LARGE, seed) for seed in range(10)]
    room = bytearray(10 * LARGE)

    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        assert len(blocks) * LARGE < limits.API_WRITE_AHEAD
        receiving = asyncio.create_task(reader.recv_into(room, waitall=True))

        async def work() -> None:
            for block in blocks:
                writer.write(block)
                await writer.drain()
            assert await receiving == len(room)

        watch = await watched(writer, work())
        assert "pipelined" in watch.modes
        assert watch.adverts > 1

    talk(program)
    assert digest(room) == digest(b"".join(blocks))


def test_drain_waits_for_who_does_not_read() -> None:
    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        block, written = bytes(8 << 20), 0

        async def work() -> None:
            nonlocal written
            for _ in range(12):
                writer.write(block)
                written += 1
                await writer.drain()

        working = asyncio.create_task(work())
        for _ in range(1000):
            await asyncio.sleep(0)  # turns in which the writer could go on, and must not
        assert written * len(block) <= limits.API_WRITE_AHEAD + 2 * len(block)
        got = 0
        room = bytearray(1 << 20)
        while got < 12 * len(block):
            got += await reader.recv_into(room)
        await working

    talk(program)


def test_the_calls_of_a_stream_reader() -> None:
    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        writer.writelines([b"one\ntwo\n", bytearray(b"three;four"), memoryview(b"!")])
        await writer.drain()
        assert await reader.readline() == b"one\n"
        room = bytearray(2)
        assert await reader.recv_into(room) == 2
        assert bytes(room) + await reader.readexactly(2) == b"two\n"
        assert await reader.readuntil(b";") == b"three;"
        assert await reader.read(4) == b"four"
        writer.write(b"!last line")
        assert not reader.at_eof()
        assert writer.can_write_eof()
        writer.write_eof()
        assert [line async for line in reader] == [b"!!last line"]
        assert reader.at_eof()
        assert await reader.read() == b""
        assert await reader.recv_into(room) == 0
        with pytest.raises(asyncio.IncompleteReadError):
            await reader.readexactly(1)
        with pytest.raises(OSError, match="after the end"):
            writer.write(b"x")

    talk(program)


def test_a_line_without_an_end() -> None:
    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        writer.write(b"x" * 200_000)
        with pytest.raises(asyncio.LimitOverrunError):
            await reader.readuntil(b"\n")
        assert await reader.readexactly(200_000) == b"x" * 200_000

    talk(program)


def test_many_small_writes_are_joined() -> None:
    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        lines = [b"line %d\n" % number for number in range(20_000)]
        reading = asyncio.create_task(reader.readexactly(sum(map(len, lines))))
        for line in lines:
            writer.write(line)
        await writer.drain()
        assert await reading == b"".join(lines)
        assert moved(writer.get_extra_info("details"), "messages_sent{send}") < 100

    talk(program)


def test_a_server_of_coroutines_and_all_addresses() -> None:
    async def echo(reader: SdpReader, writer: SdpWriter) -> None:
        while data := await reader.read(1 << 20):
            await writer.sendall(data)
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        async with await sidestep.start_server(echo, port=0, family=socket.AF_INET, protocol="sdp") as server:
            assert server.is_serving()
            (_, port) = server.sockets[0].getsockname()
            data = pattern(LARGE)

            async def one() -> None:
                reader, writer = await sidestep.open_connection("127.0.0.1", port, protocol="sdp", rdma_port=port)
                assert writer.get_extra_info("peername") == ("127.0.0.1", port)
                sending = asyncio.create_task(writer.sendall(data))
                assert digest(await reader.readexactly(LARGE)) == digest(data)
                await sending
                writer.write_eof()
                assert await reader.read() == b""
                writer.close()
                await writer.wait_closed()

            await asyncio.gather(*(one() for _ in range(5)))
        assert (server.is_serving(), server.sockets) == (False, ())

    run(main)


# --- cancelling ---


def test_a_cancelled_receive_leaves_its_buffer_alone_and_loses_nothing() -> None:
    data = pattern(2 * LARGE)

    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        room = bytearray(2 * LARGE)
        receiving = asyncio.create_task(reader.recv_into(room, waitall=True))
        await writer.sendall(data[:LARGE])  # it waits for the rest
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        room[:] = bytes(2 * LARGE)
        other = bytearray(2 * LARGE)
        await asyncio.gather(writer.sendall(data[LARGE:]), reader.recv_into(other, waitall=True))
        assert digest(other) == digest(data)
        assert room == bytes(2 * LARGE)
        room.append(0)

    talk(program)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_cancelling_in_the_midst_of_zcopy(turns: int) -> None:
    """At any moment: advertised, being read, half read. What arrives is what was sent, in its order."""
    data = bytearray(pattern(4 * LARGE))
    before = bytes(data)

    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        room = bytearray(4 * LARGE)
        receiving = asyncio.create_task(reader.recv_into(room, waitall=True))
        sending = asyncio.create_task(writer.sendall(data))
        for _ in range(turns):
            await asyncio.sleep(0)  # a turn of the loop: the unit by which the moment of the cancel is chosen
        receiving.cancel()
        sending.cancel()
        received, sent = await asyncio.gather(receiving, sending, return_exceptions=True)
        got = bytes(room) if received == len(room) else b""
        room[:] = bytes(len(room))
        data[:] = bytes(len(data))  # both are free: neither end may see, or touch, them from here on
        writer.write(b"the end")
        writer.write_eof()
        got += await reader.read()
        assert got.endswith(b"the end")
        assert before.startswith(got[: -len(b"the end")])
        if sent is None:
            assert len(got) == len(before) + len(b"the end")
        assert room == bytes(len(room))
        room.append(0)
        data.append(0)

    talk(program)


def test_a_timeout_cancels() -> None:
    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        room = bytearray(LARGE)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.recv_into(room), 0.01)
        data = pattern(LARGE)
        await asyncio.gather(writer.sendall(data), reader.recv_into(room, waitall=True))
        assert digest(room) == digest(data)

    talk(program)


def test_connecting_can_be_cancelled() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    sidestep.open_connection("127.0.0.1", port, protocol="sdp", rdma_port=port), 0.05
                )

    run(main)


# --- ends ---


def test_the_other_end_breaks_off() -> None:
    async def program(client: End, server: End) -> None:
        (_, writer), (reader, other) = client, server
        sending = asyncio.gather(*(writer.sendall(bytearray(LARGE)) for _ in range(4)), return_exceptions=True)
        await reader.readexactly(1)
        other.abort()
        assert any(isinstance(each, OSError) for each in await sending)
        writer.write(b"x")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await writer.drain()
        assert writer.is_closing()

    talk(program)


def test_closing_with_sends_outstanding_delivers_them() -> None:
    blocks = [pattern(LARGE, seed) for seed in range(4)]

    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        for block in blocks:
            writer.write(block)
        writer.close()
        assert digest(await reader.read()) == digest(b"".join(blocks))

    talk(program)


def test_nobody_listens() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            with pytest.raises(ConnectionRefusedError):
                await sidestep.open_connection("127.0.0.1", port, protocol="sdp", rdma_port=port)

    run(main)


def test_a_loop_that_ends_with_connections_open_leaves_nothing_to_the_next_one() -> None:
    async def forgets() -> None:
        arrived: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        server = await sidestep.start_server(lambda *end: arrived.set_result(end), "127.0.0.1", 0, protocol="sdp")
        port = server.sockets[0].getsockname()[1]
        await sidestep.open_connection("127.0.0.1", port, protocol="sdp", rdma_port=port)
        await arrived

    asyncio.run(forgets())
    assert len(engine._engines) == 1
    talk(_nothing)
    assert engine._engines == {}


async def _nothing(client: End, server: End) -> None:
    """Connects and closes."""


def test_options_that_make_no_sense() -> None:
    async def main() -> None:
        with pytest.raises(Misuse):
            await sidestep.open_connection("127.0.0.1", 1, protocol="sdp", ssl=True)  # type: ignore[call-overload]
        with pytest.raises(Misuse):
            await sidestep.open_connection("127.0.0.1", 1, rdma_port=1)
        with pytest.raises(Misuse):
            await sidestep.start_server(_nothing, start_serving=False, protocol="sdp")  # type: ignore[call-overload]

    run(main)


def test_small_sends_go_by_bcopy() -> None:
    size = Strategy().bcopy_max

    async def program(client: End, server: End) -> None:
        (_, writer), (reader, _) = client, server
        await asyncio.gather(writer.sendall(bytes(size)), reader.readexactly(size))
        found = writer.get_extra_info("details")
        assert moved(found, "bytes_sent{read_response}") == 0

    talk(program)
