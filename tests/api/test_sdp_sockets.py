"""SDP sockets of a Python program's own: the calls of a socket, Zcopy from and into its memory, all ways to end."""

from __future__ import annotations

import array
import asyncio
import errno
import io
import json
import mmap
import os
import signal
import socket as stdlib
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from queue import SimpleQueue
from typing import Any

import pytest
from common import digest, forked, pattern
from sdp_pairs import LARGE, WAIT_S, Running, moved, pair

import sidestep
from sidestep.api.rnic import SETTINGS
from sidestep.api.service import service
from sidestep.api.sockets import SdpSocket, select
from sidestep.errors import Misuse
from sidestep.sdp.strategy import Strategy
from sidestep.socket import MSG_DONTWAIT, MSG_PEEK, MSG_WAITALL, SHUT_WR, create_connection, create_server

Ends = tuple[SdpSocket, SdpSocket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with pair() as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """When both ends are closed no queue pair is left, and no port."""
    yield
    rnics, by = service().rnics, service()
    with by:
        assert by.wait(lambda: not rnics.counters().get("queue_pairs"), WAIT_S)
        assert not any(at.host.ports_in_use for at in rnics._at.values())


def exchange(sender: SdpSocket, receiver: SdpSocket, data: Any, room: Any) -> None:
    """Sends all of it into all of that."""
    sending = Running(lambda: sender.sendall(data))
    assert receiver.recv_into(room, 0, MSG_WAITALL) == memoryview(room).nbytes
    sending.result()


# --- data ---


@pytest.mark.parametrize("size", [1, 1000, 40_000, 256 << 10, (256 << 10) + 1, LARGE, (16 << 20) + 7])
def test_bytes_arrive_both_ways(ends: Ends, size: int) -> None:
    for sender, receiver in (ends, ends[::-1]):
        data, room = pattern(size, size), bytearray(size)
        exchange(sender, receiver, data, room)
        assert digest(room) == digest(data)


def anonymous(data: bytes) -> mmap.mmap:
    made = mmap.mmap(-1, len(data))
    made[:] = data
    return made


BUFFERS: list[tuple[str, Callable[[bytes], Any]]] = [
    ("bytearray", bytearray),
    ("slice", lambda data: memoryview(bytearray(b"x" + data + b"x"))[1:-1]),
    ("array", lambda data: array.array("Q", data)),
    ("mmap", anonymous),
]


@pytest.mark.parametrize(("name", "make"), BUFFERS, ids=[name for name, _ in BUFFERS])
def test_a_large_buffer_is_read_out_of_its_own_memory_into_that_of_the_receiver(
    ends: Ends, name: str, make: Callable[[bytes], Any]
) -> None:
    client, server = ends
    data, room = make(pattern(LARGE)), make(bytes(LARGE))
    tracemalloc.start()
    try:
        exchange(client, server, data, room)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bytes(room) == bytes(data)
    assert peak < LARGE // 3, "somebody has copied it"
    sent = client.details()
    assert moved(sent, "bytes_sent{read_response}") > LARGE - Strategy().bcopy_max  # one goes along in Combined mode
    assert moved(sent, "bytes_sent{send}") + moved(sent, "bytes_sent{send_se}") < 1000
    if isinstance(data, mmap.mmap):
        data.close()  # nothing keeps the memory: this would be BufferError
        room.close()


def test_bytes_are_sent_from_where_they_are(ends: Ends) -> None:
    client, server = ends
    data, room = pattern(LARGE), bytearray(LARGE)
    tracemalloc.start()
    try:
        exchange(client, server, data, room)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert room == data
    assert peak < LARGE // 3


def test_a_buffer_is_free_again_after_the_call(ends: Ends) -> None:
    client, server = ends
    data, room = bytearray(pattern(LARGE)), bytearray(LARGE)
    exchange(client, server, data, room)
    data.append(1)  # BufferError if anybody still had it
    room.append(1)


def test_several_receives_of_threads_are_written_into_directly(ends: Ends) -> None:
    """Receives that wait before the bytes come are shown to the other end in Pipelined mode: Write Zcopy."""
    client, server = ends
    blocks = [pattern(LARGE, seed) for seed in range(6)]
    rooms = [bytearray(LARGE) for _ in blocks]
    started = [Running(lambda room=room: server.recv_into(room, 0, MSG_WAITALL)) for room in rooms[:1]]  # type: ignore[misc]
    sending = [Running(lambda block=block: client.sendall(block)) for block in blocks]  # type: ignore[misc]
    started += [Running(lambda room=room: server.recv_into(room, 0, MSG_WAITALL)) for room in rooms[1:]]  # type: ignore[misc]
    for each in sending:
        each.result()
    assert [each.result() for each in started] == [LARGE] * len(rooms)
    assert sorted(map(digest, rooms)) == sorted(map(digest, blocks))


def test_a_file(ends: Ends) -> None:
    client, server = ends
    with client.makefile("rw", encoding="utf-8") as out, server.makefile("rb") as into:
        out.write("first\nsecond\n")
        out.flush()
        assert (into.readline(), into.readline()) == (b"first\n", b"second\n")
        server.sendall(b"answer\n")
        assert out.readline() == "answer\n"
        client.close()
        out.write("third\n")  # the socket is open until its file is closed
    assert server.recv(100) == b"third\n"
    assert server.recv(100) == b""


def test_the_end_of_each_direction(ends: Ends) -> None:
    client, server = ends
    client.sendall(b"last")
    client.shutdown(SHUT_WR)
    assert server.recv(10) == b"last"
    assert server.recv(10) == b""
    server.sendall(b"answer")
    assert client.recv(10) == b"answer"
    with pytest.raises(BrokenPipeError):
        client.sendall(b"more")


def test_both_ends_send_at_the_same_time(ends: Ends) -> None:
    data = [pattern(LARGE, seed) for seed in (1, 2)]
    rooms = [bytearray(LARGE), bytearray(LARGE)]
    calls = []
    for index, end in enumerate(ends):
        calls.append(Running(lambda end=end, index=index: end.sendall(data[index])))  # type: ignore[misc]
        calls.append(Running(lambda end=end, index=index: end.recv_into(rooms[index], 0, MSG_WAITALL)))  # type: ignore[misc]
    for call in calls:
        call.result()
    assert list(map(digest, rooms)) == list(map(digest, data[::-1]))


# --- what it is ---


def test_names_and_kind(ends: Ends) -> None:
    client, server = ends
    assert client.getsockname() == server.getpeername()
    assert client.getpeername() == server.getsockname()
    assert (client.family, client.type, client.proto) == (
        stdlib.AF_INET,
        stdlib.SOCK_STREAM,
        sidestep.socket.IPPROTO_SDP,
    )
    assert isinstance(client, sidestep.socket.SdpSocket)
    assert client.getpeername()[0] == "127.0.0.1"
    with pytest.raises(io.UnsupportedOperation):
        client.fileno()
    client.close()
    assert client.fileno() == -1
    assert repr(client) == "<SdpSocket [closed]>"
    with pytest.raises(OSError, match="Bad file descriptor"):
        client.recv(1)


def test_ipv6() -> None:
    try:
        listener = create_server(("::1", 0), family=stdlib.AF_INET6, protocol="sdp")
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        pytest.skip(f"no IPv6 here: {error}")  # a kernel without it, or with it switched off
    with listener:
        port = listener.getsockname()[1]
        with create_connection(("::1", port), WAIT_S, protocol="sdp", rdma_port=port) as client:
            server, address = listener.accept()
            with server:
                assert address[0] == "::1"
                assert client.getpeername() == ("::1", port, 0, 0)
                exchange(client, server, pattern(LARGE), bytearray(LARGE))


def test_a_port_is_taken_once() -> None:
    with create_server(("127.0.0.1", 0), protocol="sdp") as one:
        with pytest.raises(OSError, match="Address already in use"):
            create_server(("127.0.0.1", one.getsockname()[1]), protocol="sdp")
        with pytest.raises(OSError, match="ssign"):  # EADDRNOTAVAIL
            create_server(("192.0.2.1", 0), protocol="sdp")


def test_nobody_listens() -> None:
    with stdlib.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            create_connection(("127.0.0.1", port), WAIT_S, protocol="sdp", rdma_port=port)


def test_a_full_queue_refuses() -> None:
    with create_server(("127.0.0.1", 0), backlog=1, protocol="sdp") as listener:
        port = listener.getsockname()[1]
        first = create_connection(("127.0.0.1", port), WAIT_S, protocol="sdp", rdma_port=port)
        with first, pytest.raises(ConnectionRefusedError):
            create_connection(("127.0.0.1", port), WAIT_S, protocol="sdp", rdma_port=port)


def test_options_that_make_no_sense() -> None:
    with pytest.raises(Misuse):
        create_server(("127.0.0.1", 0), protocol="xyz")  # type: ignore[call-overload]
    with pytest.raises(Misuse):
        create_connection(("127.0.0.1", 1), rdma_port=1)  # type: ignore[call-overload]
    with pytest.raises(OSError, match="not supported"):
        SdpSocket(stdlib.AF_UNIX)


def test_its_device_is_listed(ends: Ends) -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "sidestep", "rdma", "list", "--json"], check=True, capture_output=True, text=True
    )
    own = [each for each in json.loads(listed.stdout)["processes"] if each["pid"] == os.getpid()]
    assert "iwarp@127.0.0.1" in {device["name"] for each in own for device in each["devices"]}


def test_closing_ends_what_other_threads_wait_for(ends: Ends) -> None:
    client, _ = ends
    stream = client.stream
    receiving = Running(lambda: client.recv_into(bytearray(LARGE), 0, MSG_WAITALL))
    with service() as by:
        assert by.wait(lambda: bool(stream.connection._sink.receives), WAIT_S)
    client.close()
    try:
        assert receiving.result() == 0
    except OSError:
        """Either will do, as long as it ends."""


# --- time ---


def test_a_receive_times_out_and_its_buffer_is_left_alone(ends: Ends) -> None:
    client, server = ends
    room = bytearray(LARGE)
    server.settimeout(0.02)
    with pytest.raises(TimeoutError):
        server.recv_into(room)
    server.settimeout(WAIT_S)
    data, other = pattern(LARGE), bytearray(LARGE)
    exchange(client, server, data, other)
    assert digest(other) == digest(data)
    assert room == bytes(LARGE)


def test_a_large_send_that_nobody_reads_times_out_and_is_taken_back(ends: Ends) -> None:
    client, server = ends
    data = bytearray(pattern(LARGE))
    before = bytes(data)
    client.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client.sendall(data)
    data[:] = bytes(LARGE)  # it is ours again
    client.settimeout(WAIT_S)
    client.sendall(b"end")
    client.shutdown(SHUT_WR)
    got = b"".join(iter(lambda: server.recv(1 << 20), b""))
    assert got.endswith(b"end")
    assert before.startswith(got[:-3]), "what was sent before is what it was then"


def test_sockets_that_do_not_wait(ends: Ends) -> None:
    client, server = ends
    client.setblocking(False)
    assert (client.getblocking(), client.timeout) == (False, 0.0)
    with pytest.raises(BlockingIOError):
        client.recv(1)
    assert client.send(b"abc") == 3
    assert server.recv(3) == b"abc"
    with pytest.raises(BlockingIOError):
        server.recv(1, MSG_DONTWAIT)
    with pytest.raises(ValueError, match="Timeout"):
        client.settimeout(-1)


def test_connecting_without_waiting() -> None:
    with create_server(("127.0.0.1", 0), protocol="sdp") as listener, SdpSocket() as client:
        port = listener.getsockname()[1]
        client.settimeout(0)
        with suppress(BlockingIOError):  # it may be quicker than that: the other end is in the same loop
            client.connect(("127.0.0.1", port), rdma_port=port)
        assert select([listener], [client], timeout=WAIT_S) != ([], [], [])
        assert select([], [client], timeout=WAIT_S) == ([], [client], [])
        assert client.error() == 0
        assert select([listener], [], timeout=WAIT_S) == ([listener], [], [])
        server, _ = listener.accept()
        with server:
            assert client.send(b"abc") == 3
            assert server.recv(3) == b"abc"


def test_connecting_to_who_does_not_answer_times_out() -> None:
    with stdlib.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, and never says a word of MPA
        port = silent.getsockname()[1]
        with pytest.raises(TimeoutError):
            create_connection(("127.0.0.1", port), 0.05, protocol="sdp", rdma_port=port)


def test_who_does_not_answer_a_withdrawal_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop that does nothing any more is such a peer: it neither reads what is on offer nor lets go of it."""
    stack = service().rnics.at(ip_address("127.0.0.1")).stack
    monkeypatch.setattr(stack, "settings", replace(SETTINGS, cancel_answer_s=0.05))
    ports: SimpleQueue[int] = SimpleQueue()
    connected, over = threading.Event(), threading.Event()

    async def serve() -> None:
        began = asyncio.Event()

        def blocks(*_ends: object) -> None:
            began.set()
            connected.set()
            over.wait(WAIT_S)

        async with await sidestep.start_server(blocks, "127.0.0.1", 0, protocol="sdp") as server:
            ports.put(server.sockets[0].getsockname()[1])
            await began.wait()

    serving = Running(lambda: asyncio.run(serve()))
    port = ports.get(timeout=WAIT_S)
    try:
        with create_connection(("127.0.0.1", port), WAIT_S, protocol="sdp", rdma_port=port) as client:
            assert connected.wait(WAIT_S)
            data = bytearray(LARGE)
            client.settimeout(0.01)
            with pytest.raises(OSError, match=r"Connection|timed out"):
                client.sendall(data)
            data.append(0)  # it is ours again
            with pytest.raises(OSError, match=r"Broken pipe|Connection"):
                client.sendall(b"x")
    finally:
        over.set()
        serving.result()


class Struck(Exception):
    """What the signal handler raises."""


def strike_once(end: SdpSocket, wanted: Callable[[], bool]) -> None:
    """Sends this process's main thread a signal when that is so of the stream."""
    by = service()
    with by:
        assert by.wait(wanted, WAIT_S)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


@pytest.fixture
def struck() -> Iterator[None]:
    def strike(number: int, frame: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGUSR1, strike)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_raises_ends_a_receive_whose_buffer_is_free_then(ends: Ends, struck: None) -> None:
    client, server = ends
    room = bytearray(LARGE)
    stream = server.stream
    striking = Running(lambda: strike_once(server, lambda: bool(stream.connection._sink.receives)))
    with pytest.raises(Struck):
        server.recv_into(room, 0, MSG_WAITALL)
    striking.result()
    data, other = pattern(LARGE), bytearray(LARGE)
    exchange(client, server, data, other)
    assert digest(other) == digest(data)
    assert room == bytes(LARGE)
    room.append(0)


def test_a_signal_in_the_midst_of_a_receive_loses_no_byte(ends: Ends, struck: None) -> None:
    client, server = ends
    room = bytearray(2 * LARGE)
    data = pattern(2 * LARGE)
    stream = server.stream
    receives = stream.connection._sink.receives
    sending = Running(lambda: client.sendall(data[:LARGE]))
    striking = Running(lambda: strike_once(server, lambda: bool(receives) and receives[0].filled >= LARGE))
    with pytest.raises(Struck):
        server.recv_into(room, 0, MSG_WAITALL)
    striking.result()
    sending.result()
    room[:] = bytes(len(room))
    sending = Running(lambda: client.sendall(data[LARGE:]))
    other = bytearray(2 * LARGE)
    assert server.recv_into(other, 0, MSG_WAITALL) == 2 * LARGE
    sending.result()
    assert digest(other) == digest(data)
    assert room == bytes(2 * LARGE)


def test_a_signal_that_raises_ends_a_send(ends: Ends, struck: None) -> None:
    client, server = ends
    data = bytearray(pattern(LARGE))
    before = bytes(data)
    stream = client.stream
    striking = Running(lambda: strike_once(client, lambda: bool(stream.connection._source.adverts)))
    with pytest.raises(Struck):
        client.sendall(data)
    striking.result()
    data[:] = bytes(LARGE)
    data.append(0)
    client.close()
    assert before.startswith(b"".join(iter(lambda: server.recv(1 << 20), b"")))


# --- ends ---


def test_closing_while_a_thread_sends(ends: Ends) -> None:
    client, server = ends
    stream = client.stream
    sending = Running(lambda: client.sendall(bytearray(LARGE)))
    with service() as by:
        assert by.wait(lambda: bool(stream.connection._source.adverts), WAIT_S)
    server.close()
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        sending.result()


def test_the_other_end_breaks_off_in_the_midst_of_a_large_receive(ends: Ends) -> None:
    client, server = ends
    room = bytearray(2 * LARGE)
    receiving = Running(lambda: server.recv_into(room, 0, MSG_WAITALL))
    client.sendall(pattern(LARGE))
    stream = client.stream
    with service():
        stream.abort()
    assert receiving.result() == LARGE
    with pytest.raises(ConnectionResetError):
        server.recv(1)


def test_closing_with_unread_bytes_resets(ends: Ends) -> None:
    client, server = ends
    client.sendall(b"unread")
    assert server.recv(1, MSG_PEEK) == b"u"
    server.close()
    with pytest.raises(ConnectionResetError):
        client.recv(1)


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"MPA ID Req Frame\xff\xff\xff\xff"])
def test_strangers_at_the_port_disturb_nobody(garbage: bytes) -> None:
    with create_server(("127.0.0.1", 0), protocol="sdp") as listener:
        port = listener.getsockname()[1]
        with stdlib.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(garbage)
            with create_connection(("127.0.0.1", port), WAIT_S, protocol="sdp", rdma_port=port) as client:
                listener.settimeout(WAIT_S)
                server, _ = listener.accept()
                with server:
                    exchange(client, server, pattern(LARGE), bytearray(LARGE))


def test_one_that_is_forgotten_is_closed_with_a_warning() -> None:
    with create_server(("127.0.0.1", 0), protocol="sdp") as listener:
        listener.settimeout(WAIT_S)
        port = listener.getsockname()[1]
        lost = [create_connection(("127.0.0.1", port), WAIT_S, protocol="sdp", rdma_port=port)]
        server, _ = listener.accept()
        with server:
            server.settimeout(WAIT_S)
            with pytest.warns(ResourceWarning, match="unclosed"):
                lost.clear()
            assert server.recv(1) == b""


def test_what_a_process_has_sent_before_it_ends_arrives() -> None:
    program = """if True:
        import sys
        from sidestep import socket
        made = socket.create_connection(("127.0.0.1", int(sys.argv[1])), protocol="sdp", rdma_port=int(sys.argv[1]))
        made.sendall(b"last words")
        if len(sys.argv) > 2:
            made.close()
    """
    with create_server(("127.0.0.1", 0), protocol="sdp") as listener:
        port = str(listener.getsockname()[1])
        listener.settimeout(WAIT_S)
        for closes in ([], ["close"]):
            running = subprocess.Popen([sys.executable, "-c", program, port, *closes])
            server, _ = listener.accept()
            with running, server:
                assert server.recv(100, MSG_WAITALL) == b"last words"
                assert server.recv(1) == b""


def test_a_forked_child_cannot_use_it(ends: Ends) -> None:
    client, _ = ends

    def child() -> int:
        with pytest.raises(Misuse):
            client.sendall(b"x")
        return 0

    assert os.waitpid(forked(child), 0)[1] == 0
    client.sendall(b"x")
