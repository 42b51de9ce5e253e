"""Data check of memcached through pymemcache: many threads, values up to the limit, cas, counters, multi-get.

usage: memcached_check.py PORT THREADS. Prints one JSON line; connections stay open until standard input ends.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

from gate import linger
from pymemcache.client.base import Client

SIZES = (0, 1, 100, 4095, 16_384, 100_000, 1_000_000)


def converse(client: Client, worker: int) -> dict[str, object]:
    """One connection's share of the check."""
    sums = []
    for size in SIZES:
        assert client.set(f"{worker}:{size}", random.Random(size + worker).randbytes(size), noreply=False)
        sums.append(hashlib.sha256(client.get(f"{worker}:{size}")).hexdigest())
    many = {f"{worker}:key{n}": b"%d" % (n * n) for n in range(1000)}
    assert client.set_many(many, noreply=True) == []
    for _ in range(500):
        assert client.incr("total", 1) is not None
    value, token = client.gets(f"{worker}:key1")
    first = client.cas(f"{worker}:key1", b"new", token, noreply=False)
    second = client.cas(f"{worker}:key1", b"newer", token, noreply=False)
    return {
        "sums": sums,
        "many": sum(int(value) for value in client.get_many([*many][2:]).values()),
        "cas": [value.decode(), first, second],
        "deleted": client.delete(f"{worker}:0", noreply=False),
        "absent": client.get(f"{worker}:0"),
    }


def main() -> None:
    port, workers = int(sys.argv[1]), int(sys.argv[2])
    clients = [Client(("127.0.0.1", port), timeout=60, no_delay=True) for _ in range(workers)]
    clients[0].set("total", b"0", noreply=False)
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(converse, clients, range(workers)))
    total = int(clients[0].get("total"))
    print(json.dumps({"results": results, "total": total}), flush=True)
    linger(lambda: [client.version() for client in clients])
    for client in clients:
        client.quit()


if __name__ == "__main__":
    main()
