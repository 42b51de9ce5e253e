"""An HTTP/1.1 client of the standard library that stays under the test's control.

usage: http_client.py PORT fetch PATH...      one keep-alive connection: size and SHA-256 of each body
       http_client.py PORT half PATH          reads half a body, prints "half", goes on after a line of input
       http_client.py PORT post PATH SIZE     sends half a body, prints "half", goes on after a line of input
       http_client.py PORT pester PATH COUNT  COUNT threads ask without pause; prints each new answer seen by all
Prints JSON lines. Connections stay open until standard input ends.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import sys
import threading

HOST = "127.0.0.1"
TIMEOUT_S = 60


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def checksum(body: bytes) -> list[object]:
    return [len(body), hashlib.sha256(body).hexdigest()]


def fetch(port: int, paths: list[str]) -> None:
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    answers = []
    for path in paths:
        connection.request("GET", path)
        response = connection.getresponse()
        answers.append([response.status, *checksum(response.read())])
    say(answers)
    sys.stdin.read()
    connection.close()


def half(port: int, path: str) -> None:
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    connection.request("GET", path)
    response = connection.getresponse()
    assert response.status == 200, response.status
    body = response.read(int(response.headers["Content-Length"]) // 2)
    say("half")
    sys.stdin.readline()
    body += response.read()
    say(checksum(body))
    connection.close()


def post(port: int, path: str, size: int) -> None:
    body = random.Random(size).randbytes(size)
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(size))
    connection.endheaders()
    connection.send(body[: size // 2])
    say("half")
    sys.stdin.readline()
    connection.send(body[size // 2 :])
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert answer[:2] == checksum(body), answer
    say([response.status, *answer])
    sys.stdin.read()
    connection.close()


class Pest(threading.Thread):
    """Asks again and again; a reused connection that the server closed before answering is opened anew (RFC 9112 9.3.1)."""

    def __init__(self, port: int, path: str, told: threading.Condition, seen: dict[str, set[int]]) -> None:
        super().__init__(daemon=True)
        self.port, self.path, self.told, self.seen = port, path, told, seen
        self.requests = self.reconnects = 0
        self.error: BaseException | None = None
        self.stopping = False

    def run(self) -> None:
        try:
            self.pester()
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            self.error = error
            with self.told:
                self.told.notify_all()

    def pester(self) -> None:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT_S)
        fresh = True
        last = ""
        while not self.stopping:
            try:
                connection.request("GET", self.path)
                response = connection.getresponse()
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                if fresh:
                    raise
                connection.close()
                self.reconnects += 1
                fresh = True
                continue
            answer = response.read().decode()
            assert response.status == 200, response.status
            fresh = connection.sock is None
            self.requests += 1
            if answer != last:
                last = answer
                with self.told:
                    self.seen.setdefault(answer, set()).add(id(self))
                    self.told.notify_all()
        connection.close()


def pester(port: int, path: str, count: int) -> None:
    told = threading.Condition()
    seen: dict[str, set[int]] = {}
    said: set[str] = set()
    pests = [Pest(port, path, told, seen) for _ in range(count)]
    end = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        with told:
            end.set()
            told.notify_all()

    threading.Thread(target=await_end, daemon=True).start()
    for pest in pests:
        pest.start()
    with told:
        while not end.is_set() and not any(pest.error for pest in pests):
            for answer, by in seen.items():
                if len(by) == count and answer not in said:
                    said.add(answer)
                    say(answer)
            told.wait()
    for pest in pests:
        pest.stopping = True
    for pest in pests:
        pest.join()
        if pest.error:
            raise pest.error
    say({"answers": sorted(seen), "idle": sum(pest.requests < 3 for pest in pests)})


def main() -> None:
    port, what, path, *more = sys.argv[1:]
    if what == "fetch":
        fetch(int(port), [path, *more])
    elif what == "half":
        half(int(port), path)
    elif what == "post":
        post(int(port), path, int(more[0]))
    else:
        pester(int(port), path, int(more[0]))


if __name__ == "__main__":
    main()
