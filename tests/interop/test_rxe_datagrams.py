"""Unreliable datagrams of our software HCA and the kernel's rxe, by pyverbs there; and the datagram service on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from dissector import numbers, shown
from guest_verbs import WAIT_S, End, GuestVerbs, RxeBench, pattern
from lab_guest import RXE_BRIDGE

from sidestep.rdma import grh
from sidestep.rdma.datagrams import DatagramService, Message
from sidestep.rdma.roce.packet import UDP_PORT
from sidestep.rdma.verbs import QueuePair
from sidestep.rdma.work import GRH_LEN, Completion, Receive, Status, UdSend

QKEY = 0x1357_9BDF
SIZES = [0, 1, 3, 256, 1024]


class Datagrams(End):
    """A queue pair for them, of ours."""

    @classmethod
    def on(cls, bench: RxeBench) -> Datagrams:
        done: list[Completion] = []
        domain, queue = bench.device.alloc_pd(), bench.device.create_cq(256, done.extend)
        qp: QueuePair = domain.create_ud_qp(queue, queue, QKEY)
        return cls(bench.device, domain, qp, done)

    def post(self, number: int, length: int) -> memoryview:
        room = self.memory(GRH_LEN + length).view
        self.qp.post_recv(Receive(number, (room,)))
        return room

    def say(
        self, bench: RxeBench, number: int, content: bytes, immediate: bytes | None = None, qkey: int = QKEY
    ) -> None:
        ah = self.domain.create_ah(bench.guest_address)
        gather = (self.memory(content).view,) if content else ()
        self.qp.post_send(
            UdSend(wr_id=0, gather=gather, ah=ah, remote_qpn=number, remote_qkey=qkey, immediate=immediate)
        )
        assert self.sent(1) == [Status.SUCCESS]


def pair(bench: RxeBench) -> tuple[Datagrams, GuestVerbs, int]:
    """Ours, the guest's, and the number of that."""
    guest = bench.guest()
    return Datagrams.on(bench), guest, guest.call("datagrams", qkey=QKEY)["number"]


@pytest.mark.spec("IBTA 9.8.3")
@pytest.mark.parametrize("immediate", [None, b"\xde\xad\xbe\xef"])
def test_to_rxe(rxe_bench: RxeBench, immediate: bytes | None) -> None:
    ours, guest, number = pair(rxe_bench)
    for seed, size in enumerate(SIZES):
        guest.call("datagram_rooms", length=size)
        ours.say(rxe_bench, number, pattern(seed, size), immediate)
        (got,) = guest.call("datagrams_received")["datagrams"]
        assert (got["status"], got["length"], got["source"]) == ("SUCCESS", GRH_LEN + size, ours.qp.number)
        assert got["immediate"] == (None if immediate is None else immediate.hex())
        whole = bytes.fromhex(got["bytes"])
        assert whole[GRH_LEN:] == pattern(seed, size)
        assert grh.source_of(whole) == rxe_bench.device.address, "what rxe writes in front is read as ours is"


@pytest.mark.spec("IBTA 9.8.3")
@pytest.mark.parametrize("immediate", [None, b"\xde\xad\xbe\xef"])
def test_from_rxe(rxe_bench: RxeBench, immediate: bytes | None) -> None:
    ours, guest, number = pair(rxe_bench)
    for seed, size in enumerate(SIZES):
        room = ours.post(seed, size)
        told = guest.call(
            "datagram", address=rxe_bench.device.address, number=ours.qp.number, qkey=QKEY, seed=seed, length=size,
            immediate=None if immediate is None else immediate.hex(),
        )  # fmt: skip
        assert told == {"status": "SUCCESS"}
        (got,) = ours.received(1)
        assert (got.status, got.wr_id, got.byte_len) == (Status.SUCCESS, seed, GRH_LEN + size)
        assert (got.source_qpn, got.immediate) == (number, immediate)
        assert room[GRH_LEN:] == pattern(seed, size)
        assert grh.source_of(room) == rxe_bench.guest_address


@pytest.mark.spec("IBTA 10.2.5")
def test_a_wrong_key_is_dropped_at_both_ends(rxe_bench: RxeBench) -> None:
    ours, guest, number = pair(rxe_bench)
    address = rxe_bench.device.address
    guest.call("datagram_rooms", length=8, count=2)
    ours.say(rxe_bench, number, b"forged", qkey=QKEY + 1)
    ours.say(rxe_bench, number, b"good")
    (got,) = guest.call("datagrams_received", count=2, wait_s=2.0)["datagrams"]
    assert bytes.fromhex(got["bytes"])[GRH_LEN:] == b"good"
    ours.post(1, 8)
    for seed, qkey in enumerate((QKEY ^ 2, QKEY)):
        guest.call("datagram", address=address, number=ours.qp.number, qkey=qkey, seed=seed, length=8)
    (completion,) = ours.received(1)
    assert completion.status is Status.SUCCESS
    assert rxe_bench.device.counters()["packet_dropped{qkey}"] == 1


def test_many_at_a_time_and_wireshark_knows_them(rxe_bench: RxeBench, tmp_path: Path) -> None:
    ours, guest, number = pair(rxe_bench)
    file, count, size = tmp_path / "datagrams.pcap", 32, 200
    for at in range(count):
        ours.post(at, size)
    guest.call("datagram_rooms", length=size, count=count)
    address = rxe_bench.device.address
    with rxe_bench.lab.capture(file, only=f"udp port {UDP_PORT}", interface=RXE_BRIDGE):
        for seed in range(count):
            ours.say(rxe_bench, number, pattern(seed, size))
            guest.call("datagram", address=address, number=ours.qp.number, qkey=QKEY, seed=seed, length=size)
        assert len(guest.call("datagrams_received", count=count)["datagrams"]) == count
        assert len(ours.received(count)) == count
    capture = file.read_bytes()
    rows = numbers(shown(capture, tmp_path, ["infiniband.deth.srcqp", "infiniband.deth.q_key"], "infiniband.deth"))
    assert sorted(rows) == sorted([(ours.qp.number, QKEY), (number, QKEY)] * count)
    assert shown(capture, tmp_path, ["frame.number"], "_ws.malformed") == []


@pytest.fixture
def echo(rxe_bench: RxeBench) -> Iterator[int]:
    """The datagram service on the kernel's device, which returns what ours sends it: the number of its queue pair."""
    lab = rxe_bench.lab
    command = lab.python_in_guest("datagram_echo.py", rxe_bench.guest_address, str(QKEY))
    running = lab.background("datagram_echo", "exec " + " ".join(command))
    yield int(running.wait_for("^number").split()[-1])
    running.kill()


@pytest.mark.usefixtures("link")
def test_messages_over_rxe(rxe_bench: RxeBench, echo: int) -> None:
    """Some get there and back, whatever happens on the way, each once and as it was."""
    loop = rxe_bench.device.loop
    got: list[Message] = []
    service = DatagramService(rxe_bench.device, QKEY, got.append, lambda: loop.now)
    sent: list[bytes] = []
    for size in (0, 1, 1008, 1009, 8000, 40_000):
        until, count = loop.now + WAIT_S, len(got)
        while len(got) == count:
            assert loop.now < until, f"no message of {size} bytes came back: {service.counters()}"
            sent.append(Random(len(sent)).randbytes(size))
            service.send(rxe_bench.guest_address, echo, sent[-1])
            loop.run_until(lambda: len(got) > count, 1.0)  # noqa: B023 - called at once
    loop.run_until(lambda: False, 1.0)  # what is doubled or late comes, too
    assert {(each.address, each.number) for each in got} == {(rxe_bench.guest_address, echo)}
    back = [bytes(each.data)[::-1] for each in got]
    assert set(back) <= set(sent)
    long_ones = [each for each in back if len(each) > 1]
    assert len(set(long_ones)) == len(long_ones)
    service.close()
