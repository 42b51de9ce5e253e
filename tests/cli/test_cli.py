"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from common import PATIENCE_S, run_command, slot
from foreign_programs import put_out_of_reach
from shim_client import ShimClient

import sidestep as package
from sidestep import config, limits
from sidestep.cli import COMMANDS, run_help
from sidestep.cli.group import cli
from sidestep.cli.run import run
from sidestep.errors import Unavailable
from sidestep.native.layout import REASON_TEXT, Reason
from sidestep.provider import control
from sidestep.testing import Sidestep

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A runtime directory of its own; a provider that is started there is stopped after the test."""
    yield tmp_path
    path = tmp_path / "sidestep" / "provider"
    if config.answers(path):
        control.stop(path)


@pytest.fixture
def command(home: Path) -> Run:
    """Runs `sidestep ARGS` in that runtime directory."""
    return partial(run_command, home)


# ---- run ----

SHOW = 'echo "$LD_PRELOAD|$SIDESTEP_SOCKET|$SIDESTEP_PROMOTE_AFTER|$SIDESTEP_RING_SIZE|$SIDESTEP_SPIN_US"'


def test_run_starts_a_provider_and_tells_the_shim(command: Run, home: Path) -> None:
    found = command("run", "--promote-after", "3:99", "--ring-size=8K", "--spin-us=0", "sh", "-c", SHOW)
    library, socket, promote_after, ring_size, spin_us = found.stdout.strip().split("|")
    assert library == str(package.native_library())
    assert socket == str(home / "sidestep" / "provider")
    assert (promote_after, ring_size, spin_us) == ("3:99", "8192", "0")
    assert found.stderr == ""
    assert config.answers(home / "sidestep" / "provider")


def test_a_run_below_a_run_starts_the_provider_that_has_gone_and_is_an_exec_else(command: Run) -> None:
    own = f"{sys.executable} -m sidestep"
    script = f"{own} run -- sh -c '{SHOW}'; {own} provider stop; {own} run -- sh -c '{SHOW}'; {own} provider status"
    found = command("run", "--spin-us=7", "sh", "-c", f"{SHOW}; {script}")
    first, below, again, status, *_ = found.stdout.splitlines()
    assert first == below == again
    assert first.endswith("|7")
    assert status.startswith("pid ")
    assert found.returncode == 0


def test_run_leaves_defaults_to_the_provider(command: Run) -> None:
    found = command("run", "--", "sh", "-c", SHOW)
    assert found.stdout.strip().endswith("|||")


def test_run_keeps_other_preloaded_libraries(command: Run) -> None:
    library = package.native_library()
    env = {"LD_PRELOAD": f"libm.so.6:{library}"}
    assert command("run", "sh", "-c", "echo $LD_PRELOAD", **env).stdout == f"libm.so.6 {library}\n"


@pytest.mark.parametrize("status", [0, 1, 77])
def test_run_ends_as_its_program_does(command: Run, status: int) -> None:
    assert command("run", "sh", "-c", f"exit {status}").returncode == status


def test_run_passes_options_of_the_program_on(command: Run) -> None:
    assert command("run", "echo", "--json", "-h", "--", "x").stdout == "--json -h -- x\n"


def test_run_tells_what_cannot_be_run(command: Run, tmp_path: Path) -> None:
    found = command("run", "no-such-program")
    assert (found.returncode, found.stderr) == (127, "sidestep: no-such-program is not found\n")
    plain = tmp_path / "plain"
    plain.write_text("not a program")
    found = command("run", plain)
    assert found.returncode == 126
    assert "cannot be executed" in found.stderr
    plain.chmod(0o755)
    found = command("run", plain)
    assert found.returncode == 126
    assert len(found.stderr.splitlines()) == 1
    assert f"sidestep run -- sh {plain}" in found.stderr
    plain.write_text("#!/no/such/shell\n")
    found = command("run", plain)
    assert found.returncode == 126
    assert found.stderr.startswith(f"sidestep: {plain} cannot be executed: its interpreter /no/such/shell is not found")
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize(("before", "ignored"), [("", 0), ("trap '' PIPE; ", 1 << (signal.SIGPIPE - 1))])
def test_a_program_ignores_the_signals_that_it_would_ignore(home: Path, before: str, ignored: int) -> None:
    """And not those that Python does."""
    line = f"{before}{shlex.quote(sys.executable)} -m sidestep run -- grep SigIgn /proc/self/status; true"
    env = os.environ | {"XDG_RUNTIME_DIR": str(home)}
    found = subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert int(found.stdout.split()[1], 16) & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)) == ignored


UNDER_A_FILTER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import sandbox
sched_setaffinity = {"x86_64": 203, "aarch64": 122}[os.uname().machine]
assert sandbox.put_under(sandbox.forbidding([sched_setaffinity])) == 0
os.execv(sys.executable, [sys.executable, "-m", "sidestep", "run", "--", "env"])
"""


def test_where_a_filter_kills_who_changes_its_cpus_the_shim_does_not(command: Run, home: Path) -> None:
    """As the unit of Debian's redis has it (SystemCallFilter=~@resources)."""
    assert f"{config.ENV_STAY}=" not in command("run", "env").stdout
    argv = [sys.executable, "-c", UNDER_A_FILTER, str(Path(__file__).parents[1] / "shim/programs")]
    env = os.environ | {"XDG_RUNTIME_DIR": str(home)}
    found = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert f"{config.ENV_STAY}=1" in found.stdout.splitlines()


def test_run_goes_on_over_tcp_without_a_provider(command: Run) -> None:
    found = command("run", "--socket=/proc/nowhere/provider", "echo", "done")
    assert (found.returncode, found.stdout) == (0, "done\n")
    assert len(found.stderr.splitlines()) == 1
    assert "plain TCP" in found.stderr
    refused = command("run", "--require", "--socket=/proc/nowhere/provider", "echo", "done")
    assert (refused.returncode, refused.stdout) == (125, "")
    assert refused.stderr.startswith("sidestep: echo is not started: ")
    assert command("run", "--require", "echo", "done").stdout == "done\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_users_provider_is_not_believed_and_that_is_said(tmp_path: Path) -> None:
    (place := tmp_path / "place").mkdir()
    path = place / "provider"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        other.bind(os.fspath(path))
        os.seteuid(12345)
        try:
            other.listen()
        finally:
            os.seteuid(0)

        def command(*argv: str) -> subprocess.CompletedProcess[str]:
            argv = (sys.executable, "-m", "sidestep", *argv)
            env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            env["SIDESTEP_SOCKET"] = str(path)
            return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)

        what = f"{path} is not believed to be a provider's: uid 12345 listens there, neither you nor root"
        ran = command("run", "echo", "done")
        assert (ran.stdout, ran.returncode) == ("done\n", 0)
        assert ran.stderr.startswith(f"sidestep: plain TCP for now: {what}; end it, or give a place")
        doctor = json.loads(command("doctor", "--json").stdout)["findings"]
        assert [(one["level"], one["text"]) for one in doctor if one["subject"] == "provider"] == [("fail", what)]
        assert what in command("explain", f":{server.getsockname()[1]}").stderr
        for command_line in ("ss", "top --once", "provider status", "provider stop", "provider start", "explain"):
            refused = command(*command_line.split())
            assert refused.returncode != 0
            assert what in refused.stderr
        other.setblocking(False)
        while True:  # who looked said nothing
            try:
                client, _ = other.accept()
            except BlockingIOError:
                break
            with client:
                assert client.recv(1) == b""


def on_terminal(home: Path, *args: str | Path) -> str:
    """What `sidestep ARGS` says on standard error if that is a terminal."""
    master, terminal = os.openpty()
    env = os.environ | {"XDG_RUNTIME_DIR": str(home), "XDG_CONFIG_HOME": str(home)}
    with open(master, "rb", buffering=0) as reader:
        with open(terminal, "wb", buffering=0) as writer:
            argv = [sys.executable, "-m", "sidestep", *args]
            subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, stderr=writer, timeout=60, check=True)
            os.write(terminal, b"\n--\n")
        said = b""
        while b"\n--" not in said.replace(b"\r", b""):
            said += reader.read(4096)
    return said.decode()


def test_run_tells_a_terminal_and_the_log_of_a_program_out_of_reach(command: Run, home: Path, tmp_path: Path) -> None:
    """A script that joins both streams of a program gets the program's own."""
    source = tmp_path / "static.c"
    source.write_text('#include <stdio.h>\nint main(void) { puts("ran"); return 0; }\n')
    subprocess.run(["cc", "-static", source, "-o", tmp_path / "static"], check=True)
    put_out_of_reach(tmp_path / "static")
    log = tmp_path / "log"
    found = command("run", tmp_path / "static", SIDESTEP_LOG=str(log))
    assert (found.stdout, found.stderr) == ("ran\n", "")
    assert "its system calls cannot be replaced" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "its system calls cannot be replaced" in on_terminal(home, "run", tmp_path / "static")
    assert "its system calls cannot be replaced" in command("check", tmp_path / "static").stdout
    refused = command("run", "--require", tmp_path / "static")
    assert (refused.returncode, refused.stdout) == (125, "")
    assert "its system calls cannot be replaced" in refused.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [("nowhere/log", "No such file or directory"), ("", "it is a directory"), ("file/log", "Not a direc")],
)
def test_a_log_that_cannot_be_written_is_told(command: Run, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    path = f"{tmp_path}/{name}"
    told = f"SIDESTEP_LOG={path} cannot be written: {why}"
    ran = command("run", "echo", "done", SIDESTEP_LOG=path)
    assert (ran.stdout, ran.returncode) == ("done\n", 0)
    assert ran.stderr.startswith(f"sidestep: {told}")
    assert len(ran.stderr.splitlines()) == 1
    for words in (("doctor",), ("check", "sh")):
        found = command(*words, SIDESTEP_LOG=path)
        assert found.returncode == 0
        assert told in found.stdout


def test_a_log_that_can_be_written_is_not_made_by_looking(command: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    findings = json.loads(command("doctor", "--json", SIDESTEP_LOG=str(log)).stdout)["findings"]
    assert [one["level"] for one in findings if one["subject"] == "log"] == ["ok"]
    assert not log.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts programs that become another user")
def test_run_tells_root_once_whom_its_own_provider_leaves_out(command: Run, home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for _ in range(2):
        assert command("run", "true", SIDESTEP_LOG=str(log)).stderr == ""
    (line,) = (line for line in log.read_text().splitlines() if "only programs of root are paired" in line)
    assert "sidestep provider start --system" in line or "systemctl enable --now sidestep.socket" in line
    command("provider", "stop")
    assert "only programs of root are paired" in on_terminal(home, "run", "true")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_doctor_tells_which_users_a_users_own_provider_leaves_out(command: Run) -> None:
    def users() -> dict[str, str]:
        findings = json.loads(command("doctor", "--json").stdout)["findings"]
        (found,) = (one for one in findings if one["subject"] == "users")
        return dict(found)

    assert "uid 12345" not in users()["text"]
    os.seteuid(12345)
    try:
        server = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(0)
    with server:
        found = users()
    assert found["level"] == "note"
    assert "root's own and leaves out servers of" in found["text"]
    assert "uid 12345" in found["text"]
    assert found["remedy"].startswith("one provider for all users, as root: s")


@pytest.mark.parametrize(
    "args",
    [
        ("run",),
        ("run", "--promote-after=x", "true"),
        ("run", "--ring-size=5", "true"),
        ("run", "--bogus", "true"),
        ("ss", "--state=odd"),
        ("provider",),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_code_2(command: Run, args: tuple[str, ...]) -> None:
    found = command(*args)
    assert found.returncode == 2
    assert found.stdout == ""
    assert "Usage" in found.stderr


# ---- provider ----


def test_provider_start_status_stop(command: Run) -> None:
    assert command("provider", "status").returncode == 1
    started = json.loads(command("provider", "start", "--promote-after=0", "--json").stdout)
    assert started["started"] is True
    assert json.loads(command("provider", "start", "--json").stdout) == started | {"started": False}
    status = json.loads(command("provider", "status", "--json").stdout)
    assert (status["pid"], status["promote_after"]) == (started["pid"], "0:2097152")
    assert f"{started['pid']}" in command("provider", "status").stdout
    stopped = command("provider", "stop", "--json")
    assert json.loads(stopped.stdout).items() >= {"pid": started["pid"], "stopped": True}.items()
    gone = command("provider", "stop")
    assert gone.returncode == 1
    assert "hint: start one" in gone.stderr


def test_start_with_settings_that_the_provider_that_runs_does_not_have_fails(command: Run) -> None:
    remote = "--remote=198.51.100.1"
    started = json.loads(command("provider", "start", "--promote-after=0", remote, "--json").stdout)
    for same in ((remote,), ("--promote-after=0", "--engine=on", remote), ("--proof=lookup",)):
        again = command("provider", "start", *same, "--json")
        assert (again.returncode, json.loads(again.stdout)) == (0, started | {"started": False})
    for changed, told in (
        (("--remote=198.51.100.2",), "--remote"),
        (("--promote-after=1", "--ring-size=64K", remote), "--promote-after and --ring-size"),
        ((remote, "--engine=off"), "--engine"),
        (("--system", f"--socket={started['socket']}"), "--system"),
    ):
        refused = command("provider", "start", *changed)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert f"provider {started['pid']} runs already at {started['socket']}, with another {told}\n" in refused.stderr
        assert "hint: 'sidestep provider stop' first" in refused.stderr


def test_a_provider_that_has_no_cpu_yet_is_waited_for_and_then_told_as_such(
    command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = json.loads(command("provider", "start", "--json").stdout)
    monkeypatch.setattr(limits, "START_TIMEOUT_S", 0.2)
    os.kill(started["pid"], signal.SIGSTOP)
    try:
        found = CliRunner().invoke(cli, ["provider", "start", f"--socket={started['socket']}"])
    finally:
        os.kill(started["pid"], signal.SIGCONT)
    assert isinstance(found.exception, Unavailable)
    assert "it may still be starting" in str(found.exception.remedy)


def test_other_hosts_may_be_named_one_by_one(command: Run) -> None:
    command("provider", "start", "--remote=198.51.100.1,198.51.100.2", "--remote", "2001:db8::/64")
    status = json.loads(command("provider", "status", "--json").stdout)
    assert status["remote"] == "198.51.100.1/32,198.51.100.2/32,2001:db8::/64"


def test_provider_in_the_foreground_serves_until_it_is_stopped(command: Run, home: Path) -> None:
    path = home / "sidestep" / "provider"
    argv = [sys.executable, "-m", "sidestep", "provider", "start", "--foreground", f"--socket={path}"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert f"provider {process.pid} serves" in process.stderr.readline()
        while not config.answers(path):
            assert process.poll() is None
        assert command("provider", "stop").returncode == 0
        assert process.wait(PATIENCE_S) == 0


def test_provider_in_the_foreground_speaks_json_and_only_once_it_serves(command: Run, home: Path) -> None:
    path = home / "sidestep" / "provider"
    args = ("provider", "start", "--foreground", "--idle-exit=20", f"--socket={path}")
    argv = [sys.executable, "-m", "sidestep", *args, "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert (told["pid"], told["started"], told["socket"]) == (process.pid, True, str(path))
        assert config.answers(path)
        second = command(*args)
        assert (second.returncode, second.stdout) == (1, "")
        assert "serves" not in second.stderr.replace("a provider serves", "")
        assert command("provider", "stop").returncode == 0
        assert process.stdout.read() == ""


def test_a_socket_needs_a_directory_of_its_own(command: Run, home: Path) -> None:
    home.chmod(0o755)
    found = command("provider", "start", f"--socket={home / 'provider'}")
    assert found.returncode == 1
    assert f"{home} is not a directory of mode 0700" in found.stderr
    assert "DIRECTORY/provider" in found.stderr
    assert "remove" not in found.stderr


# ---- ss ----


@pytest.fixture
def listed(sidestep: Sidestep) -> Iterator[Callable[..., Any]]:
    """`sidestep ss` of a provider with three connections."""
    with ShimClient(sidestep.socket) as client:
        client.hello()
        client.write_arena([
            slot(1000),
            slot(2000, state=5, reason=7, tx_ring_bytes=0, tx_ring_msgs=0, tx_tcp_bytes=1234567, tx_tcp_msgs=12),
            slot(3000, state=1, reason=1, family=10, local_addr=bytes(15) + b"\1", pid=1),
        ])  # fmt: skip

        def run(*args: str) -> subprocess.CompletedProcess[str]:
            argv = [sys.executable, "-m", "sidestep", "ss", f"--socket={sidestep.socket}", *args]
            return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)

        yield run


def test_ss_prints_one_json_document(listed: Callable[..., Any]) -> None:
    found = json.loads(listed("--json").stdout)["connections"]
    assert [one["state"] for one in found] == ["promoted", "pinned", "native"]
    assert [one["reason"] for one in found] == [None, "URGENT_DATA", "YOUNG"]
    assert found[1]["why"] == "the program uses urgent (out-of-band) data"
    assert found[2]["local"] == "[::1]:3000"
    assert set(found[0]) == {
        "pid", "program", "fd", "local", "remote", "role", "state", "reason", "why", "segment", "tx", "rx", "doorbells",
        "sleeps", "calls", "spins_won", "spins_lost", "age_s", "promoted_s", "born_ns",
        "promotions", "link", "container", "ended_s", "relay_over",
    }  # fmt: skip
    assert set(found[0]["tx"]) == {"tcp_bytes", "tcp_msgs", "ring_bytes", "ring_msgs", "ring_from"}


def test_ss_prints_a_table_with_the_reason_in_words(listed: Callable[..., Any]) -> None:
    lines = listed().stdout.splitlines()
    assert lines[0].split()[:5] == ["PROGRAM", "PID", "FD", "LOCAL", "REMOTE"]
    assert len(lines) == 4
    assert "promoted" in lines[1]
    assert "100/4 ring" in lines[1]
    assert "1.2M/12 tcp" in lines[2]
    assert "the program uses urgent (out-of-band) data" in lines[2]
    assert "\x1b" not in "".join(lines)


def test_ss_without_options_is_the_same(listed: Callable[..., Any], sidestep: Sidestep) -> None:
    env = os.environ | {config.ENV_SOCKET: str(sidestep.socket)}
    argv = [sys.executable, "-m", "sidestep", "ss"]
    found = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert (found.stdout, found.stderr) == (listed().stdout, "")


@pytest.mark.parametrize("args", [("--help",), ("ss",), ("ss", "--state=promoted")])
def test_output_that_cannot_be_written(listed: Callable[..., Any], sidestep: Sidestep, args: tuple[str, ...]) -> None:
    """A reader that has seen enough is no error to speak of; a full disk is one."""
    env = os.environ | {config.ENV_SOCKET: str(sidestep.socket)}
    argv = [sys.executable, "-m", "sidestep", *args]
    end, pipe = os.pipe()
    os.close(end)
    found = subprocess.run(argv, env=env, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(pipe)
    assert (found.returncode, found.stderr) == (1, "")
    with open("/dev/full", "w", encoding="ascii") as full:
        found = subprocess.run(argv, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert found.returncode == 1
    assert found.stderr.startswith("sidestep: not all of it could be written: No space left on device\n")


def test_ss_fits_the_terminal(sidestep: Sidestep) -> None:
    with ShimClient(sidestep.socket) as client:
        client.hello()
        client.write_arena([slot(1000, state=5, reason=13, tx_tcp_bytes=5, tx_tcp_msgs=1)])
        master, terminal = os.openpty()
        argv = [sys.executable, "-m", "sidestep", "ss", f"--socket={sidestep.socket}"]
        env = os.environ | {"COLUMNS": "80", "TERM": "xterm-256color"}
        for changes, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
            subprocess.run(argv, env=env | changes, stdin=terminal, stdout=terminal, timeout=60, check=True)
            shown = os.read(master, 65536).decode()
            assert ("\x1b[33mpinned" in shown) == coloured
            lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
            assert max(map(len, lines)) <= 80
            assert "-> 127.0.0.2:80" in lines[2]
            assert " ".join(" ".join(lines[3:]).split()) == REASON_TEXT[Reason.EPOLL_UNSUPPORTED]
        os.close(master)
        os.close(terminal)


@pytest.mark.parametrize(
    ("args", "ports"),
    [
        (("--state=promoted",), [1000]),
        (("--state=promoted", "--state=native"), [1000, 3000]),
        (("--port=2000",), [2000]),
        (("--port=80",), [1000, 2000, 3000]),
        (("--pid=1",), [3000]),
        (("--program=no-such-name",), []),
    ],
)
def test_ss_filters(listed: Callable[..., Any], args: tuple[str, ...], ports: list[int]) -> None:
    found = json.loads(listed("--json", *args).stdout)["connections"]
    assert [int(one["local"].rpartition(":")[2]) for one in found] == ports


@pytest.mark.parametrize("args", [("ss",), ("ss", "--json")])
def test_ss_without_a_provider_says_what_to_do(command: Run, args: tuple[str, ...]) -> None:
    found = command(*args)
    assert (found.returncode, found.stdout) == (1, "")
    assert "sidestep provider start" in found.stderr


# ---- doctor ----


def test_doctor_finds_this_machine_fit(command: Run, home: Path) -> None:
    found = command("doctor", "--json", "sh")
    findings = {one["subject"]: one for one in json.loads(found.stdout)["findings"]}
    assert {name: one for name, one in findings.items() if one["level"] == "fail"} == {}
    assert found.returncode == 0
    assert findings["sh"]["level"] == findings["sock_diag"]["level"] == findings["shim"]["level"] == "ok"
    assert list(home.iterdir()) == []  # looking changes nothing


def test_doctor_fails_for_a_program_out_of_reach(command: Run) -> None:
    found = command("doctor", "no-such-program")
    assert found.returncode == 1
    assert "no-such-program" in found.stdout


def test_doctor_names_a_missing_interpreter(command: Run, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    found = command("doctor", script)
    assert found.returncode == 1
    assert "its interpreter /no/such/shell is not found" in found.stdout


# ---- all ----


IMPORTING = (sys.executable, "-X", "importtime", "-m", "sidestep")
# All that `sidestep run -- CMD` loads of ours: a list that only falls.
RUN_LOADS = {
    "sidestep", "sidestep.cli", "sidestep.cli.start", "sidestep.errors", "sidestep.native", "sidestep.native.defaults",
    "sidestep.observe", "sidestep.observe.preload_check", "sidestep.places",
}  # fmt: skip
SLOW = {"click", "dataclasses", "inspect", "json", "pathlib", "selectors", "shutil", "socket", "subprocess", "typing"}


@pytest.mark.parametrize(
    ("args", "most", "slow"),
    [
        (("run", "--", "true"), len(RUN_LOADS), SLOW),
        (("run", "--", *IMPORTING, "run", "--", "true"), len(RUN_LOADS), SLOW),
        (("--help",), 3, SLOW),
        (("run", "--help"), 7, SLOW),
        (
            ("ss",),
            22,
            {"asyncio", "click", "dataclasses", "shutil", "ssl", "subprocess", "textwrap", "sidestep.rdma",
             "sidestep.remote", "sidestep.policy", "sidestep.settings"},
        ),
    ],
    ids=["run", "run_below_run", "help", "run_help", "ss"],
)  # fmt: skip
def test_what_is_started_often_loads_only_what_it_needs(
    sidestep: Sidestep, args: tuple[str, ...], most: int, slow: set[str]
) -> None:
    """At most so many of our modules; time differs from machine to machine."""
    argv = [sys.executable, "-m", "sidestep", *args] if IMPORTING[0] in args else [*IMPORTING, *args]
    env = os.environ | {config.ENV_SOCKET: str(sidestep.socket)}
    found = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in found.stderr.splitlines() if "import time:" in line}
    assert "sidestep.cli" in loaded
    assert loaded & slow == set()
    ours = sorted(name for name in loaded if name.partition(".")[0] == "sidestep")
    assert len(ours) <= most, ours
    assert args[:2] != ("run", "--") or set(ours) <= RUN_LOADS


def test_the_collector_stands_still_until_a_command_is_loaded(sidestep: Sidestep) -> None:
    look = "import atexit, gc; from sidestep.cli import main; atexit.register(lambda: print(gc.isenabled())); main()"
    env = os.environ | {config.ENV_SOCKET: str(sidestep.socket)}
    for words, runs in (("--help", "False"), ("ss", "True")):
        found = subprocess.run([sys.executable, "-c", look, words], env=env, capture_output=True, text=True, check=True)
        assert found.stdout.splitlines()[-1] == runs


def test_run_with_and_without_options_is_the_same(command: Run) -> None:
    for words in ("-- echo -h", "echo -h", "--spin-us=0 echo -h", "--spin-us=0 -- echo -h"):
        assert command("run", *words.split()).stdout == "-h\n"
    for words in ("", "--", "--no-such-option true"):
        found = command("run", *words.split())
        assert (found.returncode, found.stdout) == (2, "")
        assert "Usage: sidestep run [OPTIONS] [--] CMD [ARG]..." in found.stderr


def test_the_help_page_of_run_names_what_click_reads(command: Run) -> None:
    options = [option for option in run.get_params(click.Context(cli)) if isinstance(option, click.Option)]
    for option in options:
        if (name := ", ".join(option.opts)) != "--help":  # click's own, which the group names
            assert (option.metavar or "", option.help) == run_help.OPTIONS[name]
    assert len(options) == len(run_help.OPTIONS)
    page = command("run", "--help").stdout
    assert page == command("run", "-h").stdout == command("run", "--stats", "--help").stdout
    assert re.findall(r"(?m)^  (-[-a-z]+)", page.partition("Options:")[2]) == [
        re.split("[, ]", name)[0] for name in run_help.OPTIONS
    ]
    assert max(map(len, page.splitlines())) <= 80


def test_every_command_has_help(command: Run) -> None:
    listing = command("--help").stdout
    for option in cli.get_params(click.Context(cli)):
        assert re.search(rf"(?m)^  .*{option.opts[-1]} ", listing)
    for name in COMMANDS:
        assert f"\n  {name} " in listing
    for args in (*((name,) for name in COMMANDS), ("provider", "start")):
        assert command(*args, "--help").returncode == 0


def test_version(command: Run) -> None:
    assert command("--version").stdout == f"sidestep, version {package.__version__}\n"


def test_a_library_that_is_too_old_is_told(command: Run, tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").touch()
    found = command("metrics", PYTHONPATH=str(tmp_path))
    told = (
        f"sidestep: prometheus_client is too old for {sys.executable}\n"
        f"hint: {sys.executable} -m pip install 'prometheus-client>=0.20'\n"
    )
    assert (found.returncode, found.stderr) == (2, told)
