"""What other processes may ask of a process with software RNICs, and what they cannot do to it."""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import gettempdir

import pytest
from common import forked
from iwarp_pair import IwarpPair

from sidestep import config, limits
from sidestep.errors import PeerViolation
from sidestep.observe import rdma
from sidestep.observe.capture import remote
from sidestep.observe.capture.devices import DeviceWriter
from sidestep.observe.capture.packets import Wire
from sidestep.rdma import control
from sidestep.rdma.control import PACKET_MAX, Control
from sidestep.rdma.iwarp.counting import EVENTS, NAMES, PRESENT
from sidestep.rdma.iwarp.tap import Seen, SeenKind, WireEnds
from sidestep.rdma.work import RdmaRead, RdmaWrite, Send

NOBODY = 65534


@pytest.fixture
def pair() -> Iterator[IwarpPair]:
    made = IwarpPair()
    yield made
    made.close()


@pytest.fixture
def offered(pair: IwarpPair, tmp_path: Path) -> Iterator[Control]:
    directory = tmp_path / "rdma"
    made = Control(pair.loop, [pair.active.device, pair.passive.device], "a test", directory)
    yield made
    made.close()


def asking(offered: Control) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(os.fspath(offered.path))
    sock.setblocking(False)
    return sock


def packets(pair: IwarpPair, sock: socket.socket, enough: Callable[[list[bytes]], bool]) -> list[bytes]:
    """What comes until it is enough, or the end."""
    found: list[bytes] = []

    def ready() -> bool:
        while True:
            try:
                packet = sock.recv(PACKET_MAX)
            except BlockingIOError:
                return False
            if not packet:
                return True
            found.append(packet)
            if enough(found):
                return True

    pair.until(ready)
    return found


def test_only_this_user_can_get_there(offered: Control) -> None:
    assert stat.S_IMODE(offered.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(offered.path.parent.stat().st_mode) == 0o700
    offered.close()
    assert not offered.path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_turned_away(pair: IwarpPair, offered: Control, tmp_path: Path) -> None:
    """Even if modes let him in."""
    above = [path for path in tmp_path.parents if path.is_relative_to(gettempdir()) and path != Path(gettempdir())]
    for path in (tmp_path, *above, offered.path.parent):
        path.chmod(path.stat().st_mode | 0o055)
    offered.path.chmod(0o666)
    reader, writer = os.pipe()

    def nobody() -> int:
        os.setgroups([])
        os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            sock = asking(offered)
            sock.setblocking(True)
            os.write(writer, b"c")
            sock.send(b'{"op": "list"}')
            os.write(writer, b"got" if sock.recv(100) else b"nothing")
        except OSError as error:
            os.write(writer, (error.strerror or "").encode())
        return 0

    pid = forked(nobody)
    pair.until(lambda: offered.refused_count == 1)
    os.waitpid(pid, 0)
    os.close(writer)
    answer = os.read(reader, 100)
    os.close(reader)
    assert answer.startswith(b"c")
    assert b"got" not in answer


def test_a_list(pair: IwarpPair, offered: Control) -> None:
    pair.connect()
    with asking(offered) as sock:
        sock.send(b'{"op": "list"}')
        found = [json.loads(one) for one in packets(pair, sock, lambda all_: b'"end"' in all_[-1])]
    assert found[0] == {"process": {"pid": os.getpid(), "program": "a test"}}
    devices = [one["device"] for one in found if "device" in one]
    assert [one["name"] for one in devices] == ["active", "passive"]
    assert [one["listening"] for one in devices] == [[], [5001]]
    queue_pairs = [one["queue_pair"] for one in found if "queue_pair" in one]
    assert [one["state"] for one in queue_pairs] == ["RTS", "RTS"]
    assert {one["remote_address"] for one in queue_pairs} == {one["address"] for one in devices}
    assert queue_pairs[0]["crc"] is True
    assert queue_pairs[0]["receives_posted"] == 16


@pytest.mark.parametrize(
    "question",
    [b"\0", b"[]", b"null", b"{}", b'{"op": "stop"}', b'{"op": []}', b'{"op": "capture", "port": "x"}',
     b"[" * 4000, b" " * (limits.RDMA_ASK_MAX + 1)],
    ids=["zero", "list", "null", "empty", "unknown", "unhashable", "port", "deep", "long"],
)  # fmt: skip
def test_what_cannot_be_read_ends_the_connection(pair: IwarpPair, offered: Control, question: bytes) -> None:
    with asking(offered) as sock:
        sock.send(question)
        packets(pair, sock, lambda found: False)
    with asking(offered) as sock:  # others are served
        sock.send(b'{"op": "list"}')
        assert packets(pair, sock, lambda found: b'"end"' in found[-1])


def test_no_more_than_so_many(pair: IwarpPair, offered: Control) -> None:
    socks = [asking(offered) for _ in range(limits.RDMA_WATCHERS_MAX)]
    while pair.loop.turn(0):
        pass
    extra = asking(offered)
    pair.until(lambda: offered.refused_count == 1)
    for sock in (*socks, extra):
        sock.close()


def captured(found: list[bytes]) -> list[Seen]:
    return [control.decode(one) for one in found if not one.startswith(b"{")]


def test_a_slow_reader_stops_nobody_and_learns_what_it_missed(
    pair: IwarpPair, offered: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RDMA_CAPTURE_WAITING_MAX", 1 << 20)
    pair.connect()
    source = bytearray(1 << 20)
    pair.active.region(source)
    target = pair.passive.region(bytearray(1 << 20))
    with asking(offered) as slow, asking(offered) as quick:
        for sock in (slow, quick):
            sock.send(b'{"op": "capture", "device": "active"}')
        pair.until(lambda: len(pair.active.device.taps) == 2)
        for number in range(8):  # it reads nothing meanwhile
            pair.do(pair.active, RdmaWrite(number, (memoryview(source),), target.va, target.rkey))
            packets(pair, quick, lambda found: True)
        found = captured(packets(pair, slow, lambda all_: all_[-1][0] == SeenKind.LOST))
        assert found[-1].offset > 100, "pieces of 32 KiB"
        pair.disconnect()  # goes on, and is seen to the end
        rest = captured(packets(pair, slow, lambda all_: all_[-1][0] == SeenKind.END and not all_[-1][1]))
        assert [one.what for one in rest if one.what is not SeenKind.BYTES] == [SeenKind.END, SeenKind.END]
    pair.until(lambda: not len(pair.active.device.taps))


def test_who_has_seen_enough_reads_all_that_passed_until_then(pair: IwarpPair, offered: Control) -> None:
    """Much of it waits in the process, as nobody has read yet; then the connection ends."""
    pair.connect()
    source = bytearray(1 << 20)
    pair.active.region(source)
    target = pair.passive.region(bytearray(1 << 20))
    taps = pair.active.device.taps
    with asking(offered) as sock:
        sock.send(b'{"op": "capture", "device": "active"}')
        pair.until(lambda: len(taps) == 1)
        pair.do(pair.active, RdmaWrite(1, (memoryview(source),), target.va, target.rkey))
        sock.shutdown(socket.SHUT_WR)
        pair.until(lambda: len(taps) == 0)
        pair.do(pair.active, RdmaWrite(2, (memoryview(source),), target.va, target.rkey))  # not wanted any more
        found = captured(packets(pair, sock, lambda found: False))
    sent = sum(len(one.data) for one in found if one.outbound)
    assert len(source) < sent < 2 * len(source)


class ChoosyWriter(DeviceWriter[Wire]):
    """Keeps all, and says of one thing that it is not wanted."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), None)
        self.told: list[Seen] = []
        self.unwanted = 0  # things of which that is still to be said

    def _open(self, source: str, seen: Seen, ends: WireEnds) -> Wire:
        return Wire(source, ends, interface=0)

    def _handle(self, wire: Wire, seen: Seen) -> bool:
        self.told.append(seen)
        self.unwanted -= 1
        return self.unwanted != 0


def test_what_is_not_wanted_at_the_end_costs_nothing_of_the_rest(
    pair: IwarpPair, offered: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that has said its last can leave nothing out."""
    monkeypatch.setattr(remote, "sockets", lambda: [(offered.path, os.geteuid())])
    pair.connect()
    source = bytearray(1 << 20)
    pair.active.region(source)
    target = pair.passive.region(bytearray(1 << 20))
    writer = ChoosyWriter()
    with ThreadPoolExecutor(1) as pool, remote.RemoteCapture(writer, "active") as capture:

        def turn() -> None:
            turned = pool.submit(capture.turn, 0, sys.maxsize)
            while not turned.done():
                pair.loop.turn(0.01)  # a thread's end does not wake it
            turned.result()

        turn()
        writer.unwanted = 1
        pair.do(pair.active, RdmaWrite(1, (memoryview(source),), target.va, target.rkey))
        capture.stop()
        while capture.following:
            turn()
    assert sum(len(seen.data) for seen in writer.told if seen.outbound) > len(source)


def test_only_what_was_asked_for(pair: IwarpPair, offered: Control) -> None:
    here, there = pair.active.device.address, pair.passive.device.address
    cases = {
        '"address": "127.0.0.1"': 0,
        f'"address": "{there}"': 1,
        f'"address": "{there}", "port": 5001': 1,
        f'"address": "{here}", "port": 5001': 0,
        '"port": 5001': 1,
        '"device": "nobody"': 0,
    }
    socks = {case: asking(offered) for case in cases}
    for case, sock in socks.items():
        device = "" if "device" in case else ', "device": "active"'
        sock.send(f'{{"op": "capture", {case}{device}}}'.encode())
    pair.until(lambda: len(pair.active.device.taps) == 5)
    pair.connect()
    pair.disconnect()
    pair.until(lambda: not pair.loop.turn(0))
    for case, sock in socks.items():
        found = []
        try:
            while packet := sock.recv(PACKET_MAX):
                found.append(packet)
        except BlockingIOError:
            sock.close()
        assert sum(one.what is SeenKind.OPENED for one in captured(found)) == cases[case], case


def test_connections_that_are_left_out_are_forgotten_when_they_are_over(
    pair: IwarpPair, offered: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make any number of them while a capture runs that is about others."""
    monkeypatch.setattr(limits, "RDMA_LEFT_OUT_MAX", 4)
    device = pair.passive.device
    with asking(offered) as sock:
        sock.send(b'{"op": "capture", "device": "passive", "port": 1}')
        pair.until(lambda: len(device.taps) == 1)
        (tap,) = device.taps._taps
        wanted = tap.__self__._wanted  # type: ignore[attr-defined]
        open_now: list[socket.socket] = []
        for number in range(20):
            open_now.append(socket.create_connection((device.address, 5001)))
            pair.until(lambda: len(device.taps.wires) == len(open_now))
            if number < 12:
                open_now.pop().close()
                pair.until(lambda: len(device.taps.wires) == len(open_now))
            assert len(wanted.left_out) <= max(4, 2 * len(open_now))
        assert {wire.number for wire in device.taps.wires} <= wanted.left_out
        for each in open_now:
            each.close()


def test_what_a_killed_process_left_is_taken_away(pair: IwarpPair, tmp_path: Path) -> None:
    directory = tmp_path / "rdma"
    directory.mkdir(mode=0o700)
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(os.fspath(directory / "1-1"))
    left.close()
    alive = Control(pair.loop, [], "alive", directory)
    other = Control(pair.loop, [], "other", directory)
    assert sorted(directory.iterdir()) == sorted([alive.path, other.path])
    alive.close()
    other.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root looks for devices of other users")
def test_root_finds_those_of_the_system_wide_provider(
    pair: IwarpPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sidestep").mkdir(mode=0o700)
    made = Control(pair.loop, [], "provider", tmp_path / "sidestep" / "rdma")
    monkeypatch.setattr(config, "SYSTEM_RUNTIME", tmp_path)
    for user, found in (("root", True), ("nobody", False), ("no such user", False)):  # the directory is root's
        monkeypatch.setattr(config, "SYSTEM_USER", user)
        assert ((made.path, 0) in list(rdma.sockets())) == found
    made.close()


def test_a_process_that_has_nothing_to_tell_is_neither_waited_for_nor_left(
    offered: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RDMA_ASK_S", 0.01)
    with closing(rdma.DeviceClient(offered.path, os.geteuid())) as asked:
        assert asked.seen_now() is None


def test_packets_of_a_capture() -> None:
    ends = WireEnds(("::1", 1), ("fe80::1%eth0", 2), True, "iwarp0", False)
    for seen in (
        Seen(SeenKind.OPENED, 7, 1 << 60, ends=ends),
        Seen(SeenKind.BYTES, 7, 5, True, 1 << 40, 3, b"data"),
        Seen(SeenKind.LOST, 0, 5, offset=9),
    ):
        assert control.decode(control.encode(seen)) == seen
    for broken in (
        b"",
        b"\x09" + bytes(40),
        b"\x01" + bytes(40),
        control.encode(Seen(SeenKind.OPENED, 1, 1)) + b'["a"]',
    ):
        with pytest.raises(PeerViolation):
            control.decode(broken)


# ---- counters ----


def test_what_is_counted(pair: IwarpPair) -> None:
    pair.connect()
    active, passive = pair.active, pair.passive
    source = bytearray(3000)
    active.region(source)
    target = passive.region(bytearray(3000))
    pair.do(active, Send(1, (memoryview(source),)), arrives=passive)
    pair.do(active, Send(2, (memoryview(source)[:5],), solicited=True), arrives=passive)
    pair.do(active, RdmaWrite(3, (memoryview(source),), target.va, target.rkey))
    pair.do(active, RdmaRead(4, (memoryview(source),), target.va, target.rkey))
    mine, its = active.device.counters(), passive.device.counters()
    for sent, received in ((mine, its), (its, mine)):
        assert {name.replace("sent", "received", 1): n for name, n in sent.items() if "_sent" in name} == {
            name: n for name, n in received.items() if "_received" in name and "segments" not in name
        }
    assert mine["messages_sent{send}"] == mine["messages_sent{send_se}"] == 1
    assert mine["bytes_sent{write}"] == its["bytes_sent{read_response}"] == 3000
    assert mine["bytes_sent{send_se}"] == 5
    assert mine["messages_sent{write}"] == 2, "one is the ready-to-receive message"
    assert mine["connection_made{active}"] == its["connection_made{passive}"] == 1
    assert (mine["connections"], mine["queue_pairs"], its["listeners"]) == (1, 1, 1)
    assert active.device.queue_pairs()[0]["bytes_sent{write}"] == 3000

    active.qp.post_send(RdmaWrite(5, (memoryview(source),), target.va + 1, target.rkey))
    pair.until(lambda: "terminate_received{0x1101}" in active.device.counters())
    pair.until(lambda: not active.device.taps.wires and not passive.device.taps.wires)
    mine, its = active.device.counters(), passive.device.counters()
    assert its["terminate_sent{0x1101}"] == 1
    assert mine["stream_bytes_sent"] == its["stream_bytes_received"], "also of streams that have ended"
    assert mine["bytes_sent{write}"] == 6000
    assert its["bytes_received{write}"] == 3000, "what is refused is not delivered"
    assert {name.partition("{")[0] for name in mine | its} <= set(NAMES)


def test_what_fails_is_counted(pair: IwarpPair) -> None:
    pair.active.device.cm.connect(pair.passive.device.address, 5002, pair.active.qp, b"", pair.active.handle)
    pair.until(lambda: pair.active.events)
    assert pair.active.device.counters()["connection_refused{ECONNREFUSED}"] == 1
    with socket.create_connection((pair.passive.device.address, 5001)) as stranger:
        pair.until(lambda: pair.passive.device.counters()["half_open"] == 1)
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(20))
        pair.until(lambda: pair.passive.device.counters().get("connection_failed{violation}") == 1)


def test_no_counter_is_of_two_kinds() -> None:
    assert not set(EVENTS) & set(PRESENT)
