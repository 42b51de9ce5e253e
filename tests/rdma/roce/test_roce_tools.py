"""The tools work over the software HCA as over any device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loop_dut import addresses
from rping_client import RpingClient
from udp_dut import QUICK

from sidestep.loop import Loop
from sidestep.observe.namespaces import Namespace, ip
from sidestep.rdma.roce.ip_cm import TCP_SERVICE
from sidestep.rdma.roce.udp_link import UdpRoceDevice
from sidestep.rdma.tools.client import Session, connect
from sidestep.rdma.tools.devices import HostPort
from sidestep.rdma.tools.server import ToolServer
from sidestep.rdma.tools.talk import Pinger
from sidestep.rdma.tools.terms import Op, Terms


@pytest.mark.least("ci")
@pytest.mark.skipif(os.getuid() != 0, reason="only root has a network namespace of its own")
@pytest.mark.parametrize("asked", [(), ("--address", "127.0.0.1"), ("--address", "127.0.0.2")], ids=len)
def test_server_and_client_meet_on_one_host(tmp_path: Path, asked: tuple[str, ...]) -> None:
    """In a namespace, because port 4791 of an address belongs to one device."""
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "sidestep", "rdma"]
    pings = [*command, "ping", "--device=roce", "-n", "2", "-i", "0", "--json"]
    namespace = Namespace()
    with namespace.inside():
        ip("addr add 192.0.2.7/24 dev lo")
        argv = [*command, "server", "--device=roce", *asked, "--json"]
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            places = [one["address"] for one in json.loads(server.stdout.readline())["listening"]]
            assert places == list(asked[1:]) or {"127.0.0.1", "192.0.2.7"} <= set(places)
            for place in [one for one in places if ":" not in one]:
                found = subprocess.run([*pings, place], env=env, capture_output=True, text=True, timeout=60, check=True)
                assert json.loads(found.stdout)["received"] == 2
            server.terminate()
    namespace.close()


def test_rping_and_pings() -> None:
    one, two, _ = addresses()
    loop = Loop()
    here, there = UdpRoceDevice(one, loop, QUICK), UdpRoceDevice(two, loop, QUICK)
    log: list[str] = []
    server = ToolServer(there, loop, TCP_SERVICE, log.append)
    assert server.port
    assert there.listening() == [server.port]
    failures: list[str] = []
    client = RpingClient(here, 5000, 3, failures.append)
    client.connect(two, TCP_SERVICE + server.port)
    assert loop.run_until(lambda: client.ended and len(log) == 2, 20.0)
    assert (failures, client.messages) == ([], 3)
    client.close()
    pinger = Pinger(here, Terms(Op.PING, 64), failures.append)
    connect(loop, pinger, HostPort(two, server.port), Session(), 20.0)
    assert [each["mtu"] for each in here.queue_pairs()] == [4096]
    assert pinger.connection is not None
    pinger.connection.disconnect()
    assert loop.run_until(lambda: len(log) == 4, 20.0)
    server.close()
    here.close()
    there.close()
    loop.close()
