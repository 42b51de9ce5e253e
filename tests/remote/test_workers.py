"""Workers of a provider: connections with other hosts are spread over them; one that dies takes no other's along."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from common import PATIENCE_S
from hosts import Host, Make
from talking import ends_well, line, on_tcp, promoted, serving, talking
from test_explicit_sdp import call
from test_explicit_sdp import serving as echo_server

# The same with workers as without: this module's `two` has some.
from test_loss import (  # noqa: F401 - collected from here as well
    test_a_link_that_comes_back_costs_nothing_but_time,
    test_a_program_that_is_killed_ends_as_over_tcp,
    test_a_provider_that_is_told_to_go_leaves_tcp_behind,
    test_many_are_cut_at_once_under_load,
    test_the_rdma_connection_is_cut_and_tcp_goes_on,
)
from test_promotion import (  # noqa: F401
    test_a_live_connection_is_promoted,
    test_many_sizes,
)
from test_remote_programs import (  # noqa: F401
    blob,
    test_iperf3,
    test_nginx_large_file,
    test_redis,
)

from sidestep.provider import control

pytestmark = pytest.mark.slow

WORKERS = 2


@pytest.fixture
def two(make_hosts: Make) -> tuple[Host, Host]:
    """Two hosts whose providers have workers."""
    one, other = make_hosts(2, workers=WORKERS)
    return one, other


def wait_for_an_end(host: Host) -> None:
    """Until a worker has ended that nobody had told to."""
    host.wait_for(lambda: host.counter("worker_ended"))


def of_process(host: Host, pid: int) -> set[str]:
    """The segments of the connections that this process carries."""
    with control.ControlConnection(host.sidestep.socket) as connection:
        return {str(link["segment"]) for link in connection.links() if link["process"] == pid}


def test_connections_are_spread(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    clients = [talking(one, other.address) for _ in range(6)]
    promoted(one, other, ends=6)
    for host in two:
        carries = host.workers()
        assert len(carries) == WORKERS
        assert sum(carries.values()) == 6, "the provider itself carries some"
        assert all(carries.values())
        assert all(each.link for each in host.sidestep.connections()), "how each is carried cannot be seen"
        for pid, count in carries.items():
            assert len(of_process(host, pid)) == count
    for client in clients:
        ends_well(client)
    assert (one.joined("connect"), other.joined("accept")) == (6, 6)
    assert not one.counter("relay_reset") + other.counter("relay_reset")
    for host in two:
        host.sidestep.wait_for(lambda found: not found)
        host.workers(lambda carries: not any(carries.values()))


def test_what_begins_with_sdp_comes_to_the_provider_itself(two: tuple[Host, Host]) -> None:
    one, other = two
    server = echo_server(other, other.address)
    seen, end = call(one, other.address, size=3_000_000)
    assert (seen.split()[0], end) == ("connected", "right")
    assert line(server).startswith("accepted")


def said_something(clients: list[subprocess.Popen[str]], count: int) -> list[subprocess.Popen[str]]:
    """So many of them, once they have told how they ended."""
    poller = select.poll()
    by_number = {client.stdout.fileno(): client for client in clients if client.stdout}
    for number in by_number:
        poller.register(number, select.POLLIN)
    ended: list[subprocess.Popen[str]] = []
    while len(ended) < count:
        told = poller.poll(PATIENCE_S * 1000)
        assert told, "no client has ended"
        for number, _ in told:
            poller.unregister(number)
            ended.append(by_number[number])
    return ended


@pytest.mark.parametrize("whose", ["opener's", "acceptor's"])
def test_a_worker_that_is_killed_takes_only_its_own_connections(two: tuple[Host, Host], whose: str) -> None:
    one, other = two
    host = one if whose == "opener's" else other
    serving(other)
    clients = [talking(one, other.address, pause_s=0.01) for _ in range(4)]
    promoted(one, other, ends=4)
    carries = host.workers()
    victim, lost = next(iter(carries.items()))
    assert 0 < lost < 4
    os.kill(victim, signal.SIGKILL)
    ended = said_something(clients, lost)
    assert [line(client).split()[0] for client in ended] == ["Connection"] * lost
    for client in clients:
        if client not in ended:
            ends_well(client)
    host.workers(lambda carries: victim not in carries)
    assert host.counter("worker_ended") == 1
    again = [talking(one, other.address) for _ in range(4)]
    promoted(one, other, ends=4)
    assert all(host.workers().values())
    for client in again:
        ends_well(client)


@pytest.mark.parametrize("whose", ["opener's", "acceptor's"])
def test_connections_of_workers_outlive_their_provider(two: tuple[Host, Host], whose: str) -> None:
    one, other = two
    host = one if whose == "opener's" else other
    serving(other)
    clients = [talking(one, other.address) for _ in range(2)]
    promoted(one, other, ends=2)
    host.sidestep.kill_provider()
    for client in clients:
        ends_well(client)


def test_a_worker_that_does_not_answer_holds_nobody_up(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    before = one.workers()
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    with control.ControlConnection(one.sidestep.socket) as connection:
        assert list(connection.links()) == []
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    one.workers(lambda carries: not before.keys() & carries.keys())
    client = talking(one, other.address)
    promoted(one, other)
    ends_well(client)


def test_where_no_worker_works_the_provider_carries_by_itself(
    make_hosts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'sidestep.provider.workers.worker' in sys.orig_argv:\n"
        "    raise SystemExit('as the test wants it')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one, other = make_hosts(2, workers=WORKERS, workers_work=False)
    serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    for host in (one, other):
        assert not host.sidestep.status()["workers"]
        assert of_process(host, host.sidestep.provider_pid)
        wait_for_an_end(host)
    ends_well(client)


@pytest.mark.parametrize(
    "packets",
    [
        pytest.param("[b'\\xff']", id="no message"),
        pytest.param("[wire.Carried(99).encode()]", id="not ready"),
        pytest.param("[ready, ready]", id="ready twice"),
        pytest.param("[ready, wire.Carried(99).encode()]", id="carries what was not lent"),
        pytest.param("[ready, wire.Over(99).encode()]", id="ends what was not lent"),
        pytest.param("[ready, wire.Leave().encode()]", id="what only providers say"),
        pytest.param("[ready, wire.Over(1).encode()[:-1]]", id="too short"),
        pytest.param("[ready, wire.Counted(14, b'offer_accepted').encode()]", id="a counter of the provider's own"),
        pytest.param("[ready, wire.Listens(bytes(16), 1).encode()]", id="a port that nobody asked for"),
    ],
)
def test_a_worker_that_breaks_a_rule_is_killed(
    make_hosts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packets: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'sidestep.provider.workers.worker' in sys.orig_argv:\n"
        "    import os, socket, time\n"
        "    from sidestep.native import _channel\n"
        "    from sidestep.provider.workers import messages as wire\n"
        "    sock = socket.socket(fileno=int(next(a for a in sys.orig_argv if 'ipc-fd' in a).partition('=')[2]))\n"
        "    doorbell, ready = _channel.Doorbell(), wire.Ready(b'x' * 16).encode()\n"
        f"    for packet in {packets}:\n"
        "        own = [doorbell.fd, doorbell.page_fd, os.pipe()[0]] if packet == ready else []\n"
        "        socket.send_fds(sock, [packet], own)\n"
        "    time.sleep(1000)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (host,) = make_hosts(1, workers=1, workers_work=False)
    wait_for_an_end(host)
    assert host.sidestep.status()["counters"]["worker_ended{signal_9}"]
    assert not host.counter("internal_error")


def test_a_protocol_that_is_removed_takes_its_workers_along(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    before = one.workers()
    with control.ControlConnection(one.sidestep.socket) as connection:
        connection.document("module_remove", name="sdp")
    on_tcp(one, other)
    ends_well(client)
    assert not one.sidestep.status()["workers"]
    with control.ControlConnection(one.sidestep.socket) as connection:
        connection.document("module_add", name="sdp")
    assert not before.keys() & one.workers().keys()
    client = talking(one, other.address)
    promoted(one, other)
    ends_well(client)
    assert not one.counter("relay_reset") + other.counter("relay_reset")


def test_devices_of_workers_are_seen(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    carrying = {pid for host in two for pid, count in host.workers().items() if count}
    list_them = [sys.executable, "-m", "sidestep", "rdma", "list", "--json"]
    found = subprocess.run(list_them, capture_output=True, check=True)
    assert carrying <= {each["pid"] for each in json.loads(found.stdout)["processes"]}
    ends_well(client)


def test_a_stopped_provider_leaves_no_worker(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    workers = [os.pidfd_open(pid) for pid in one.workers()]
    control.stop(one.sidestep.socket)
    poller = select.poll()
    for pidfd in workers:
        poller.register(pidfd, select.POLLIN)
    ended = poller.poll(0)
    for pidfd in workers:
        os.close(pidfd)
    assert len(ended) == WORKERS
    client.kill()
