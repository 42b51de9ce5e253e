"""`rping` of the guest, on the kernel's rxe, and our pings understand each other, in both roles."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import needed
import pytest
from guest_verbs import WAIT_S, RxeBench
from lab_guest import RXE_BRIDGE, Lab
from rping_client import RpingClient

from sidestep.rdma.roce.ip_cm import TCP_SERVICE
from sidestep.rdma.roce.packet import UDP_PORT, Op
from sidestep.rdma.roce.udp_link import UdpRoceDevice
from sidestep.rdma.tools.server import ToolServer

_PORT = 7174
_OURS = 7175
_ROUNDS = 10
_SIZES = [23, 64, 4096, 65_535]  # what rping takes at most


@pytest.fixture
def rping(lab: Lab) -> Iterator[None]:
    """A server that stays."""
    server = lab.serve("rping-rxe", f"exec rping -s -P -a {lab.rxe_address} -p {_PORT} -S {max(_SIZES)} -v", _PORT)
    yield
    server.kill()


@pytest.mark.usefixtures("rping")
def test_we_ping(rxe_bench: RxeBench, lab: Lab) -> None:
    for size in _SIZES:
        failures: list[str] = []
        client = RpingClient(rxe_bench.device, size, _ROUNDS, failures.append)
        client.connect(lab.rxe_address, TCP_SERVICE + _PORT)
        rxe_bench.until(lambda: client.ended, "ended")  # noqa: B023 - called in this round
        assert (failures, client.messages) == ([], _ROUNDS)
        client.close()


def test_we_ping_over_ipv6(lab: Lab) -> None:
    options = f"-P -a {lab.rxe_address6} -p {_PORT} -S {max(_SIZES)} -v"
    server = lab.serve("rping-rxe6", f"exec rping -s {options}", _PORT)
    with lab.network():
        device = UdpRoceDevice(lab.rxe_host_address6)
        failures: list[str] = []
        client = RpingClient(device, 4096, _ROUNDS, failures.append)
        client.connect(lab.rxe_address6, TCP_SERVICE + _PORT)
        assert device.loop.run_until(lambda: client.ended, WAIT_S)
        assert (failures, client.messages) == ([], _ROUNDS)
        client.close()
        device.close()
    server.kill()


@pytest.mark.usefixtures("rping")
def test_tshark_finds_nothing_wrong(rxe_bench: RxeBench, lab: Lab, tmp_path: Path) -> None:
    needed.programs("tshark")
    failures: list[str] = []
    with lab.capture(tmp_path / "rping.pcap", only=f"udp port {UDP_PORT}", interface=RXE_BRIDGE):
        client = RpingClient(rxe_bench.device, 4096, 2, failures.append)
        client.connect(lab.rxe_address, TCP_SERVICE + _PORT)
        rxe_bench.until(lambda: client.ended, "ended")
        client.close()
    assert failures == []
    fields = ["-T", "fields", "-e", "_ws.col.Info", "-e", "infiniband.bth.opcode"]
    done = subprocess.run(
        ["tshark", "-r", tmp_path / "rping.pcap", "-d", f"udp.port=={UDP_PORT},infiniband", *fields],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "Malformed" not in done.stdout
    seen = {int(code) for line in done.stdout.splitlines() if (code := line.split("\t")[1])}
    assert {Op.UD_SEND_ONLY, Op.SEND_ONLY, Op.ACK, Op.READ_REQUEST, Op.WRITE_FIRST} <= seen


def test_rping_pings(rxe_bench: RxeBench, lab: Lab) -> None:
    """It compares what comes back itself."""
    log: list[str] = []
    server = ToolServer(rxe_bench.device, rxe_bench.device.loop, TCP_SERVICE + _OURS, log.append)
    for size in _SIZES:
        log.clear()
        options = f"-a {lab.rxe_host_address} -p {_OURS} -S {size} -C {_ROUNDS} -V"
        client = lab.background(f"rping-rxe-{size}", f"rping -c {options}; echo result $?")
        rxe_bench.until(lambda: "ended" in "".join(log), "ended")
        assert log == [f"{lab.rxe_address}: rping", f"{lab.rxe_address}: rping has ended, {_ROUNDS} messages"]
        assert "result 0" in client.wait_for("^result")
    server.close()
