"""An HTTP/1.1 client of the standard library that stays under the test's control.

usage: http_client.py PORT fetch PATH...      one keep-alive connection: size and SHA-256 of each body
       http_client.py PORT held PATH          reads some of a body, prints "begun", lingers, reads the rest
       http_client.py PORT post PATH SIZE     sends some of a body, prints "begun", lingers, sends the rest
       http_client.py PORT pester PATH COUNT  COUNT threads ask without pause; prints each new answer seen by all
Prints JSON lines. `fetch` lingers with its connection open.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import sys
import threading

from gate import linger

HOST = "127.0.0.1"
TIMEOUT_S = 60


def send_control(value: object) -> None:
    print(json.dumps(value), flush=True)


def checksum(body: bytes | bytearray) -> list[object]:
    return [len(body), hashlib.sha256(body).hexdigest()]


def fetch(port: int, paths: list[str]) -> None:
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    answers = []
    for path in paths:
        connection.request("GET", path)
        response = connection.getresponse()
        answers.append([response.status, *checksum(response.read())])
    send_control(answers)

    def again() -> None:
        connection.request("GET", paths[0])
        assert connection.getresponse().read() is not None

    linger(again)
    connection.close()


def held(port: int, path: str) -> None:
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    connection.request("GET", path)
    response = connection.getresponse()
    assert response.status == 200, response.status
    body = bytearray(response.read(1_000_000))
    send_control("begun")
    linger(lambda: body.extend(response.read(1_000_000)))
    body += response.read()
    send_control(checksum(body))
    connection.close()


def post(port: int, path: str, size: int) -> None:
    body = random.Random(size).randbytes(size)
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(size))
    connection.endheaders()
    unsent = memoryview(body)

    def send(length: int) -> None:
        nonlocal unsent
        connection.send(unsent[:length])
        unsent = unsent[length:]

    send(10_000)
    send_control("begun")
    linger(lambda: send(10_000))
    send(len(unsent))
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert answer[:2] == checksum(body), answer
    send_control([response.status, *answer])
    connection.close()


class Pest(threading.Thread):
    """Asks on and on; a reused connection that was closed before it answered is opened anew (RFC 9112 9.3.1)."""

    def __init__(self, port: int, path: str, told: threading.Condition, seen: dict[str, set[int]]) -> None:
        super().__init__(daemon=True)
        self.port, self.path, self.told, self.seen = port, path, told, seen
        self.requests = self.reconnects = 0
        self.error: BaseException | None = None
        self.stopping = False

    def run(self) -> None:
        try:
            self.pester()
        except BaseException as error:  # reported by the main thread
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
                    send_control(answer)
            told.wait()
    for pest in pests:
        pest.stopping = True
    for pest in pests:
        pest.join()
        if pest.error:
            raise pest.error
    send_control({"answers": sorted(seen), "idle": sum(pest.requests < 3 for pest in pests)})


def main() -> None:
    port, what, path, *more = sys.argv[1:]
    if what == "fetch":
        fetch(int(port), [path, *more])
    elif what == "held":
        held(int(port), path)
    elif what == "post":
        post(int(port), path, int(more[0]))
    else:
        pester(int(port), path, int(more[0]))


if __name__ == "__main__":
    main()
