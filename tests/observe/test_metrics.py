"""Metrics of real connections, scraped as Prometheus does, and read back by its client library."""

from __future__ import annotations

import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import needed
import pytest
from chatting import Chat, promoted_chat, promoted_client, talk_on
from common import PATIENCE_S, slot
from prometheus_client.parser import text_string_to_metric_families
from shim_client import ShimClient

from sidestep import limits
from sidestep.cli.metrics import parse_listen
from sidestep.counters import NAMES
from sidestep.errors import Misuse, Unavailable
from sidestep.observe.metrics import Exporter, MetricsServer
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow  # real programs, and commands as processes

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values(text: str) -> Values:
    """Every sample of a scrape; each name and set of labels comes once."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def scrape(exporter: Exporter) -> Values:
    """What an exporter tells now."""
    return values(exporter.text().decode())


def moved(found: Values, unit: str, path: str, direction: str) -> float:
    """One of the totals."""
    return found[f"sidestep_{unit}_total", (("direction", direction), ("path", path))]


def test_the_counts_are_those_of_the_connections(sidestep: Sidestep, closing: ExitStack) -> None:
    promoted_chat(sidestep, closing)
    found = scrape(Exporter(sidestep.socket))
    ends = sidestep.connections()
    assert len(ends) == 2
    assert moved(found, "bytes", "ring", "sent") == sum(one.tx.ring_bytes for one in ends) > 0
    assert moved(found, "bytes", "tcp", "received") == sum(one.rx.tcp_bytes for one in ends) > 0
    assert moved(found, "messages", "ring", "received") == sum(one.rx.ring_msgs for one in ends) > 0
    assert found["sidestep_connections", (("reason", ""), ("state", "promoted"))] == 2
    assert found["sidestep_connections", (("reason", ""), ("state", "pinned"))] == 0
    assert found["sidestep_connections_promoted_total", ()] == found["sidestep_connections_seen_total", ()] == 2
    assert found["sidestep_offer_accepted_total", (("reason", ""),)] == 1
    assert found["sidestep_programs", ()] == 2
    assert found["sidestep_provider_up", ()] == 1


def test_reasons_are_labels(sidestep: Sidestep, closing: ExitStack) -> None:
    chat = Chat(closing, sidestep.popen)
    chat.client(sidestep.popen, "urgent")
    found = scrape(Exporter(sidestep.socket))
    assert found["sidestep_connections", (("reason", "URGENT_DATA"), ("state", "pinned"))] == 1


def test_counters_do_not_go_down_when_connections_end_or_the_provider_does(
    sidestep: Sidestep, closing: ExitStack
) -> None:
    exporter = Exporter(sidestep.socket)
    chat, client = promoted_chat(sidestep, closing)
    before = scrape(exporter)
    talk_on(client)
    second = scrape(exporter)
    assert moved(second, "bytes", "ring", "sent") == moved(before, "bytes", "ring", "sent") + 2 * 20 * 100
    client.kill()
    client.wait()
    sidestep.wait_for(lambda found: not found)
    third = scrape(exporter)
    assert third["sidestep_connections", (("reason", ""), ("state", "promoted"))] == 0
    assert {key: value for key, value in third.items() if key[0].startswith("sidestep_bytes")} == {
        key: value for key, value in second.items() if key[0].startswith("sidestep_bytes")
    }
    sidestep.kill_provider()
    without = scrape(exporter)
    assert without["sidestep_provider_up", ()] == 0
    assert moved(without, "bytes", "ring", "sent") == moved(second, "bytes", "ring", "sent")
    assert ("sidestep_programs", ()) not in without
    sidestep.restart_provider()
    promoted_client(sidestep, chat)
    last = scrape(exporter)
    assert last["sidestep_provider_up", ()] == 1
    assert last["sidestep_connections_seen_total", ()] == 4
    totals = {key for key in third if key[0].endswith("_total") and key[0].removesuffix("_total")[9:] not in NAMES}
    assert [key for key in totals if last[key] < third[key]] == []


def test_a_socket_that_starts_over_counts_on(sidestep: Sidestep) -> None:
    with ShimClient(sidestep.socket) as client:
        client.hello()
        exporter = Exporter(sidestep.socket)
        born = {"born_ns": 5}
        client.write_arena([slot(1000, tx_ring_bytes=100, **born)])
        assert moved(scrape(exporter), "bytes", "ring", "sent") == 100
        client.write_arena([slot(1000, tx_ring_bytes=30, **born)])
        assert moved(scrape(exporter), "bytes", "ring", "sent") == 130


def test_names_keep_the_conventions(sidestep: Sidestep) -> None:
    text = Exporter(sidestep.socket).text().decode()
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert all(name.startswith("sidestep_") for name in types)
    assert {name for name, kind in types.items() if kind == "counter"} == {
        name for name in types if name.endswith("_total")
    }
    assert {f"sidestep_{name}_total" for name in NAMES} <= types.keys()


# ---- serving ----


@contextmanager
def serving(sidestep: Sidestep, listen: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`sidestep metrics --listen`, and where it says it is."""
    argv = [sys.executable, "-m", "sidestep", "metrics", f"--socket={sidestep.socket}", f"--listen={listen}"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("metrics at "), line
            yield process, line.removeprefix("metrics at ").strip()
        finally:
            process.kill()


def curl(*args: str) -> str:
    """The body of an answer, which must be a good one."""
    argv = [needed.program("curl"), "--silent", "--show-error", "--fail", "--max-time", "20", "--noproxy", "*", *args]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("listen", ["0", ":0", "[::1]:0"])
def test_scraped_over_tcp_on_this_host_only(sidestep: Sidestep, listen: str) -> None:
    with serving(sidestep, listen) as (process, url):
        assert url.startswith("http://[::1]:" if "::1" in listen else "http://127.0.0.1:")
        for _ in range(2):
            assert values(curl(url))["sidestep_provider_up", ()] == 1
        assert values(curl("--compressed", url))["sidestep_provider_up", ()] == 1
        assert '<a href="/metrics">' in curl(url.removesuffix("metrics"))
        sidestep.kill_provider()
        assert values(curl(url))["sidestep_provider_up", ()] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_scraped_over_a_unix_socket_of_this_user(sidestep: Sidestep, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    with serving(sidestep, f"unix:{path}") as (process, url):
        assert url == f"unix:{path}"
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert values(curl("--unix-socket", str(path), "http://localhost/metrics"))["sidestep_provider_up", ()] == 1
        with pytest.raises(Unavailable):  # a socket that is in use is nobody else's
            MetricsServer(path, Exporter(sidestep.socket))
        assert values(curl("--unix-socket", str(path), "http://localhost/metrics"))
        process.kill()
        process.wait()
    assert path.exists()
    with serving(sidestep, f"unix:{path}") as (process, _):  # what the killed one left is replaced
        assert values(curl("--unix-socket", str(path), "http://localhost/metrics"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert not path.exists()


def test_scrapers_that_say_nothing_do_not_keep_others_out(sidestep: Sidestep, closing: ExitStack) -> None:
    with serving(sidestep, "0") as (_, url):
        port = int(url.rpartition(":")[2].partition("/")[0])
        silent = [
            closing.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(limits.METRICS_REQUESTS_MAX + 1)
        ]
        silent[-1].settimeout(PATIENCE_S)
        assert silent[-1].recv(1) == b""  # one too many
        silent[0].setblocking(False)
        with pytest.raises(BlockingIOError):  # while the others may still speak
            silent[0].recv(1)
        silent[0].close()  # its thread ends, and makes room
        body = curl("--retry", "20", "--retry-all-errors", "--retry-delay", "1", url)
        assert values(body)["sidestep_provider_up", ()] == 1


def test_scrapers_that_say_a_byte_now_and_then_are_cut(sidestep: Sidestep, closing: ExitStack) -> None:
    with serving(sidestep, "0") as (_, url):
        port = int(url.rpartition(":")[2].partition("/")[0])
        slow = [
            closing.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(limits.METRICS_REQUESTS_MAX)
        ]
        until = time.monotonic() + 4 * limits.METRICS_REQUEST_TIMEOUT_S
        while slow:
            assert time.monotonic() < until, f"{len(slow)} keep their places"
            ended, _, _ = select.select(slow, (), (), 0.5)
            slow = [one for one in slow if one not in ended]
            for one in slow:
                with suppress(OSError):  # it has been cut in this moment
                    one.send(b"G")


def test_a_file_that_is_no_socket_is_left_alone(sidestep: Sidestep, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("kept")
    with pytest.raises(Unavailable, match="cannot listen"):
        MetricsServer(path, Exporter(sidestep.socket))
    assert path.read_text() == "kept"


def test_printed_once_without_listening(sidestep: Sidestep, closing: ExitStack) -> None:
    promoted_chat(sidestep, closing)
    argv = [sys.executable, "-m", "sidestep", "metrics", f"--socket={sidestep.socket}"]
    found = values(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert found["sidestep_connections", (("reason", ""), ("state", "promoted"))] == 2


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("[::1]:9400", ("::1", 9400)),
        ("unix:/a/b", Path("/a/b")),
    ],
)
def test_where_to_listen_is_understood(text: str, address: object) -> None:
    assert parse_listen(text) == address


@pytest.mark.parametrize("text", ["", "x", "127.0.0.1", "1.2.3.4:99999", "unix:"])
def test_where_nobody_can_listen_is_told(text: str) -> None:
    with pytest.raises(Misuse):
        parse_listen(text)


def test_thousands_of_connections_are_counted(sidestep: Sidestep) -> None:
    with ShimClient(sidestep.socket, slots_max=4000) as client:
        client.hello()
        client.write_arena([slot(1 + number, born_ns=number, tx_ring_bytes=1) for number in range(4000)])
        found = scrape(Exporter(sidestep.socket))
    assert moved(found, "bytes", "ring", "sent") == 4000
    assert found["sidestep_connections", (("reason", ""), ("state", "promoted"))] == 4000
