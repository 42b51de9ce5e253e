"""docs/internals/devices.md says what is so: its samples run, its names exist."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from loopback_dut import LoopbackUnderTest

from sidestep import limits
from sidestep.counters import NAMES
from sidestep.rdma import cm, conformance, datagrams, grh, loopback, verbs, work
from sidestep.rdma.conformance import DeviceUnderTest
from sidestep.rdma.iwarp import counting as iwarp_counting
from sidestep.rdma.loopback import NO_DELAY, Fabric
from sidestep.rdma.roce import counting as roce_counting
from sidestep.rdma.roce.wire import Wire
from sidestep.rdma.soft import device as soft_device
from sidestep.rdma.soft import memory as soft_memory
from sidestep.rdma.soft import qp as soft_qp
from sidestep.rdma.soft import queues as soft_queues
from sidestep.rdma.work import Send, Status
from sidestep.remote import control_pool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/internals/devices.md").read_text(encoding="utf-8")
SAMPLES = [re.sub(r"(?m)^   ", "", text) for text in re.findall(r"```python\n(.*?)```", PAGE, re.S)]


def test_the_first_sample_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(SAMPLES[0], "devices.md", "exec"), {})
    assert "SUCCESS" in capsys.readouterr().out


def test_the_datagram_service_runs_as_shown() -> None:
    wire = Wire(Random(1))
    own, other = wire.device("10.0.0.1"), wire.device("10.0.0.2")
    known = {"DatagramService": datagrams.DatagramService, "loop": wire}
    got: list[datagrams.Message] = []
    receiver = datagrams.DatagramService(other, 0x1234567, got.append, lambda: wire.now)
    exec(compile(SAMPLES[1], "devices.md", "exec"), known | {"device": own, "number_of_the_other": receiver.number})
    wire.run()
    assert [bytes(each.data) for each in got] == [b"a message of any length"]


def test_the_suite_runs_as_shown() -> None:
    def make_devices() -> DeviceUnderTest:
        return LoopbackUnderTest(Fabric(Random(1), timing=NO_DELAY))

    exec(compile(SAMPLES[2], "devices.md", "exec"), {"make_devices": make_devices})
    assert len(SAMPLES) == 3


def test_the_files_exist() -> None:
    named = re.findall(r"`((?:src|tests)/[\w/.]+)`", PAGE)
    assert len(named) >= 7
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_names_exist() -> None:
    names = set(re.findall(r"`([a-zA-Z_]+)(?:=\w+)?`", PAGE))
    places = (
        verbs,
        cm,
        soft_device,
        Fabric(Random(1)).device("a"),  # with what it has only as an object
        cm.ConnectionManager,
        cm.ConnectionRequest,
        soft_memory,
        soft_memory.Domain,
        soft_qp,
        soft_qp.SoftQueuePair,
        soft_queues,
        verbs.DeviceAttributes,
        verbs.MemoryRegion,
        verbs.SharedReceiveQueue,
        work,
        cm.Connection,
        conformance,
        datagrams,
        grh,
        loopback,
        Fabric,
        Send,
        control_pool,
        limits,
    )
    known = {name for place in places for name in dir(place)} | set(Status.__members__) | set(NAMES)
    of_the_kernel = {"rdma_rxe", "UDP_SEGMENT", "UDP_GRO", "peer_to_peer", "IBV_ACCESS_REMOTE_READ"}
    of_the_kernel |= {"cm_close_handler"}
    assert names - known == {"memoryview", "bytes", "loopback"} | of_the_kernel
    assert "observer" in inspect.signature(Fabric).parameters


def test_who_writes_a_device_is_told_every_class() -> None:
    classes = [one for place in (verbs, cm) for one in vars(place).values() if inspect.isabstract(one)]
    ours = {one.__name__ for one in classes if one.__module__.startswith("sidestep")}
    assert len(ours) == 12
    assert {name for name in ours if f"`{name}`" not in PAGE} == set()


@pytest.fixture(scope="module")
def rdma_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the reference, as it is made from the code."""
    place = tmp_path_factory.mktemp("reference")
    subprocess.run([sys.executable, ROOT / "docs/reference/make.py", place], check=True)
    return (place / "rdma.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("record", [verbs.DeviceAttributes, verbs.QpCapabilities, loopback.Timing, loopback.Faults])
def test_the_reference_names_every_field(record: Any, rdma_page: str) -> None:
    assert [one.name for one in dataclasses.fields(record) if f"| `{one.name}` |" not in rdma_page] == []


@pytest.mark.parametrize("names", [iwarp_counting.NAMES, roce_counting.EVENTS], ids=["iwarp", "roce"])
def test_the_reference_explains_every_counter(names: dict[str, str], rdma_page: str) -> None:
    assert set(names.items()) <= set(re.findall(r"(?m)^\| `(\w+)` \| (.*) \|$", rdma_page))
