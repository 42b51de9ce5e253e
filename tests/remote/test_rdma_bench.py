"""`sidestep rdma bench` between two hosts, by rstream of rdmacm-utils; what its programs say, and what clients may."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import needed
import pytest
from common import PATIENCE_S
from hosts import Host

from sidestep.demo.hosts import Run, Way, Work
from sidestep.errors import Unavailable
from sidestep.testing import free_port

SIDESTEP = [sys.executable, "-m", "sidestep"]
PORT = 7473
RSTREAM = """
name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer
custom    64      1k      100     12m         0.50s      0.19       2.69
"""
SEND_LAT = """
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99%[usec]
 64      1000          1.77           9.98         1.80                1.82             0.12            1.93
"""
SEND_BW = """
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      1000             1050.00            1000.00              0.016000
"""


@contextmanager
def serving(address: str, port: int, *more: str | Path) -> Iterator[subprocess.Popen[str]]:
    argv = [*SIDESTEP, "rdma", "bench", "--serve", "--address", address, "--port", str(port), *more]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == f"listening at {address}:{port}\n"
            yield server
        finally:
            server.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    with serving("127.0.0.1", port) as program:
        yield program, port


def bench(host: Host, server: str, *more: str) -> subprocess.CompletedProcess[str]:
    argv = [*SIDESTEP, "rdma", "bench", server, "--socket", str(host.sidestep.socket), *more]
    with host.namespace.inside():
        return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=100)


def rows(told: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert told.returncode == 0, told.stderr
    return {row["way"]: row for row in json.loads(told.stdout)["rows"]}


@pytest.mark.slow
def test_two_hosts_are_compared(two: tuple[Host, Host]) -> None:
    needed.programs("rstream")
    one, other = two
    with ExitStack() as stack:
        with other.namespace.inside():
            stack.enter_context(serving("0.0.0.0", PORT, "--socket", other.sidestep.socket))
        found = rows(bench(one, other.address, "--rounds=2", "--seconds=0.5", "--json"))
        shown = bench(one, other.address, "--rounds=1", "--seconds=0.1")
    for way in ("tcp", "sidestep"):
        assert not found[way]["problem"]
        assert {work: len(each) for work, each in found[way]["message_us"].items()} == {str(work): 2 for work in Work}
        assert found[way]["round_trip_us"] == pytest.approx(sum(found[way]["message_us"]["latency"]))
    carried = found["sidestep"]["carried"]
    assert carried.keys() == set(Work)
    assert f"sdp over iwarp@{one.address}" in carried.values()  # of a short run the last look may come before it is
    if not Path("/sys/class/infiniband").exists():
        assert found["rsockets"]["problem"] == "the kernel has no RDMA device here"
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(tuple(Way)) and ":" not in line] == list(Way)
    assert any(line.startswith("sidestep, latency: ") for line in lines)


def test_what_stands_against_it_is_told() -> None:
    port = free_port()
    told = subprocess.run(
        [*SIDESTEP, "rdma", "bench", f"127.0.0.1:{port}"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (told.returncode, told.stderr) == (
        1,
        f"sidestep: nobody answers at 127.0.0.1 port {port}: Connection refused\n"
        "hint: start 'sidestep rdma bench --serve' there\n",
    )


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"[]\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"way": "tcp", "work": "latency"}\n',
        b'{"way": "shell", "work": "latency", "iterations": 1}\n',
        b'{"way": "tcp", "work": "latency", "iterations": 0}\n',
        b'{"way": "tcp", "work": "latency", "iterations": 1e99}\n',
        b"[" * 60_000 + b"\n",
        b"",
    ],
)
def test_who_says_something_else_is_sent_away(server: tuple[subprocess.Popen[str], int], said: bytes) -> None:
    program, port = server
    for _ in range(2):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client,
            client.makefile("rb") as stream,
        ):
            assert json.loads(stream.readline())["machine"]
            client.sendall(said)
            client.shutdown(socket.SHUT_WR)
            assert stream.read() == b""
        assert program.stderr is not None
        assert program.stderr.readline() == "127.0.0.1 measures\n"
        assert program.stderr.readline().startswith("127.0.0.1 is ")


@pytest.mark.parametrize(
    ("run", "said", "microseconds"),
    [
        (Run(Way.TCP, Work.MESSAGES, 100), RSTREAM, 2.5),
        (Run(Way.RSOCKETS, Work.MESSAGES, 100), RSTREAM, 2.5),
        (Run(Way.VERBS, Work.LATENCY, 1000), SEND_LAT, 1.8),
        (Run(Way.VERBS, Work.MESSAGES, 1), SEND_BW.replace("65536", "64"), 62.5),
        (Run(Way.VERBS, Work.BANDWIDTH, 1), SEND_BW, 62.5),
    ],
)
def test_what_programs_say(run: Run, said: str, microseconds: float) -> None:
    assert run.microseconds(said) == pytest.approx(microseconds)


@pytest.mark.parametrize("said", ["", "custom", "rconnect: Connection refused", SEND_LAT.replace("1.80", "one")])
@pytest.mark.parametrize("way", list(Way))
def test_what_says_nothing(way: Way, said: str) -> None:
    with pytest.raises(Unavailable, match="told no figures"):
        Run(way, Work.LATENCY, 1).microseconds(said)
