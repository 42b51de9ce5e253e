"""The asyncio face: streams, servers, several requests outstanding, and cancelled ones."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from endpoint_world import (
    BOTH_MODES,
    CHECKING,
    LEFT,
    LENIENT,
    PORT,
    RIGHT,
    End,
    Range,
    Watch,
    World,
    addresses,
    digest,
    eager,
    pattern,
    pipelined,
    read_zcopy,
    take,
)

from sidestep.rdma.loopback import Kind
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.sdp.aio import AsyncStream, Pump, open_connection, start_server, timers
from sidestep.sdp.requests import EventKind
from sidestep.sdp.settings import Settings
from sidestep.sdp.stack import Stack
from sidestep.sdp.strategy import Strategy, bcopy_only
from sidestep.sdp.wire import Mid, Mode

MODES = pytest.mark.parametrize("immediate", BOTH_MODES, ids=["timed", "immediate"])
ATTRIBUTES = pytest.mark.parametrize("attributes", [LENIENT, CHECKING], ids=["lenient", "checking"])

Program = Callable[[AsyncStream], Awaitable[None]]


class AsyncWorld(World):
    """Two hosts whose fabric the event loop drives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(kick=self._kick, **options)
        self.pump = Pump(self.fabric)

    def _kick(self) -> None:
        self.pump.kick()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30.0))  # a test that hangs says where


def converse(client: Program, server: Program, **options: Any) -> AsyncWorld:
    """Two programs, each with its end of a connection."""
    worlds: list[AsyncWorld] = []

    async def main() -> None:
        world = AsyncWorld(**options)
        worlds.append(world)
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def serve(stream: AsyncStream) -> None:
            try:
                async with stream:
                    await server(stream)
            except BaseException as error:
                served.set_exception(error)
            else:
                served.set_result(None)

        async with await start_server(serve, world.right, PORT):
            async with await open_connection(world.left, RIGHT, PORT) as stream:
                await client(stream)
            await served
        world.pump.close()

    run(main)
    worlds[0].assert_nothing_left()
    return worlds[0]


async def recv_all(stream: AsyncStream, size: int) -> bytes:
    room = bytearray(size)
    count = await stream.recv_into(room, waitall=True)
    return bytes(room[:count])


async def turns(count: int = 200) -> None:
    """Lets the others have theirs."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- data ---


@MODES
@ATTRIBUTES
@pytest.mark.parametrize("strategy", [Strategy, eager, bcopy_only, read_zcopy, pipelined])
def test_bytes_arrive(immediate: bool, attributes: DeviceAttributes, strategy: Callable[[], Strategy]) -> None:
    sizes = [1, 100, 5000, 64 << 10, 65 << 10, 300_000]
    data = [pattern(size, size) for size in sizes]

    async def client(stream: AsyncStream) -> None:
        for each in data:
            assert await stream.send(each) == len(each)
            assert digest(await stream.readexactly(len(each))) == digest(each[::-1])
        stream.write_eof()
        assert await stream.recv(10) == b""

    async def server(stream: AsyncStream) -> None:
        for each in data:
            got = await recv_all(stream, len(each))
            assert digest(got) == digest(each)
            await stream.send(bytearray(got[::-1]))
        assert await stream.read() == b""

    converse(client, server, immediate=immediate, attributes=attributes, settings=Settings(strategy=strategy))


@MODES
@ATTRIBUTES
def test_several_outstanding_are_pipelined_from_buffer_to_buffer(immediate: bool, attributes: DeviceAttributes) -> None:
    watch = Watch()
    count, size = 12, 100_000
    data = [bytearray(pattern(size, seed)) for seed in range(count)]
    rooms = [bytearray(size) for _ in range(count)]
    modes: list[Mode] = []

    async def client(stream: AsyncStream) -> None:
        assert await asyncio.gather(*(stream.send(each) for each in data)) == [size] * count
        modes.append(stream.stream.connection.send_mode)

    async def server(stream: AsyncStream) -> None:
        counts = await asyncio.gather(*(stream.recv_into(room, waitall=True) for room in rooms))
        assert counts == [size] * count

    converse(client, server, immediate=immediate, attributes=attributes, watch=watch)
    assert modes == [Mode.PIPELINED]
    assert [digest(room) for room in rooms] == [digest(each) for each in data]
    answers = [views[0] for kind, source, views, _ in watch.gathered if kind is Kind.READ_RESPONSE and source == LEFT]
    assert sum(each.length for each in answers) >= (count - 1) * size
    assert all(any(Range.of(each).holds(one) for each in data) for one in answers)
    targets = [to for kind, _, _, to in watch.placed_ranges if kind is Kind.READ_RESPONSE]
    assert all(any(Range.of(room).holds(one) for room in rooms) for one in targets)


@MODES
@ATTRIBUTES
def test_receives_that_wait_are_written_into(immediate: bool, attributes: DeviceAttributes) -> None:
    watch = Watch()
    count, size = 8, 100_000
    data = [bytearray(pattern(size, seed)) for seed in range(count)]
    rooms = [bytearray(size) for _ in range(count)]

    async def client(stream: AsyncStream) -> None:
        stream.stream.connection.want_send_mode(Mode.PIPELINED, 0.0)
        stream.stream.run()
        assert await stream.recv(5) == b"ready"
        for each in data:
            await stream.send(each)

    async def server(stream: AsyncStream) -> None:
        while stream.stream.connection.receive_mode is not Mode.PIPELINED:
            await asyncio.sleep(0)
        receives = [asyncio.ensure_future(stream.recv_into(room)) for room in rooms]
        await turns()
        await stream.send(b"ready")
        assert await asyncio.gather(*receives) == [size] * count

    converse(
        client, server, immediate=immediate, attributes=attributes, watch=watch, settings=Settings(strategy=pipelined)
    )
    assert [digest(room) for room in rooms] == [digest(each) for each in data]
    written = [
        (source, to) for kind, device, source, to in watch.placed_ranges if kind is Kind.WRITE and device == RIGHT
    ]
    assert sum(to.length for _, to in written) == count * size
    assert all(any(Range.of(each).holds(source) for each in data) for source, _ in written)
    assert all(any(Range.of(room).holds(to) for room in rooms) for _, to in written)


@MODES
def test_both_ways_at_once(immediate: bool) -> None:
    data = pattern(2_000_000)

    async def talk(stream: AsyncStream) -> None:
        room = bytearray(len(data))
        sent, got = await asyncio.gather(stream.send(data), stream.recv_into(room, waitall=True))
        assert (sent, got) == (len(data), len(data))
        assert digest(room) == digest(data)

    converse(talk, talk, immediate=immediate)


@MODES
def test_urgent_data(immediate: bool) -> None:
    async def client(stream: AsyncStream) -> None:
        await stream.send(b"before!", urgent=True)
        await stream.send(b"after")
        assert await stream.recv(1) == b"."

    async def server(stream: AsyncStream) -> None:
        assert await recv_all(stream, 100) == b"before"
        assert stream.at_mark()
        assert stream.take_urgent() == ord("!")
        assert stream.take_urgent() is None
        assert await stream.readexactly(5) == b"after"
        await stream.send(b".")

    converse(client, server, immediate=immediate)


@MODES
def test_an_end_that_comes_too_early(immediate: bool) -> None:
    async def client(stream: AsyncStream) -> None:
        await stream.send(b"short")

    async def server(stream: AsyncStream) -> None:
        with pytest.raises(asyncio.IncompleteReadError) as told:
            await stream.readexactly(10)
        assert told.value.partial == b"short"
        assert await stream.readexactly(0) == b""

    converse(client, server, immediate=immediate)


# --- cancelling ---


@MODES
@ATTRIBUTES
def test_a_cancelled_receive_loses_nothing(immediate: bool, attributes: DeviceAttributes) -> None:
    async def client(stream: AsyncStream) -> None:
        assert await stream.recv(1) == b"1"
        await stream.send(b"the whole of it")
        assert await stream.recv(1) == b"2"

    async def server(stream: AsyncStream) -> None:
        room = bytearray(100_000)
        receive = asyncio.ensure_future(stream.recv_into(room, waitall=True))
        await turns(20)
        receive.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receive
        room.append(1)  # the memory is free
        await stream.send(b"1")
        partial = asyncio.ensure_future(stream.recv_into(room, waitall=True))
        while not any(receive.filled for receive in stream.stream.connection._sink.receives):
            await asyncio.sleep(0)
        partial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await partial
        room.append(1)
        assert await stream.recv(100) == b"the whole of it"
        await stream.send(b"2")

    converse(client, server, immediate=immediate, attributes=attributes)


@MODES
@ATTRIBUTES
def test_a_receive_that_was_shown_to_the_other_end_can_be_cancelled(
    immediate: bool, attributes: DeviceAttributes
) -> None:
    watch = Watch()
    data = bytearray(pattern(250_000))

    async def client(stream: AsyncStream) -> None:
        stream.stream.connection.want_send_mode(Mode.PIPELINED, 0.0)
        stream.stream.run()
        assert await stream.recv(1) == b"."
        await stream.send(data)

    async def server(stream: AsyncStream) -> None:
        while stream.stream.connection.receive_mode is not Mode.PIPELINED:
            await asyncio.sleep(0)
        rooms = [bytearray(100_000) for _ in range(3)]
        receives = [asyncio.ensure_future(stream.recv_into(room)) for room in rooms]
        while Mid.SINK_AVAIL not in watch.mids(RIGHT):
            await asyncio.sleep(0)
        for receive in receives:
            receive.cancel()
        done, _ = await asyncio.wait(receives)
        assert all(each.cancelled() for each in done)
        for room in rooms:
            room.append(1)
        await stream.send(b".")
        assert digest(await recv_all(stream, len(data))) == digest(data)

    converse(
        client, server, immediate=immediate, attributes=attributes, watch=watch, settings=Settings(strategy=pipelined)
    )
    assert Mid.SINK_AVAIL_CANCEL in watch.mids(RIGHT)


@MODES
@ATTRIBUTES
def test_a_send_that_is_advertised_can_be_cancelled(immediate: bool, attributes: DeviceAttributes) -> None:
    watch = Watch()
    data = bytearray(pattern(500_000))
    got: list[bytes] = []

    async def client(stream: AsyncStream) -> None:
        send = asyncio.ensure_future(stream.send(data))
        while Mid.SRC_AVAIL not in watch.mids(LEFT):
            await asyncio.sleep(0)
        send.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
            send.cancel()  # once is enough, and more changes nothing
        with pytest.raises(asyncio.CancelledError):
            await send
        data.append(1)  # the memory is free
        await stream.send(b"|the end")
        stream.write_eof()
        assert await stream.recv(1) == b"."

    async def server(stream: AsyncStream) -> None:
        while Mid.SRC_AVAIL_CANCEL not in watch.mids(LEFT):
            await asyncio.sleep(0)
        got.append(await stream.read())
        await stream.send(b".")

    converse(client, server, immediate=immediate, attributes=attributes, watch=watch)
    part, _, rest = got[0].rpartition(b"|")
    assert rest == b"the end"
    assert len(part) < 400_000
    assert bytes(data).startswith(part)


@MODES
def test_cancelling_everything_at_once(immediate: bool) -> None:
    """A group that is cancelled gets all its memory back, and the stream goes on."""

    async def client(stream: AsyncStream) -> None:
        assert await stream.recv(2) == b"go"
        await stream.send(b"abc" * 1000)

    async def server(stream: AsyncStream) -> None:
        rooms = [bytearray(70_000) for _ in range(5)]
        async with asyncio.TaskGroup() as group:
            receives = [group.create_task(stream.recv_into(room)) for room in rooms]
            await turns(30)
            for receive in receives:
                receive.cancel()
        for room in rooms:
            room.append(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.recv(1), 0.001)
        await stream.send(b"go")
        assert await recv_all(stream, 3000) == b"abc" * 1000

    converse(client, server, immediate=immediate)


def test_a_stream_with_a_hole_is_reset() -> None:
    """A receive is cancelled that has bytes, when a later one has some too: nobody may go on with the rest."""

    async def client(stream: AsyncStream) -> None:
        await stream.send(b"x" * 100)
        with pytest.raises(ConnectionResetError):
            await stream.recv(1)

    async def server(stream: AsyncStream) -> None:
        first, second = bytearray(50), bytearray(50)
        one = asyncio.ensure_future(stream.recv_into(first))
        two = asyncio.ensure_future(stream.recv_into(second))
        await asyncio.sleep(0)
        while not stream.stream.connection._flow.gone and not all(receive.done for receive in stream._receives):
            await asyncio.sleep(0)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        assert await two == 50
        with pytest.raises(ConnectionAbortedError):
            await stream.recv(1)

    converse(client, server, immediate=True)


@MODES
def test_connecting_can_be_cancelled(immediate: bool) -> None:
    async def main() -> None:
        world = AsyncWorld(immediate=immediate)
        attempt = asyncio.ensure_future(open_connection(world.left, RIGHT, PORT))
        await asyncio.sleep(0)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        await turns(10)
        world.pump.close()
        world.assert_nothing_left()

    run(main)


# --- ends ---


@MODES
def test_errors(immediate: bool) -> None:
    async def client(stream: AsyncStream) -> None:
        assert await stream.recv(1) == b"."
        stream.abort()
        with pytest.raises(BrokenPipeError):
            await stream.send(b"x")
        assert await stream.recv(1) == b""

    async def server(stream: AsyncStream) -> None:
        await stream.send(b".")
        data = bytearray(200_000)
        outcomes = await asyncio.gather(stream.recv(1), stream.send(data), stream.send(data), return_exceptions=True)
        assert [type(each) for each in outcomes] == [ConnectionResetError] * 3  # all were outstanding when it broke
        data.append(1)
        assert await stream.recv(1) == b""
        with pytest.raises(BrokenPipeError):
            await stream.send(b"x")
        stream.close()

    converse(client, server, immediate=immediate)


@MODES
def test_half_close(immediate: bool) -> None:
    async def client(stream: AsyncStream) -> None:
        await stream.send(b"question")
        stream.write_eof()
        stream.write_eof()
        with pytest.raises(BrokenPipeError):
            await stream.send(b"more")
        assert await stream.read() == b"answer"
        stream.close()
        stream.close()
        await stream.wait_closed()

    async def server(stream: AsyncStream) -> None:
        assert await stream.read() == b"question"
        await stream.send(b"answer")

    converse(client, server, immediate=immediate)


@MODES
def test_a_body_that_raises_resets(immediate: bool) -> None:
    async def main() -> None:
        world = AsyncWorld(immediate=immediate)
        told: list[type[BaseException]] = []

        async def serve(stream: AsyncStream) -> None:
            try:
                await stream.recv(1)
            except OSError as error:
                told.append(type(error))
            stream.close()

        async def body() -> None:
            async with await open_connection(world.left, RIGHT, PORT) as stream:
                await stream.send(b"")
                await turns(50)
                raise ZeroDivisionError

        async with await start_server(serve, world.right, PORT):
            with pytest.raises(ZeroDivisionError):
                await body()
            await turns()
        assert told == [ConnectionResetError]
        world.pump.close()
        world.assert_nothing_left()

    run(main)


@MODES
def test_who_is_served_by_what_raises_is_reset(immediate: bool) -> None:
    """The task tells of the exception; the connection does not stay, with an other end that waits for ever."""

    async def main() -> None:
        world = AsyncWorld(immediate=immediate)
        raised: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context.get("exception")))

        async def serve(stream: AsyncStream) -> None:
            raise ZeroDivisionError

        async with await start_server(serve, world.right, PORT):
            stream = await open_connection(world.left, RIGHT, PORT)
            with pytest.raises(ConnectionResetError):
                await stream.recv(1)
            await stream.wait_closed()
        world.pump.close()
        world.assert_nothing_left()

    run(main)


@MODES
def test_refusals(immediate: bool) -> None:
    async def main() -> None:
        world = AsyncWorld(immediate=immediate)
        with pytest.raises(ConnectionRefusedError):
            await open_connection(world.left, RIGHT, PORT)
        with pytest.raises(OSError, match="family") as told:
            await open_connection(world.left, "fd00::1", PORT)
        assert told.value.errno == errno.EINVAL
        with pytest.raises(OSError, match="not a port"):
            await open_connection(world.left, RIGHT, PORT, local_address=("", 70_000))
        async with await start_server(lambda stream: None, world.right, PORT) as server:
            assert server.port == PORT
            with pytest.raises(OSError, match="in use") as told:
                await start_server(lambda stream: None, world.right, PORT)
            assert told.value.errno == errno.EADDRINUSE
        with pytest.raises(OSError, match="assign"):
            await start_server(lambda stream: None, world.right, PORT, address="192.168.7.7")
        world.pump.close()
        world.assert_nothing_left()

    run(main)


@MODES
def test_names(immediate: bool) -> None:
    seen: list[tuple[str, int]] = []

    async def client(stream: AsyncStream) -> None:
        assert stream.getpeername() == (RIGHT, PORT)
        seen.append(stream.getsockname())
        assert await stream.recv(1) == b"."

    async def server(stream: AsyncStream) -> None:
        assert stream.getsockname() == (RIGHT, PORT)
        seen.append(stream.getpeername())
        await stream.send(b".")

    converse(client, server, immediate=immediate)
    assert seen[0] == seen[1] == (LEFT, 32768)


def test_a_stream_that_is_not_connected() -> None:
    async def main() -> None:
        world = AsyncWorld()
        stream = AsyncStream(world.left)
        with pytest.raises(OSError, match="not connected"):
            await stream.send(b"x")
        with pytest.raises(TypeError):
            await stream.recv_into(b"x")
        stream.close()

    run(main)


# --- many ---


@MODES
def test_many_connections(immediate: bool) -> None:
    count = 30

    async def main() -> None:
        world = AsyncWorld(immediate=immediate, settings=Settings(receive_count=8, receive_size=4096))

        async def serve(stream: AsyncStream) -> None:
            async with stream:
                got = await stream.read()
                await stream.send(digest(got).encode())

        async def ask(index: int) -> None:
            data = pattern(5000 + 777 * index, index)
            async with await open_connection(world.left, RIGHT, PORT) as stream:
                await stream.send(data)
                stream.write_eof()
                assert (await stream.read()).decode() == digest(data)

        async with await start_server(serve, world.right, PORT):
            await asyncio.gather(*(ask(index) for index in range(count)))
        await turns()
        world.pump.close()
        world.assert_nothing_left()

    run(main)


def test_timers_of_the_event_loop() -> None:
    """A stack on the loop's own clock: its timeouts come by themselves."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        fabric = World().fabric
        ends = [End(), End()]
        settings = Settings(keepalive_s=0.001)
        stacks = [Stack(fabric.device(name, LENIENT), loop.time, settings) for name in ("one", "two")]
        stacks[1].listen(PORT, partial(take, ends[1]))
        ends[0].stream = stacks[0].connect("two", addresses(), ends[0].tell)
        assert fabric.run_until(lambda: all(end.got(EventKind.ESTABLISHED) for end in ends))
        first = stacks[0].next_deadline()
        assert first is not None
        timers(stacks[0])  # also those that are set already
        while stacks[0].next_deadline() == first:
            await asyncio.sleep(0)
        second = stacks[0].next_deadline()
        while stacks[0].next_deadline() == second:
            await asyncio.sleep(0)
        for stack in stacks:
            stack.close()

    run(main)
