"""The provider as a process: started, found, stopped, killed, started twice."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from common import PATIENCE_S, eventually, forked

from sidestep import config, limits
from sidestep.errors import Misuse, Unavailable
from sidestep.provider import control
from sidestep.provider.rundir import AlreadyRunning, RunDir, lock_path, log_path
from sidestep.provider.server import Watchdog
from sidestep.settings import PromoteAfter, ProviderSettings, parse_ring_size
from sidestep.testing import Sidestep

LINGER_S = 100  # of which a busy machine uses up no half


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[ProviderSettings]:
    """Of a provider in the background; whatever serves there is ended after the test."""
    made = ProviderSettings(tmp_path / "private" / "provider", idle_exit_s=60)
    yield made
    if config.answers(made.socket):
        control.stop(made.socket)


def pid_of(settings: ProviderSettings) -> int:
    with control.ControlConnection(settings.socket) as connection:
        return int(connection.status()["pid"])


def wait_for_end(pid: int) -> None:
    """Waits until a process that is not our child has gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([pidfd], [], [], PATIENCE_S)[0], f"{pid} still runs"
    os.close(pidfd)


def test_start_returns_once_it_listens_and_stop_once_it_has_gone(settings: ProviderSettings) -> None:
    assert control.start(settings)
    pid = pid_of(settings)
    assert not control.start(settings)
    assert pid_of(settings) == pid
    assert control.stop(settings.socket) == pid
    wait_for_end(pid)
    assert not config.answers(settings.socket)
    assert not settings.socket.exists()


def test_it_is_a_daemon_without_ties_to_its_starter(settings: ProviderSettings) -> None:
    control.start(settings)
    pid = pid_of(settings)
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    session, tty = int(stat[3]), int(stat[4])
    assert tty == 0
    assert session not in (os.getsid(0), pid)  # a session of its own, which it does not lead
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    targets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}  # noqa: PTH115 - some are no paths
    assert not any("pipe:" in target for target in targets)
    assert str(log_path(settings.socket)) in targets
    assert b"LD_PRELOAD" not in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize(
    ("program", "what"),
    [("exec sleep 60", "does not listen after 0.3 s"), ("exit 0", "did not start, and ended without a word")],
)
def test_one_that_does_not_come_up_is_told_apart_from_one_that_ended(
    settings: ProviderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, what: str
) -> None:
    """Nothing of it is left."""
    (python := tmp_path / "python").write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\n{program}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    if "after" in what:
        monkeypatch.setattr(limits, "START_TIMEOUT_S", 0.3)
    with pytest.raises(Unavailable, match=what):
        control.start(settings)
    if (tmp_path / "pid").exists():
        assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_of_many_started_at_once_one_serves(settings: ProviderSettings) -> None:
    code = "import sys; from sidestep.provider.control import start; from sidestep.settings import ProviderSettings\n"
    code += "from pathlib import Path; print(start(ProviderSettings(Path(sys.argv[1]))))"
    starters = [
        subprocess.Popen([sys.executable, "-c", code, settings.socket], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    answers = [starter.communicate(timeout=PATIENCE_S)[0].strip() for starter in starters]
    assert sorted(answers) == ["False"] * 5 + ["True"]
    assert config.answers(settings.socket)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_after_a_killed_one_the_next_takes_its_place(settings: ProviderSettings, number: signal.Signals) -> None:
    control.start(settings)
    first = pid_of(settings)
    os.kill(first, number)
    wait_for_end(first)
    assert settings.socket.exists() == (number is signal.SIGKILL)
    assert not config.answers(settings.socket)
    assert control.start(settings)
    assert pid_of(settings) != first


def test_one_that_ends_leaves_the_name_of_its_successor_alone(settings: ProviderSettings) -> None:
    control.start(settings)
    first = pid_of(settings)
    lock_path(settings.socket).unlink()  # somebody tidied up, and with the lock gone a second one can start
    settings.socket.unlink()
    assert control.start(settings)
    second = pid_of(settings)
    assert second != first
    os.kill(first, signal.SIGTERM)
    wait_for_end(first)
    assert pid_of(settings) == second


def test_it_leaves_after_an_idle_time(tmp_path: Path) -> None:
    settings = ProviderSettings(tmp_path / "provider", idle_exit_s=0.2)
    tmp_path.chmod(0o700)
    control.start(settings)
    eventually(lambda: not settings.socket.exists())


def test_it_sleeps_once_it_has_nothing_to_do(settings: ProviderSettings) -> None:
    assert control.start(settings)
    status = Path(f"/proc/{pid_of(settings)}/status")
    waits = []

    def sleeps() -> bool:
        waits.append(int(status.read_text().split("voluntary_ctxt_switches:")[1].split()[0]))
        time.sleep(5 * limits.HELD_UP_S)  # in which a timer that goes on would wake it five times
        return waits[-2:-1] == waits[-1:]

    eventually(sleeps)


@pytest.fixture
def lingering() -> Iterator[list[socket.socket]]:
    """Four, of which each close() waits: the peer reads nothing of what was sent."""
    with ExitStack() as stack:
        found = []
        for _ in range(4):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                sock = socket.create_connection(listener.getsockname())
                stack.enter_context(listener.accept()[0])
            sock.setblocking(False)
            with suppress(BlockingIOError):
                while sock.send(bytes(1 << 20)):
                    pass
            sock.setblocking(True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
            found.append(sock)
        yield found


def test_who_closes_a_socket_that_lingers_is_not_held_up_however_often(lingering: list[socket.socket]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    watchdog = Watchdog()
    watchdog.take_signal()
    try:
        for number, sock in enumerate(lingering):
            with watchdog:
                began = time.monotonic()
                sock.close()
                assert time.monotonic() - began < LINGER_S / 2
            if number == 2:  # it stops, and is set anew for the last
                eventually(lambda: signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0))
    finally:
        watchdog.close()
        signal.signal(signal.SIGALRM, before)


def connected(settings: ProviderSettings) -> control.ControlConnection:
    """A client of a provider that has not left yet; on a busy machine the first may be too late for its idle time."""
    while True:
        with suppress(Unavailable):
            control.start(settings)
            connection = control.ControlConnection(settings.socket)
            connection.status()
            return connection


def test_a_client_keeps_it_from_leaving(tmp_path: Path) -> None:
    settings = ProviderSettings(tmp_path / "private" / "provider", idle_exit_s=1.0)
    with connected(settings) as connection:
        eventually(lambda: connection.status()["uptime_s"] > 2.0)
    eventually(lambda: not settings.socket.exists())


def test_settings_reach_the_process(tmp_path: Path) -> None:
    settings = ProviderSettings(tmp_path / "private" / "provider", PromoteAfter(3, 77), 8192, 0.5, 60, 123456)
    control.start(settings)
    with control.ControlConnection(settings.socket) as connection:
        status = connection.status()
    control.stop(settings.socket)
    assert (status["promote_after"], status["ring_size"]) == ("3:77", 8192)
    assert (status["offer_expiry_s"], status["idle_exit_s"], status["budget_bytes"]) == (0.5, 60, 123456)


def test_a_place_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(Unavailable, match="mode 0700"):
        control.start(ProviderSettings(tmp_path / "provider"))
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot make"):
        control.start(ProviderSettings(tmp_path / "file" / "provider"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else's")
def test_somebody_elses_place_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)
    with pytest.raises(Unavailable, match="owned by uid"):
        control.start(ProviderSettings(place / "provider"))


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    victim = tmp_path / "victim"
    lock_path(tmp_path / "provider").symlink_to(victim)
    with pytest.raises(Unavailable, match="cannot open"):
        RunDir.take(tmp_path / "provider")
    assert not victim.exists()


def test_a_place_is_taken_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    place = RunDir.take(tmp_path / "provider")
    with pytest.raises(AlreadyRunning):
        RunDir.take(tmp_path / "provider")
    place.leave()
    RunDir.take(tmp_path / "provider").leave()
    assert not (tmp_path / "provider").exists()


def test_the_socket_is_the_users_own(settings: ProviderSettings) -> None:
    control.start(settings)
    assert settings.socket.stat().st_mode & 0o777 == 0o600
    assert settings.socket.parent.stat().st_mode & 0o777 == 0o700
    assert log_path(settings.socket).stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_turned_away() -> None:
    with Sidestep() as private:
        for path in (private.socket, *private.socket.parents[:2]):  # even if the modes were opened by mistake
            path.chmod(0o777 if path == private.socket else 0o755)

        def stranger() -> int:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                return sock.connect_ex(os.fspath(private.socket)) or len(sock.recv(100))

        assert os.waitpid(forked(stranger), 0)[1] == 0
        assert private.status()["counters"]["client_dropped{credentials}"] == 1


# ---- values that users give ----


@pytest.mark.parametrize(
    ("text", "calls", "payload_len"), [("0", 0, 2097152), ("8", 8, 2097152), ("5:100", 5, 100), ("0:0", 0, 0)]
)
def test_promote_after_is_read(text: str, calls: int, payload_len: int) -> None:
    assert PromoteAfter.parse(text) == PromoteAfter(calls, payload_len)
    assert PromoteAfter.parse(str(PromoteAfter.parse(text))) == PromoteAfter(calls, payload_len)


@pytest.mark.parametrize("text", ["", "x", "-1", "1:", ":1", "1:2:3", "1.5", "٣", "4194304", "8:9223372036854775808"])
def test_a_wrong_promote_after_is_refused(text: str) -> None:
    with pytest.raises(Misuse):
        PromoteAfter.parse(text)


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("256K", 262144), ("64m", 64 << 20)])
def test_a_ring_size_is_read(text: str, size: int) -> None:
    assert parse_ring_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "2048", "5000", "128M", "-4096", "4096.0", "0x1000"])
def test_a_wrong_ring_size_is_refused(text: str) -> None:
    with pytest.raises(Misuse):
        parse_ring_size(text)


def test_a_socket_path_too_long_is_refused() -> None:
    with pytest.raises(Misuse, match="too long"):
        config.socket_path("/" + "x" * 200)


def test_where_the_socket_is_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(config.ENV_SOCKET, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert config.socket_path() == tmp_path / "sidestep" / "provider"
    monkeypatch.setenv(config.ENV_SOCKET, str(tmp_path / "other"))
    assert config.socket_path() == tmp_path / "other"
    assert config.socket_path(tmp_path / "given") == tmp_path / "given"
