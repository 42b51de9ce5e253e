"""Sends random bytes to an echo at PORT on several connections, compares what comes back, until its input ends."""

from __future__ import annotations

import random
import socket
import sys
import threading

port, connections = int(sys.argv[1]), int(sys.argv[2])
stop = threading.Event()
whole: list[int] = []


def talk(seed: int) -> None:
    chosen, moved = random.Random(seed), 0
    with socket.create_connection(("127.0.0.1", port)) as one:
        while not stop.is_set():
            data = chosen.randbytes(chosen.randrange(1, 30000))
            sender = threading.Thread(target=one.sendall, args=(data,))
            sender.start()
            got = one.recv(len(data), socket.MSG_WAITALL)
            sender.join()
            if got != data:
                raise SystemExit(f"connection {seed}: other bytes at {moved}")
            moved += len(data)
    whole.append(moved)


threads = [threading.Thread(target=talk, args=(seed,)) for seed in range(connections)]
for thread in threads:
    thread.start()
sys.stdin.read()
stop.set()
for thread in threads:
    thread.join()
print("whole" if len(whole) == connections and min(whole) > 0 else f"only {whole}", flush=True)
