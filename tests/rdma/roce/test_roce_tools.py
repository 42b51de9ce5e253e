"""The tools work over the software HCA as over any device."""

from __future__ import annotations

from loop_dut import addresses
from rping_client import RpingClient
from udp_dut import QUICK

from sidestep.loop import Loop
from sidestep.rdma.roce.ip_cm import TCP_SERVICE
from sidestep.rdma.roce.udp_link import UdpRoceDevice
from sidestep.rdma.tools.client import Session, connect
from sidestep.rdma.tools.devices import HostPort
from sidestep.rdma.tools.echo import Pinger
from sidestep.rdma.tools.server import ToolServer
from sidestep.rdma.tools.terms import Op, Terms


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
