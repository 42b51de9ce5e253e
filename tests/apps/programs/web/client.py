"""Downloads and uploads with http.client: a thread a connection, which is kept."""

from __future__ import annotations

import http.client
import sys
import threading
from pathlib import Path


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> bytes:
    connection.request(method, path, body)
    answer = connection.getresponse()
    assert answer.status in (200, 201, 204), answer.status
    return answer.read()


def talk(port: int, place: Path, number: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while (place / "wait").exists():
        ask(connection, "GET", "/nudge")
    (place / f"{number}.out").write_bytes(ask(connection, "GET", "/large"))
    ask(connection, "PUT", f"/up/{number}", (place / f"{number}.in").read_bytes())
    (place / f"{number}.back").write_bytes(ask(connection, "GET", f"/up/{number}"))
    connection.close()


def main() -> None:
    port, count, place = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    threads = [threading.Thread(target=talk, args=(port, place, number)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
