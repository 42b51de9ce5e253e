"""What the software RNIC does, beside plain TCP on the same path: `python bench/iwarp.py` (as root, for namespaces).

Two processes in two network namespaces joined by veth, with an MTU of 1500 and of 9000 bytes, and two processes on the
loopback interface. Plain TCP is measured by the same method: Python, one connection, `sendall` and `recv_into` of whole
messages, ended by an answer that everything has arrived. Device and TCP take turns, round after round; printed are the
medians, their ratio and the spread of the rounds.

    --seconds S   of one measurement (1)
    --rounds N    of all measurements (5)
    --paths ...   of "lo", "1500", "9000"
    --save FILE   the figures as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from harness.machine import Machine

from sidestep.rdma.cm import Connection, ConnectionEvent, ConnectionRequest, Disconnected, Established
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.rdma.iwarp.settings import Settings
from sidestep.rdma.iwarp.start_terms import Settings as StartupSettings
from sidestep.rdma.verbs import QpCapabilities
from sidestep.rdma.work import Access, Completion, Opcode, RdmaRead, RdmaWrite, Receive, RKey, Send

RDMA_PORT, TCP_PORT = 7471, 7472
REGION: Final = 1 << 20  # bytes
SMALL: Final = 64  # bytes of a Send
WINDOW: Final = 256  # Sends under way
QUEUES: Final = QpCapabilities(max_send_wr=4 * WINDOW, max_recv_wr=WINDOW)
DEPTH: Final = 8  # Writes or Reads under way
MUST, AIM = 0.5, 0.8  # of plain TCP's bandwidth: Writes of 1 MiB with CRC
_ASK = struct.Struct("!cQ")  # of plain TCP: what, and the bytes of a message
_TARGET = struct.Struct("!QI")  # private data of the reply: address and key


# ---- the end that serves ----


class RdmaServer:
    """Offers a region, answers `P`, and counts `R`, of which each WINDOW / 2 are acknowledged."""

    def __init__(self, address: str) -> None:
        self.device = IwarpDevice(address, settings=Settings(startup=StartupSettings(peer_to_peer=True, crc=False)))
        self.device.cm.listen(RDMA_PORT, self._asked)

    def _asked(self, request: ConnectionRequest) -> None:
        device = self.device
        domain = device.alloc_pd()
        everything = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
        region = domain.register(bytearray(REGION), everything)
        rooms = domain.register(bytearray(SMALL * WINDOW), Access.LOCAL_WRITE)
        counted = 0

        def arrived(batch: list[Completion]) -> None:
            nonlocal counted
            for each in batch:
                if not each.ok or each.opcode is not Opcode.RECEIVE:
                    continue
                room = rooms.view[each.wr_id * SMALL : (each.wr_id + 1) * SMALL]
                if room[0] == ord("P"):
                    qp.post_send(Send(each.wr_id, (bytes(room),), signaled=True))
                else:
                    counted += 1
                    if counted % (WINDOW // 2) == 0:
                        qp.post_send(Send(each.wr_id, (b"A",)))
                qp.post_recv(Receive(each.wr_id, (room,)))

        queue = device.create_cq(4 * WINDOW, arrived)
        qp = domain.create_qp(queue, queue, QUEUES)
        for index in range(WINDOW):
            qp.post_recv(Receive(index, (rooms.view[index * SMALL : (index + 1) * SMALL],)))

        def told(connection: Connection, event: ConnectionEvent) -> None:
            if isinstance(event, Disconnected):
                qp.destroy()
                region.deregister()
                rooms.deregister()

        request.accept(qp, _TARGET.pack(region.va, region.rkey), told)

    def run(self) -> None:
        while True:
            self.device.loop.turn()


def serve_tcp(address: str) -> None:
    """Takes messages, answers them, or sends them, as each connection asks."""
    with socket.create_server((address, TCP_PORT)) as listener:
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                what, size = _ASK.unpack(_exactly(sock, bytearray(_ASK.size)))
                room = bytearray(size)
                try:
                    while True:
                        if what == b"r":
                            sock.sendall(room)
                            continue
                        _exactly(sock, room)
                        if what == b"p" or room[0] == ord("E"):
                            sock.sendall(room[:SMALL])
                except OSError:
                    continue


def _exactly(sock: socket.socket, room: bytearray) -> bytearray:
    view = memoryview(room)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionResetError("the other end has closed")
        view = view[count:]
    return room


# ---- the end that measures ----


class RdmaClient:
    """One connection to an `RdmaServer`."""

    def __init__(self, local: str, remote: str, *, crc: bool) -> None:
        self.device = IwarpDevice(local, settings=Settings(startup=StartupSettings(peer_to_peer=True, crc=crc)))
        self.domain = self.device.alloc_pd()
        self.queue = self.device.create_cq(4 * WINDOW)
        self.qp = self.domain.create_qp(self.queue, self.queue, QUEUES)
        self.region = self.domain.register(bytearray(REGION), Access.LOCAL_WRITE)
        self.rooms = self.domain.register(bytearray(SMALL * WINDOW), Access.LOCAL_WRITE)
        for index in range(WINDOW):
            self._room(index)
        events: list[ConnectionEvent] = []
        self.connection = self.device.cm.connect(remote, RDMA_PORT, self.qp, b"", lambda _, event: events.append(event))
        self.device.loop.run_until(lambda: bool(events), 20)
        if not isinstance(events[0], Established):
            raise SystemExit(f"no connection to {remote}: {events}")
        va, key = _TARGET.unpack(events[0].private_data)
        self.va, self.key = va, RKey(key)

    def _room(self, index: int) -> None:
        self.qp.post_recv(Receive(index, (self.rooms.view[index * SMALL : (index + 1) * SMALL],)))

    def _completions(self) -> list[Completion]:
        while not (found := self.queue.poll(4 * WINDOW)):
            self.device.loop.turn()
        for each in found:
            if not each.ok:
                raise SystemExit(f"{each.opcode.name} failed: {each.status.name}")
            if each.opcode is Opcode.RECEIVE:
                self._room(each.wr_id)
        return found

    def bandwidth(self, size: int, seconds: float, *, write: bool) -> float:
        """Bytes per second."""
        view = self.region.view[:size]
        posted = done = 0
        began = time.perf_counter()
        until = began + seconds
        while time.perf_counter() < until:
            while posted - done < DEPTH:
                if write:
                    self.qp.post_send(RdmaWrite(posted, (view,), self.va, self.key))
                else:
                    self.qp.post_send(RdmaRead(posted, (view,), self.va, self.key))
                posted += 1
            done += len(self._completions())
        while done < posted:
            done += len(self._completions())
        if write:  # all has arrived when a Read behind it is answered
            self.qp.post_send(RdmaRead(0, (self.region.view[:1],), self.va, self.key))
            self._completions()
        return posted * size / (time.perf_counter() - began)

    def latency(self, seconds: float) -> list[float]:
        """Seconds of each round trip of a small Send."""
        message = b"P" * SMALL
        times = []
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            self.qp.post_send(Send(0, (message,)))
            left = 2
            while left:
                left -= len(self._completions())
            times.append(time.perf_counter() - began)
        return times

    def rate(self, seconds: float) -> float:
        """Small Sends per second."""
        message = b"R" * SMALL
        sent = acknowledged = outstanding = 0
        began = time.perf_counter()
        until = began + seconds
        while time.perf_counter() < until or acknowledged < sent // (WINDOW // 2) * (WINDOW // 2):
            while sent - acknowledged < WINDOW and outstanding < 100 and time.perf_counter() < until:
                self.qp.post_send(Send(1, (message,), signaled=sent % 16 == 0))
                outstanding += sent % 16 == 0
                sent += 1
            for each in self._completions():
                if each.opcode is Opcode.RECEIVE:
                    acknowledged += WINDOW // 2
                else:
                    outstanding -= 1
        return acknowledged / (time.perf_counter() - began)

    def close(self) -> None:
        self.connection.disconnect()
        self.device.loop.run_until(lambda: not self.device.cm.connections, 5)
        self.device.close()


def tcp_bandwidth(local: str, remote: str, size: int, seconds: float, *, write: bool) -> float:
    """Bytes per second."""
    with _tcp(local, remote, b"w" if write else b"r", size) as sock:
        room = bytearray(size)
        count = 0
        began = time.perf_counter()
        until = began + seconds
        while time.perf_counter() < until:
            if write:
                sock.sendall(room)
            else:
                _exactly(sock, room)
            count += 1
        if write:
            room[0] = ord("E")
            sock.sendall(room)
            count += 1
            _exactly(sock, bytearray(min(size, SMALL)))
        return count * size / (time.perf_counter() - began)


def tcp_latency(local: str, remote: str, seconds: float) -> list[float]:
    """Seconds of each round trip."""
    with _tcp(local, remote, b"p", SMALL) as sock:
        message, room = b"P" * SMALL, bytearray(SMALL)
        times = []
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            sock.sendall(message)
            _exactly(sock, room)
            times.append(time.perf_counter() - began)
        return times


def tcp_rate(local: str, remote: str, seconds: float) -> float:
    """Messages per second, one call each."""
    return tcp_bandwidth(local, remote, SMALL, seconds, write=True) / SMALL


def _tcp(local: str, remote: str, what: bytes, size: int) -> socket.socket:
    sock = socket.create_connection((remote, TCP_PORT), 20, (local, 0))
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(_ASK.pack(what, size))
    return sock


# ---- what is measured ----


@dataclass(frozen=True)
class Task:
    """One row."""

    name: str
    unit: str
    rdma: Callable[[RdmaClient, float], float]
    tcp: Callable[[str, str, float], float]
    crc: bool
    less_is_better: bool = False
    goal: bool = False


def _bandwidth(op: str, size: int, *, crc: bool) -> Task:
    write = op == "Write"
    label = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
    return Task(
        f"{op} {label}{', CRC' if crc else ''}", "MB/s",
        lambda client, seconds: client.bandwidth(size, seconds, write=write) / 1e6,
        lambda local, remote, seconds: tcp_bandwidth(local, remote, size, seconds, write=write) / 1e6,
        crc, goal=crc and write and size == 1 << 20,
    )  # fmt: skip


def _tasks(crc: bool) -> list[Task]:
    rows = [_bandwidth(op, size, crc=crc) for op in ("Write", "Read") for size in (64 << 10, 1 << 20)]
    suffix = ", CRC" if crc else ""
    rows.append(
        Task(
            f"Send 64 B round trip{suffix}", "us",
            lambda client, seconds: statistics.median(client.latency(seconds)) * 1e6,
            lambda local, remote, seconds: statistics.median(tcp_latency(local, remote, seconds)) * 1e6,
            crc, less_is_better=True,
        )
    )  # fmt: skip
    rows.append(Task(f"Send 64 B{suffix}", "1/s", lambda client, seconds: client.rate(seconds), tcp_rate, crc))
    return rows


TASKS = [*_tasks(True), *_tasks(False)]


@dataclass
class Row:
    """What came of a task on a path."""

    path: str
    name: str
    unit: str
    rdma: list[float]
    tcp: list[float]
    goal: bool

    @property
    def ratio(self) -> float:
        return statistics.median(self.rdma) / statistics.median(self.tcp)


def measure(path: str, local: str, remote: str, rounds: int, seconds: float) -> list[Row]:
    """All tasks, device and TCP in turns."""
    rows = [Row(path, task.name, task.unit, [], [], task.goal) for task in TASKS]
    for _ in range(rounds):
        for crc in (True, False):
            client = RdmaClient(local, remote, crc=crc)
            for task, row in zip(TASKS, rows, strict=True):
                if task.crc == crc:
                    row.rdma.append(task.rdma(client, seconds))
                    row.tcp.append(task.tcp(local, remote, seconds))
            client.close()
    return rows


# ---- paths ----


@contextmanager
def servers(remote: str, namespace: str | None) -> Iterator[None]:
    """Both servers, each a process."""
    enter = ["ip", "netns", "exec", namespace] if namespace else []
    running = [
        subprocess.Popen([*enter, sys.executable, __file__, "--serve", kind, remote], stdout=subprocess.PIPE)
        for kind in ("rdma", "tcp")
    ]
    try:
        for port in (RDMA_PORT, TCP_PORT):
            _await(remote, port, enter)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _await(remote: str, port: int, enter: list[str]) -> None:
    """Until somebody listens there."""
    for _ in range(200):
        command = [*enter, "ss", "-Htln", f"src {remote}:{port}"]
        if subprocess.run(command, check=True, capture_output=True).stdout:
            return
        time.sleep(0.05)  # a process is starting
    raise SystemExit(f"nobody listens on {remote} port {port}")


@contextmanager
def veth(mtu: int) -> Iterator[tuple[str, str]]:
    """Two namespaces and what joins them; their names."""
    names = f"sbench-a{os.getpid()}", f"sbench-b{os.getpid()}"
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        peer = ["peer", "name", "eth0", "netns", names[1]]
        subprocess.run(["ip", "link", "add", "eth0", "netns", names[0], "type", "veth", *peer], check=True)
        for number, name in enumerate(names, 1):
            for command in (f"addr add 10.99.0.{number}/24 dev eth0", f"link set eth0 mtu {mtu} up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *command.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def run_path(path: str, rounds: int, seconds: float) -> list[Row]:
    """Measures one path; those between namespaces in a process of their own."""
    if path == "lo":
        with servers("127.0.0.2", None):
            return measure(path, "127.0.0.1", "127.0.0.2", rounds, seconds)
    with veth(int(path)) as (here, there), servers("10.99.0.2", there):
        command = [sys.executable, __file__, "--measure", path, "--rounds", str(rounds), "--seconds", str(seconds)]
        found = subprocess.run(
            ["ip", "netns", "exec", here, *command], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        return [Row(**row) for row in json.loads(found)]


def show(rows: list[Row]) -> None:
    """The table."""
    print(f"{'path':6}{'what':28}{'device':>12}{'TCP':>12} {'unit':6}{'ratio':>6}   spread of device, TCP")
    for row in rows:
        spreads = ", ".join(f"{min(each):.0f}..{max(each):.0f}" for each in (row.rdma, row.tcp))
        rdma, tcp = statistics.median(row.rdma), statistics.median(row.tcp)
        verdict = ""
        if row.goal:
            verdict = f"  must {MUST}: {'met' if row.ratio >= MUST else 'MISSED'}; aim {AIM}" + (
                ": reached" if row.ratio >= AIM else ""
            )
        print(f"{row.path:6}{row.name:28}{rdma:12.1f}{tcp:12.1f} {row.unit:6}{row.ratio:6.2f}   {spreads}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paths", nargs="+", default=["lo", "1500", "9000"])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        kind, address = options.serve
        if kind == "rdma":
            RdmaServer(address).run()
        else:
            serve_tcp(address)
        return
    if options.measure:
        rows = measure(options.measure, "10.99.0.1", "10.99.0.2", options.rounds, options.seconds)
        json.dump([asdict(row) for row in rows], sys.stdout)
        return
    print(Machine.now())
    rows = [row for path in options.paths for row in run_path(path, options.rounds, options.seconds)]
    show(rows)
    if options.save:
        figures = {"machine": Machine.now().as_json(), "rows": [asdict(row) for row in rows]}
        options.save.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
