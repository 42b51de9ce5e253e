"""Compiles and runs the simulator: two copies of the shim, its C sources as they are, in a simulated kernel.

    python tests/sim/simulator.py seed 17                 # tells the steps of a seed; the same each time
    python tests/sim/simulator.py steps 1 50000000        # seeds from 1 on, until so many steps are made
    python tests/sim/simulator.py scenario "promoted 0.send 1.close@3 0.recv"   # see scenario.c
    python tests/sim/simulator.py --tree DIR ...          # the shim of another source tree

The linker's `--wrap` leads what the shim asks of the C library directly to the simulated kernel, as dlsym() leads the
rest there; `-fsanitize=thread`, without its library, makes each access to memory that both ends have a call of ours.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # pytest puts it there by itself

import coverage_build

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
OUTPUT: Final = ROOT / "build" / "native-tests"
SPILL: Final = "-DCHANNEL_SPILL=32768u"  # small, so that it is full and wraps
SHIM_FLAGS: Final = (
    "-std=gnu11", "-O1", "-g", "-fPIC", "-fexceptions", "-fvisibility=hidden", "-fno-semantic-interposition",
    "-U_FORTIFY_SOURCE", "-fsanitize=thread", "-w", SPILL,
)  # fmt: skip
SIM_FLAGS: Final = (SPILL, "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wstrict-prototypes")
WRAPPED: Final = re.compile(r"^WRAP\([^,]+, (\w+),", re.MULTILINE)
TIMEOUT_S: Final = 3600


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


@dataclass(frozen=True)
class Simulator:
    """The program and what it is told of the two libraries."""

    command: tuple[Path, Path, Path]

    def seeds(self, first: int, steps: int, *, tracing: bool = False) -> str:
        """What is said of the seeds from `first` on, so many that `steps` are made; of one with 0."""
        return self._say([str(first), str(steps), "trace" if tracing else "quiet"], "")

    def scenarios(self, lines: Iterable[str], *, tracing: bool = False) -> str:
        """What is said of scenarios."""
        return self._say(["scenarios", "trace" if tracing else "quiet"], "\n".join(lines))

    def _say(self, arguments: list[str], text: str) -> str:
        done = subprocess.run(
            [*self.command, *arguments], input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"the simulator ended with {done.returncode}: {done.stderr}")
        return done.stdout


def _shim_sources(native: Path) -> list[Path]:
    return [native / "channel/channel.c", native / "loader/loader_decode_x86_64.c", *sorted(native.glob("shim/*/*.c"))]


def _compile(name: str, out: Path, native: Path) -> None:
    includes = [f"-I{folder}" for folder in sorted({out, *(path.parent for path in native.rglob("*.h"))})]
    cc = os.environ.get("CC", "gcc")
    _run(sys.executable, native / "header.py", native / "layout.py", native / "defaults.py", out / "layout.h")

    def compiled(source: Path, flags: Iterable[str]) -> Path:
        made = out / f"{source.parent.name}-{source.stem}.o"
        _run(cc, *flags, *includes, "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(2) as pool:
        flags = [*SHIM_FLAGS, *coverage_build.compile_flags(name)]
        sources = [*_shim_sources(native), *map(Path, coverage_build.runtime())]
        shim = list(pool.map(lambda source: compiled(source, flags), sources))
        sim = list(pool.map(lambda source: compiled(source, SIM_FLAGS), sorted(HERE.glob("*.c"))))
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED.findall((HERE / "beside.c").read_text())]
    # no such area: the simulated kernel is asked for the CPU
    wraps.append("-Wl,--wrap=__rseq_size")
    _run(cc, "-shared", "-Wl,-Bsymbolic", *wraps, *shim, "-o", out / "shim-0.so")
    shutil.copy(out / "shim-0.so", out / "shim-1.so")  # another file is another process: with globals of its own
    _run(cc, "-rdynamic", *sim, "-ldl", "-o", out / "sim")


def build(tree: Path = ROOT) -> Simulator:
    """The simulator for the shim of a source tree; compiled only if there is none of this content yet."""
    native = tree / "src" / "sidestep" / "native"
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.[ch]"), Path(__file__), *native.rglob("*.[ch]"), *native.glob("*.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update("".join(coverage_build.compile_flags("")).encode())
    target = OUTPUT / f"sim-{digest.hexdigest()[:16]}"
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with (OUTPUT / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=OUTPUT) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                _compile(target.name, made, native)
                made.rename(target)  # whole or not at all
    return Simulator((target / "sim", target / "shim-0.so", target / "shim-1.so"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the simulator.")
    parser.add_argument("--tree", type=Path, default=ROOT, help="of which the shim is taken")
    parser.add_argument("what", choices=["seed", "steps", "scenario"])
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    simulator = build(given.tree)
    if given.what == "scenario":
        said = simulator.scenarios([" ".join(given.words)], tracing=True)
    elif given.what == "seed":
        said = simulator.seeds(int(given.words[0]), 0, tracing=True)
    else:
        said = simulator.seeds(int(given.words[0]), int(given.words[1]))
    print(said, end="")


if __name__ == "__main__":
    main()
