"""Sockets that block, two programs in virtual time."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random

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
    create_connection,
    create_server,
    done,
    eager,
    pipelined,
    read_zcopy,
    socket_on,
)
from virtual_time import VirtualTime

from sidestep.api.sockets import (
    MSG_DONTWAIT,
    MSG_OOB,
    MSG_PEEK,
    MSG_WAITALL,
    SHUT_RD,
    SHUT_RDWR,
    SHUT_WR,
    SdpSocket,
    select,
)
from sidestep.errors import Misuse
from sidestep.rdma.loopback import Fabric, Kind
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.sdp.host import EPHEMERAL, Host
from sidestep.sdp.settings import SdpSettings
from sidestep.sdp.strategy import Strategy, bcopy_only

ATTRIBUTES = pytest.mark.parametrize("attributes", [LENIENT, CHECKING], ids=["lenient", "checking"])

Program = Callable[[SdpSocket], object]


def converse(world: World, client: Program, server: Program) -> None:
    """Two programs, each with its end of a connection, at the same time."""
    listener = create_server(world.right, world.driver, (RIGHT, PORT))

    def accept() -> None:
        conn, _ = listener.accept()
        listener.close()
        with conn:
            server(conn)

    def connect() -> None:
        with create_connection(world.left, world.driver, (RIGHT, PORT)) as conn:
            client(conn)

    world.driver.together(accept, connect)
    world.assert_nothing_left()


def never() -> bool:
    """What a program that only lets time pass waits for."""
    return False


def recv_all(conn: SdpSocket, size: int) -> bytes:
    room = bytearray(size)
    count = 0
    with memoryview(room) as view:
        while count < size and (more := conn.recv_into(view[count:])):
            count += more
    return bytes(room[:count])


# --- data ---


@ATTRIBUTES
@pytest.mark.parametrize("strategy", [Strategy, eager, bcopy_only, read_zcopy, pipelined])
def test_bytes_arrive(attributes: DeviceAttributes, strategy: Callable[[], Strategy]) -> None:
    world = World(attributes=attributes, settings=SdpSettings(strategy=strategy))
    sizes = [1, 100, 5000, 64 << 10, 65 << 10, 300_000]
    data = [pattern(size, size) for size in sizes]

    def client(conn: SdpSocket) -> None:
        for each in data:
            conn.sendall(each)
            assert digest(recv_all(conn, len(each))) == digest(each[::-1])
        conn.shutdown(SHUT_WR)
        assert conn.recv(10) == b""

    def server(conn: SdpSocket) -> None:
        for each in data:
            got = recv_all(conn, len(each))
            assert digest(got) == digest(each)
            conn.sendall(bytearray(got[::-1]))
        assert conn.recv(1) == b""

    converse(world, client, server)


@ATTRIBUTES
def test_a_large_send_goes_from_buffer_to_buffer(attributes: DeviceAttributes) -> None:
    watch = Watch()
    world = World(attributes=attributes, watch=watch)
    data = bytearray(pattern(1_000_000))
    room = bytearray(len(data))

    def client(conn: SdpSocket) -> None:
        conn.sendall(data)

    def server(conn: SdpSocket) -> None:
        assert conn.recv_into(room, flags=MSG_WAITALL) == len(room)

    converse(world, client, server)
    assert digest(room) == digest(data)
    answers = [views[0] for kind, _, views, _ in watch.gathered if kind is Kind.READ_RESPONSE]
    assert sum(each.length for each in answers) >= len(data) - 64
    assert all(Range.of(data).holds(each) for each in answers)
    targets = [to for kind, _, _, to in watch.placed_ranges if kind is Kind.READ_RESPONSE]
    assert all(Range.of(room).holds(each) for each in targets)


@ATTRIBUTES
def test_a_small_send_gathers_the_users_buffer(attributes: DeviceAttributes) -> None:
    watch = Watch()
    world = World(attributes=attributes, watch=watch)
    data = bytearray(b"small, and where the user has it")

    def client(conn: SdpSocket) -> None:
        with memoryview(data) as view:
            assert conn.send(view[6:]) == len(data) - 6

    def server(conn: SdpSocket) -> None:
        assert conn.recv(100) == data[6:]

    converse(world, client, server)
    (sent,) = [views[0] for kind, source, views, _ in watch.gathered if kind is Kind.SEND and source == LEFT and views]
    assert Range.of(data).holds(sent)
    data.append(1)  # and it is free again


def test_waitall_and_peek() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        for part in (b"one ", b"two ", b"three"):
            conn.sendall(part)
            assert conn.recv(1) == b"."

    def server(conn: SdpSocket) -> None:
        assert conn.recv(100, MSG_PEEK) == b"one "
        assert conn.recv(2, MSG_PEEK) == b"on"
        conn.sendall(b".")
        room = bytearray(13)
        conn.sendall(b".")
        conn.sendall(b".")
        assert conn.recv_into(room, flags=MSG_WAITALL) == 13
        assert bytes(room) == b"one two three"

    converse(world, client, server)


def test_waitall_waits_for_all() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        for part in (b"one", b"two", b"three"):
            world.driver.wait(never, 1)
            conn.sendall(part)

    def server(conn: SdpSocket) -> None:
        assert conn.recv(11, MSG_WAITALL) == b"onetwothree"
        assert world.fabric.now >= 3

    converse(world, client, server)


@ATTRIBUTES
def test_peek_at_bytes_that_are_only_on_offer(attributes: DeviceAttributes) -> None:
    world = World(attributes=attributes, settings=SdpSettings(strategy=pipelined))
    data = pattern(200_000)

    def client(conn: SdpSocket) -> None:
        conn.sendall(data)

    def server(conn: SdpSocket) -> None:
        peeked = conn.recv(1000, MSG_PEEK)
        assert peeked
        assert data.startswith(peeked)
        assert digest(recv_all(conn, len(data))) == digest(data)

    converse(world, client, server)


def test_urgent_data() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        conn.sendall(b"before")
        assert conn.send(b"-!", MSG_OOB) == 2
        conn.sendall(b"after")
        assert conn.recv(1) == b"."

    def server(conn: SdpSocket) -> None:
        assert select([], [], [conn])[2] == [conn]
        assert recv_all(conn, 7) == b"before-"
        assert conn.at_mark()
        assert conn.recv(10, MSG_OOB) == b"!"
        with pytest.raises(OSError, match="Invalid") as told:
            conn.recv(1, MSG_OOB)
        assert told.value.errno == errno.EINVAL
        assert not conn.urgent
        assert recv_all(conn, 5) == b"after"
        conn.sendall(b".")

    converse(world, client, server)


def test_urgent_data_inline() -> None:
    world = World(settings=SdpSettings(urgent_inline=True))

    def client(conn: SdpSocket) -> None:
        conn.send(b"ab!", MSG_OOB)
        conn.shutdown(SHUT_WR)

    def server(conn: SdpSocket) -> None:
        assert conn.recv(10) == b"ab"
        assert conn.at_mark()
        with pytest.raises(OSError, match="Invalid"):
            conn.recv(1, MSG_OOB)
        assert conn.recv(10, MSG_PEEK) == b"!"
        assert conn.recv(10) == b"!"
        assert conn.recv(10) == b""

    converse(world, client, server)


def test_an_urgent_byte_that_is_announced_but_not_here() -> None:
    world = World(settings=SdpSettings(strategy=read_zcopy))

    def client(conn: SdpSocket) -> None:
        stream = conn.stream
        assert stream is not None
        with memoryview(data) as view:
            send = stream.send(view)
            urgent = stream.send(memoryview(b"!"), urgent=True)
            world.driver.wait(done(send, urgent))
            del send

    data = bytearray(pattern(60_000))

    def server(conn: SdpSocket) -> None:
        world.driver.wait(lambda: conn.urgent)
        with pytest.raises(BlockingIOError):
            conn.recv(1, MSG_OOB)  # it waits behind bytes that are on offer
        assert digest(recv_all(conn, len(data))) == digest(data)
        world.driver.wait(conn.at_mark)
        assert conn.recv(1, MSG_OOB) == b"!"

    converse(world, client, server)


# --- time ---


def test_a_receive_in_vain() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        before = world.fabric.now
        conn.settimeout(2.5)
        assert conn.gettimeout() == 2.5
        room = bytearray(10)
        with pytest.raises(TimeoutError) as told:
            conn.recv_into(room)
        room.append(1)  # it is free, although somebody holds the exception
        del told
        assert world.fabric.now - before == pytest.approx(2.5)
        with pytest.raises(BlockingIOError):
            conn.recv(10, MSG_DONTWAIT)
        conn.sendall(b"go on")
        assert conn.recv(10) == b"here"  # nothing of the stream was lost

    def server(conn: SdpSocket) -> None:
        assert conn.recv(10) == b"go on"
        conn.sendall(b"here")

    converse(world, client, server)


def test_waitall_gives_what_there_is_when_time_is_over() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        conn.sendall(b"part")
        assert conn.recv(1) == b"."

    def server(conn: SdpSocket) -> None:
        conn.settimeout(1.0)
        assert conn.recv(10, MSG_WAITALL) == b"part"
        conn.sendall(b".")

    converse(world, client, server)


@ATTRIBUTES
def test_a_send_that_nobody_reads_is_taken_back(attributes: DeviceAttributes) -> None:
    world = World(attributes=attributes)
    data = bytearray(pattern(4_000_000))
    sent = 0

    def client(conn: SdpSocket) -> None:
        nonlocal sent
        conn.settimeout(3.0)
        with memoryview(data) as view:
            sent = conn.send(view)
        data.append(0)  # the memory is free again
        assert 0 < sent < len(data) - 1
        conn.shutdown(SHUT_WR)
        conn.settimeout(None)
        assert conn.recv(1) == b"."

    def server(conn: SdpSocket) -> None:
        world.driver.wait(never, 10)
        got = recv_all(conn, 8_000_000)
        assert got == bytes(data[:sent])
        conn.sendall(b".")

    converse(world, client, server)


def test_sendall_in_vain() -> None:
    world = World(settings=SdpSettings(receive_count=8, receive_size=4096))

    def client(conn: SdpSocket) -> None:
        conn.settimeout(1.0)
        with pytest.raises(TimeoutError):
            conn.sendall(bytes(1_000_000))
        conn.set_linger(0)

    def server(conn: SdpSocket) -> None:
        world.driver.wait(never, 5)
        with pytest.raises(ConnectionResetError):
            recv_all(conn, 2_000_000)

    converse(world, client, server)


def test_a_timeout_of_zero() -> None:
    world = World(settings=SdpSettings(receive_count=8, receive_size=4096))

    def client(conn: SdpSocket) -> None:
        conn.settimeout(0)
        with pytest.raises(BlockingIOError):
            conn.recv(1)
        sent = 0
        while conn.writable:
            sent += conn.send(bytes(10_000))
        with pytest.raises(BlockingIOError):
            conn.send(b"x")
        assert 10_000 < sent < 8 * 4096
        assert world.fabric.now < 0.01
        assert select([], [conn], timeout=0.5) == ([], [], [])
        conn.settimeout(None)
        conn.sendall(b"the rest")
        assert select([], [conn])[1] == [conn]
        conn.shutdown(SHUT_WR)
        assert int(conn.recv(10)) == sent + 8

    def server(conn: SdpSocket) -> None:
        world.driver.wait(never, 2)
        count = 0
        conn.settimeout(0)
        while True:
            assert select([conn], [])[0] == [conn]
            part = conn.recv(5000)
            if not part:
                break
            count += len(part)
        conn.settimeout(None)
        conn.sendall(str(count).encode())

    converse(world, client, server)


def test_connecting_takes_too_long() -> None:
    world = World()
    nowhere = Host(world.stacks[0], [LEFT], resolve=lambda address: "nowhere")
    sock = socket_on(nowhere, world.driver)
    sock.settimeout(2.0)
    with pytest.raises(TimeoutError):
        sock.connect((RIGHT, PORT))
    assert world.fabric.now == pytest.approx(2.0)
    sock.settimeout(None)
    with pytest.raises(TimeoutError) as told:
        sock.connect((RIGHT, PORT))  # it may be tried again
    assert told.value.errno == errno.ETIMEDOUT
    sock.close()
    assert nowhere.ports_in_use == 0
    world.assert_nothing_left()


def test_connecting_without_waiting() -> None:
    world = World()
    with create_server(world.right, world.driver, ("", PORT)) as server:
        sock = socket_on(world.left, world.driver)
        sock.settimeout(0)
        for expected in (errno.EINPROGRESS, errno.EALREADY):
            with pytest.raises(BlockingIOError) as told:
                sock.connect((RIGHT, PORT))
            assert told.value.errno == expected
        assert select([], [sock])[1] == [sock]
        assert sock.error() == 0
        with pytest.raises(OSError, match="already connected"):
            sock.connect((RIGHT, PORT))
        conn, peer = server.accept()
        assert peer == sock.getsockname()
        conn.close()
        sock.close()
    world.assert_nothing_left()


def test_an_interrupted_call_gives_memory_back_and_loses_nothing() -> None:
    world = World()

    def interrupt() -> None:
        raise KeyboardInterrupt

    listener = create_server(world.right, world.driver, (RIGHT, PORT))
    left = create_connection(world.left, world.driver, (RIGHT, PORT))
    right, _ = listener.accept()
    listener.close()
    left.sendall(b"part of it")
    room = bytearray(100_000)
    world.fabric.call_later(0.1, interrupt)
    with pytest.raises(KeyboardInterrupt) as told:
        right.recv_into(room, flags=MSG_WAITALL)
    room.append(1)
    assert right.recv(10, MSG_WAITALL) == b"part of it"
    data = bytearray(10_000_000)
    world.fabric.call_later(0.1, interrupt)
    with pytest.raises(KeyboardInterrupt) as told:
        left.sendall(data)
    data.append(1)
    del told
    for sock in (left, right):
        sock.set_linger(0)
        sock.close()
    world.assert_nothing_left()


# --- ends ---


def test_shutdown_of_either_direction() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        conn.sendall(b"request")
        conn.shutdown(SHUT_WR)
        with pytest.raises(BrokenPipeError):
            conn.sendall(b"more")
        assert conn.recv(10) == b"answer"
        conn.shutdown(SHUT_RD)
        assert conn.recv(10) == b""

    def server(conn: SdpSocket) -> None:
        assert recv_all(conn, 100) == b"request"
        conn.sendall(b"answer")
        conn.shutdown(SHUT_RDWR)
        with pytest.raises(BrokenPipeError):
            conn.send(b"x")
        with pytest.raises(OSError, match="Invalid"):
            conn.shutdown(17)

    converse(world, client, server)


def test_closing_with_unread_bytes_resets() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        conn.sendall(b"never read")
        with pytest.raises(ConnectionResetError):
            conn.recv(10)
        assert conn.recv(10) == b""  # it was told once
        with pytest.raises(BrokenPipeError):
            conn.send(b"x")

    def server(conn: SdpSocket) -> None:
        assert select([conn], [])[0] == [conn]

    converse(world, client, server)


@pytest.mark.parametrize("linger", [None, 5.0])
def test_closing_with_all_read_is_graceful(linger: float | None) -> None:
    world = World()
    data = pattern(500_000)

    def client(conn: SdpSocket) -> None:
        conn.sendall(data)
        conn.set_linger(linger)
        conn.close()
        conn.close()
        with pytest.raises(OSError, match="Bad file") as told:
            conn.recv(1)
        assert told.value.errno == errno.EBADF

    def server(conn: SdpSocket) -> None:
        assert digest(recv_all(conn, len(data))) == digest(data)
        assert conn.recv(1) == b""

    converse(world, client, server)


def test_a_linger_that_is_over_resets() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        conn.set_linger(2.0)
        before = world.fabric.now
        conn.close()
        assert world.fabric.now - before == pytest.approx(2.0, abs=0.1)

    def server(conn: SdpSocket) -> None:
        assert conn.recv(1) == b""
        world.driver.wait(never, 10)
        with pytest.raises(ConnectionResetError):
            conn.sendall(b"too late")

    converse(world, client, server)


def test_the_other_end_breaks_off() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        assert conn.recv(1) == b"."
        conn.set_linger(0)

    def server(conn: SdpSocket) -> None:
        conn.sendall(b".")
        with pytest.raises(ConnectionResetError):
            conn.recv(1)
        assert conn.error() == 0

    converse(world, client, server)


def test_so_error_is_told_once() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        assert conn.recv(1) == b"."
        conn.set_linger(0)

    def server(conn: SdpSocket) -> None:
        conn.sendall(b".")
        select([conn], [])
        assert conn.error() == errno.ECONNRESET
        assert conn.error() == 0
        assert conn.recv(1) == b""

    converse(world, client, server)


# --- names ---


def test_names() -> None:
    world = World()
    with create_server(world.right, world.driver, ("", 0)) as server:
        port = server.getsockname()[1]
        assert server.getsockname() == ("0.0.0.0", port)
        assert port in EPHEMERAL
        client = create_connection(world.left, world.driver, (RIGHT, port), source_address=("", 777))
        assert client.getsockname() == (LEFT, 777)
        assert client.getpeername() == (RIGHT, port)
        conn, peer = server.accept()
        assert peer == (LEFT, 777) == conn.getpeername()
        assert conn.getsockname() == (RIGHT, port)
        conn.close()
        client.close()
    world.assert_nothing_left()


def test_names_of_ipv6() -> None:
    world = World()
    left = Host(world.stacks[0], ["10.0.0.1", "fd00::1"], resolve=lambda address: RIGHT)
    right = Host(world.stacks[1], ["fd00::2"])
    with create_server(right, world.driver, ("fd00::2", PORT)) as server:
        client = create_connection(left, world.driver, ("fd00::2", PORT))
        conn, peer = server.accept()
        assert peer == client.getsockname() == ("fd00::1", peer[1], 0, 0)
        assert conn.getsockname() == client.getpeername() == ("fd00::2", PORT, 0, 0)
        conn.close()
        client.close()
    world.assert_nothing_left()


def test_ports_run_out() -> None:
    world = World()
    for _ in EPHEMERAL:
        world.left.take_port()
    with pytest.raises(OSError, match="ephemeral") as told:
        create_connection(world.left, world.driver, (RIGHT, PORT))
    assert told.value.errno == errno.ENOBUFS
    world.left.give_port(EPHEMERAL[77])
    assert world.left.take_port() == EPHEMERAL[77]


# --- listening ---


def test_refusals() -> None:
    world = World()
    with pytest.raises(ConnectionRefusedError):
        create_connection(world.left, world.driver, (RIGHT, PORT))
    with create_server(world.right, world.driver, ("", PORT), backlog=1):
        first = create_connection(world.left, world.driver, (RIGHT, PORT))
        with pytest.raises(ConnectionRefusedError):
            create_connection(world.left, world.driver, (RIGHT, PORT))
        with pytest.raises(OSError, match="in use") as told:
            create_server(world.right, world.driver, ("", PORT))
        assert told.value.errno == errno.EADDRINUSE
        with pytest.raises(OSError, match="assign") as told:
            create_server(world.right, world.driver, ("192.168.77.1", PORT))
        assert told.value.errno == errno.EADDRNOTAVAIL
    with pytest.raises(ConnectionResetError):
        first.recv(1)  # nobody had accepted it
    first.close()
    world.assert_nothing_left()


def test_accept_in_vain() -> None:
    world = World()
    with create_server(world.right, world.driver, ("", PORT)) as server:
        server.settimeout(1.5)
        with pytest.raises(TimeoutError):
            server.accept()
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
        assert not server.readable
        client = create_connection(world.left, world.driver, (RIGHT, PORT))
        assert select([server], [])[0] == [server]
        assert select([server], [client]) == ([server], [client], [])
        conn, _ = server.accept()
        conn.close()
        client.close()
    world.assert_nothing_left()


def test_what_a_socket_is_not_for() -> None:
    world = World()
    sock = socket_on(world.left, world.driver)
    for call in (lambda: sock.recv(1), lambda: sock.send(b"x"), sock.getpeername, lambda: sock.shutdown(SHUT_WR)):
        with pytest.raises(OSError, match="not connected") as told:
            call()
        assert told.value.errno == errno.ENOTCONN
    with pytest.raises(OSError, match="not listening"):
        sock.accept()
    sock.bind(("", 5))
    with pytest.raises(OSError, match="bound already"):
        sock.bind(("", 6))
    sock.listen()
    with pytest.raises(OSError, match="Invalid"):
        sock.listen()
    with pytest.raises(OSError, match="not supported"):
        sock.connect((RIGHT, PORT))
    with pytest.raises(ValueError, match="range"):
        sock.settimeout(-1)
    sock.close()
    with pytest.raises(OSError, match="Bad file"):
        sock.accept()
    with pytest.raises(OSError, match="family"):
        create_connection(world.left, world.driver, ("fd00::1", PORT))
    with pytest.raises(Misuse):
        select([], [])
    world.assert_nothing_left()


def test_what_cannot_be_received_into() -> None:
    world = World()

    def client(conn: SdpSocket) -> None:
        with pytest.raises(TypeError):
            conn.recv_into(b"read-only")
        assert conn.recv_into(bytearray()) == 0
        assert conn.send(b"") == 0
        conn.sendall(b"")
        with pytest.raises((BufferError, TypeError)):
            conn.send(memoryview(bytes(10))[::2])

    converse(world, client, lambda conn: None)


# --- many ---


def test_many_programs_at_once() -> None:
    count = 8
    world = World(settings=SdpSettings(receive_count=16, receive_size=4096))
    server = create_server(world.right, world.driver, ("", PORT))
    data = [pattern(20_000 + 1000 * index, index) for index in range(count)]
    answers: list[str] = []

    def serve() -> None:
        for _ in range(count):
            conn, _ = server.accept()
            with conn:
                got = recv_all(conn, 1_000_000)
                conn.sendall(digest(got).encode())
        server.close()

    def ask(index: int) -> None:
        with create_connection(world.left, world.driver, (RIGHT, PORT)) as conn:
            conn.sendall(data[index])
            conn.shutdown(SHUT_WR)
            answers.append(recv_all(conn, 64).decode())

    world.driver.together(serve, *(lambda index=index: ask(index) for index in range(count)))
    assert sorted(answers) == sorted(digest(each) for each in data)
    world.assert_nothing_left()


# --- the driver ---


def test_programs_that_wait_for_each_other_are_told() -> None:
    world = World()
    stuck: list[Misuse] = []

    def waits(conn: SdpSocket) -> None:
        try:
            conn.recv(1)
        except Misuse as told:
            stuck.append(told)

    converse(world, waits, waits)
    assert len(stuck) == 1  # who leaves then closes, which the other one was waiting for
    assert "nothing is left" in str(stuck[0])


def test_a_program_that_fails_is_the_one_to_blame() -> None:
    world = World()

    def fails(conn: SdpSocket) -> None:
        raise ZeroDivisionError

    def waits(conn: SdpSocket) -> None:
        conn.sendall(b"x" * 10_000_000)

    with pytest.raises((ZeroDivisionError, ConnectionResetError)):
        converse(world, waits, fails)


def test_equal_seeds_give_equal_runs() -> None:
    def run(seed: int) -> tuple[list[tuple[Kind, str, int]], list[float]]:
        watch = Watch()
        world = World(seed=seed, watch=watch)
        data = pattern(200_000)
        times: list[float] = []

        def client(conn: SdpSocket) -> None:
            for at in range(0, len(data), 7000):
                conn.sendall(data[at : at + 7000])
            assert conn.recv(64) == digest(data).encode()
            times.append(world.fabric.now)

        def server(conn: SdpSocket) -> None:
            conn.sendall(digest(recv_all(conn, len(data))).encode())

        converse(world, client, server)
        sent = [(kind, source, size) for (kind, source, _, _), size in zip(watch.gathered, watch.sizes, strict=True)]
        return sent, times

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_virtual_time_without_programs() -> None:
    driver = VirtualTime(Fabric(Random(1)))
    assert driver.wait(lambda: False, 3.0) is False
    assert driver.fabric.now == pytest.approx(3.0)
    assert driver.wait(lambda: True) is True
    with pytest.raises(Misuse):
        driver.wait(lambda: False)
