"""What the software RNIC does, beside plain TCP on the same path: `python bench/iwarp.py` (as root, for namespaces).

Two processes in two network namespaces joined by veth, with an MTU of 1500 and of 9000 bytes, and two processes on the
loopback interface. Plain TCP is measured by the same method: Python, one connection, `sendall` and `recv_into` of whole
messages, ended by an answer that everything has arrived. Device and TCP take turns, round after round; printed are the
medians of the figures and of their ratios to TCP's, and the spread of the rounds.

With `--siw` the paths are those of the lab (tests/interop/README.md), a guest under qemu with Linux's own iWARP driver,
and siw takes part in the turns: between this machine and the guest, and within the guest. Without a lab it says why.

    --seconds S   of one measurement (1)
    --rounds N    of all measurements (5)
    --paths ...   of "lo", "1500", "9000"
    --siw         the paths of the lab instead
    --save FILE   the figures as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rnic import tcp
from rnic.device import DeviceClient, DeviceServer
from rnic.method import DEVICE_PORT, SIW_PORT, Client, NoConnection
from rnic.tcp import TCP_PORT

from sidestep.demo.machine import Machine

MUST, AIM = 0.5, 0.8  # of plain TCP's bandwidth: Writes of 1 MiB with CRC
GOAL: Final = "Write 1 MiB, CRC"
TCP: Final = "TCP"
CONNECT_TRIES: Final = 100
CONNECT_PAUSE_S: Final = 0.1  # a server on siw begins anew for each client


# ---- the two ends ----


def _siw_client(local: str, remote: str, crc: bool) -> Client:
    from rnic.siw import SiwClient  # needs pyverbs, which only the guest has

    return SiwClient(remote, SIW_PORT, crc=crc)


CLIENTS: Final[dict[str, Callable[[str, str, bool], Client]]] = {
    "device": lambda local, remote, crc: DeviceClient(local, remote, DEVICE_PORT, crc=crc),
    "to siw": lambda local, remote, crc: DeviceClient(local, remote, SIW_PORT, crc=crc),
    "siw": _siw_client,
}
ON_PATH: Final = {"host-guest": ("device", "to siw"), "guest": ("device", "siw")}  # elsewhere only our device


def client(kind: str, local: str, remote: str, *, crc: bool) -> Client:
    """A connection, once the server is there."""
    for _ in range(CONNECT_TRIES):
        try:
            return CLIENTS[kind](local, remote, crc)
        except NoConnection as error:
            why = error
            time.sleep(CONNECT_PAUSE_S)
    raise SystemExit(f"{kind}: {why}")


def serve(kind: str, address: str) -> None:
    """A server, until it is killed."""
    if kind == "device":
        DeviceServer(address).run()
    elif kind == "siw":
        from rnic import siw

        siw.serve(address)
    else:
        tcp.serve(address)


# ---- what is measured ----


@dataclass(frozen=True)
class Task:
    """One row."""

    name: str
    unit: str
    rdma: Callable[[Client, float], float]
    tcp: Callable[[str, str, float], float]
    crc: bool


def _bandwidth(op: str, size: int, *, crc: bool) -> Task:
    write = op == "Write"
    label = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
    return Task(
        f"{op} {label}{', CRC' if crc else ''}", "MB/s",
        lambda client, seconds: client.bandwidth(size, seconds, write=write) / 1e6,
        lambda local, remote, seconds: tcp.bandwidth(local, remote, size, seconds, write=write) / 1e6,
        crc,
    )  # fmt: skip


def _tasks(crc: bool) -> list[Task]:
    rows = [_bandwidth(op, size, crc=crc) for op in ("Write", "Read") for size in (64 << 10, 1 << 20)]
    suffix = ", CRC" if crc else ""
    rows.append(
        Task(
            f"Send 64 B round trip{suffix}", "us",
            lambda client, seconds: statistics.median(client.latency(seconds)) * 1e6,
            lambda local, remote, seconds: statistics.median(tcp.latency(local, remote, seconds)) * 1e6,
            crc,
        )
    )  # fmt: skip
    rows.append(Task(f"Send 64 B{suffix}", "1/s", lambda client, seconds: client.rate(seconds), tcp.rate, crc))
    return rows


TASKS = [*_tasks(True), *_tasks(False)]


@dataclass
class Row:
    """What came of a task on a path, for each that took part: a figure of each round."""

    path: str
    name: str
    unit: str
    figures: dict[str, list[float]]

    def median(self, who: str) -> float:
        return statistics.median(self.figures[who])

    def ratio(self, who: str) -> float:
        """To plain TCP: the median of what the rounds say, for what a neighbour takes is taken from both of a round."""
        return statistics.median(mine / plain for mine, plain in zip(self.figures[who], self.figures[TCP], strict=True))

    @property
    def verdict(self) -> str:
        """On the goal, which is for the paths of one machine."""
        if self.name != GOAL or self.path in ON_PATH:
            return ""
        ratio = self.ratio("device")
        return f"  must {MUST}: {'met' if ratio >= MUST else 'MISSED'}; aim {AIM}{': reached' if ratio >= AIM else ''}"


def measure(path: str, local: str, remote: str, rounds: int, seconds: float) -> list[Row]:
    """All tasks, devices and TCP in turns."""
    kinds = ON_PATH.get(path, ("device",))
    rows = [Row(path, task.name, task.unit, {who: [] for who in (*kinds, TCP)}) for task in TASKS]
    for _ in range(rounds):
        for crc in (True, False):
            with ExitStack() as stack:
                clients = {kind: stack.enter_context(closing(client(kind, local, remote, crc=crc))) for kind in kinds}
                for task, row in zip(TASKS, rows, strict=True):
                    if task.crc != crc:
                        continue
                    for kind, each in clients.items():
                        row.figures[kind].append(task.rdma(each, seconds))
                    row.figures[TCP].append(task.tcp(local, remote, seconds))
    return rows


# ---- paths ----


@contextmanager
def servers(remote: str, namespace: str | None) -> Iterator[None]:
    """Both servers, each a process."""
    enter = ["ip", "netns", "exec", namespace] if namespace else []
    running = [
        subprocess.Popen([*enter, sys.executable, __file__, "--serve", kind, remote], stdout=subprocess.PIPE)
        for kind in ("device", "tcp")
    ]
    try:
        for port in (DEVICE_PORT, TCP_PORT):
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
        command = [sys.executable, __file__, *_measurement(path, "10.99.0.1", "10.99.0.2", rounds, seconds)]
        found = subprocess.run(
            ["ip", "netns", "exec", here, *command], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        return _rows(json.loads(found))


def _measurement(path: str, local: str, remote: str, rounds: int, seconds: float) -> list[str]:
    """The arguments with which this program measures in another place, and prints what `_rows` reads."""
    return ["--measure", path, local, remote, "--rounds", str(rounds), "--seconds", str(seconds)]


def _rows(found: dict[str, Any]) -> list[Row]:
    return [Row(**row) for row in found["rows"]]


def run_lab(rounds: int, seconds: float) -> tuple[list[Row], str]:
    """Both paths of the lab, round after round, and what the guest is."""
    from rnic.lab import Guest

    rows: dict[tuple[str, str], Row] = {}
    about = ""
    with Guest.started() as guest:
        for _ in range(rounds):
            here = guest.on_host(_measurement("host-guest", guest.host_address, guest.address, 1, seconds))
            there = guest.inside(_measurement("guest", guest.address, guest.address, 1, seconds))
            about = f"{there['machine']}; siw: {guest.parameters()}"
            for row in (*_rows(here), *_rows(there)):
                first = rows.setdefault((row.path, row.name), row)
                if first is not row:
                    for who, figures in row.figures.items():
                        first.figures[who] += figures
    return sorted(rows.values(), key=lambda row: row.path != "host-guest"), about


UNEQUAL: Final = """
Not on equal terms:
- The guest's CPUs are what is said above; "TCG" means that qemu emulates them, instruction by instruction. Its figures
  compare only with each other, on a line, and say nothing of siw on a machine of its own.
- siw is in the guest's kernel and called by way of pyverbs; our device is Python and C in the process that uses it.
- host-guest: "device" has our device at both ends, "to siw" has siw in the guest. There is no siw on this machine, so
  siw to siw is measured only within the guest.
- siw as initiator uses a CRC only while its module parameter mpa_crc_required is set; it is set for just that. As
  responder it goes by the Request. Its other parameters are those of the lab.
"""


def show(rows: list[Row]) -> None:
    """A table for each path; behind the figure of a device its ratio to TCP's."""
    for path in dict.fromkeys(row.path for row in rows):
        chosen = [row for row in rows if row.path == path]
        devices = [who for who in chosen[0].figures if who != TCP]
        heads = "".join(f"{who:>12}{'ratio':>7}" for who in devices)
        print(f"\n{path:28}{heads}{TCP:>12} unit   spread of {', '.join(chosen[0].figures)}")
        for row in chosen:
            figures = "".join(f"{row.median(who):12.1f}{row.ratio(who):7.2f}" for who in devices)
            spreads = ", ".join(f"{min(each):.0f}..{max(each):.0f}" for each in row.figures.values())
            print(f"{row.name:28}{figures}{row.median(TCP):12.1f} {row.unit:6} {spreads}{row.verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paths", nargs="+", default=["lo", "1500", "9000"])
    parser.add_argument("--siw", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    if options.measure:
        path, local, remote = options.measure
        rows = measure(path, local, remote, options.rounds, options.seconds)
        json.dump({"machine": str(Machine.now()), "rows": [asdict(row) for row in rows]}, sys.stdout)
        return
    print(Machine.now())
    about: dict[str, Any] = {"machine": Machine.now().as_json()}
    if options.siw:
        from rnic.lab import Unusable  # needs what the tests have

        try:
            rows, guest = run_lab(options.rounds, options.seconds)
        except Unusable as why:
            print(f"siw is not measured: {why}", file=sys.stderr)
            return
        print(f"guest: {guest}")
        about["guest"] = guest
    else:
        rows = [row for path in options.paths for row in run_path(path, options.rounds, options.seconds)]
    show(rows)
    if options.siw:
        print(UNEQUAL)
    if options.save:
        options.save.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
