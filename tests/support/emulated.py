"""Programs for aarch64 under sidestep's loader, emulated by qemu-user.

Loader and shim are those of the wheel. What qemu-user 7.2 lacks that promotion needs is brought to it
(tests/loader/programs/qemu_*.c).
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest
import toolchain
from foreign_programs import PROGRAMS, made_by
from foreign_programs import build_go as build_any_go

from sidestep.config import ENV_PROMOTE_AFTER, ENV_SOCKET
from sidestep.testing import Sidestep

GLIBC: Final = Path("/usr/aarch64-linux-gnu")
GCC: Final = "aarch64-linux-gnu-gcc"
ZIG: Final = (sys.executable, "-m", "ziglang", "cc", "-target")
KINDS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {  # compiler and options
    "static": ((GCC,), ("-static",)),
    "static-pie": ((GCC,), ("-static-pie", "-fPIE")),
    "musl": ((*ZIG, "aarch64-linux-musl"), ("-static",)),
}
OPTIONS: Final = ("-g", "-O1", "-std=gnu11", "-pthread", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror")


def missing() -> str | None:
    """Why nothing can be emulated here; None: it can."""
    if platform.machine() == "aarch64":
        return "this machine is what would be emulated"
    if shutil.which("qemu-aarch64") is None or not (GLIBC / "lib/libgcc_s.so.1").exists():
        return "there is no aarch64 here; apt-get install qemu-user libc6-arm64-cross libgcc-s1-arm64-cross"
    return None


def build(name: str, kind: str, *options: str) -> Path:
    """A program of tests/loader/programs, compiled in one of KINDS; skips the test where its compiler is missing."""
    compiler, more = KINDS[kind]
    if kind != "musl" and (shutil.which(GCC) is None or not (GLIBC / "lib/libc.a").exists()):
        pytest.skip("there is no compiler; apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    return made_by([*compiler, *OPTIONS, *more, *options], f"{name}.c", {})


def build_go(name: str, *, cgo: bool) -> Path:
    """A program of Go, static, or with the C library, which its own calls go past."""
    if cgo and shutil.which(GCC) is None:
        pytest.skip("there is no C compiler for Go; apt-get install gcc-aarch64-linux-gnu")
    return build_any_go(name, GOARCH="arm64", CGO_ENABLED=str(int(cgo)), CC=GCC)


class Emulated:
    """The wheel's loader and shim, put into a directory."""

    def __init__(self, wheel: Path, directory: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            self._shim, self.loader = (
                Path(archive.extract(f"sidestep/native/{name}", directory))
                for name in ("libsidestep.so", "sidestep-loader")
            )
        self.loader.chmod(0o755)
        self._directory = directory

    @cached_property
    def _more(self) -> tuple[Path, Path]:
        """What is preloaded into qemu-user, and what into the program that it emulates."""
        outside, inside = (self._directory / f"qemu_{side}.so" for side in ("outside", "inside"))
        options = ["-shared", "-fPIC", "-O1", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([toolchain.compiler(), *options, "-o", outside, PROGRAMS / "qemu_outside.c"], check=True)
        zig = [*ZIG, "aarch64-linux-gnu.2.28"]
        subprocess.run([*zig, *options, "-o", inside, PROGRAMS / "qemu_inside.c"], check=True)
        return outside, inside

    def _argv(self, inside: dict[str, str], argv0: str, what: Iterable[str | Path]) -> list[str | Path]:
        set_there = [word for name, value in inside.items() for word in ("-E", f"{name}={value}")]
        return ["qemu-aarch64", "-L", GLIBC, "-0", argv0, *set_there, *what]

    def check(self, program: Path) -> dict[str, Any]:
        """What the loader finds in a program, as it says it."""
        argv = self._argv({"LD_PRELOAD": str(self._shim)}, "check", [self.loader, "--check", program])
        said = subprocess.run(argv, stdout=subprocess.PIPE, check=False, timeout=60).stdout
        found: dict[str, Any] = json.loads(said)
        return found

    def native(self, program: Path, *arguments: str) -> list[str | Path]:
        """How to start a program that is emulated only."""
        return self._argv({}, program.name, [program, *arguments])

    def loaded(self, sidestep: Sidestep, program: Path, *arguments: str) -> tuple[list[str | Path], dict[str, str]]:
        """How to start one under sidestep, too, and its environment."""
        outside, more = self._more
        inside = {
            "LD_PRELOAD": f"{self._shim}:{more}",
            "SIDESTEP_PROGRAM": str(program),
            ENV_SOCKET: str(sidestep.socket),
            ENV_PROMOTE_AFTER: "0",
        }
        argv = self._argv(inside, program.name, [self.loader, *arguments])
        return argv, sidestep.env(LD_PRELOAD=str(outside))
