"""multiprocessing over AF_INET: a Listener and its Client with challenge and answer, and a manager with proxies.

usage: mp_peer.py server PORT | client PORT | manager PORT | proxies PORT
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.managers import BaseManager
from queue import Queue

from gate import linger

HOST = "127.0.0.1"
KEY = b"not a secret"
BULK_SIZES = (0, 1, 4, 16_384, 16_385, 1 << 20, 10_000_000)  # around the size where header and body are sent apart


def answer(peer: Connection) -> None:
    """Objects come back with their checksum, raw bytes as they are."""
    with peer:
        try:
            while True:
                kind, value = peer.recv()
                if kind == "object":
                    peer.send([value, hashlib.sha256(repr(value).encode()).hexdigest()])
                else:
                    peer.send_bytes(peer.recv_bytes())
        except EOFError:
            return


def serve(port: int) -> None:
    with Listener((HOST, port), backlog=16, authkey=KEY) as listener:
        while True:
            try:
                peer = listener.accept()
            except AuthenticationError:
                continue
            threading.Thread(target=answer, args=(peer,), daemon=True).start()


def converse(peers: list[Connection]) -> dict[str, object]:
    """Ask over all connections in turn."""
    objects = [{"n": n, "text": "ä" * n, "list": list(range(n))} for n in range(0, 400, 4)]
    right = 0
    for number, value in enumerate(objects):
        peer = peers[number % len(peers)]
        peer.send(("object", value))
        right += peer.recv() == [value, hashlib.sha256(repr(value).encode()).hexdigest()]
    same = []
    for size in BULK_SIZES:
        data = random.Random(size).randbytes(size)
        for peer in peers:
            sender = threading.Thread(
                target=lambda peer=peer, data=data: (peer.send(("bytes", None)), peer.send_bytes(data))
            )
            sender.start()
            same.append(peer.recv_bytes() == data)
            sender.join()
    idle = [peer.poll(0) for peer in peers]
    return {"objects": right, "bytes": same.count(True), "idle": idle}


def talk(port: int) -> None:
    peers = [Client((HOST, port), authkey=KEY) for _ in range(3)]
    try:
        Client((HOST, port), authkey=b"wrong")
        verdict = "let in"
    except Exception as error:  # its class is the result
        verdict = type(error).__name__
    print(json.dumps({**converse(peers), "wrong key": verdict}), flush=True)
    linger(lambda: converse(peers))
    for peer in peers:
        peer.close()


class Shop(BaseManager):
    """Shares a queue and a dictionary."""


def manage(port: int) -> None:
    queue: Queue[object] = Queue()
    Shop.register("queue", callable=lambda: queue)
    Shop((HOST, port), KEY).get_server().serve_forever()


def use_proxies(port: int) -> None:
    Shop.register("queue")
    shop = Shop((HOST, port), KEY)
    shop.connect()
    queue = shop.queue()  # type: ignore[attr-defined]
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.extend(queue.get(timeout=30) for _ in range(500)))
    reader.start()  # a proxy opens a connection for each thread
    for number in range(500):
        queue.put(number)
    reader.join()
    print(json.dumps({"in order": got == list(range(500)), "left": queue.qsize()}), flush=True)
    linger(queue.qsize)


if __name__ == "__main__":
    {"server": serve, "client": talk, "manager": manage, "proxies": use_proxies}[sys.argv[1]](int(sys.argv[2]))
