"""The small real programs that `sidestep demo` runs: they know TCP and nothing else.

``python programs.py ROLE ADDRESS [PORT ...]``: a role is a function of this file, and the words are its arguments. A
server prints "listening PORT". A client prints "holding" and keeps its connection open until its standard input ends:
its parent can look at the connection. It then prints one JSON object.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import socket
import statistics
import sys
import time
from typing import Any, Final

ECHO_LEN: Final = 64  # bytes
BULK_LEN: Final = 16 << 20  # bytes a transfer
SEND_LEN: Final = 1 << 20  # bytes a send
DIGEST_LEN: Final = 32  # bytes, SHA-256
POUR_BATCH: Final = 4096  # bytes
WARMUP_S: Final = 0.1
REDIS_VALUES: Final = 200
REDIS_VALUE_LEN_MAX: Final = 40_000  # bytes


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _finish(result: dict[str, Any]) -> None:
    _tell("holding")
    sys.stdin.read()
    _tell(json.dumps(result))


def _connect(address: str, port: str) -> socket.socket:
    sock = socket.create_connection((address, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _accept(address: str) -> socket.socket:
    with socket.create_server((address, 0)) as listener:
        _tell(f"listening {listener.getsockname()[1]}")
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _receive(sock: socket.socket, view: memoryview) -> bool:
    """Fills `view`; False where the stream ends first."""
    filled = 0
    while filled < len(view):
        count = sock.recv_into(view[filled:])
        if not count:
            return False
        filled += count
    return True


def _receive_whole(sock: socket.socket, view: memoryview) -> None:
    if not _receive(sock, view):
        sys.exit("the server closed the connection")


def echo_server(address: str) -> None:
    message = memoryview(bytearray(ECHO_LEN))
    with _accept(address) as sock:
        while _receive(sock, message):
            sock.sendall(message)


def echo_client(address: str, port: str, seconds: str) -> None:
    """Ping-pong with echo_server; the result has the median round trip and whether each answer was what was sent."""
    answer = memoryview(bytearray(ECHO_LEN))
    times: list[int] = []
    number, equal = 0, True
    with _connect(address, port) as sock:
        start = time.perf_counter_ns() + int(WARMUP_S * 1e9)
        end = start + int(float(seconds) * 1e9)
        now = time.perf_counter_ns()
        while now < end:
            sent = now
            message = number.to_bytes(ECHO_LEN, "little")
            sock.sendall(message)
            _receive_whole(sock, answer)
            equal = equal and answer == message
            number += 1
            now = time.perf_counter_ns()
            if sent >= start:
                times.append(now - sent)
        _finish({"value": statistics.median(times) / 1e3 if times else 0.0, "equal": equal and bool(times)})


def pour_server(address: str) -> None:
    """Receives zeros, up to the first that is none; answers with that."""
    buffer = memoryview(bytearray(SEND_LEN))
    with _accept(address) as sock:
        while (count := sock.recv_into(buffer)) and not buffer[count - 1]:
            pass
        sock.sendall(b"!")
        sock.recv(1)


def pour_client(address: str, port: str, seconds: str, size: str) -> None:
    """Sends messages to pour_server; the result has microseconds a message, to the answer that all have come."""
    message, count = bytes(int(size)), 0
    batch = max(1, POUR_BATCH // len(message))  # messages between two looks at the clock
    with _connect(address, port) as sock:
        start = time.perf_counter()
        while time.perf_counter() < start + float(seconds):
            for _ in range(batch):
                sock.sendall(message)
            count += batch
        sock.sendall(b"!")
        _receive_whole(sock, memoryview(bytearray(1)))
        _finish({"value": (time.perf_counter() - start) / count * 1e6, "equal": True})


def bulk_server(address: str) -> None:
    """Receives transfers of one client; answers each with a byte at its end, then with its SHA-256."""
    buffer = memoryview(bytearray(BULK_LEN))
    with _accept(address) as sock:
        while _receive(sock, buffer):
            sock.sendall(b"!")
            sock.sendall(hashlib.sha256(buffer).digest())


def bulk_client(address: str, port: str, seconds: str) -> None:
    """Sends transfers to bulk_server; the result has the median MB/s and whether each SHA-256 was right."""
    data = bytearray(random.Random(2002).randbytes(BULK_LEN))  # noqa: S311 - any bytes will do
    view, equal = memoryview(data), True
    rates: list[float] = []
    done, digest = memoryview(bytearray(1)), memoryview(bytearray(DIGEST_LEN))
    end = time.perf_counter() + WARMUP_S + float(seconds)
    with _connect(address, port) as sock:
        while time.perf_counter() < end or len(rates) < 2:
            data[:8] = len(rates).to_bytes(8, "little")
            start = time.perf_counter()
            for offset in range(0, BULK_LEN, SEND_LEN):
                sock.sendall(view[offset : offset + SEND_LEN])
            _receive_whole(sock, done)
            rates.append(BULK_LEN / (time.perf_counter() - start) / 1e6)
            _receive_whole(sock, digest)  # summed after the clock was read: the transfer is what is measured
            equal = equal and digest == hashlib.sha256(data).digest()
        _finish({"value": statistics.median(rates[1:]), "equal": equal})  # the first is the connection's youth


def redis_check(address: str, port: str) -> None:
    """Stores random values in a redis server and reads them back; the result says whether they are equal."""
    source = random.Random(1989)  # noqa: S311 - any bytes will do
    values = [source.randbytes(source.randrange(1, REDIS_VALUE_LEN_MAX)) for _ in range(REDIS_VALUES)]
    with _connect(address, port) as sock, sock.makefile("rb") as answers:
        stored = True
        for number, value in enumerate(values):
            sock.sendall(_command(b"SET", b"demo:%d" % number, value))
            stored = stored and answers.readline() == b"+OK\r\n"
        equal = True
        for number, value in enumerate(values):
            sock.sendall(_command(b"GET", b"demo:%d" % number))
            expected = b"$%d\r\n%s\r\n" % (len(value), value)
            equal = equal and answers.read(len(expected)) == expected
        sock.sendall(_command(b"SET", b"key:__rand_int__", b"VXK"))  # redis-benchmark -t get asks for that key
        stored = stored and answers.readline() == b"+OK\r\n"
        _finish({"value": float(len(values)), "equal": stored and equal})


def fetch(address: str, port: str, seconds: str, sha256: str) -> None:
    """GETs /page.txt of a web server again and again over one connection; the result has the median MB/s."""
    rates: list[float] = []
    equal = True
    end = time.perf_counter() + WARMUP_S + float(seconds)
    client = http.client.HTTPConnection(address, int(port))
    while time.perf_counter() < end or len(rates) < 2:
        start = time.perf_counter()
        client.request("GET", "/page.txt")
        answer = client.getresponse()
        body = answer.read()
        rates.append(len(body) / (time.perf_counter() - start) / 1e6)
        equal = equal and answer.status == http.client.OK and hashlib.sha256(body).hexdigest() == sha256
    _finish({"value": statistics.median(rates[1:]), "equal": equal})
    client.close()


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
