"""Streams in virtual time: servers, several requests outstanding, and cancelled ones."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from common import digest, pattern
from endpoint_world import (
    CHECKING,
    LEFT,
    LENIENT,
    PORT,
    RIGHT,
    Range,
    Watch,
    World,
    eager,
    pipelined,
    read_zcopy,
)
from virtual_time import LoopbackPump, OneHost

from sidestep.api.streams import SdpReader, SdpServer, SdpWriter, open_connection, start_server
from sidestep.rdma.loopback import Kind
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.settings import SdpSettings
from sidestep.sdp.strategy import Strategy, bcopy_only
from sidestep.sdp.wire import Mid, Mode

ATTRIBUTES = pytest.mark.parametrize("attributes", [LENIENT, CHECKING], ids=["lenient", "checking"])

Program = Callable[[SdpReader, SdpWriter], Awaitable[None]]


class AsyncWorld(World):
    """Two hosts whose fabric the event loop drives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(kick=self._kick, **options)
        self.pump = LoopbackPump(self.fabric)

    def _kick(self) -> None:
        self.pump.kick()

    async def connect(
        self, address: str = RIGHT, local_addr: tuple[str, int] | None = None
    ) -> tuple[SdpReader, SdpWriter]:
        """From the left one."""
        return await open_connection(address, PORT, local_addr=local_addr, hosts=OneHost(self.left))

    async def serve(self, program: Callable[..., Awaitable[None] | None], address: str | None = None) -> SdpServer:
        """At the right one."""
        return await start_server(program, address, PORT, family=socket.AF_INET, hosts=OneHost(self.right))


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30.0))  # a test that hangs says where


async def closing(program: Program, reader: SdpReader, writer: SdpWriter) -> None:
    """The program, which is closed or, if it fails, reset."""
    try:
        await program(reader, writer)
    except BaseException:
        writer.abort()
        raise
    writer.close()


def converse(client: Program, server: Program, **options: Any) -> AsyncWorld:
    """Two programs, each with its end of a connection."""
    worlds: list[AsyncWorld] = []

    async def main() -> None:
        world = AsyncWorld(**options)
        worlds.append(world)
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def serve(reader: SdpReader, writer: SdpWriter) -> None:
            try:
                await closing(server, reader, writer)
            except BaseException as error:
                served.set_exception(error)
            else:
                served.set_result(None)
            await writer.wait_closed()

        async with await world.serve(serve):
            reader, writer = await world.connect()
            await closing(client, reader, writer)
            await served
            await writer.wait_closed()
        world.pump.close()

    run(main)
    worlds[0].assert_nothing_left()
    return worlds[0]


def stream_of(end: SdpReader | SdpWriter) -> SdpStream:
    return end._transport.stream


async def recv_all(reader: SdpReader, size: int) -> bytes:
    room = bytearray(size)
    count = await reader.recv_into(room, waitall=True)
    return bytes(room[:count])


async def turns(count: int = 200) -> None:
    """Lets the others have theirs."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- data ---


@ATTRIBUTES
@pytest.mark.parametrize("strategy", [Strategy, eager, bcopy_only, read_zcopy, pipelined])
def test_bytes_arrive(attributes: DeviceAttributes, strategy: Callable[[], Strategy]) -> None:
    sizes = [1, 100, 5000, 64 << 10, 65 << 10, 300_000]
    data = [pattern(size, size) for size in sizes]

    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        for each in data:
            await writer.sendall(each)
            assert digest(await reader.readexactly(len(each))) == digest(each[::-1])
        writer.write_eof()
        assert await reader.read(10) == b""

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        for each in data:
            got = await recv_all(reader, len(each))
            assert digest(got) == digest(each)
            await writer.sendall(bytearray(got[::-1]))
        assert await reader.read() == b""

    converse(client, server, attributes=attributes, settings=SdpSettings(strategy=strategy))


@ATTRIBUTES
def test_several_outstanding_are_pipelined_from_buffer_to_buffer(attributes: DeviceAttributes) -> None:
    watch = Watch()
    count, size = 12, 100_000
    data = [bytearray(pattern(size, seed)) for seed in range(count)]
    rooms = [bytearray(size) for _ in range(count)]
    modes: list[Mode] = []

    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        await asyncio.gather(*(writer.sendall(each) for each in data))
        modes.append(stream_of(writer).connection.send_mode)

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        counts = await asyncio.gather(*(reader.recv_into(room, waitall=True) for room in rooms))
        assert counts == [size] * count

    converse(client, server, attributes=attributes, watch=watch)
    assert modes == [Mode.PIPELINED]
    assert [digest(room) for room in rooms] == [digest(each) for each in data]
    answers = [views[0] for kind, source, views, _ in watch.gathered if kind is Kind.READ_RESPONSE and source == LEFT]
    assert sum(each.length for each in answers) >= (count - 1) * size
    assert all(any(Range.of(each).holds(one) for each in data) for one in answers)
    targets = [to for kind, _, _, to in watch.placed_ranges if kind is Kind.READ_RESPONSE]
    assert all(any(Range.of(room).holds(one) for room in rooms) for one in targets)


@ATTRIBUTES
def test_receives_that_wait_are_written_into(attributes: DeviceAttributes) -> None:
    watch = Watch()
    count, size = 8, 100_000
    data = [bytearray(pattern(size, seed)) for seed in range(count)]
    rooms = [bytearray(size) for _ in range(count)]

    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        stream_of(writer).connection.want_send_mode(Mode.PIPELINED, 0.0)
        stream_of(writer).run()
        assert await reader.read(5) == b"ready"
        for each in data:
            await writer.sendall(each)

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        while stream_of(writer).connection.receive_mode is not Mode.PIPELINED:
            await asyncio.sleep(0)
        receives = [asyncio.ensure_future(reader.recv_into(room)) for room in rooms]
        await turns()
        await writer.sendall(b"ready")
        assert await asyncio.gather(*receives) == [size] * count

    converse(
        client,
        server,
        attributes=attributes,
        watch=watch,
        settings=SdpSettings(strategy=pipelined),
    )
    assert [digest(room) for room in rooms] == [digest(each) for each in data]
    written = [
        (source, to) for kind, device, source, to in watch.placed_ranges if kind is Kind.WRITE and device == RIGHT
    ]
    assert sum(to.length for _, to in written) == count * size
    assert all(any(Range.of(each).holds(source) for each in data) for source, _ in written)
    assert all(any(Range.of(room).holds(to) for room in rooms) for _, to in written)


def test_both_ways_at_once() -> None:
    data = pattern(2_000_000)

    async def talk(reader: SdpReader, writer: SdpWriter) -> None:
        room = bytearray(len(data))
        _, got = await asyncio.gather(writer.sendall(data), reader.recv_into(room, waitall=True))
        assert got == len(data)
        assert digest(room) == digest(data)

    converse(talk, talk)


def test_urgent_data() -> None:
    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        await writer.sendall(b"before!", urgent=True)
        await writer.sendall(b"after")
        assert await reader.read(1) == b"."

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        assert await recv_all(reader, 100) == b"before"
        assert reader.at_mark()
        assert reader.take_urgent() == ord("!")
        assert reader.take_urgent() is None
        assert await reader.readexactly(5) == b"after"
        await writer.sendall(b".")

    converse(client, server)


def test_an_end_that_comes_too_early() -> None:
    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        await writer.sendall(b"short")

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        with pytest.raises(asyncio.IncompleteReadError) as told:
            await reader.readexactly(10)
        assert told.value.partial == b"short"
        assert await reader.readexactly(0) == b""
        with pytest.raises(TypeError):
            await reader.recv_into(b"read-only")

    converse(client, server)


# --- cancelling ---


@ATTRIBUTES
def test_a_cancelled_receive_loses_nothing(attributes: DeviceAttributes) -> None:
    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        assert await reader.read(1) == b"1"
        await writer.sendall(b"the whole of it")
        assert await reader.read(1) == b"2"

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        room = bytearray(100_000)
        receive = asyncio.ensure_future(reader.recv_into(room, waitall=True))
        await turns(20)
        receive.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receive
        room.append(1)  # the memory is free
        await writer.sendall(b"1")
        partial = asyncio.ensure_future(reader.recv_into(room, waitall=True))
        while not any(receive.filled for receive in stream_of(writer).connection._sink.receives):
            await asyncio.sleep(0)
        partial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await partial
        room.append(1)
        assert await reader.read(100) == b"the whole of it"
        await writer.sendall(b"2")

    converse(client, server, attributes=attributes)


@ATTRIBUTES
def test_a_receive_that_was_shown_to_the_other_end_can_be_cancelled(attributes: DeviceAttributes) -> None:
    watch = Watch()
    data = bytearray(pattern(250_000))

    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        stream_of(writer).connection.want_send_mode(Mode.PIPELINED, 0.0)
        stream_of(writer).run()
        assert await reader.read(1) == b"."
        await writer.sendall(data)

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        while stream_of(writer).connection.receive_mode is not Mode.PIPELINED:
            await asyncio.sleep(0)
        rooms = [bytearray(100_000) for _ in range(3)]
        receives = [asyncio.ensure_future(reader.recv_into(room)) for room in rooms]
        while Mid.SINK_AVAIL not in watch.mids(RIGHT):
            await asyncio.sleep(0)
        for receive in receives:
            receive.cancel()
        done, _ = await asyncio.wait(receives)
        assert all(each.cancelled() for each in done)
        for room in rooms:
            room.append(1)
        await writer.sendall(b".")
        assert digest(await recv_all(reader, len(data))) == digest(data)

    converse(
        client,
        server,
        attributes=attributes,
        watch=watch,
        settings=SdpSettings(strategy=pipelined),
    )
    assert Mid.SINK_AVAIL_CANCEL in watch.mids(RIGHT)


@ATTRIBUTES
def test_a_send_that_is_advertised_can_be_cancelled(attributes: DeviceAttributes) -> None:
    watch = Watch()
    data = bytearray(pattern(500_000))
    got: list[bytes] = []

    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        send = asyncio.ensure_future(writer.sendall(data))
        while Mid.SRC_AVAIL not in watch.mids(LEFT):
            await asyncio.sleep(0)
        send.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
            send.cancel()  # once is enough, and more changes nothing
        with pytest.raises(asyncio.CancelledError):
            await send
        data.append(1)  # the memory is free
        await writer.sendall(b"|the end")
        writer.write_eof()
        assert await reader.read(1) == b"."

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        while Mid.SRC_AVAIL_CANCEL not in watch.mids(LEFT):
            await asyncio.sleep(0)
        got.append(await reader.read())
        await writer.sendall(b".")

    converse(client, server, attributes=attributes, watch=watch)
    part, _, rest = got[0].rpartition(b"|")
    assert rest == b"the end"
    assert len(part) < 400_000
    assert bytes(data).startswith(part)


def test_cancelling_everything_at_once() -> None:
    """A group that is cancelled gets all its memory back, and the stream goes on."""

    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        assert await reader.read(2) == b"go"
        await writer.sendall(b"abc" * 1000)

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        rooms = [bytearray(70_000) for _ in range(5)]
        async with asyncio.TaskGroup() as group:
            receives = [group.create_task(reader.recv_into(room)) for room in rooms]
            await turns(30)
            for receive in receives:
                receive.cancel()
        for room in rooms:
            room.append(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.001)
        await writer.sendall(b"go")
        assert await recv_all(reader, 3000) == b"abc" * 1000

    converse(client, server)


def test_a_stream_with_a_hole_is_reset() -> None:
    """A receive is cancelled that has bytes, when a later one has some too: nobody may go on with the rest."""

    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        await writer.sendall(b"x" * 100)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        first, second = bytearray(50), bytearray(50)
        one = asyncio.ensure_future(reader.recv_into(first))
        two = asyncio.ensure_future(reader.recv_into(second))
        await asyncio.sleep(0)
        while not stream_of(writer).connection._flow.gone and not all(
            receive.done for receive in reader._transport._receives
        ):
            await asyncio.sleep(0)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        assert await two == 50
        with pytest.raises(ConnectionAbortedError):
            await reader.read(1)

    converse(client, server)


def test_connecting_can_be_cancelled() -> None:
    async def main() -> None:
        world = AsyncWorld()
        attempt = asyncio.ensure_future(world.connect())
        while not world.stacks[0].streams:
            await asyncio.sleep(0)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        await turns(10)
        world.pump.close()
        world.assert_nothing_left()

    run(main)


# --- ends ---


def test_errors() -> None:
    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        assert await reader.read(1) == b"."
        writer.abort()
        with pytest.raises(BrokenPipeError):
            await writer.sendall(b"x")
        assert await reader.read(1) == b""

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        await writer.sendall(b".")
        data = bytearray(200_000)
        outcomes = await asyncio.gather(
            reader.read(1), writer.sendall(data), writer.sendall(data), return_exceptions=True
        )
        assert [type(each) for each in outcomes] == [ConnectionResetError] * 3  # all were outstanding when it broke
        data.append(1)
        assert await reader.read(1) == b""
        with pytest.raises(BrokenPipeError):
            await writer.sendall(b"x")
        writer.close()

    converse(client, server)


def test_half_close() -> None:
    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        await writer.sendall(b"question")
        writer.write_eof()
        writer.write_eof()
        with pytest.raises(BrokenPipeError):
            await writer.sendall(b"more")
        assert await reader.read() == b"answer"
        writer.close()
        writer.close()
        await writer.wait_closed()

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        assert await reader.read() == b"question"
        await writer.sendall(b"answer")

    converse(client, server)


def test_a_body_that_raises_resets() -> None:
    async def main() -> None:
        world = AsyncWorld()
        told: list[type[BaseException]] = []

        async def serve(reader: SdpReader, writer: SdpWriter) -> None:
            try:
                await reader.read(1)
            except OSError as error:
                told.append(type(error))
            writer.close()

        async def body() -> None:
            async def program(reader: SdpReader, writer: SdpWriter) -> None:
                await writer.sendall(b"")
                await turns(50)
                raise ZeroDivisionError

            await closing(program, *await world.connect())

        async with await world.serve(serve):
            with pytest.raises(ZeroDivisionError):
                await body()
            await turns()
        assert told == [ConnectionResetError]
        world.pump.close()
        world.assert_nothing_left()

    run(main)


def test_who_is_served_by_what_raises_is_reset() -> None:
    """The task tells of the exception; the connection does not stay, with an other end that waits for ever."""

    async def main() -> None:
        world = AsyncWorld()
        raised: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context.get("exception")))

        async def serve(reader: SdpReader, writer: SdpWriter) -> None:
            raise ZeroDivisionError

        async with await world.serve(serve):
            reader, writer = await world.connect()
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
            await writer.wait_closed()
        world.pump.close()
        world.assert_nothing_left()

    run(main)


def test_refusals() -> None:
    async def main() -> None:
        world = AsyncWorld()
        with pytest.raises(ConnectionRefusedError):
            await world.connect()
        with pytest.raises(OSError, match="family") as told:
            await world.connect("fd00::1")
        assert told.value.errno == errno.EINVAL
        with pytest.raises(OSError, match="not a port"):
            await world.connect(local_addr=("0.0.0.0", 70_000))
        async with await world.serve(lambda *ends: None) as server:
            assert server.sockets[0].getsockname() == ("0.0.0.0", PORT)
            with pytest.raises(OSError, match="in use") as told:
                await world.serve(lambda *ends: None)
            assert told.value.errno == errno.EADDRINUSE
        with pytest.raises(OSError, match="assign"):
            await world.serve(lambda *ends: None, "192.168.7.7")
        world.pump.close()
        world.assert_nothing_left()

    run(main)


def test_names() -> None:
    seen: list[tuple[str, int]] = []

    async def client(reader: SdpReader, writer: SdpWriter) -> None:
        assert writer.get_extra_info("peername") == (RIGHT, PORT)
        seen.append(writer.get_extra_info("sockname"))
        assert await reader.read(1) == b"."

    async def server(reader: SdpReader, writer: SdpWriter) -> None:
        assert writer.get_extra_info("sockname") == (RIGHT, PORT)
        seen.append(writer.get_extra_info("peername"))
        await writer.sendall(b".")

    converse(client, server)
    assert seen[0] == seen[1] == (LEFT, 32768)


# --- many ---


def test_many_connections() -> None:
    count = 30

    async def main() -> None:
        world = AsyncWorld(settings=SdpSettings(receive_count=8, receive_size=4096))

        async def serve(reader: SdpReader, writer: SdpWriter) -> None:
            got = await reader.read()
            await writer.sendall(digest(got).encode())
            writer.close()

        async def ask(index: int) -> None:
            data = pattern(5000 + 777 * index, index)
            reader, writer = await world.connect()
            await writer.sendall(data)
            writer.write_eof()
            assert (await reader.read()).decode() == digest(data)
            writer.close()

        async with await world.serve(serve):
            await asyncio.gather(*(ask(index) for index in range(count)))
        await turns()
        world.pump.close()
        world.assert_nothing_left()

    run(main)
