"""Programs that no C library of ours is loaded into: of C, compiled in several ways, and of Go."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import needed
import toolchain

PROGRAMS: Final = toolchain.TESTS / "loader" / "programs"
KERNEL_HEADERS: Final = tuple(f"-idirafter{place}" for place in ("/usr/include", "/usr/include/x86_64-linux-gnu"))
KINDS: Final[dict[str, tuple[str | None, tuple[str, ...]]]] = {  # compiler and options
    "static": (None, ("-static",)),
    "static-pie": (None, ("-static-pie", "-fPIE")),
    "musl-static": ("musl-gcc", ("-static", *KERNEL_HEADERS)),
    "musl": ("musl-gcc", KERNEL_HEADERS),
}


HWCAP2_FSGSBASE: Final = 2  # asm/hwcap2.h
AT_HWCAP2: Final = 26


def loader_missing() -> str | None:
    """Why this machine cannot have the loader; None: it can."""
    if os.uname().machine != "x86_64":
        return "these programs are of x86-64; tests/fresh has what runs on aarch64"
    found = dict(struct.iter_unpack("=QQ", Path("/proc/self/auxv").read_bytes()))
    return None if found.get(AT_HWCAP2, 0) & HWCAP2_FSGSBASE else "this machine lacks FSGSBASE"


def build(name: str, kind: str) -> Path:
    """A program of tests/loader/programs, compiled in one of KINDS."""
    cc, options = KINDS[kind]
    if cc:
        needed.program(cc)
    return toolchain.build(f"{name}-{kind}", [PROGRAMS / f"{name}.c"], ["-O1", "-D_GNU_SOURCE", *options], cc=cc)


def build_go(name: str, **env: str) -> Path:
    """A program of Go in tests/loader/programs, static unless CGO_ENABLED is 1."""
    compiler = [needed.program("go"), "build"]
    return made_by(compiler, f"{name}.go", {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local"} | env)


def build_rust(name: str) -> Path:
    """A program of Rust there, static."""
    return made_by([needed.program("rustc"), "-O", "-C", "target-feature=+crt-static"], f"{name}.rs", {})


def made_by(compiler: Sequence[str], source: str, env: Mapping[str, str]) -> Path:
    """What a compiler makes of a file in tests/loader/programs."""

    def make(program: Path) -> None:
        subprocess.run([*compiler, "-o", program, PROGRAMS / source], check=True, env=os.environ | env)

    words = [*compiler, *(f"{name}={value}" for name, value in sorted(env.items()))]
    return toolchain.made_once(f"{toolchain.digest(words, PROGRAMS)}-{source.replace('.', '-')}", make)


def put_out_of_reach(program: Path) -> Path:
    """Takes its section headers away, without which the loader cannot tell what of it is code; it runs as before."""
    data = bytearray(program.read_bytes())
    struct.pack_into("=Q", data, 40, 0)  # e_shoff
    struct.pack_into("=HH", data, 60, 0, 0)  # e_shnum, e_shstrndx
    program.write_bytes(data)
    return program
