"""Data check of a redis server through redis-py: pipelines, large values, MULTI, pub/sub, blocking pop, scripts.

usage: redis_check.py PORT. Prints one JSON line and then keeps its connections open until its standard input ends.
"""

# mypy: disable-error-code="attr-defined,no-untyped-call,unused-ignore"
from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
from typing import Any

import redis
from gate import linger

LARGE_SIZES = (1, 1000, 16_384, 65_537, 1 << 20, 8 << 20)


def pipelines(client: redis.Redis) -> int:
    """20 pipelines of 500 commands; the sum of what comes back."""
    total = 0
    for batch in range(20):
        pipe = client.pipeline(transaction=False)
        for item in range(250):
            pipe.set(f"key:{batch}:{item}", batch * 1000 + item)
            pipe.get(f"key:{batch}:{item}")
        total += sum(int(answer) for answer in pipe.execute()[1::2])
    return total


def large_values(client: redis.Redis) -> dict[str, str]:
    """Checksums of values as they come back from the server."""
    found = {}
    for size in LARGE_SIZES:
        client.set(f"large:{size}", random.Random(size).randbytes(size))
        found[str(size)] = hashlib.sha256(client.get(f"large:{size}")).hexdigest()  # type: ignore[arg-type]
    return found


def transactions(client: redis.Redis, rival: redis.Redis) -> list[Any]:
    """A MULTI block that succeeds, and one that WATCH makes fail."""
    client.set("account", 100)
    with client.pipeline(transaction=True) as pipe:
        pipe.decrby("account", 30).incrby("savings", 30)
        done = pipe.execute()
    with client.pipeline(transaction=True) as pipe:
        pipe.watch("account")
        rival.set("account", 1)
        pipe.multi()
        pipe.set("account", 2)
        try:
            pipe.execute()
            verdict = "executed"
        except redis.WatchError:
            verdict = "refused"
    return [done, verdict, int(client.get("account"))]  # type: ignore[arg-type]


def pubsub(client: redis.Redis, listener: redis.Redis) -> str:
    """2,000 messages of many sizes from one connection to another: the checksum of all, in order of arrival."""
    channel = listener.pubsub(ignore_subscribe_messages=False)
    channel.subscribe("news")
    assert channel.get_message(timeout=30)["type"] == "subscribe"  # type: ignore[index]
    sizes = [random.Random(i).randrange(1, 4000) for i in range(2000)]
    sender = threading.Thread(target=lambda: [client.publish("news", bytes([n % 256]) * n) for n in sizes])
    sender.start()
    checksum = hashlib.sha256()
    for _ in sizes:
        message = channel.get_message(timeout=30)
        assert message is not None, "no message in 30 s"
        assert message["type"] == "message", message
        checksum.update(message["data"])
    sender.join()
    channel.unsubscribe()
    expected = hashlib.sha256(b"".join(bytes([n % 256]) * n for n in sizes)).hexdigest()
    return "in order" if checksum.hexdigest() == expected else "corrupt"


def blocking_pop(client: redis.Redis, waiter: redis.Redis) -> list[str]:
    """A connection that sleeps in BLPOP is woken by a push on another."""
    got: list[str] = []

    def wait() -> None:
        for _ in range(50):
            got.append(waiter.blpop("queue", timeout=30)[1].decode())  # type: ignore[index,union-attr]

    thread = threading.Thread(target=wait)
    thread.start()
    for item in range(50):
        client.rpush("queue", f"item {item}")
    thread.join()
    return got


def main() -> None:
    port = int(sys.argv[1])
    clients = [
        redis.Redis(
            host="127.0.0.1", port=port, client_name=f"check-{i}", socket_timeout=60, single_connection_client=True
        )
        for i in range(4)
    ]
    a, b, c, d = clients
    result = {
        "pipelines": pipelines(a),
        "large": large_values(a),
        "transactions": transactions(a, b),
        "pubsub": pubsub(b, c),
        "blpop": blocking_pop(a, d),
        "script": a.eval("local n = 0 for i = 1, ARGV[1] do n = n + i end return n", 0, 1000),
        "clients": sorted({entry["name"] for entry in a.client_list()} & {f"check-{i}" for i in range(9)}),
        "keys": a.dbsize(),
    }
    print(json.dumps(result), flush=True)
    linger(lambda: [client.ping() for client in clients])
    for client in clients:
        client.close()


if __name__ == "__main__":
    main()
