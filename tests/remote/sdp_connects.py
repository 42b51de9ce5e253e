"""Programs of the tests of connections that begin with SDP: each says in lines what it sees.

reaching.py serve ADDRESS PORT PROTOCOL      an echo server that tells names
reaching.py call ADDRESS PORT PROTOCOL SIZE  connects, tells names, checks that SIZE bytes come back, ends
reaching.py name FD                          tells the names of a socket that it inherited
reaching.py heirs ADDRESS PORT PROTOCOL      connects; a copy, a child, whoever is passed it, and its next program tell
reaching.py full ADDRESS PORT                listens with room for one, that nobody takes before a line comes
reaching.py block ADDRESS PORT PROTOCOL S    connects with SO_SNDTIMEO
reaching.py slow ADDRESS PORT PROTOCOL       connects without blocking, and tells what it sees; lines tell it to go on
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import struct
import sys
import threading

IPPROTO_SDP = 0x534450
_PIECE = 1 << 16


def family_of(address: str) -> socket.AddressFamily:
    """Of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def shown(address: tuple[str, int]) -> str:
    """An address in a line."""
    return f"{address[0]} {address[1]}"


def serve(address: str, port: int, protocol: int) -> None:
    """Echoes; a thread a connection."""
    listener = socket.socket(family_of(address), socket.SOCK_STREAM, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(64)
    print("listens", flush=True)
    while True:
        connection, peer = listener.accept()
        try:
            assert peer == connection.getpeername(), (peer, connection.getpeername())
        except OSError:  # who came has gone again
            continue
        print("accepted", shown(peer), "at", shown(connection.getsockname()), flush=True)
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        try:
            while data := connection.recv(_PIECE):
                connection.sendall(data)
        except OSError as error:
            print(f"server: {error.strerror}", flush=True)


def call(address: str, port: int, protocol: int, size: int) -> None:
    """Connects and checks."""
    sock = socket.socket(family_of(address), socket.SOCK_STREAM, protocol)
    try:
        sock.connect((address, port))
    except OSError as error:
        print(os.strerror(error.errno or 0), flush=True)
        return
    print("connected", shown(sock.getpeername()), "from", shown(sock.getsockname()), flush=True)
    data = random.Random(size).randbytes(size)
    sender = threading.Thread(target=_send, args=(sock, data))
    sender.start()
    got = bytearray()
    while piece := sock.recv(_PIECE):
        got += piece
    sender.join()
    print("right" if got == data else f"wrong: {len(got)} bytes of {size}", flush=True)


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


def name(number: str) -> None:
    """Of a socket that was inherited."""
    with socket.socket(fileno=int(number)) as sock:
        print("executed", shown(sock.getpeername()), shown(sock.getsockname()), flush=True)


def heirs(address: str, port: int, protocol: int) -> None:
    """Whoever holds the socket sees the same."""
    sock = socket.socket(family_of(address), socket.SOCK_STREAM, protocol)
    sock.connect((address, port))
    print("connected", shown(sock.getpeername()), shown(sock.getsockname()), flush=True)
    with sock.dup() as copy:
        print("copied", shown(copy.getpeername()), shown(copy.getsockname()), flush=True)
    here, there = socket.socketpair()
    if not (child := os.fork()):
        print("forked", shown(sock.getpeername()), shown(sock.getsockname()), flush=True)
        _, (fd, *_), _, _ = socket.recv_fds(there, 1, 1)
        with socket.socket(fileno=fd) as passed:
            print("passed", shown(passed.getpeername()), shown(passed.getsockname()), flush=True)
        os._exit(0)
    socket.send_fds(here, [b"x"], [sock.fileno()])
    os.waitpid(child, 0)
    os.set_inheritable(sock.fileno(), True)
    os.execv(sys.executable, [sys.executable, __file__, "name", str(sock.fileno())])


def full(address: str, port: int) -> None:
    """A listener whose queue is full."""
    with socket.create_server((address, port), family=family_of(address), backlog=0) as listener:
        first = socket.create_connection((address, port))
        print("listens", flush=True)
        sys.stdin.readline()
        listener.accept()[0].close()
        first.close()
        print("emptied", flush=True)
        connection, peer = listener.accept()
        print("accepted", peer[0], flush=True)
        connection.close()


def block(address: str, port: int, protocol: int, seconds: float) -> None:
    """No longer than it may."""
    sock = socket.socket(family_of(address), socket.SOCK_STREAM, protocol)
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    error = sock.connect_ex((address, port))
    same = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, len(limit)) == limit
    print(errno.errorcode.get(error, error), "kept" if same else "changed", flush=True)


def slow(address: str, port: int, protocol: int) -> None:
    """Before and after each line that comes."""
    sock = socket.socket(family_of(address), socket.SOCK_STREAM | socket.SOCK_NONBLOCK, protocol)
    with select.epoll() as waits:
        print(errno.errorcode.get(sock.connect_ex((address, port)), 0), flush=True)
        waits.register(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        print(errno.errorcode.get(sock.connect_ex((address, port)), 0), _peer(sock), waits.poll(0), flush=True)
        sys.stdin.readline()
        events = waits.poll(30)[0][1]
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        print(errno.errorcode.get(error, error), bool(events & select.EPOLLOUT), bool(events & select.EPOLLERR),
              _peer(sock), errno.errorcode.get(sock.connect_ex((address, port)), 0), flush=True)  # fmt: skip


def _peer(sock: socket.socket) -> str:
    try:
        return shown(sock.getpeername())
    except OSError as why:
        return errno.errorcode[why.errno or 0]


def main(kind: str, *rest: str) -> None:
    """What is asked for."""
    if kind == "name":
        name(*rest)
        return
    address, port, *more = rest
    if kind == "call":
        call(address, int(port), int(more[0]), int(more[1]))
    elif kind == "block":
        block(address, int(port), int(more[0]), float(more[1]))
    elif kind == "full":
        full(address, int(port))
    else:
        {"serve": serve, "heirs": heirs, "slow": slow}[kind](address, int(port), int(more[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
