"""A client of real programs, on either host: asks until standard input ends, checks every byte, and says what it saw.

program_client.py redis ADDRESS PORT     sets and gets values, at last while the server saves: by forks, and by its log
program_client.py stored ADDRESS PORT    gets them all once
program_client.py http ADDRESS PORT      downloads `/data` by some connections at a time
"""

from __future__ import annotations

import hashlib
import http.client
import random
import select
import socket
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

KEYS = 30
VALUE_MAX = 60_000  # bytes
DOWNLOADS = 4
TIMEOUT_S = 100.0
SAVES = 5


class Redis:
    """One connection (RESP2)."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answers: BinaryIO = connection.makefile("rb")

    def send(self, *words: bytes) -> None:
        lengths = (b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        self._connection.sendall(b"*%d\r\n" % len(words) + b"".join(lengths))

    def answer(self) -> bytes:
        line = self._answers.readline()
        assert line.endswith(b"\r\n"), f"the server's answer ends early: {line!r}"
        if line[:1] != b"$":
            return line.strip()
        length = int(line[1:])
        assert length >= 0, "a key is missing"
        return self._answers.read(length + 2)[:-2]

    def ask(self, *words: bytes) -> bytes:
        self.send(*words)
        return self.answer()

    def stored(self) -> dict[bytes, bytes]:
        keys = [b"key:%d" % number for number in range(KEYS)]
        for key in keys:
            self.send(b"GET", key)
        return {key: self.answer() for key in keys}


def redis(address: str, port: int) -> None:
    dice = random.Random(port)
    values: dict[bytes, bytes] = {}
    with socket.create_connection((address, port), TIMEOUT_S) as connection:
        server = Redis(connection)

        def work(*saves: bytes) -> None:
            for number in range(KEYS):
                values[b"key:%d" % number] = dice.randbytes(dice.randrange(VALUE_MAX))
            for key, value in values.items():
                server.send(b"SET", key, value)
            assert {server.answer() for _ in values} == {b"+OK"}
            for save in saves:
                said = server.ask(*save.split())
                assert b"ackground" in said or b"in progress" in said or b"cheduled" in said, said
            assert server.stored() == values, "the server has other values"

        rounds = _until_told(work)  # without forks: who has just made one shares all its connections
        for _ in range(SAVES):
            work(b"BGSAVE SCHEDULE", b"BGREWRITEAOF")  # one may still be at work
        print(f"right: {rounds}", digest(values), int(forks(server) >= 2), flush=True)


def forks(server: Redis) -> int:
    """How many the server has made; those of its saves have ended well."""
    found = dict(
        line.split(":", 1) for line in server.ask(b"INFO", b"everything").decode().split("\r\n") if ":" in line
    )
    assert (found["rdb_last_bgsave_status"], found["aof_last_bgrewrite_status"]) == ("ok", "ok"), found
    return int(found["total_forks"])


def digest(values: dict[bytes, bytes]) -> str:
    return hashlib.sha256(b"".join(values[key] for key in sorted(values))).hexdigest()


def stored(address: str, port: int) -> None:
    with socket.create_connection((address, port), TIMEOUT_S) as connection:
        print(digest(Redis(connection).stored()), flush=True)


def downloads(address: str, port: int) -> None:
    connections = [http.client.HTTPConnection(address, port, timeout=TIMEOUT_S) for _ in range(DOWNLOADS)]
    seen: set[str] = set()

    def download(connection: http.client.HTTPConnection) -> None:
        connection.request("GET", "/data")
        seen.add(hashlib.sha256(connection.getresponse().read()).hexdigest())

    def work() -> None:
        at_once = [threading.Thread(target=download, args=(each,)) for each in connections]
        for each in at_once:
            each.start()
        for each in at_once:
            each.join()

    rounds = _until_told(work)
    print(f"right: {rounds}", *seen, flush=True)


def _until_told(work: Callable[[], None]) -> int:
    """How often it was done; after the first time it says that it goes on."""
    work()
    print("goes on", flush=True)
    rounds = 1
    while not select.select([sys.stdin], [], [], 0)[0]:
        work()
        rounds += 1
    return rounds


def main() -> None:
    what, address, port = sys.argv[1:]
    {"redis": redis, "stored": stored, "http": downloads}[what](address, int(port))


main()
