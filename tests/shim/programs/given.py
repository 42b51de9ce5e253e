"""A giver and a taker of connections, which are programs of their own. usage: given.py giver|taker HOW PATH

Clients connect to the port that the giver prints. It echoes words until one begins with "b", gives the connections away
by the UNIX socket PATH, and ends. The taker echoes each to its end, and prints what it saw.

HOW: alone; kept: the giver keeps its numbers; peek and peeked: the taker looks first, and goes on with what came last
or first; twice: a socket under two numbers in one message; many: five in one; back: the taker gives it back, and the
giver echoes; self: the giver gives it to itself; cut: the taker has room for one of two.
"""

import array
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

WORD = 64


def take_word(one: socket.socket) -> bytes:
    """A whole one, or nothing at the end."""
    return one.recv(WORD, socket.MSG_WAITALL)


def echo_first(one: socket.socket) -> None:
    """Until the client says that it may be given away."""
    while (word := take_word(one))[:1] != b"b":
        one.sendall(word)
    one.sendall(word)


def echo_all(ends: list[socket.socket]) -> None:
    """To the end, through each of the numbers in turn."""
    turn = 0
    while word := take_word(ends[turn % len(ends)]):
        turn += 1
        ends[turn % len(ends)].sendall(word)
    for end in ends:
        end.close()


def in_threads(work: Callable[[Any], None], each: Iterable[Any]) -> None:
    threads = [threading.Thread(target=work, args=(one,)) for one in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def lowest(count: int) -> list[int]:
    """The numbers that the kernel gives next."""
    numbers = [os.dup(0) for _ in range(count)]
    for number in numbers:
        os.close(number)
    return numbers


def take(way: socket.socket, room: int, flags: int = 0) -> tuple[list[socket.socket], int]:
    expected = lowest(room)
    _, ancillary, seen, _ = way.recvmsg(1, socket.CMSG_LEN(room * 4), flags)
    numbers = array.array("i")
    for _, _, data in ancillary:
        numbers.frombytes(data[: len(data) - len(data) % 4])
    assert list(numbers) == expected[: len(numbers)], numbers
    return [socket.socket(fileno=number) for number in numbers], seen


def give(way: socket.socket, ends: list[socket.socket]) -> None:
    socket.send_fds(way, [b"x"], [end.fileno() for end in ends])


def giver(how: str, path: str) -> None:
    way = socket.socket(socket.AF_UNIX)
    if how != "self":
        way.connect(path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        ends = [listener.accept()[0] for _ in range({"many": 5, "cut": 2}.get(how, 1))]
    in_threads(echo_first, ends)
    if how == "self":
        ours, theirs = socket.socketpair()
        give(ours, ends)
        ends[0].close()
        (one,), _ = take(theirs, 1)
        echo_all([one])
        return
    give(way, [ends[0], ends[0].dup()] if how == "twice" else ends)
    if how != "kept":
        for end in ends:
            end.close()
    if how == "back":
        (one,), _ = take(way, 1)
        echo_all([one])
    sys.stdin.readline()


def taker(how: str, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("listens", flush=True)
        way, _ = listener.accept()
    seen = 0
    if how in ("peek", "peeked"):
        looked, _ = take(way, 1, socket.MSG_PEEK)
        ends, _ = take(way, 1)
        for end in looked if how == "peek" else ends:
            end.close()
        ends = ends if how == "peek" else looked
    else:
        ends, seen = take(way, {"many": 5, "twice": 2}.get(how, 1))
    print(len(ends), "cut" if seen & socket.MSG_CTRUNC else "whole", flush=True)
    if how == "back":
        give(way, ends)
        ends[0].close()
    elif how == "twice":
        echo_all(ends)
    else:
        in_threads(echo_all, [[end] for end in ends])
    sys.stdin.readline()


if __name__ == "__main__":
    {"giver": giver, "taker": taker}[sys.argv[1]](*sys.argv[2:])
