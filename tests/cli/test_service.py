"""`sidestep service`, in a directory of its own instead of this machine's. With a real systemd: tests/fresh."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from common import PATIENCE_S, run_command

from sidestep.installation import native_library

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system that has one service."""
    place = tmp_path / "root/usr/lib/systemd/system"
    place.mkdir(parents=True)
    (place / "it.service").write_text("[Service]\nExecStart=/usr/bin/true\nNoExecPaths=/\n")
    return tmp_path / "root"


@pytest.fixture
def service(tmp_path: Path, root: Path) -> Run:
    """Runs `sidestep service` in that system."""

    def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_command(tmp_path, "service", command, "--root", str(root), *arguments)

    return run


def test_a_drop_in_is_written_listed_and_taken_away(service: Run, root: Path) -> None:
    path = root / "etc/systemd/system/it.service.d/sidestep.conf"
    enabled = service("enable", "it")
    assert (enabled.returncode, enabled.stdout) == (0, "")
    assert f"it.service: wrote {path}" in enabled.stderr
    assert "its sandbox lets through ExecPaths=" in enabled.stderr
    assert f'Environment="LD_PRELOAD={native_library()}"' in path.read_text()
    listed = service("list", "--json")
    assert json.loads(listed.stdout) == {
        "schema": "sidestep.service.list/1",
        "services": [{"unit": "it.service", "file": str(path), "state": "library missing"}],
    }
    disabled = service("disable", "it.service")
    assert f"it.service: removed {path}" in disabled.stderr
    assert not path.parent.exists()
    assert service("disable", "it").stderr == "it.service has no drop-in\n"
    assert service("list").stdout == ""


def test_a_library_that_is_there_is_said_to_be(service: Run, root: Path) -> None:
    service("enable", "it")
    (inside := root / str(native_library()).lstrip("/")).parent.mkdir(parents=True)
    inside.touch()
    assert "it.service  enabled" in service("list").stdout


def test_a_dry_run_shows_the_file_and_changes_nothing(service: Run, root: Path) -> None:
    before = sorted(root.rglob("*"))
    found = service("enable", "it", "--dry-run")
    assert found.stdout.startswith("# Made by 'sidestep service enable'")
    assert f"would be {root}/etc/systemd/system/it.service.d/sidestep.conf" in found.stderr
    assert sorted(root.rglob("*")) == before


def test_other_drop_ins_stay(service: Run, root: Path) -> None:
    service("enable", "it")
    (other := root / "etc/systemd/system/it.service.d/other.conf").touch()
    service("disable", "it")
    assert list(other.parent.iterdir()) == [other]


def test_a_drop_in_can_be_taken_away_after_its_service_has_gone(service: Run, root: Path) -> None:
    service("enable", "it")
    (root / "usr/lib/systemd/system/it.service").unlink()
    assert "it.service: removed" in service("disable", "it").stderr


def test_no_such_service(service: Run) -> None:
    for command in ("enable", "disable"):
        found = service(command, "its")
        assert found.returncode == 1
        assert "there is no service its.service" in found.stderr
        assert "did you mean it?" in found.stderr


def test_a_unit_that_stands_for_others_is_not_enabled_but_they_are_named(service: Run, root: Path) -> None:
    """As Debian has PostgreSQL: a unit that runs nothing, a template, and an instance for each cluster."""
    place = root / "usr/lib/systemd/system"
    (place / "postgresql.service").write_text(
        "[Service]\nType=oneshot\nExecStart=/bin/true\nExecReload=/bin/true\nRemainAfterExit=on\n"
    )
    found = service("enable", "postgresql")
    assert (found.returncode, found.stdout) == (1, "")
    assert "runs no program but 'true': it stands for other units\nhint: name one of them: " in found.stderr
    (place / "postgresql@.service").write_text("[Service]\nExecStart=/usr/bin/true %i\n")
    (cluster := root / "etc/postgresql/15/main").mkdir(parents=True)
    (cluster / "start.conf").touch()
    (wants := root / "run/systemd/generator/postgresql.service.wants").mkdir(parents=True)
    for name in ("postgresql@15-main.service", "postgresql@13-old.service"):
        (wants / name).symlink_to("/usr/lib/systemd/system/postgresql@.service")
    found = service("enable", "postgresql")
    assert found.returncode == 1
    assert "it stands for other units: postgresql@13-old.service, postgresql@15-main.service" in found.stderr
    assert "sidestep service enable postgresql@15-main\n" in found.stderr
    assert not (root / "etc/systemd/system").exists()
    assert service("enable", "postgresql@15-main").returncode == 0
    assert (root / "etc/systemd/system/postgresql@15-main.service.d/sidestep.conf").exists()


def test_services_of_ones_own(tmp_path: Path) -> None:
    """The user's place, which takes no root; no provider and no systemd there: both are told."""
    config, runtime = tmp_path / "config", tmp_path / "runtime"
    (place := config / "systemd/user").mkdir(parents=True)
    runtime.mkdir(mode=0o700)
    (place / "it.service").write_text("[Service]\nExecStart=/usr/bin/true\n")
    command = partial(run_command, runtime, "service")
    found = command("enable", "it", "--user", XDG_CONFIG_HOME=str(config))
    assert found.returncode == 0
    assert "Start your provider: sidestep provider start --idle-exit 0" in found.stderr
    assert "systemd does not run here" in found.stderr
    text = (place / "it.service.d/sidestep.conf").read_text()
    assert f'"SIDESTEP_SOCKET={runtime}/sidestep/provider"' in text
    assert "sidestep service disable --user it" in text


def test_of_a_system_without_a_provider_the_command_that_starts_one_is_shown() -> None:
    """In place of this machine's /etc and /run are empty ones."""
    script = (
        "mount -t tmpfs none /etc && mount -t tmpfs none /run && mkdir -p /etc/systemd/system && "
        "echo '[Service]\nExecStart=/usr/bin/true' >/etc/systemd/system/it.service && "
        f"exec '{sys.executable}' -m sidestep service enable it"
    )
    argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert found.returncode == 0, found.stderr
    assert "no provider answers at /run/sidestep/provider; until then the service stays on TCP. Start " in found.stderr
    assert re.search(
        r"as root: (sidestep provider start --system|systemctl enable --now sidestep\.socket)", found.stderr
    )


def test_who_may_not_write_there_is_told_to_use_sudo(root: Path) -> None:
    (root / "etc").mkdir(mode=0o555)
    setpriv = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []  # else root may
    command = [*setpriv, sys.executable, "-m", "sidestep", "service", "enable", "--root", str(root), "it"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1
    assert "cannot be changed: Permission denied\nhint: use sudo" in found.stderr
