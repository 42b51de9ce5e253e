"""The units of the service manager, judged by its own tool, and against the code they start."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path

import needed

from sidestep import config

UNITS = Path(__file__).parents[2] / "systemd"
EXPOSURE_MAX = 20  # of 100, as `systemd-analyze security` counts


def tool() -> str:
    """systemd-analyze."""
    return needed.program("systemd-analyze")


def unit(name: str) -> configparser.RawConfigParser:
    """A unit file; of a key that is there twice the last value."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNITS / name)
    return parser


def test_the_units_are_valid(tmp_path: Path) -> None:
    for name in ("sidestep.socket", "sidestep.service"):
        # The command need not be installed here; everything else is looked at as it is shipped.
        text = (UNITS / name).read_text().replace("ExecStart=sidestep ", "ExecStart=/bin/true ")
        (tmp_path / name).write_text(text)
    found = subprocess.run(
        [tool(), "verify", "--man=no", str(tmp_path / "sidestep.service"), str(tmp_path / "sidestep.socket")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    complaints = [line for line in found.stderr.splitlines() if "sidestep" in line]
    assert (found.returncode, complaints) == (0, [])


def test_the_service_has_little_to_lose() -> None:
    found = subprocess.run(
        [tool(), "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", str(UNITS / "sidestep.service")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout.splitlines()[-1:]


def test_the_units_name_what_the_code_looks_for() -> None:
    assert unit("sidestep.socket")["Socket"]["ListenSequentialPacket"] == str(config.SYSTEM_SOCKET)
    assert unit("sidestep.service")["Service"]["User"] == config.SYSTEM_USER
    assert unit("sidestep.service")["Service"]["CapabilityBoundingSet"] == ""
    assert unit("sidestep.service")["Service"]["Environment"] == f"XDG_RUNTIME_DIR={config.SYSTEM_RUNTIME}"
    assert Path("/run", unit("sidestep.service")["Service"]["RuntimeDirectory"]) == config.SYSTEM_RUNTIME
