"""A root without glibc, as that of an Alpine container, in which programs run with a bundle of `sidestep bundle`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from sidestep.testing import Sidestep

PLACE: Final = "/opt/sidestep"
RUN: Final = f"{PLACE}/run"
MUSL: Final = Path("/lib/ld-musl-x86_64.so.1")  # musl's loader, which is its library, too
_DIRECTORIES: Final = ("bin", "dev", "lib", "opt/sidestep", "proc", "run/sidestep", "tmp")
_ENTER: Final = """
bundle=$1 provider=$2 root=$3; shift 3
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$bundle" "$root/opt/sidestep"
mount --bind "$provider" "$root/run/sidestep"
exec chroot "$root" "$@"
"""


def need_mounts(argv: Sequence[str], *kind: str) -> None:
    """Skips the test where nobody may mount /proc in what is so entered."""
    if why := subprocess.run([*argv, "mount", *kind, "/proc"], capture_output=True, text=True).stderr.strip():
        # no root can be made there, in which glibc is not: the CI's machine is root and runs these tests
        pytest.skip(f"it takes root, or namespaces of users, to mount something: {why}")


def entered() -> list[str]:
    return ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


class BareRoot:
    """It has musl's loader, and in /bin what is added."""

    def __init__(self, path: Path, bundle: Path, provider: Sidestep) -> None:
        self.path = path
        self.bundle = bundle
        self.provider = provider
        for name in _DIRECTORIES:
            (path / name).mkdir(parents=True)
        shutil.copy(MUSL, path / "lib")

    def add(self, program: Path, name: str) -> None:
        shutil.copy(program, self.path / "bin" / name)

    def argv(self, argv: Sequence[str]) -> list[str]:
        """What runs a program there."""
        return [*entered(), "sh", "-ec", _ENTER, "sh", str(self.bundle), str(self.provider.socket.parent),
                str(self.path), *argv]  # fmt: skip

    def env(self, **more: str) -> dict[str, str]:
        """As an image and docs/guides/containers.md set it."""
        path = f"/bin:{os.environ['PATH']}"  # also for what enters it
        return {"PATH": path, "SIDESTEP_SOCKET": "/run/sidestep/provider", "SIDESTEP_PROMOTE_AFTER": "0"} | more

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        """Starts a program there; the caller ends it."""
        return subprocess.Popen(self.argv(argv), env=self.env(), **options)
