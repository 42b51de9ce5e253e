"""A connection that ends while its duplicate waits for a provider that stands still.

usage: ends.py PORT HOW
The first connection echoes until the peer ends it. Then a line is printed and one is read; the second connection sends
a byte, reads one, and ends as HOW says.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys


def echo(sock: socket.socket) -> None:
    """Until the peer has ended."""
    while data := sock.recv(100):
        sock.sendall(data)


def close(sock: socket.socket) -> None:
    sock.close()


def unread(sock: socket.socket) -> None:
    sock.recv(1, socket.MSG_PEEK)  # there it is, and there it stays
    sock.close()


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def linger(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 20))
    sock.close()


def twice(sock: socket.socket) -> None:
    other = sock.dup()
    sock.close()
    other.sendall(other.recv(1))
    other.close()


def replaced(sock: socket.socket) -> None:
    with open(os.devnull, "rb") as other:
        os.dup2(other.fileno(), sock.fileno())


def fork(sock: socket.socket) -> None:
    child = os.fork()
    if child:
        sock.close()
        os.waitpid(child, 0)
        return
    sock.sendall(sock.recv(1))
    os._exit(0)


_HEIR = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as sock:
    sock.sendall(sock.recv(1))
"""
_RECEIVER = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as way:
    fds = socket.recv_fds(way, 1, 1)[1]
with socket.socket(fileno=fds[0]) as sock:
    sock.sendall(sock.recv(1))
"""


def outside() -> dict[str, str]:
    """The environment of a program that no shim sees."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def passed(sock: socket.socket) -> None:
    here, there = socket.socketpair()
    with here, there:
        number = there.fileno()
        subprocess.Popen([sys.executable, "-c", _RECEIVER, str(number)], pass_fds=[number], env=outside())
        socket.send_fds(here, [b"x"], [sock.fileno()])
        sock.close()


def spawned(sock: socket.socket) -> None:
    action = (os.POSIX_SPAWN_DUP2, sock.fileno(), 9)
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", _HEIR, "9"], outside(), file_actions=[action])
    sock.close()
    os.waitpid(child, 0)


def leave(sock: socket.socket) -> None:
    sock.detach()
    sys.exit()  # the end of the process closes it


def abort(sock: socket.socket) -> None:
    os._exit(0)


def main() -> None:
    port, how = int(sys.argv[1]), sys.argv[2]
    with socket.create_connection(("127.0.0.1", port)) as first:
        echo(first)
    print("ready", flush=True)
    sys.stdin.readline()
    second = socket.create_connection(("127.0.0.1", port))
    second.sendall(b"a")
    assert second.recv(1) == b"b"
    globals()[how](second)
    print("ended", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
