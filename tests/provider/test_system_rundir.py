"""Where the system-wide provider is, and what is handed over to it."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from common import forked

from sidestep import config
from sidestep.errors import Unavailable
from sidestep.native import defaults
from sidestep.provider.rundir import RunDir, lock_path, passed_listener


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A system-wide socket at which somebody listens, as this machine's would be."""
    monkeypatch.delenv(config.ENV_SOCKET, raising=False)
    directory = tmp_path / "run"
    directory.mkdir(mode=0o755)
    path = directory / "provider"
    monkeypatch.setattr(defaults, "SYSTEM_SOCKET", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        yield path


def test_the_system_wide_provider_is_found(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert config.socket_path() == place
    assert config.socket_path(tmp_path / "given") == tmp_path / "given"
    monkeypatch.setenv(config.ENV_SOCKET, str(tmp_path / "asked"))
    assert config.socket_path() == tmp_path / "asked"


def test_a_socket_that_others_could_have_put_there_is_not_used(place: Path) -> None:
    place.parent.chmod(0o777)
    assert config.socket_path() == config.runtime_dir() / "provider"
    place.parent.chmod(0o755)
    assert config.socket_path() == place


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_socket_of_another_user_is_not_used(place: Path, closing: ExitStack) -> None:
    """But of whom root gave the directory to."""
    place.unlink()
    other = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    other.bind(os.fspath(place))
    os.seteuid(12345)
    try:
        other.listen()
    finally:
        os.seteuid(0)
    assert config.socket_path() == config.runtime_dir() / "provider"
    os.chown(place.parent, 12345, 12345)
    assert config.socket_path() == place


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else's")
def test_where_all_can_make_things_a_taken_place_is_left_to_who_took_it(tmp_path: Path) -> None:
    usual = config.shared_place(tmp_path)
    usual.mkdir(mode=0o700)
    assert config.shared_place(tmp_path) == usual
    os.chown(usual, 12345, 12345)
    first, second = config.shared_place(tmp_path), config.shared_place(tmp_path)
    assert first != second  # nobody can guess it
    config.make_private_dir(second)
    assert config.shared_place(tmp_path) == second  # but oneself finds it again
    os.chown(second, 12345, 12345)
    assert config.shared_place(tmp_path) not in (usual, second)


def test_a_thing_of_ones_own_that_is_no_private_directory_does_not_take_the_place(tmp_path: Path) -> None:
    """Others may have put it there: a hard link to a file that they may write, or a directory open to all."""
    usual = config.shared_place(tmp_path)
    usual.touch()
    first = config.shared_place(tmp_path)
    assert first != usual
    first.mkdir(mode=0o755)
    second = config.shared_place(tmp_path)
    assert second not in (first, usual)
    config.make_private_dir(second)
    assert config.shared_place(tmp_path) == second


@pytest.mark.parametrize("mode", [0o1777, 0o770])
def test_a_runtime_directory_that_others_can_change_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert config.runtime_dir() == tmp_path / "sidestep"
    tmp_path.chmod(mode)
    assert not config.runtime_dir().is_relative_to(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert not config.runtime_dir().is_relative_to(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else's")
def test_another_users_runtime_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sudo and su may leave it in the environment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    os.chown(tmp_path, 12345, 12345)
    assert not config.runtime_dir().is_relative_to(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make mounts, and a directory of somebody else's")
def test_a_provider_has_a_place_without_session_home_and_a_root_to_write_to() -> None:
    """And where the name that is left was taken by another user. Whoever comes next finds the same provider."""
    script = (
        "mount -t tmpfs none /run && mount -t tmpfs none /dev/shm && chmod 1777 /dev/shm && mkdir /dev/shm/sidestep-0"
        " && chown 12345 /dev/shm/sidestep-0 && mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp"
        ' && "$@" provider start --json && "$@" provider start --json && "$@" run -- sh -c \'echo "$SIDESTEP_SOCKET"\''
        ' && "$@" provider stop'
    )
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "sidestep"]
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    found = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=90, check=False, cwd="/")
    assert found.returncode == 0, found.stderr
    first, second, told = found.stdout.splitlines()
    one, other = json.loads(first), json.loads(second)
    assert (one["started"], other["started"]) == (True, False)
    assert one["pid"] == other["pid"]
    assert one["socket"] == other["socket"] == told
    assert Path(told).parent.name.startswith("sidestep-0-")
    assert Path(told).parent.parent == Path("/dev/shm")


def test_a_socket_that_nobody_answers_is_not_used(place: Path) -> None:
    place.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(os.fspath(place))
    assert config.socket_path() == config.runtime_dir() / "provider"


def test_a_file_in_its_place_is_not_used(place: Path) -> None:
    place.unlink()
    place.touch()
    assert config.socket_path() == config.runtime_dir() / "provider"


def test_a_directory_that_others_can_change_is_no_place(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    directory.chmod(0o775)
    with pytest.raises(Unavailable, match="only root or uid"):
        RunDir.take(directory / "provider", public=True)


def test_a_public_socket_is_for_all(tmp_path: Path) -> None:
    path = tmp_path / "run" / "provider"
    taken = RunDir.take(path, public=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o022 == 0
    assert stat.S_IMODE(lock_path(path).stat().st_mode) == 0o600
    taken.leave()
    assert not path.exists()


def with_descriptor_3(sock: socket.socket, judge: Callable[[dict[str, str]], None]) -> None:
    """Runs `judge` as the service manager would run a provider: in a child, as our own descriptor 3 is the workers'."""

    def child() -> int:
        os.dup2(sock.fileno(), 3)
        judge({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "provider", "HOME": "/"})
        return 0

    with sock:
        assert os.waitpid(forked(child), 0)[1] == 0, "see standard error"


def test_the_socket_handed_over_is_taken_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "provider"

    def judge(environment: dict[str, str]) -> None:
        found = passed_listener(environment)
        assert found is not None
        assert environment == {"HOME": "/"}
        assert not os.get_inheritable(found.fileno())
        place = RunDir.inherit(found)
        assert place.path == path
        place.leave()

    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(os.fspath(path))
    made.listen()
    with_descriptor_3(made, judge)
    assert path.exists()  # the service manager's


@pytest.mark.parametrize(
    ("family", "kind"), [(socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_SEQPACKET)]
)
def test_a_socket_of_another_kind_is_refused(family: socket.AddressFamily, kind: socket.SocketKind) -> None:
    def judge(environment: dict[str, str]) -> None:
        with pytest.raises(Unavailable, match="ListenSequentialPacket"):
            passed_listener(environment)

    with_descriptor_3(socket.socket(family, kind), judge)  # the second is right but for listening


def test_what_is_for_others_is_left() -> None:
    assert passed_listener({}) is None
    assert passed_listener({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) is None
    with pytest.raises(Unavailable, match="not one"):
        passed_listener({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"})
