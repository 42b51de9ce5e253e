"""memcached with four threads: libevent's epoll, connections handed from the listening thread to the workers."""

from __future__ import annotations

import json
import os
import random

import needed
from stage import Stage, sha256

THREADS = 8
SIZES = (0, 1, 100, 4095, 16_384, 100_000, 1_000_000)


def test_data(stage: Stage) -> None:
    """Eight connections at once get back what they stored, and each counted increment counts."""
    memcached = needed.program("memcached")
    user = ["-u", "root"] if os.geteuid() == 0 else []
    server, port = stage.serve(
        lambda port: [memcached, "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-t", "4", "-m", "256", *user]
    )
    client = stage.python("client", "memcached_check.py", port, THREADS)
    result = json.loads(client.line())
    assert result["total"] == 500 * THREADS
    for worker, answers in enumerate(result["results"]):
        assert answers == {
            "sums": [sha256(random.Random(size + worker).randbytes(size)) for size in SIZES],
            "many": sum(n * n for n in range(2, 1000)),
            "cas": ["1", True, False],
            "deleted": True,
            "absent": None,
        }
    stage.check_path(port, THREADS, nudge=client.nudge)
    client.rest()
    assert server.stop() in (0, -15)
