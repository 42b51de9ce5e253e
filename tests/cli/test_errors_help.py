"""What a user gets who mistypes, asks for what is not there, or lacks a library: the sentence that helps."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from common import forked, slot
from shim_client import ShimClient

import sidestep.cli
from sidestep.cli.group import cli
from sidestep.errors import SidestepError
from sidestep.native import layout
from sidestep.observe.sockets import hidden_users
from sidestep.testing import Sidestep

ROOT = Path(layout.__file__).parents[3]


def said(*args: str | Path) -> tuple[str, str]:
    """The error of `sidestep ARGS` and its hint, as `sidestep.cli.main` prints them."""
    result: Result = CliRunner().invoke(cli, [*map(str, args)], prog_name="sidestep")
    error = result.exception
    return (error.message, error.remedy) if isinstance(error, SidestepError) else (result.stderr, "")


# ---- commands and arguments ----


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("explan",), "'explan': did you mean explain?"),
        (("modules",), "'modules': did you mean provider modules?"),
        (("status",), "'status': did you mean provider status?"),
        (("xyzzy",), "'xyzzy': sidestep --help lists all"),
        (("provider", "sart"), "'sart': did you mean start?"),
        (("policy", "tets"), "'tets': did you mean test?"),
        (("service", "enabel"), "'enabel': did you mean enable?"),
        (("rdma", "lst"), "'lst': did you mean list?"),
        (("sdp", "decod"), "'decod': did you mean decode?"),
    ],
)
def test_a_command_that_is_not_there_names_those_that_are_close(words: tuple[str, ...], meant: str) -> None:
    message, _ = said(*words)
    assert "Usage: sidestep" in message
    assert f"there is no command {meant}" in message


@pytest.mark.parametrize("place", [":70000", "127.0.0.1:65536", ":999999999999"])
def test_a_port_that_is_none_is_said_to_be(place: str, tmp_path: Path) -> None:
    for words in (("explain", place), ("demote", place)):
        message, hint = said(*words, f"--socket={tmp_path / 'provider'}")
        assert f"{place.rpartition(':')[2]} is no port" in message or f"{place!r} is not ADDRESS:PORT" in message
        assert hint or "the largest is 65535" in message


def test_a_program_that_does_not_run_is_named(tmp_path: Path) -> None:
    nowhere = f"--socket={tmp_path / 'provider'}"
    message, hint = said("explain", "no-such-program-anywhere", nowhere)
    assert message == "no program named no-such-program-anywhere runs here"
    assert hint == "start it with 'sidestep run -- no-such-program-anywhere'"
    name = Path("/proc/self/comm").read_text().strip()
    message, hint = said("explain", f"{name}x", nowhere)
    assert message == f"no program named {name}x runs here"
    assert name in hint


def test_a_program_without_connections_is_told_to_run(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as program:
        comm = Path(f"/proc/{program.pid}/comm")
        while comm.read_text().strip() != "sleep":
            os.sched_yield()
        message, hint = said("explain", "sleep", f"--socket={tmp_path / 'provider'}")
        program.kill()
    assert message == "sleep runs, and has no TCP connection or listening socket"
    assert "psql -h 127.0.0.1" in hint


def test_of_sockets_that_the_kernel_hides_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestep.cli.explain.program_names", lambda: {"postgres"})
    monkeypatch.setattr("sidestep.cli.explain.hidden_users", lambda _: ["postgres"])
    message, hint = said("explain", "postgres", f"--socket={tmp_path / 'provider'}")
    assert message == "postgres runs as postgres: the kernel hides its sockets from you"
    assert "'sidestep explain :5432'" in hint


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_users_of_hidden_programs_are_named() -> None:
    with subprocess.Popen(["sleep", "100"]) as program:
        while Path(f"/proc/{program.pid}/comm").read_text().strip() != "sleep":
            os.sched_yield()
        assert hidden_users("sleep") == []
        read, write = os.pipe()

        def other_user() -> int:
            os.setuid(12345)
            os.write(write, ",".join(hidden_users("sleep")).encode())
            return 0

        assert os.waitpid(forked(other_user), 0)[1] == 0
        assert os.read(read, 100) == b"root"
        program.kill()


def test_a_program_that_is_not_there_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "redis-server").touch(mode=0o755)
    assert said("check", "redis-sever") == (
        "redis-sever is in no directory of PATH", "did you mean redis-server?",
    )  # fmt: skip
    assert said("check", "NOTHERE") == ("NOTHERE is in no directory of PATH", "install it, or give its path")
    assert said("check", tmp_path / "redis-srver") == (
        f"{tmp_path}/redis-srver does not exist", "did you mean redis-server?",
    )  # fmt: skip
    (tmp_path / "data").touch(mode=0o644)
    assert said("check", tmp_path / "data")[0] == f"{tmp_path}/data is not executable"
    assert said("check", tmp_path)[0] == f"{tmp_path} is a directory"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert said("check", "redis-server")[1] == "give its path: ./redis-server"


@pytest.mark.parametrize("command", ["ss", "explain", "top", "demote"])
def test_before_the_first_run_the_hint_begins_it(command: str, tmp_path: Path) -> None:
    more = {"top": ["--once"], "demote": ["--all"]}.get(command, [])
    message, hint = said(command, *more, f"--socket={tmp_path / 'provider'}")
    assert message == f"no provider answers at {tmp_path / 'provider'}: none runs there"
    assert "'sidestep run -- PROGRAM'" in hint


@pytest.fixture
def connections(sidestep: Sidestep) -> Iterator[Sidestep]:
    """A provider with two connections, of which nobody follows orders."""
    with ShimClient(sidestep.socket) as client:
        client.hello()
        client.write_arena([slot(1000, segment_id=b"1" * 16), slot(2000, segment_id=b"2" * 16)])
        yield sidestep


@pytest.mark.parametrize("command", ["demote", "promote"])
def test_connections_are_named_by_a_port_as_for_explain(connections: Sidestep, command: str) -> None:
    words = [command, ":1000", "--timeout=0", f"--socket={connections.socket}"]
    shown = CliRunner().invoke(cli, words).stdout
    assert "127.0.0.1:1000" in shown
    assert "127.0.0.1:2000" not in shown
    both = CliRunner().invoke(cli, [command, ":80", *words[2:]]).stdout
    assert "127.0.0.1:1000" in both
    assert "127.0.0.1:2000" in both
    message, hint = said(command, ":3", f"--socket={connections.socket}")
    assert (message, hint) == ("no connection under sidestep fits", "'sidestep ss' lists all")


# ---- libraries that come with extras ----


def test_hints_bring_the_libraries_that_the_extras_name() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needs = {need for name in ("top", "metrics", "capture") for need in extras[name]}
    assert set(sidestep.cli.EXTRAS.values()) == needs


@pytest.mark.parametrize(
    ("library", "debian", "remedy"),
    [
        ("pcapng", False, f"{sys.executable} -m pip install 'python-pcapng>=2.1.1,<3'"),
        ("textual", False, f"{sys.executable} -m pip install 'textual>=1'"),
        ("prometheus_client", True, "apt install python3-prometheus-client"),
        ("pcapng", True, "in a virtual environment, and there: pip install 'python-pcapng>=2.1.1,<3'"),
    ],
)
def test_a_missing_library_is_told_with_its_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: str, debian: bool, remedy: str
) -> None:
    def fails(**_: Any) -> None:
        raise ModuleNotFoundError(library, name=library)

    monkeypatch.setattr("sidestep.cli.group.cli", fails)
    monkeypatch.setattr(sys, "argv", ["sidestep", "top"])
    if debian:
        monkeypatch.setattr(sidestep.cli, "__file__", f"{sidestep.cli.DEBIAN_MODULES}dist-packages/sidestep/cli/x.py")
    with pytest.raises(SystemExit) as ended:
        sidestep.cli.main()
    error, hint = capsys.readouterr().err.splitlines()
    assert (ended.value.code, error) == (2, f"sidestep: {library} is not installed for {sys.executable}")
    assert hint.startswith("hint: ")
    assert hint.endswith(remedy)


def test_a_capture_leaves_the_file_alone_until_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = tmp_path / "kept.pcapng"
    kept.write_text("of yesterday")
    kept.chmod(0o600)
    words = ["capture", "-w", str(kept), "--duration=0"]
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "sidestep.observe.capture.pcapng", raising=False)
        patch.setitem(sys.modules, "pcapng", None)
        assert isinstance(CliRunner().invoke(cli, words).exception, ImportError)
    assert kept.read_text() == "of yesterday"
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert kept.read_bytes().startswith(b"\n\r\r\n")  # the first block of pcapng
    assert kept.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [kept]
    assert CliRunner().invoke(cli, ["capture", "-w", "/dev/null", "--duration=0"]).exit_code == 0
    assert said("capture", "-w", tmp_path / "nowhere/file", "--duration=0")[0].endswith("No such file or directory")


# ---- examples ----


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize("words", [[], ["server"], ["server", "http"]], ids=len)
def test_an_example_without_arguments_says_how_it_is_used(
    monkeypatch: pytest.MonkeyPatch, example: Path, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(example), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(example), run_name="__main__")
    assert re.match(rf"usage: {example.name} (server|serve) PORT \| (client|talk) PORT", str(ended.value.code))
