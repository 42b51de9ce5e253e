"""Programs that run with more rights than who started them: the environment is a stranger's."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import toolchain
from common import PATIENCE_S
from tenants import ALICE, PROGRAMS, as_user

from sidestep import native_library
from sidestep.config import ShimSettings
from sidestep.settings import PromoteAfter


@pytest.fixture
def workdir() -> Iterator[Path]:
    """A directory that all users can look into."""
    with tempfile.TemporaryDirectory(prefix="sidestep-privileged-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def test_the_environment_is_not_believed(workdir: Path) -> None:
    """The loader preloads nothing that is named by a path, but where root's own list or the program names the shim.

    It then writes no log as root, and does not ask the provider that the environment names.
    """
    program = workdir / "privileged"
    shim = native_library()
    flags = ["-O2", "-Wl,--no-as-needed", str(shim), f"-Wl,-rpath,{shim.parent}"]
    program.write_bytes(toolchain.build("privileged", [PROGRAMS / "privileged.c"], flags).read_bytes())
    program.chmod(0o4755)
    hers, roots = workdir / "hers", workdir / "roots"
    hers.mkdir(0o700)
    os.chown(hers, ALICE, ALICE)
    roots.mkdir(0o700)
    settings = ShimSettings(hers / "provider", PromoteAfter(0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as provider:
        with as_user(ALICE):
            provider.bind(str(settings.socket))
            provider.listen()
        ran = subprocess.run(
            [program], env=settings.environment({"SIDESTEP_LOG": str(roots / "log")}), user=ALICE, group=ALICE,
            extra_groups=[], capture_output=True, text=True, timeout=PATIENCE_S, check=True,
        )  # fmt: skip
        assert ran.stdout == "secure 1, user 0\n"
        assert list(roots.iterdir()) == []
        with pytest.raises(BlockingIOError):
            provider.accept()
