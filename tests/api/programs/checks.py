"""What a Python program can do with sidestep's sockets, without LD_PRELOAD. usage: checks.py NAME [ARGUMENT...]

Each check runs in a process of its own, because loading the shim cannot be undone, and against the provider that the
environment names. It ends with an exception, or without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import select
import selectors
import socket as plain
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sidestep
from sidestep import constants, socket
from sidestep.errors import Misuse, Unavailable
from sidestep.observe import demotion
from sidestep.observe.connections import Connection, connections

DEADLINE_S = 60.0  # only a broken run waits as long
ROUNDS = 50
ORDERS = 10
HOST = "127.0.0.1"
Sock = plain.socket


# ---- looking ----
def states(*socks: Sock) -> list[str]:
    """The state of the connection of each socket, as `sidestep ss` tells; "untracked" if the shim does not know it."""
    rows = list(connections(Path(os.environ["SIDESTEP_SOCKET"])))
    return [next((row.state for row in rows if _is(row, sock)), "untracked") for sock in socks]


def _is(row: Connection, sock: Sock) -> bool:
    if row.remote.endswith(":0"):  # it has not been looked at yet
        return (row.pid, row.fd) == (os.getpid(), sock.fileno())
    ends = (sock.getsockname(), sock.getpeername())
    return [row.local, row.remote] == [f"{host.removeprefix('::ffff:')}:{port}" for host, port, *_ in ends]


def talk(a: Sock, b: Sock, rounds: int = ROUNDS) -> None:
    """Small messages there and back."""
    for i in range(rounds):
        a.sendall(b"ping %d" % i)
        assert b.recv(100) == b"ping %d" % i
        b.sendall(b"pong %d" % i)
        assert a.recv(100) == b"pong %d" % i


def settle(a: Sock, b: Sock) -> None:
    """Talk until both ends are promoted."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := states(a, b)) != ["promoted"] * 2:
        assert time.monotonic() < deadline, found
        talk(a, b, 1)


def expect(wanted: str, *socks: Sock) -> None:
    """All of them are in that state, or in one of those."""
    found = states(*socks)
    assert all(state in wanted.split() for state in found), found


def pair_of(module: object, server_module: object | None = None) -> tuple[Sock, Sock]:
    """A connection between two sockets of `module`."""
    server_module = server_module or module
    with server_module.create_server((HOST, 0)) as server:  # type: ignore[attr-defined]
        a = module.create_connection(server.getsockname())  # type: ignore[attr-defined]
        b, address = server.accept()
        assert address == a.getsockname()
    return a, b


def promoted_pair() -> tuple[socket.socket, socket.socket]:
    """A promoted connection between two sidestep sockets."""
    a, b = sidestep_pair()
    settle(a, b)
    return a, b


def sidestep_pair() -> tuple[socket.socket, socket.socket]:
    """A connection between two sidestep sockets."""
    a, b = pair_of(socket)
    assert isinstance(a, socket.socket)
    assert isinstance(b, socket.socket)
    return a, b


# ---- only sidestep's sockets ----
def check_opt_in() -> None:
    """Sidestep's sockets are promoted; plain ones of the same process are not even tracked."""
    before = pair_of(plain)
    a, b = promoted_pair()
    assert type(a) is type(b) is socket.socket
    assert isinstance(a, plain.socket)
    after = pair_of(plain)
    for pair in (before, after):
        talk(*pair)
    expect("untracked", *before, *after)
    assert not sidestep.installed()
    # a number that was a sidestep listener's is anybody's afterwards
    with socket.create_server((HOST, 0)) as listener:
        number = listener.fileno()
    reused = plain.create_server((HOST, 0))
    assert reused.fileno() == number
    c = plain.create_connection(reused.getsockname())
    d, _ = reused.accept()
    talk(c, d)
    expect("untracked", c, d)


def check_stand_in() -> None:
    """The module has all names of the one it stands in for."""
    missing = [name for name in dir(plain) if not hasattr(socket, name)]
    assert not missing, missing
    assert set(plain.__all__) <= set(socket.__all__)
    assert socket.AF_INET is plain.AF_INET
    namespace: dict[str, object] = {}
    exec("from sidestep.socket import *", namespace)
    assert namespace["socket"] is socket.socket
    assert namespace["SOL_SOCKET"] == plain.SOL_SOCKET


def check_bulk() -> None:
    """Megabytes each way at once."""
    a, b = promoted_pair()
    data = os.urandom(1 << 20) * 4
    got: list[bytes] = [b"", b""]

    def send(sock: Sock) -> None:
        sock.sendall(data)
        sock.shutdown(plain.SHUT_WR)

    def receive(index: int, sock: Sock) -> None:
        with sock.makefile("rb") as file:
            got[index] = file.read()

    run_threads(
        *(lambda sock=sock: send(sock) for sock in (a, b)),
        *(lambda i=i, sock=sock: receive(i, sock) for i, sock in enumerate((a, b))),
    )
    assert got == [data, data]


def run_threads(*calls: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Run them at once; what one raises is raised."""
    failed: list[BaseException] = []

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0 if failed else deadline_s)
        if failed:
            raise failed[0]
        assert not thread.is_alive(), "a thread hangs"


def check_timeout() -> None:
    """A receive and a send that time out leave the connection fit for use."""
    a, b = promoted_pair()
    a.settimeout(0.05)
    with expected(TimeoutError):
        a.recv(1)
    sent = 0
    with expected(TimeoutError):
        while True:
            sent += a.send(bytes(65536))
    left = sent
    while left:
        left -= len(b.recv(left))
    talk(a, b)
    assert a.gettimeout() == 0.05
    expect("promoted", a, b)


@contextlib.contextmanager
def expected(kind: type[BaseException], words: str = "") -> Iterator[None]:
    """The block must raise that."""
    told = None
    try:
        yield
    except kind as error:
        told = str(error)
    assert told is not None, f"no {kind.__name__}"
    assert words in told


def check_nonblocking() -> None:
    """Nothing there is BlockingIOError, and every kind of wait tells when something is."""
    a, b = promoted_pair()
    b.setblocking(False)
    with expected(BlockingIOError):
        b.recv(1)

    def by_select() -> bool:
        return bool(select.select([b], [], [], 0 if not waiting else DEADLINE_S)[0])

    def by_poll() -> bool:
        poller = select.poll()
        poller.register(b, select.POLLIN)
        return bool(poller.poll(0 if not waiting else DEADLINE_S * 1000))

    def by_epoll() -> bool:
        with select.epoll() as poller:
            poller.register(b, select.EPOLLIN)
            return bool(poller.poll(0 if not waiting else DEADLINE_S))

    def by_selector() -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(b, selectors.EVENT_READ)
            return bool(selector.select(0 if not waiting else DEADLINE_S))

    for wait in (by_select, by_poll, by_epoll, by_selector):
        waiting = False
        assert not wait(), wait
        waiting = True
        thread = threading.Thread(target=lambda: a.sendall(b"x"))
        thread.start()
        assert wait(), wait
        thread.join()
        assert b.recv(10) == b"x"
    for _ in range(2):  # a direction that was full on TCP has room again once it goes by ring
        with expected(BlockingIOError):
            while True:
                b.send(bytes(65536))
        expect("promoted", a, b)
    assert not select.select([], [b], [], 0)[1]


def check_files() -> None:
    """makefile, context managers, detach and dup."""
    a, b = promoted_pair()
    with a, b:
        with a.makefile("rw", encoding="utf-8", newline="\n") as one, b.makefile("rw", newline="\n") as two:
            for number in range(20):
                one.write(f"line {number}\n")
                one.flush()
                assert two.readline() == f"line {number}\n"
        copy = a.dup()
        assert type(copy) is socket.socket
        expect("promoted", copy)
        a.close()
        copy.sendall(b"by the copy")
        assert b.recv(100) == b"by the copy"
        again = socket.socket(fileno=copy.detach())
        talk(again, b)
        with again:
            pass
        assert again.fileno() == -1
        assert b.recv(1) == b""
    assert b.fileno() == -1


def check_scatter() -> None:
    """The less common calls."""
    a, b = promoted_pair()
    assert a.sendmsg([b"one", b"two", b"three"]) == 11
    one, two = bytearray(4), bytearray(10)
    count, control, _, _ = b.recvmsg_into([one, two])
    assert (count, control, bytes(one + two[:7])) == (11, [], b"onetwothree")
    a.sendall(b"0123456789")
    assert b.recv(4, plain.MSG_PEEK) == b"0123"
    assert b.recv_into(one) == 4
    assert b.recvfrom(100)[0] == b"456789"
    with Path(__file__).open("rb") as file:
        assert a.sendfile(file) == Path(__file__).stat().st_size
    with b.makefile("rb") as received:
        assert received.read(Path(__file__).stat().st_size) == Path(__file__).read_bytes()
    expect("promoted", a, b)


def check_create_connection_arguments() -> None:
    """An address is a host and a port, as for the standard one."""
    with expected(ValueError, "not enough values to unpack"):
        socket.create_connection(("127.0.0.1",))  # type: ignore[arg-type]


def check_create_connection() -> None:
    """Errors, several addresses, source address, timeout."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("localhost", port), timeout=60, source_address=(HOST, 0)) as a:
            assert type(a) is socket.socket
            assert a.gettimeout() == 60
            server.accept()[0].close()
    with expected(ConnectionRefusedError):
        socket.create_connection((HOST, port))
    with expected(ExceptionGroup):
        socket.create_connection((HOST, port), all_errors=True)
    with socket.create_server(("::", 0), family=plain.AF_INET6, dualstack_ipv6=True) as server:
        a = socket.create_connection((HOST, server.getsockname()[1]))
        b, _ = server.accept()
        assert type(b) is socket.socket
        assert b.family == plain.AF_INET6
    listener = socket.socket()
    listener.bind((HOST, 0))
    listener.listen()
    listener.settimeout(DEADLINE_S)
    c = socket.socket()
    c.connect(listener.getsockname())
    d, _ = listener.accept()
    assert d.gettimeout() is None
    settle(c, d)
    assert [type(end) for end in socket.socketpair()] == [socket.socket] * 2
    assert type(socket.fromfd(c.fileno(), c.family, c.type)) is socket.socket


def check_tls(cert: str, key: str) -> None:
    """TLS in user space on top, begun after the first bytes."""
    a, b = promoted_pair()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    client = ssl.create_default_context(cafile=cert)
    client.check_hostname = False
    ends: list[Sock] = []
    run_threads(
        lambda: ends.append(server.wrap_socket(b, server_side=True)), lambda: ends.append(client.wrap_socket(a))
    )
    talk(ends[0], ends[1])
    expect("promoted", *ends)


def check_threads() -> None:
    """Many connections of many threads at once."""
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            b, _ = server.accept()
            with b:
                while piece := b.recv(65536):
                    b.sendall(piece)

        def converse() -> None:
            with socket.create_connection(server.getsockname()) as a:
                deadline = time.monotonic() + DEADLINE_S
                number = 0
                while number < 200 or states(a) != ["promoted"]:
                    assert time.monotonic() < deadline, states(a)
                    message = b"%d " % number * (number % 50 + 1)
                    a.sendall(message)
                    echoed = bytearray()
                    while len(echoed) < len(message):
                        echoed += a.recv(65536)
                    assert echoed == message
                    number += 1

        run_threads(*[serve] * 8, *[converse] * 8)


def check_fork() -> None:
    """A child goes on with a connection, and makes one of its own."""
    a, b = promoted_pair()
    pid = os.fork()
    if not pid:
        try:
            a.sendall(b"from the child")
            promoted_pair()
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
        os._exit(1)
    assert b.recv(100) == b"from the child"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    talk(a, b)
    expect("promoted", a, b)


def check_children() -> None:
    """A child process is not affected, however it is started, and the parent goes on."""
    a, b = promoted_pair()
    sidestep.install()
    look = "import os; print('sidestep' in open('/proc/self/maps').read(), 'LD_PRELOAD' in os.environ)"
    for options in ({}, {"close_fds": False}, {"start_new_session": True}):
        done = subprocess.run([sys.executable, "-I", "-S", "-c", look], capture_output=True, text=True, **options)  # type: ignore[call-overload]
        assert done.stdout == "False False\n", done
    assert os.system("true") == 0
    pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", "pass"], dict(os.environ))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    talk(a, b)
    expect("promoted", a, b)


def check_explicit_by_number() -> None:
    """IPPROTO_SDP wants that protocol, whatever the family; there is none here."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with expected(OSError, "Protocol not supported"):
            socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_SDP)


def check_explicit() -> None:
    """The families and protocols of explicit sockets; the type argument is the standard one."""
    assert set(constants.__all__) <= set(socket.__all__)
    for family, wanted in ((constants.AF_INET_OFFLOAD, "promoted"), (constants.AF_INET_DIRECT, "pinned")):
        with socket.socket(family) as listener, socket.socket(family, plain.SOCK_STREAM) as a:
            assert listener.family == a.family == plain.AF_INET
            listener.bind((HOST, 0))
            listener.listen()
            a.connect(listener.getsockname())
            b, _ = listener.accept()
            if wanted == "promoted":
                settle(a, b)
            talk(a, b)
            expect(wanted, a, b)
            b.close()


# ---- in place ----
class _Buffer(ctypes.Structure):
    """The beginning of Python's Py_buffer."""

    _fields_ = (("buf", ctypes.c_void_p), ("rest", ctypes.c_uint8 * 256))


def on_ring(view: memoryview) -> bool:
    """Whether the bytes of a view are memory of a channel, all of them."""
    buffer = _Buffer()
    get, put = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    get.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
    put.argtypes = [ctypes.POINTER(_Buffer)]
    put.restype = None
    assert get(view, ctypes.byref(buffer), 0) == 0
    address = buffer.buf
    put(ctypes.byref(buffer))
    covered = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:sidestep-channel" in line:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            covered += max(0, min(end, address + len(view)) - max(start, address))
    return covered == len(view)


def check_peek() -> None:
    """What has come is seen where it lies, and stays until it is consumed."""
    a, b = promoted_pair()
    a.sendall(b"one two three")
    with b.peek() as view:
        assert view.readonly
        assert on_ring(view)
        assert bytes(view) == b"one two three"
        assert bytes(view[4:7]) == b"two"
        with expected(BufferError):
            b.consume(4)
        assert b.recv(3, plain.MSG_PEEK) == b"one"
    with expected(Misuse):
        b.consume(14)
    b.consume(4)
    with b.peek(3) as view:
        assert bytes(view) == b"two"
    b.consume(3)
    assert b.recv(100) == b" three"
    with expected(Misuse):
        b.consume(1)
    a.sendall(b"others read it")
    b.peek(6).release()
    assert b.recv(7) == b"others "
    with expected(Misuse, "since peek"):
        b.consume(6)
    assert b.recv(100) == b"read it"
    b.settimeout(0.02)
    with expected(TimeoutError):
        b.peek()
    b.setblocking(False)
    with expected(BlockingIOError):
        b.peek()
    b.setblocking(True)
    timer = threading.Timer(0.05, a.sendall, [b"awaited"])
    timer.start()
    with b.peek() as view:
        assert bytes(view) == b"awaited"
        assert on_ring(view)
    b.consume(7)
    timer.join()
    a.sendall(b"last")
    a.shutdown(plain.SHUT_WR)
    b.peek().release()
    b.consume(4)
    for _ in range(2):
        with b.peek() as view:
            assert len(view) == 0
        b.consume(0)


def check_reserve() -> None:
    """Bytes are written where the other end reads them, and are nothing before they are committed."""
    a, b = promoted_pair()
    with expected(Misuse):
        a.commit(0)
    with a.reserve(100) as view:
        assert on_ring(view)
        assert len(view) == 100
        view[:5] = b"hello"
        with expected(BufferError):
            a.commit(5)
    with expected(Misuse):
        a.commit(101)
    with expected(Misuse):
        a.reserve(1)
    b.setblocking(False)
    with expected(BlockingIOError):
        b.recv(1)
    a.commit(5)
    b.setblocking(True)
    assert b.recv(100) == b"hello"
    a.reserve(100).release()
    a.commit(0)
    a.sendall(b"nothing of it")
    assert b.recv(100) == b"nothing of it"
    expect("promoted", a, b)


def check_reserve_full() -> None:
    """No room: it waits, times out, or says so; and goes on when the other end has read."""
    a, b = promoted_pair()
    a.setsockopt(plain.SOL_SOCKET, plain.SO_SNDBUF, 64 << 10)  # else there is room behind the ring
    sent = 0
    a.setblocking(False)
    with expected(BlockingIOError):
        while True:
            with a.reserve(100_000) as view:
                size = len(view)
                view[:] = bytes([sent % 251]) * size
            a.commit(size)
            sent += size
    assert sent == 128 << 10  # and as much as TCP's first window
    a.settimeout(0.02)
    with expected(TimeoutError):
        a.reserve(1)
    a.settimeout(DEADLINE_S)
    timer = threading.Timer(0.05, lambda: b.recv(sent, plain.MSG_WAITALL))
    timer.start()
    with a.reserve(10) as view:
        view[:] = b"0123456789"
    a.commit(10)
    timer.join()
    assert b.recv(100) == b"0123456789"


def check_reserve_fork() -> None:
    """A child of fork() cannot commit or give back what its parent has reserved."""
    a, b = promoted_pair()
    view = a.reserve(6)
    pid = os.fork()
    if not pid:
        view.release()
        a.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    a.setblocking(False)
    with expected(BlockingIOError):
        a.send(b"not yet")
    view[:] = b"parent"
    view.release()
    a.commit(6)
    assert b.recv(100) == b"parent"


def check_reserve_other_senders() -> None:
    """Who else sends meanwhile waits; nothing is overwritten, and nothing comes out of order."""
    a, b = promoted_pair()
    view = a.reserve(8)
    with expected(OSError, "deadlock"):
        a.send(b"myself")
    done = threading.Event()

    def other() -> None:
        a.sendall(b"second")
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    copy = a.dup()
    with expected(BlockingIOError):
        copy.send(b"third", plain.MSG_DONTWAIT)  # O_NONBLOCK would be the other thread's, too
    assert not select.select([], [copy], [], 0)[1]
    view[:] = b"first..."
    view.release()
    assert not done.is_set()
    a.commit(8)
    thread.join(DEADLINE_S)
    assert done.is_set()
    assert b.recv(14, plain.MSG_WAITALL) == b"first...second"
    # whoever closes the socket gives the room back
    a.reserve(8).release()
    a.close()
    copy.sendall(b"third")
    assert b.recv(100) == b"third"
    expect("promoted", copy, b)


def check_rings_wrap() -> None:
    """Views are whole wherever they lie, and the stream is, too."""
    a, b = promoted_pair()
    for turn in range(60):
        size = 30_011
        pattern = bytes((turn + i) % 256 for i in range(256)) * 118
        with a.reserve(size) as view:
            assert len(view) == size
            view[:] = pattern[:size]
        a.commit(size)
        with b.peek() as seen:
            assert len(seen) == size
            assert seen == pattern[:size]
            assert on_ring(seen)
        b.consume(size)
    expect("promoted", a, b)


def check_views_outlive_sockets() -> None:
    """A view is readable for as long as it is held, whatever becomes of the connection."""
    a, b = promoted_pair()
    a.sendall(b"kept" * 100)
    view = b.peek()
    room = a.reserve(1000)
    b.close()
    a.close()
    del a, b
    assert bytes(view) == b"kept" * 100
    room[:] = bytes(1000)
    assert on_ring(view)
    view.release()
    room.release()
    assert "memfd:sidestep-channel" not in Path("/proc/self/maps").read_text()


def check_in_place_on_tcp() -> None:
    """The same calls on a connection that is on TCP, one that is going back to it, and one the shim does not know."""
    a, b = sidestep_pair()

    def exchange(a: socket.socket, b: socket.socket) -> None:
        with a.reserve(11) as view:
            view[:] = b"hello world"
        a.commit(11)
        with b.peek(5) as view:
            assert bytes(view) == b"hello"
            assert view.readonly
        b.consume(5)
        b.peek(1).release()
        b.consume(1)
        assert b.recv(100) == b"world"

    exchange(a, b)
    exchange(b, a)
    # bytes are seen and room is reserved; then the connection goes back, as the socket is given to a stranger
    c, d = promoted_pair()
    d.sendall(b"seen before")
    view = c.peek()
    assert on_ring(view)
    room = c.reserve(9)
    assert on_ring(room)
    room[:] = b"committed"
    x, y = plain.socketpair()
    argv, bare = [sys.executable, "-c", "input()"], {**os.environ, "SIDESTEP_DISABLE": "1"}
    stranger = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[y.fileno()], env=bare)
    plain.send_fds(x, [b"-"], [c.fileno()])
    assert bytes(view) == b"seen before"
    view.release()
    room.release()
    d.setblocking(False)
    with expected(BlockingIOError):
        d.recv(1)  # its next call sends again what was not read
    d.setblocking(True)
    c.consume(5)
    assert c.recv(100) == b"before"
    c.commit(9)
    assert d.recv(100) == b"committed"
    expect("pinned", c, d)
    stranger.communicate(b"\n")
    exchange(c, d)
    untracked = [socket.socket(fileno=end.detach()) for end in pair_of(plain)]
    exchange(untracked[0], untracked[1])
    # TCP that is full has no room either: a commit would have to wait, also where nobody may
    full, reader = untracked
    full.setblocking(False)
    with expected(BlockingIOError):
        while True:
            full.send(bytes(100_000))
    with expected(BlockingIOError):
        full.reserve(1)
    full.settimeout(0.02)
    with expected(TimeoutError):
        full.reserve(1)
    reader.close()
    with expected(OSError, "Bad file descriptor"):
        reader.reserve(1)
    x.close()
    y.close()


def check_in_place_under_demotion(seed: str) -> None:
    """Every way to send and to receive at random, while the connection is demoted and promoted: not a byte is wrong."""
    a, b = promoted_pair()
    pattern = random.Random(0).randbytes(65_537) * 5  # a prime: what is out of place shows
    over = threading.Event()

    def content(offset: int, size: int) -> bytes:
        return pattern[offset % 65_537 :][:size]

    def send(sock: socket.socket, chance: random.Random) -> None:
        done = 0
        while not over.is_set():
            size = (1 << chance.randrange(18)) + chance.randrange(100)
            if chance.random() < 0.5:
                sock.sendall(content(done, size))
            else:
                with sock.reserve(size) as room:
                    size = chance.choice([len(room), chance.randrange(len(room) + 1)])
                    room[:size] = content(done, size)
                sock.commit(size)
            done += size
        sock.shutdown(plain.SHUT_WR)
        sent[sock] = done

    def receive(sock: socket.socket, chance: random.Random) -> None:
        done = 0
        while True:
            size = (1 << chance.randrange(18)) + chance.randrange(100)
            if chance.random() < 0.4:
                piece = sock.recv(size)
                assert piece == content(done, len(piece)), done
                done += len(piece)
                if not piece:
                    break
                continue
            with sock.peek(chance.choice([size, -1])) as seen:
                if not seen:
                    break
                look = min(len(seen), 200_000)
                assert seen[:look] == content(done, look), done
                taken = chance.choice([look, chance.randrange(look + 1)])
            sock.consume(taken // 2)
            sock.consume(taken - taken // 2)
            done += taken

        received[sock] = done

    def order(chance: random.Random) -> None:
        try:
            for what in [demotion.Order.DEMOTE, demotion.Order.PROMOTE] * ORDERS:
                found = demotion.order(provider, what, lambda row: row.pid == os.getpid(), DEADLINE_S)
                assert {end.result for end in found} <= {demotion.Result.TCP, demotion.Result.PROMOTED}, found
                over.wait(chance.random() * 0.02)
        finally:
            over.set()

    provider = Path(os.environ["SIDESTEP_SOCKET"])
    sent: dict[Sock, int] = {}
    received: dict[Sock, int] = {}
    chances = [random.Random(f"{seed} {i}") for i in range(5)]
    run_threads(
        lambda: order(chances[4]),
        lambda: send(a, chances[0]),
        lambda: receive(b, chances[1]),
        lambda: send(b, chances[2]),
        lambda: receive(a, chances[3]),
        deadline_s=60.0,
    )
    assert (sent[a], sent[b]) == (received[b], received[a])
    rows = [row for row in connections(provider) if row.pid == os.getpid()]
    assert len(rows) == 2
    assert min(row.promotions for row in rows) > ORDERS / 2, [row.promotions for row in rows]
    for way in (way for row in rows for way in (row.tx, row.rx)):
        assert way.tcp_bytes > 10_000, way
        assert way.ring_bytes > 10_000, way


def check_peer_resets_under_a_view() -> None:
    """What is seen stays; then comes the error, at once and as ever."""
    a, b = promoted_pair()
    a.sendall(b"last words")
    view = b.peek()
    b.sendall(b"never read")
    room = b.reserve(4)
    room[:] = b"lost"
    room.release()
    a.close()  # with bytes unread: a reset
    assert bytes(view) == b"last words"
    view.release()
    b.consume(10)
    with expected(ConnectionError):
        b.peek()
    with expected(OSError):
        b.commit(4)


# ---- install ----
def check_install() -> None:
    """Sockets that exist stay native, and what is made from now on is promoted; until uninstall()."""
    existing = pair_of(plain)
    listener = plain.create_server((HOST, 0))
    stop = threading.Event()
    other_threads = [threading.Thread(target=stop.wait, daemon=True) for _ in range(3)]
    for thread in other_threads:
        thread.start()
    assert sidestep.install()
    assert sidestep.install()  # twice is once
    assert sidestep.installed()
    a = plain.create_connection(listener.getsockname())
    b, _ = listener.accept()
    c, d = pair_of(plain)
    talk(*existing)
    settle(a, b)
    settle(c, d)
    expect("untracked", *existing)
    stop.set()
    sidestep.uninstall()
    assert not sidestep.installed()
    e, f = pair_of(plain)
    for pair in ((a, b), (c, d), (e, f)):
        talk(*pair)
    expect("untracked", e, f)
    expect("promoted", a, b, c, d)
    promoted_pair()


def check_install_waiting_thread() -> None:
    """A thread that sits in the kernel's recv and poll on native sockets when install() comes is not disturbed."""
    a, b = pair_of(plain)
    c, d = pair_of(plain)
    got: list[object] = []
    ready = threading.Barrier(3)

    def receive() -> None:
        ready.wait()
        got.append(b.recv(100))

    def wait() -> None:
        poller = select.poll()
        poller.register(d, select.POLLIN)
        ready.wait()
        got.append(len(poller.poll(DEADLINE_S * 1000)))

    threads = [threading.Thread(target=receive), threading.Thread(target=wait)]
    for thread in threads:
        thread.start()
    ready.wait()
    sidestep.install()
    a.sendall(b"late")
    c.sendall(b"late")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(got, key=str) == [1, b"late"], got
    assert d.recv(100) == b"late"


def check_settings() -> None:
    """Settings are taken once, and wrong ones are told."""
    wrong: Any
    for wrong in ({"promote_after": "x"}, {"ring_size": 5000}, {"spin_us": -1}):
        with expected(Misuse):
            sidestep.install(**wrong)
    assert sidestep.install(every_socket=False, promote_after=0, ring_size="64K", spin_us=0)
    assert not sidestep.installed()
    promoted_pair()
    with expected(Misuse, "before the first socket"):
        sidestep.install(ring_size="128K")


def check_disabled() -> None:
    """SIDESTEP_DISABLE=1: nothing happens."""
    os.environ["SIDESTEP_DISABLE"] = "1"
    assert not sidestep.install()
    assert not sidestep.installed()
    a, b = pair_of(socket)
    talk(a, b)
    assert "libsidestep" not in Path("/proc/self/maps").read_text()


def check_unavailable() -> None:
    """Without a place for the provider everything stays on TCP: install() raises, sockets warn once."""
    os.environ["SIDESTEP_SOCKET"] = "/proc/nowhere/provider"
    with expected(Unavailable, "--socket"):
        sidestep.install()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a, b = pair_of(socket)
        c, d = pair_of(socket)
    assert [(w.category, "plain TCP" in str(w.message)) for w in caught] == [(RuntimeWarning, True)], caught
    assert Path(caught[0].filename).name == "checks.py", caught[0]
    for pair in ((a, b), (c, d)):
        talk(*pair)


def check_by_name() -> None:
    """Functions that are looked up by name in the whole program are the shim's, as they would be with LD_PRELOAD."""
    a, b = promoted_pair()
    everything = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(100)
    a.sendall(b"by name")
    assert everything.recv(b.fileno(), buffer, 100, 0) == 7
    assert buffer.value == b"by name"
    # a library that is found by its short name comes to the same
    ssl_name = next(Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines()
                    if "/libcrypto.so" in line)  # fmt: skip
    crypto = ctypes.CDLL(ssl_name)
    crypto.BIO_new_socket.restype = ctypes.c_void_p
    bio = crypto.BIO_new_socket(b.fileno(), 0)
    a.sendall(b"by BIO")
    assert crypto.BIO_read(ctypes.c_void_p(bio), buffer, 100) == 6
    talk(a, b)
    expect("promoted", a, b)


def check_late_library(path: str) -> None:
    """A library that is loaded after the shim makes its calls through it."""
    a, b = promoted_pair()
    late = ctypes.CDLL(path)
    assert late.late_send(a.fileno(), b"from C", 6) == 6
    buffer = ctypes.create_string_buffer(100)
    assert late.late_recv(b.fileno(), buffer, 100) == 6
    assert buffer.value == b"from C"
    talk(a, b)
    expect("promoted", a, b)


def check_no_thread_local_memory(path: str) -> None:
    """Another library has taken what there is: install() says what to do, and all stays on TCP."""
    assert ctypes.CDLL(path).late_hog()
    with expected(Unavailable, "before other libraries"):
        sidestep.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        talk(*pair_of(socket))


# ---- asyncio ----
async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echo until the end."""
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def converse(
    opener: Callable[..., object], starter: Callable[..., object], wanted: str, **options: object
) -> None:
    """An echo server and its clients on the running loop."""
    server: asyncio.Server = await starter(echo, HOST, 0)  # type: ignore[misc]
    async with server:
        port = server.sockets[0].getsockname()[1]
        clients = [await opener(HOST, port, **options) for _ in range(5)]  # type: ignore[misc]
        socks = []
        for reader, writer in clients:
            number = 0
            while number < ROUNDS or states(writer.get_extra_info("socket"))[0] not in wanted.split():
                assert number < 10_000
                writer.write(b"%d\n" % number)
                assert await reader.readline() == b"%d\n" % number
                number += 1
            bulk = os.urandom(500_000)
            writer.write(bulk)
            assert await reader.readexactly(len(bulk)) == bulk
            socks.append(writer.get_extra_info("socket"))
        expect(wanted, *socks)
        for reader, writer in clients:
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()


def check_asyncio() -> None:
    """sidestep's functions, in a loop that was there before the shim."""

    async def main() -> None:
        plain_pair = asyncio.open_connection, asyncio.start_server
        await converse(*plain_pair, wanted="untracked")
        await converse(sidestep.open_connection, sidestep.start_server, "promoted", local_addr=(HOST, 0))
        await converse(*plain_pair, wanted="untracked")

    asyncio.run(main())


def check_asyncio_install() -> None:
    """asyncio's own, after install() within a coroutine."""

    async def main() -> None:
        sidestep.install()
        await converse(asyncio.open_connection, asyncio.start_server, "promoted")

    asyncio.run(main())


def check_asyncio_loop() -> None:
    """sidestep's event loop: asyncio's own functions, and sockets that a program makes; others are left alone."""

    async def main() -> None:
        await converse(asyncio.open_connection, asyncio.start_server, "promoted")
        await converse(asyncio.open_connection, asyncio.start_server, "promoted", local_addr=(HOST, 0))
        await sockets_of_a_loop()
        expect("untracked", *pair_of(plain))

    with asyncio.Runner(loop_factory=sidestep.EventLoop) as runner:
        runner.run(main())
    asyncio.run(converse(asyncio.open_connection, asyncio.start_server, "untracked"))


async def sockets_of_a_loop() -> None:
    """sock_connect and sock_accept."""
    loop = asyncio.get_running_loop()
    a = plain.socket()
    with plain.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        a.setblocking(False)
        accepting = asyncio.create_task(loop.sock_accept(listener))
        await loop.sock_connect(a, listener.getsockname())
        b, _ = await accepting
    with a, b:
        deadline = time.monotonic() + DEADLINE_S
        while (found := states(a, b)) != ["promoted"] * 2:
            assert time.monotonic() < deadline, found
            for sender, receiver in ((a, b), (b, a)):  # who reads waits first: what is never seen to wait stays on TCP
                got, _ = await asyncio.gather(loop.sock_recv(receiver, 9), loop.sock_sendall(sender, b"word"))
                assert got == b"word"


def check_asyncio_loop_datagrams_and_unix() -> None:
    """What is no TCP works on sidestep's event loop as on asyncio's."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        got: asyncio.Future[bytes] = loop.create_future()

        class Datagrams(asyncio.DatagramProtocol):
            def datagram_received(self, data: bytes, addr: Any) -> None:
                got.set_result(data)

        here, _ = await loop.create_datagram_endpoint(Datagrams, (HOST, 0))
        there, _ = await loop.create_datagram_endpoint(Datagrams, remote_addr=here.get_extra_info("sockname"))
        there.sendto(b"datagram")
        assert await got == b"datagram"
        here.close()
        there.close()
        name = f"\0sidestep-checks-{os.getpid()}"
        server = await asyncio.start_unix_server(echo, name)
        reader, writer = await asyncio.open_unix_connection(name)
        writer.write(b"unix")
        assert await reader.readexactly(4) == b"unix"
        writer.close()
        server.close()

    with asyncio.Runner(loop_factory=sidestep.EventLoop) as runner:
        runner.run(main())


def check_asyncio_errors() -> None:
    """Refused, cancelled, and a host without addresses."""

    async def main() -> None:
        with socket.create_server((HOST, 0)) as server:
            port = server.getsockname()[1]
        with expected(ConnectionRefusedError):
            await sidestep.open_connection(HOST, port)
        with expected(OSError):
            await sidestep.open_connection(HOST, port, family=plain.AF_INET6)
        idle = await sidestep.start_server(echo, HOST, 0, start_serving=False)
        assert not idle.is_serving()
        idle.close()

    asyncio.run(main())


def check_asyncio_tls(cert: str, key: str) -> None:
    """TLS by asyncio."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    client = ssl.create_default_context(cafile=cert)

    async def main() -> None:
        listening = await sidestep.start_server(echo, HOST, 0, ssl=server)
        port = listening.sockets[0].getsockname()[1]
        reader, writer = await sidestep.open_connection(HOST, port, ssl=client, server_hostname="localhost")
        deadline = time.monotonic() + DEADLINE_S
        while states(writer.get_extra_info("socket")) != ["promoted"]:
            assert time.monotonic() < deadline, states(writer.get_extra_info("socket"))
            writer.write(b"secret")
            assert await reader.readexactly(6) == b"secret"
        writer.close()
        listening.close()

    asyncio.run(main())


def check_uvloop() -> None:
    """A library that is loaded after install(), with calls and an event loop of its own."""
    assert "uvloop" not in sys.modules
    sidestep.install()
    import uvloop

    async def main() -> None:
        await converse(asyncio.open_connection, asyncio.start_server, "promoted")

    uvloop.run(main())


def check_uvloop_opt_in() -> None:
    """sidestep's functions on a uvloop that was made after the shim was loaded; and before, where they stay on TCP."""
    import uvloop

    async def main(wanted: str) -> None:
        await converse(sidestep.open_connection, sidestep.start_server, wanted)

    uvloop.run(main("native pinned"))
    uvloop.run(main("promoted"))


# ---- the other end is another program ----
def check_echo_client(port: str) -> None:
    """Talks to an echo server elsewhere; tells its state, and goes on until its input ends."""
    a = socket.create_connection((HOST, int(port)))
    for number in range(ROUNDS):
        a.sendall(b"%d" % number)
        assert a.recv(100) == b"%d" % number
    print(json.dumps(states(a)), flush=True)


def check_echo_server(port: str) -> None:
    """Echoes one connection, then tells its state."""
    with socket.create_server((HOST, int(port))) as server:
        print("listening", flush=True)
        b, _ = server.accept()
    state = ["?"]
    while piece := b.recv(65536):
        state = states(b)
        b.sendall(piece)
    print(json.dumps(state), flush=True)


# ---- under `sidestep run` ----
def check_preloaded() -> None:
    """The API works under `sidestep run` as well, where everything is tracked already."""
    assert "LD_PRELOAD" in os.environ
    assert sidestep.installed()
    assert sidestep.install(ring_size="1M")
    promoted_pair()
    settle(*pair_of(plain))
    sidestep.uninstall()
    assert sidestep.installed()
    settle(*pair_of(plain))


CHECKS: dict[str, Callable[..., None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
