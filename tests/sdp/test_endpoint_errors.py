"""What a program is told of the end of a connection: every cause really happens, and the table knows all of them."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from endpoint_world import LEFT, PORT, RIGHT, World, create_connection, create_server, socket_on

from sidestep.api.sockets import SdpSocket
from sidestep.errors import InternalError, LimitReached, Misuse, PeerViolation, SidestepError, Unavailable
from sidestep.rdma.loopback import Faults
from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.work import RdmaRead, RKey
from sidestep.sdp.connection import SdpCause, SdpConnection
from sidestep.sdp.errnos import BY_CAUSE, BY_ERROR, Reports, error_of, os_error
from sidestep.sdp.host import Host
from sidestep.sdp.settings import SdpSettings


def test_the_tables_are_complete() -> None:
    assert set(BY_CAUSE) == set(SdpCause)
    assert set(BY_ERROR) == set(SidestepError.__subclasses__()) - {SidestepError}


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (Misuse("m"), errno.EINVAL),
        (LimitReached("l"), errno.ENOBUFS),
        (Unavailable("u", remedy="r"), errno.ENETUNREACH),
        (PeerViolation("p", rule="x"), errno.ECONNRESET),
        (InternalError("i"), errno.EIO),
    ],
)
def test_errors_of_calls(error: SidestepError, number: int) -> None:
    raised = error_of(error)
    assert raised.errno == number
    assert raised.__cause__ is error
    assert error.message in str(raised)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ECONNRESET, ConnectionResetError),
        (errno.ECONNREFUSED, ConnectionRefusedError),
        (errno.ECONNABORTED, ConnectionAbortedError),
        (errno.ETIMEDOUT, TimeoutError),
        (errno.EPIPE, BrokenPipeError),
        (errno.EAGAIN, BlockingIOError),
    ],
)
def test_exceptions_are_those_of_sockets(number: int, kind: type[OSError]) -> None:
    assert type(os_error(number)) is kind


def test_a_connection_that_lives_has_nothing_to_report() -> None:
    reports = Reports(SdpConnection(SdpSettings()))
    assert not reports.pending
    assert reports.take() is None
    assert reports.for_writing() is None


# --- each cause, as it comes about ---


def pair(world: World) -> tuple[SdpSocket, SdpSocket]:
    with create_server(world.right, world.driver, ("", PORT)) as server:
        client = create_connection(world.left, world.driver, (RIGHT, PORT))
        conn, _ = server.accept()
    return client, conn


def qp_of(sock: SdpSocket) -> LoopbackQueuePair:
    assert sock.stream is not None
    assert isinstance(sock.stream.qp, LoopbackQueuePair)
    return sock.stream.qp


def reset_by_peer(world: World, client: SdpSocket, conn: SdpSocket) -> None:
    conn.set_linger(0)
    conn.close()


def cut(world: World, client: SdpSocket, conn: SdpSocket) -> None:
    world.fabric.cut(qp_of(client))
    assert client.stream is not None
    client.stream.send(memoryview(b"nobody gets this"))


def violate(world: World, client: SdpSocket, conn: SdpSocket) -> None:
    qp_of(conn).post_send(RdmaRead(1 << 40, (memoryview(bytearray(8)),), 0x1234, RKey(0xBAD)))


def abort(world: World, client: SdpSocket, conn: SdpSocket) -> None:
    assert client.stream is not None
    client.stream.abort()


def no_answer(world: World, client: SdpSocket, conn: SdpSocket) -> None:
    """The other end lives, but does not close."""
    assert client.stream is not None
    client.stream.shutdown_write()
    client.stream.close(3.0)


@pytest.mark.parametrize(
    ("act", "cause", "number"),
    [
        (reset_by_peer, SdpCause.RESET, errno.ECONNRESET),
        (cut, SdpCause.TRANSPORT, errno.ECONNRESET),
        (violate, SdpCause.VIOLATION, errno.ECONNRESET),
        (abort, SdpCause.ABORTED, errno.ECONNABORTED),
        (no_answer, SdpCause.TIMEOUT, errno.ETIMEDOUT),
    ],
)
def test_an_established_connection(
    act: Callable[[World, SdpSocket, SdpSocket], None], cause: SdpCause, number: int
) -> None:
    world = World()
    client, conn = pair(world)
    act(world, client, conn)
    assert client.stream is not None
    connection = client.stream.connection
    assert world.fabric.run_until(lambda: connection.error is not None)
    assert connection.cause is cause
    with pytest.raises(OSError, match=r".") as told:
        client.recv(10)
    assert told.value.errno == number
    assert told.value.__cause__ is connection.error
    assert client.recv(10) == b""
    for _ in range(2):
        with pytest.raises(BrokenPipeError):
            client.send(b"x")
    client.close()
    conn.close()
    world.assert_nothing_left()


def test_writing_is_told_why_first_and_then_epipe() -> None:
    world = World()
    client, conn = pair(world)
    reset_by_peer(world, client, conn)
    world.fabric.run()
    with pytest.raises(ConnectionResetError):
        client.send(b"x")
    with pytest.raises(BrokenPipeError):
        client.send(b"x")
    assert client.recv(1) == b""
    client.close()
    world.assert_nothing_left()


def test_nobody_listens() -> None:
    world = World()
    with pytest.raises(ConnectionRefusedError) as told:
        create_connection(world.left, world.driver, (RIGHT, PORT))
    assert "listening" in str(told.value)
    world.assert_nothing_left()


def test_nobody_answers() -> None:
    world = World()
    host = Host(world.stacks[0], [LEFT], resolve=lambda address: "nowhere")
    with pytest.raises(TimeoutError) as told:
        create_connection(host, world.driver, (RIGHT, PORT))
    assert told.value.errno == errno.ETIMEDOUT
    world.assert_nothing_left()


def test_no_memory() -> None:
    faults = Faults()
    world = World(faults=faults)
    faults.fail_registrations_next = 1
    with pytest.raises(OSError, match="buffer space") as told:
        create_connection(world.left, world.driver, (RIGHT, PORT))
    assert told.value.errno == errno.ENOBUFS
    world.assert_nothing_left()


def test_given_up_while_connecting() -> None:
    world = World()
    sock = socket_on(world.left, world.driver)
    sock.settimeout(0)
    with create_server(world.right, world.driver, ("", PORT)):
        with pytest.raises(BlockingIOError):
            sock.connect((RIGHT, PORT))
        assert sock.stream is not None
        sock.stream.abort()
        sock.settimeout(None)
        with pytest.raises(ConnectionAbortedError):
            sock.connect((RIGHT, PORT))
    sock.close()
    world.assert_nothing_left()
