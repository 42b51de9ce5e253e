"""`sidestep rdma` and `sidestep capture` as a user types them, over the loopback interface."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from iwarp_pair import End, IwarpPair
from loop_dut import addresses
from rping_client import RpingClient

from sidestep import limits
from sidestep.cli.rdma_options import parse_size
from sidestep.errors import Misuse, PeerViolation
from sidestep.observe.capture.files import read_frames
from sidestep.rdma.cm import REJECT_CONSUMER, ConnectionEvent, ConnectionRequest, Disconnected, Established, Rejected
from sidestep.rdma.iwarp.device import ATTRIBUTES, IwarpDevice
from sidestep.rdma.tools.bandwidth import Bandwidth
from sidestep.rdma.tools.devices import HostPort
from sidestep.rdma.tools.server import ToolServer
from sidestep.rdma.tools.talk import Echo
from sidestep.rdma.tools.terms import Note, NoteKind, Op, Terms
from sidestep.rdma.work import Send

pytestmark = pytest.mark.slow
WAIT_S = 60


# Root sees the devices of all processes, those of other tests that run meanwhile among them.
HIDE = 'for d in /tmp/sidestep-* /dev/shm/sidestep-*; do [ ! -d "$d" ] || mount -t tmpfs none "$d"; done; exec "$@"'
ALONE = ("unshare", "--mount", "sh", "-c", HIDE, "sh")


class Programs:
    """Runs `sidestep ARGS` in a runtime directory of its own."""

    def __init__(self, home: Path) -> None:
        base = {name: value for name, value in os.environ.items() if not name.startswith(("SIDESTEP_", "LD_PRELOAD"))}
        self.env = base | {"XDG_RUNTIME_DIR": str(home), "PYTHONUNBUFFERED": "1"}
        self._closing = ExitStack()

    def run(self, *args: str | Path, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """To its end; `before`: the words of a command that executes it."""
        return subprocess.run(
            [*before, sys.executable, "-m", "sidestep", *args], env=self.env, capture_output=True, text=True,
            timeout=WAIT_S, check=False,
        )  # fmt: skip

    def start(self, *args: str | Path) -> subprocess.Popen[str]:
        """Until `end`, or the end of the tests."""
        process = subprocess.Popen(
            [sys.executable, "-m", "sidestep", *args], env=self.env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._closing.callback(process.communicate, timeout=WAIT_S)
        self._closing.callback(process.kill)
        return process

    def server(self, *args: str) -> int:
        """The port of a server on 127.0.0.1 and ::1."""
        process = self.start("rdma", "server", "--port", "0", "--json", *args)
        assert process.stdout is not None
        return int(json.loads(process.stdout.readline())["listening"][0]["port"])

    def close(self) -> None:
        """Ends what still runs."""
        self._closing.close()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """By Ctrl-C: exit code, and what it printed since."""
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=WAIT_S)
    return process.returncode, stdout, stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    made = Programs(tmp_path_factory.mktemp("run"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def port(programs: Programs) -> int:
    return programs.server()


def found_in(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# ---- ping ----


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
@pytest.mark.parametrize("size", ["0", "1", "100K"])
def test_ping(programs: Programs, port: int, host: str, size: str) -> None:
    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    found = found_in(programs.run("rdma", "ping", f"{host}:{port}", "-n", "5", "-i", "0", "-s", size, "--json"))
    assert (found["sent"], found["received"], found["wrong"], found["error"]) == (5, 5, 0, None)
    times = found["round_trip_us"]
    assert 0 < times["min"] <= times["median"] <= times["p99"] <= times["max"]


def test_ping_until_ctrl_c(programs: Programs, port: int) -> None:
    process = programs.start("rdma", "ping", f"localhost:{port}", "-n", "0")
    assert process.stdout is not None
    assert "seq=1" in process.stdout.readline()
    code, stdout, stderr = ended(process)
    assert (code, stderr) == (0, "")
    assert "0 with other contents" in stdout
    assert "round trip min" in stdout


def test_ping_sees_other_contents(programs: Programs) -> None:
    """A server that changes a byte."""

    class Liar(Echo):
        def received(self, index: int, length: int) -> None:
            self.slots[index][length - 1] ^= 1
            super().received(index, length)

    def answer(end: End, request: ConnectionRequest) -> None:
        terms = Terms.decode(request.private_data)
        talk = Liar(end.device, terms, lambda why: None)
        talk.connection = request.accept(talk.qp, terms.encode(), lambda connection, event: None)

    code, stdout, _ = against(programs, answer, "ping", "-n", "1")
    assert code == 1
    assert "CONTENTS DIFFER" in stdout
    assert "1 with other contents" in stdout


def against(programs: Programs, answer: Callable[[End, ConnectionRequest], object], *args: str) -> tuple[int, str, str]:
    """A client against a server of this process."""
    pair = IwarpPair()
    end = pair.passive
    listener = end.device.cm.listen(0, lambda request: answer(end, request))
    place = f"{end.device.address}:{listener.service_id & 0xFFFF}"
    process = programs.start("rdma", args[0], place, *args[1:])
    while process.poll() is None:
        pair.loop.turn(0.05)
    stdout, stderr = process.communicate(timeout=WAIT_S)
    pair.close()
    return process.returncode, stdout, stderr


# ---- bandwidth ----


@pytest.mark.parametrize("both", [(), ("--both",)], ids=["one way", "both"])
@pytest.mark.parametrize("op", ["write", "read", "send"])
def test_bandwidth(programs: Programs, port: int, op: str, both: tuple[str, ...]) -> None:
    result = programs.run(
        "rdma", "bw", f"127.0.0.1:{port}", "--op", op, "--duration", "0.2", "-s", "50000", "--json", *both
    )
    found = found_in(result)
    assert (found["op"], found["wrong"], found["complete"], found["verified"]) == (op, 0, True, True)
    assert found["messages"] > 0
    assert (found["remote_messages"] > 0) == bool(both)
    assert found["bytes_per_s"] == pytest.approx(found["messages_per_s"] * 50000, rel=1e-3)


@pytest.mark.parametrize("op", ["write", "read", "send"])
def test_bandwidth_sees_other_contents(programs: Programs, op: str) -> None:
    """A server whose memory is not as it should be."""

    class Liar(Bandwidth):
        def begin(self, remote: Terms) -> None:
            if remote.op is Op.READ:
                self._target[7] ^= 1
            super().begin(remote)

        def received(self, index: int, length: int) -> None:
            self.slots[index][length - 1] ^= 1
            super().received(index, length)

        def noted(self, note: Note) -> None:
            if self.terms.op is Op.WRITE:
                self._target[-1] ^= 1
            super().noted(note)

    def answer(end: End, request: ConnectionRequest) -> None:
        asked = Terms.decode(request.private_data)
        talk = Liar(end.device, asked, lambda why: None, active=False)

        def handle(connection: object, event: object) -> None:
            if isinstance(event, Established):
                talk.begin(asked)

        talk.connection = request.accept(talk.qp, talk.terms.encode(), handle)

    code, stdout, stderr = against(programs, answer, "bw", "--op", op, "--duration", "0.05", "-s", "100")
    assert code == 1
    assert "differ" in stderr
    assert stdout.count(op) == 1


def test_bandwidth_as_a_table(programs: Programs, port: int) -> None:
    result = programs.run("rdma", "bw", f"127.0.0.1:{port}", "--duration", "0.1", "--depth", "1", "-s", "1")
    assert result.returncode == 0
    settings, heads, cells = result.stdout.splitlines()
    assert "markers off" in settings
    assert heads.split()[:5] == ["OP", "BYTES", "MESSAGES", "SECONDS", "MB/s"]
    assert cells.split()[:2] == ["write", "1"]


def test_markers_are_told(programs: Programs, port: int) -> None:
    result = programs.run("rdma", "bw", f"127.0.0.1:{port}", "--duration", "0.1", "--markers")
    assert "markers in what is received" in result.stdout


def test_bandwidth_until_ctrl_c(programs: Programs, port: int) -> None:
    process = programs.start("rdma", "bw", f"127.0.0.1:{port}", "--duration", "3600", "--json")
    until_seen(programs, "sidestep rdma bw", "bytes_sent{write}")
    code, stdout, stderr = ended(process)
    assert (code, stderr) == (0, "")
    assert json.loads(stdout)["complete"]


def until_seen(programs: Programs, program: str, counter: str) -> None:
    """Until `sidestep rdma list` shows that a device of such a program has counted something."""
    for _ in range(100):
        found = found_in(programs.run("rdma", "list", "--json"))
        ours = [process["devices"] for process in found["processes"] if process["program"] == program]
        if any(device["counters"].get(counter) for devices in ours for device in devices):
            return
    pytest.fail("nothing of it is seen")


def test_checksums_and_markers_are_agreed_on(programs: Programs, port: int) -> None:
    """RFC 5044 7.1.1: a checksum if either end wants it; markers as the receiver wants."""
    bare = programs.server("--no-crc", "--address", "127.0.0.1")
    for server, options, crc, sent, received in (
        (port, ["--no-crc"], True, False, False),
        (bare, [], True, False, False),
        (bare, ["--no-crc", "--markers"], False, False, True),
    ):
        found = found_in(programs.run("rdma", "ping", f"127.0.0.1:{server}", "-n", "2", "--json", *options))
        queue_pair = found["queue_pair"]
        agreed = queue_pair["crc"], queue_pair["markers_sent"], queue_pair["markers_received"]
        assert agreed == (crc, sent, received)


# ---- what goes wrong ----


def test_errors_say_what_to_do(programs: Programs, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[1]
        free.close()
        cases = {
            f"127.0.0.1:{nobody}": f"nobody listens at 127.0.0.1:{nobody}",
            "no.such.host.invalid": "'no.such.host.invalid' is not known",
            "255.255.255.255": "there is no way to 255.255.255.255",
            f"127.0.0.1:{silent.getsockname()[1]}": "does not answer within 0.2 seconds",
            "127.0.0.1:99999": "is not HOST or HOST:PORT",
        }
        for place, expected in cases.items():
            for tool in ("ping", "bw"):
                result = programs.run("rdma", tool, place, "--timeout", "0.2")
                assert result.returncode in (1, 2)
                assert expected in result.stderr
                assert "Traceback" not in result.stderr
    result = programs.run("rdma", "bw", f"127.0.0.1:{port}", "-s", "64M", "--depth", "100")
    assert (result.returncode, "need more memory" in result.stderr) == (2, True)
    result = programs.run("rdma", "server", "--address", "127.0.0.1", "--port", str(port))
    assert result.returncode == 1
    assert "Address already in use" in result.stderr


def test_a_rejection_is_told_with_its_words(programs: Programs) -> None:
    code, _, stderr = against(programs, lambda end, request: request.reject(private_data=b"not today"), "ping")
    assert code == 1
    assert "rejected the connection: not today" in stderr


def test_another_program_on_that_port(programs: Programs) -> None:
    def answer(end: End, request: ConnectionRequest) -> None:
        request.accept(end.qp, b"something else", end.handle)

    code, _, stderr = against(programs, answer, "bw")
    assert code == 1
    assert "is no server of these tools" in stderr


@pytest.mark.parametrize("command", ["ping", "bw"])
def test_ctrl_c_before_the_server_has_answered(programs: Programs, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        process = programs.start("rdma", command, f"127.0.0.1:{port}", "--timeout", "3600")
        asked, _ = silent.accept()
        with asked:
            assert asked.recv(1)
            code, stdout, stderr = ended(process)
    assert (code, stdout) == (1, "")
    assert f"127.0.0.1:{port} has not answered" in stderr
    assert "Traceback" not in stderr


def test_a_server_that_goes_away(programs: Programs) -> None:
    def answer(end: End, request: ConnectionRequest) -> None:
        terms = Terms.decode(request.private_data)

        def handle(connection: Any, event: object) -> None:
            if isinstance(event, Established):
                connection.disconnect()

        request.accept(end.qp, terms.encode(), handle)

    code, _, stderr = against(programs, answer, "ping", "-n", "3")
    assert code == 1
    assert "ended the connection" in stderr


# ---- rping ----


@pytest.fixture
def rping() -> Iterator[tuple[IwarpPair, list[str]]]:
    """A client that has asked our server and been told what came of it, and the lines of the server."""
    pair = IwarpPair()
    lines: list[str] = []
    server = ToolServer(pair.passive.device, pair.loop, 0, lines.append)
    client = pair.active
    client.device.cm.connect(pair.passive.device.address, server.port, client.qp, b"", client.handle)
    pair.until(lambda: client.events)
    yield pair, lines
    server.close()
    pair.close()


@pytest.mark.parametrize("size", [1, 64, 70_000])
def test_rping(rping: tuple[IwarpPair, list[str]], size: int) -> None:
    """Its client, as librdmacm's does it."""
    pair, lines = rping
    client = pair.active
    assert isinstance(client.events[0], Established)
    for number in range(3):
        text = bytes(65 + (number + at) % 26 for at in range(size - 1)) + b"\0"
        there, back = bytearray(text), bytearray(size)
        for buffer in (there, back):
            region = client.region(buffer)
            info = region.va.to_bytes(8) + int(region.rkey).to_bytes(4) + size.to_bytes(4)
            enough = len(client.completions) + 2  # of the Send, and of the answer
            client.qp.post_send(Send(0, (info,)))
            pair.until(lambda enough=enough: len(client.completions) >= enough)
        assert back == there
    assert client.connection is not None
    client.connection.disconnect()
    pair.until(lambda: any(isinstance(event, Disconnected) for event in client.events))
    pair.until(lambda: len(lines) == 2)
    assert "3 messages" in lines[1]


def test_a_hostile_rping_ends(rping: tuple[IwarpPair, list[str]]) -> None:
    pair, lines = rping
    client = pair.active
    client.qp.post_send(Send(0, (bytes(8) + b"\xff" * 8,)))  # 4 GiB
    pair.until(lambda: any(isinstance(event, Disconnected) for event in client.events))
    pair.until(lambda: len(lines) == 2)
    assert "are possible" in lines[1]
    assert pair.passive.device.counters()["queue_pairs"] == 1, "that of the pair"


NO_ROOM = Rejected(REJECT_CONSUMER, b"the server has no room")


def told_to_a_client(pair: IwarpPair, port: int, terms: Terms) -> ConnectionEvent:
    """What a client with these terms is told first."""
    told: list[ConnectionEvent] = []
    device = pair.active.device
    queue = device.create_cq(8)
    qp = device.alloc_pd().create_qp(queue, queue)
    device.cm.connect(pair.passive.device.address, port, qp, terms.encode(), lambda _, event: told.append(event))
    pair.until(lambda: told)
    return told[0]


def test_a_conversation_for_which_there_is_no_room_leaves_nothing() -> None:
    """Terms say how many receives and Reads at a time; a device may have room for fewer."""
    pair = IwarpPair()
    device = IwarpDevice(addresses()[0], pair.loop, attributes=replace(ATTRIBUTES, regions_max=40))
    pair.passive.device.close()
    pair.passive.device = device
    server = ToolServer(device, pair.loop, 0, lambda line: None)
    for terms in (Terms(Op.SEND, 8, 16), Terms(Op.READ, 8, 64, both=True)):
        assert told_to_a_client(pair, server.port, terms) == NO_ROOM
        counted = device.counters()
        assert (counted["regions"], counted["queue_pairs"], counted["keys"]) == (0, 0, 0)
        assert not device.domains
    server.close()
    pair.close()


def test_a_server_without_memory_serves_on(programs: Programs) -> None:
    """A process of its own: one that has had much memory may have some of it still."""
    process = programs.start("rdma", "server", "--port", "0", "--address", "127.0.0.1", "--json")
    assert process.stdout is not None
    port = int(json.loads(process.stdout.readline())["listening"][0]["port"])
    programs.run("rdma", "ping", f"127.0.0.1:{port}", "-n", "1")  # everything is loaded
    in_use = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    most = in_use + limits.RDMA_TOOL_MESSAGE_MAX // 2
    resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))

    refused = programs.run("rdma", "bw", f"127.0.0.1:{port}", "-s", str(limits.RDMA_TOOL_MESSAGE_MAX), "--depth", "1")
    assert "the server has no room" in refused.stderr
    device = IwarpDevice("127.0.0.1")
    failed: list[str] = []
    client = RpingClient(device, limits.RDMA_TOOL_MESSAGE_MAX, 1, failed.append)
    client.connect("127.0.0.1", port)
    assert device.loop.run_until(lambda: client.ended, WAIT_S)
    assert failed
    device.close()

    found = found_in(programs.run("rdma", "ping", f"127.0.0.1:{port}", "-n", "1", "-i", "0", "--json"))
    assert found["received"] == 1
    _, _, stderr = ended(process)
    assert "rejected: no memory" in stderr
    assert "rping has ended, 0 messages: there is no memory for it" in stderr
    assert "Traceback" not in stderr


# ---- what is said ----


def test_terms_and_notes() -> None:
    terms = Terms(Op.READ, 1 << 20, 16, True, False, 0x12345678, 1 << 63)
    assert Terms.decode(terms.encode()) == terms
    note = Note(NoteKind.DONE, 1 << 40, 3, 99)
    assert Note.decode(note.encode()) == note
    for broken in (b"", b"SSRT", terms.encode()[:-1], b"XXXX" + terms.encode()[4:], b"SSRT\x09" + terms.encode()[5:]):
        with pytest.raises(PeerViolation):
            Terms.decode(broken)
    for much in (Terms(Op.SEND, 1 << 30), Terms(Op.SEND, 1 << 20, 1 << 20), Terms(Op.WRITE, 0), Terms(Op.PING, 1, 0)):
        with pytest.raises(PeerViolation):
            Terms.decode(much.encode())
    for broken in (b"", note.encode() + b"x", b"SSRT\x09" + note.encode()[5:]):
        with pytest.raises(PeerViolation):
            Note.decode(broken)


def test_places() -> None:
    expected = {
        "host": HostPort("host", 7), "host:1": HostPort("host", 1),
        "::1": HostPort("::1", 7), "[::1]": HostPort("::1", 7),
        "[fe80::1%eth0]:9": HostPort("fe80::1%eth0", 9), "10.0.0.1:65535": HostPort("10.0.0.1", 65535),
    }  # fmt: skip
    for text, place in expected.items():
        assert HostPort.parse(text, 7) == place
        assert HostPort.parse(str(place), 7) == place
    assert HostPort.parse("host:", 7) == HostPort("host", 7)
    long = "host:" + "1" * 5000
    for text in ("", ":1", "host:0", "host:65536", "host:x", "[::1", "[::1]9", "host:\u0661", long):
        with pytest.raises(Misuse):
            HostPort.parse(text, 7)


def test_sizes() -> None:
    assert [parse_size(text) for text in ("0", "64", "4K", "1m")] == [0, 64, 4096, 1 << 20]
    for text in ("", "K", "4KB", "-1", "4.5K", "4T", "\u0661", "9" * 5000):
        with pytest.raises(Misuse):
            parse_size(text)


# ---- list and capture ----


def test_list_shows_devices_of_other_processes(programs: Programs, port: int) -> None:
    found = found_in(programs.run("rdma", "list", "--json"))
    (served,) = [
        device
        for process in found["processes"]
        for device in process["devices"]
        if device["address"] == "0.0.0.0" and port in device["listening"]
    ]
    assert served["counters"]["listeners"] == 1
    text = programs.run("rdma", "list", "-v").stdout
    assert f"listens on {port}" in text
    assert "sidestep rdma server" in text


def test_nothing_to_list(tmp_path: Path) -> None:
    alone = Programs(tmp_path)
    result = alone.run("rdma", "list", before=ALONE if os.geteuid() == 0 else ())
    assert (result.returncode, result.stdout) == (0, "")
    assert "sidestep rdma server" in result.stderr


def test_capture_of_other_processes(programs: Programs, port: int, tmp_path: Path) -> None:
    """One process that runs already, and one that begins later: each connection once."""
    file = tmp_path / "capture.pcapng"
    process = programs.start("capture", "-w", file, "--json", f"127.0.0.1:{port}")
    assert process.stderr is not None
    assert "capturing from" in process.stderr.readline()
    found_in(programs.run("rdma", "ping", f"127.0.0.1:{port}", "-n", "3", "-i", "0", "-s", "500", "--json"))
    found_in(programs.run("rdma", "ping", f"[::1]:{port}", "-n", "1", "--json"))
    code, stdout, _ = ended(process)
    summary = json.loads(stdout)
    assert (code, summary["connections"], summary["dropped"]) == (0, 1, 0)
    with file.open("rb") as stream:
        frames = list(read_frames(stream, str(file)))
    assert len(frames) == summary["frames"] == 3 + 2 + 1 + 2 * 3 + 2, "TCP, MPA, ready to receive, Sends, the end"


def test_capture_to_a_pipe(programs: Programs, port: int) -> None:
    """Of a connection that has begun; the reader leaves when it has enough."""
    ping = programs.start("rdma", "ping", f"127.0.0.1:{port}", "-n", "0", "-i", "0.01")
    assert ping.stdout is not None
    ping.stdout.readline()
    taken = subprocess.run(
        [sys.executable, "-m", "sidestep", "capture", "-w", "-", "--count", "9"], env=programs.env,
        capture_output=True, timeout=WAIT_S, check=True,
    )  # fmt: skip
    assert taken.stdout.count(b"began before the capture") >= 1
    process = programs.start("capture", "-w", "-")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(WAIT_S) == 0
    assert ended(ping)[0] == 0


def test_capture_says_who_did_not_tell_its_last(programs: Programs, tmp_path: Path) -> None:
    server = programs.start("rdma", "server", "--port", "0", "--json")
    assert server.stdout is not None
    assert "listening" in server.stdout.readline()
    taking = programs.start("capture", "-w", tmp_path / "x.pcapng", "--json")
    assert taking.stderr is not None
    assert taking.stderr.readline().startswith("capturing from")
    server.send_signal(signal.SIGSTOP)
    code, _, stderr = ended(taking)
    server.kill()
    assert code == 0
    # root hears of other tests' processes, too
    assert re.search(r"no last frames from \d+ process(es)? in 5 s", stderr)


def test_capture_says_what_is_wrong(programs: Programs, tmp_path: Path) -> None:
    result = programs.run("capture", "-w", tmp_path / "no" / "file")
    assert result.returncode == 1
    assert "cannot be written" in result.stderr
    assert programs.run("capture", "-w", "-", "--json").returncode == 2
    assert programs.run("capture").returncode == 2
