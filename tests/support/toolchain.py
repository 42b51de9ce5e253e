"""Builds the C programs of the tests, and the shim itself, plain or with a sanitizer.

What is built stays in build/native-tests under a name made from sources and flags, so a second run compiles nothing.
Objects stay there as well, each under a hash of its file, the headers that the file includes, and the flags: a change
of one file compiles that file, once for each set of flags. ccache is used where it is installed.
The compiler is $CC, else gcc; libFuzzer targets need clang.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import coverage_build
import needed
import pytest
from selection import rotate

from sidestep.testing import Sidestep

SUPPORT: Final = Path(__file__).parent
TESTS: Final = SUPPORT.parent
ROOT: Final = TESTS.parent
NATIVE_TESTS: Final = TESTS / "native"
NATIVE: Final = ROOT / "src" / "sidestep" / "native"
LAYOUT: Final = tuple(
    NATIVE / name for name in ("header.py", "layout.py", "defaults.py")
)  # what writes layout.h, and of what
NATIVE_FOLDERS: Final = tuple(sorted({path.parent for path in NATIVE.rglob("*.h")}))
HEADERS: Final = ROOT / "include" / "sidestep"  # what C programs include
OUTPUT: Final = ROOT / "build" / "native-tests"
OBJECTS: Final = OUTPUT / "objects"
CACHE: Final = ROOT / "build" / "ccache"
CORPORA: Final = NATIVE_TESTS / "corpora"  # renewed by tests of tests/native called guided, SIDESTEP_KEEP_CORPORA=1
CORPUS_MAX: Final = 70_000  # bytes of a file there
COMPILE_TIMEOUT_S: Final = 300
RUN_TIMEOUT_S: Final = 250  # less than what pytest gives a test
WARNINGS: Final = ("-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wstrict-prototypes")
GUARDED: Final = ("-Wl,--wrap=mmap", "-Wl,--wrap=munmap")  # see check.h
LINKING: Final = ("-Wl,", "-l", "-L", "-shared", "-static", "-rdynamic")  # flags that begin so are not for compiling
SPILL: Final = "-DCHANNEL_SPILL=16384u"  # small, so that it wraps often


@dataclass(frozen=True)
class Sanitizer:
    """How to compile for one sanitizer, and what its runtime is told."""

    name: str
    flags: tuple[str, ...]
    runtimes: tuple[str, ...] = ()  # to be preloaded into programs that were not built with it
    options: tuple[tuple[str, str], ...] = ()

    def env(self, log: Path | None = None) -> dict[str, str]:
        """Environment for the runtime; reports go to files named `log`.PID, else to stderr."""
        path = "" if log is None else f":log_path={log}"
        return {name: value + path for name, value in self.options}


PLAIN: Final = Sanitizer("plain", ("-O2",))
ADDRESS: Final = Sanitizer(
    "address",
    ("-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    ("libasan.so", "libubsan.so"),
    (
        # leaks: the programs under the shim are not ours; use_sigaltstack: threads come and go
        ("ASAN_OPTIONS", "detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1"),
        ("UBSAN_OPTIONS", "print_stacktrace=1:abort_on_error=1"),
    ),
)
THREAD: Final = Sanitizer(
    "thread",
    # atomic_thread_fence is unknown to it: what a fence orders must be ordered by acquire and release as well
    ("-O1", "-fno-omit-frame-pointer", "-fsanitize=thread", "-Wno-tsan"),
    ("libtsan.so",),
    # symbolize: the runtime would read debug information by calls that the shim hooks, holding its own locks
    (("TSAN_OPTIONS", "halt_on_error=0:exitcode=66:second_deadlock_stack=1:symbolize=0:handle_segv=0"),),
)
SANITIZERS: Final = (PLAIN, ADDRESS, THREAD)


def compiler() -> str:
    """The C compiler."""
    return os.environ.get("CC", "gcc")


def _run(argv: Sequence[str | os.PathLike[str]]) -> subprocess.CompletedProcess[str]:
    env = {"CCACHE_DIR": str(CACHE), "CCACHE_BASEDIR": str(ROOT), **os.environ}
    return subprocess.run(argv, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False, env=env)


@cache
def require(sanitizer: Sanitizer) -> None:
    """Fails the test, with the remedy, where the compiler cannot link a program with this sanitizer."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "empty.c"
        source.write_text("int main(void) { return 0; }\n")
        done = _run([compiler(), *sanitizer.flags, source, "-o", Path(scratch) / "empty"])
    if done.returncode:
        pytest.fail(
            f"{compiler()} cannot build for the {sanitizer.name} sanitizer: {done.stderr.strip()}\n"
            f"hint: on Debian, gcc brings it; with CC=clang install libclang-rt-dev; or set CC to a compiler that can"
        )


def build(name: str, sources: Sequence[Path], flags: Sequence[str], *, cc: str | None = None) -> Path:
    """The program or library `name` made from `sources`; compiled only if there is none of this content yet."""
    cc = cc or compiler()
    folders = {*NATIVE_FOLDERS, HEADERS, SUPPORT, NATIVE_TESTS, *(path.parent for path in sources)}
    headers = [*LAYOUT, *(header for folder in folders for header in folder.glob("*.h"))]
    words, files = [cc, *flags], sorted({*sources, *headers})  # without a compiler: any header might matter
    if any(path.is_relative_to(NATIVE) for path in sources) and "clang" not in cc and coverage_build.runtime():
        full_name = f"{hashed([*words, 'coverage'], [*files, coverage_build.RUNTIME])}-{name}"
        flags = [*flags, *coverage_build.compile_flags(full_name)]
        sources = [*sources, coverage_build.RUNTIME]
    else:
        full_name = f"{hashed(words, files)}-{name}"
    return made_once(full_name, partial(_link, cc, sources, flags))


def hashed(words: Sequence[str], files: Sequence[Path]) -> str:
    """A name for what comes of a command and the content of files."""
    found = hashlib.sha256("\0".join(words).encode())
    for path in files:
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def digest(words: Sequence[str], folder: Path) -> str:
    """Of a command and of all files in a directory that it may read."""
    return hashed(words, sorted(path for path in folder.iterdir() if path.is_file()))


def made_once(name: str, make: Callable[[Path], None], folder: Path = OUTPUT) -> Path:
    """The file or directory `name` in build/native-tests, which `make` makes there unless somebody has."""
    target = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several runs may meet here: the first makes it, the others find it done
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / name
                make(made)
                made.rename(target)  # whole or not at all
    return target


def _link(cc: str, sources: Sequence[Path], flags: Sequence[str], made: Path) -> None:
    """Compiles what has changed, as many files at a time as there are processors, and makes one file of all."""
    compiling = [flag for flag in flags if flag.startswith("-") and not flag.startswith(LINKING)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(partial(_object, cc, compiling), sources))
    _succeed([cc, "-g", "-pthread", *objects, *flags, "-o", made], made.name)


def _object(cc: str, flags: Sequence[str], source: Path) -> Path:
    layout = made_once(f"{hashed([], LAYOUT)}-layout", _write_layout)
    includes = [f"-I{folder}" for folder in (layout, *NATIVE_FOLDERS, NATIVE_TESTS)]
    argv = [cc, "-g", "-std=gnu11", "-pthread", *WARNINGS, *includes, *flags]
    files = _succeed([*argv, "-MM", "-MT", "it", source], source.name).replace("\\\n", "").split()[1:]
    name = f"{hashed(argv, [Path(file) for file in files])}-{source.stem}.o"
    return made_once(name, partial(_compile, [*argv, "-c", source], source.name), OBJECTS)


def _write_layout(folder: Path) -> None:
    folder.mkdir()
    subprocess.run([sys.executable, *LAYOUT, folder / "layout.h"], check=True)


def _compile(argv: Sequence[str | os.PathLike[str]], what: str, made: Path) -> None:
    _succeed([*(["ccache"] if shutil.which("ccache") else []), *argv, "-o", made], what)


def _succeed(argv: Sequence[str | os.PathLike[str]], what: str) -> str:
    """What the compiler says on stdout; the test fails where it finds an error."""
    done = _run(argv)
    if done.returncode:
        pytest.fail(f"{argv[0]} cannot build {what}:\n{done.stderr}")
    return done.stdout


def native(*names: str) -> list[Path]:
    """The C files of the library that are called so."""
    return [next(NATIVE.rglob(f"{name}.c")) for name in names]


def build_test(name: str, sanitizer: Sanitizer, *more: Path, flags: Sequence[str] = ()) -> Path:
    """The C test program tests/native/`name`.c, with the channel's own code, for `sanitizer`."""
    require(sanitizer)
    sources = [NATIVE_TESTS / f"{name}.c", NATIVE_TESTS / "check.c", *native("channel"), *more]
    return build(f"{name}-{sanitizer.name}", sources, [*sanitizer.flags, *GUARDED, SPILL, *flags])


def sanitized(names: Sequence[str], threads: Sequence[str] | None = None) -> list[tuple[Sanitizer, str]]:
    """C tests with the sanitizers of this run's row; THREAD only for `threads`, where that is given."""
    fitting = [SANITIZERS if threads is None or name in threads else (PLAIN, ADDRESS) for name in names]
    pairs = [(one, name) for at, name in enumerate(names) for one in rotate(fitting[at], at, ci=2)]
    return sorted(pairs, key=lambda pair: SANITIZERS.index(pair[0]))  # those of one program follow each other


def c_tests(name: str) -> list[str]:
    """What the table of tests/native/`name`.c lists; from the source, as collecting must not need a compiler."""
    return re.findall(r"\bTEST\((\w+)\),", (NATIVE_TESTS / f"{name}.c").read_text(encoding="utf-8"))


def run(
    argv: Sequence[str | os.PathLike[str]], sanitizer: Sanitizer, timeout_s: float = RUN_TIMEOUT_S, **env_more: str
) -> subprocess.CompletedProcess[str]:
    """A program that was built for `sanitizer`, run to a good end."""
    env = {**os.environ, **sanitizer.env(), **env_more}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{argv} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


def succeed(argv: Sequence[str | os.PathLike[str]], sanitizer: Sanitizer) -> str:
    """Standard output of a program that ends well and says nothing of a failure."""
    return run(argv, sanitizer).stdout


def build_shim(sanitizer: Sanitizer) -> Path:
    """libsidestep.so for `sanitizer`."""
    require(sanitizer)
    sources = [*native("channel", "loader_decode_x86_64"), *sorted(NATIVE.glob("shim/*/*.c"))]
    # the flags that meson.build gives the library, for the same reasons
    flags = [
        *("-shared", "-fPIC", "-fvisibility=hidden", "-ftls-model=initial-exec", "-fno-semantic-interposition"),
        *("-U_FORTIFY_SOURCE", "-U_FILE_OFFSET_BITS", "-w"),  # the ordinary build warns
        *("-Wl,-z,now", "-Wl,-z,relro", "-ldl"),
    ]
    return build(f"libsidestep-{sanitizer.name}.so", sources, [*sanitizer.flags, *flags])


def build_module(sanitizer: Sanitizer, name: str, *parts: str) -> Path:
    """The Python extension `name`, made of the C files called so and other parts of the library, for `sanitizer`."""
    require(sanitizer)
    sources = [*sorted(NATIVE.glob(f"*/{name}*.c")), *native(*parts)]
    flags = [
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-DPy_LIMITED_API=0x030b0000",
        "-Wno-missing-field-initializers",
    ]
    flags.append(f"-I{sysconfig.get_path('include')}")
    return build(f"_{name}-{sanitizer.name}.so", sources, [*sanitizer.flags, *flags])


@cache
def runtimes(sanitizer: Sanitizer) -> tuple[str, ...]:
    """Paths of the sanitizer's runtime libraries, for LD_PRELOAD."""
    found = []
    for name in sanitizer.runtimes:
        path = _run([compiler(), f"-print-file-name={name}"]).stdout.strip()
        if not Path(path).is_absolute():
            pytest.fail(f"{compiler()} has no shared {name}\nhint: use gcc for the tests of the sanitized shim")
        found.append(str(Path(path).resolve()))
    return tuple(found)


def preload(sanitizer: Sanitizer, shim: Path) -> str:
    """LD_PRELOAD for a program under a sanitized shim."""
    libraries = runtimes(sanitizer)
    if sanitizer is THREAD:
        # TSan calls, while it starts, functions that the shim defines and it has instrumented: the shim goes first
        closes = build("tsan-syscall.so", [NATIVE_TESTS / "tsan_syscall.c"], ["-O2", "-shared", "-fPIC", "-ldl"])
        return ":".join([str(shim), str(closes), *libraries])
    return ":".join([*libraries, str(shim)])  # ASan insists on being first


_FRAME = re.compile(r"\(([^()+]+)\+0x([0-9a-f]+)\)")


def symbolized(report: str) -> str:
    """A sanitizer's report with a source line beside each address that has one."""

    def line(match: re.Match[str]) -> str:
        done = _run(["addr2line", "-Cfspie", OUTPUT / match[1], f"0x{int(match[2], 16) - 1:x}"])
        return f"{done.stdout.strip()} {match[0]}" if not done.returncode else match[0]

    return _FRAME.sub(line, report)


class SanitizedShim:
    """The shim built for a sanitizer: what programs run under it need, and what the sanitizer has to say of them."""

    def __init__(self, sanitizer: Sanitizer, sidestep: Sidestep, directory: Path) -> None:
        self.sanitizer = sanitizer
        self._logs = directory / "reports"
        self._logs.mkdir()
        self.env = sidestep.env(
            LD_PRELOAD=preload(sanitizer, build_shim(sanitizer)), **sanitizer.env(self._logs / "report")
        )

    def reports(self) -> list[str]:
        """What the sanitizer has reported, a text for each process that had something."""
        return [symbolized(path.read_text()) for path in sorted(self._logs.iterdir())]

    def check(self) -> None:
        """Fails the test if the sanitizer has reported anything."""
        reports = self.reports()
        assert not reports, f"{len(reports)} sanitizer reports; the first:\n{reports[0][:6000]}"


def clang() -> str:
    """clang with libFuzzer."""
    found = needed.program("clang")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "empty.c"
        source.write_text("int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n > 9; }\n")
        if _run([found, "-fsanitize=fuzzer", source, "-o", Path(scratch) / "x"]).returncode:
            needed.missing("clang's libFuzzer", "clang")
    return found


def guided(name: str, seconds: float, directory: Path, *more: Path, flags: Sequence[str] = ()) -> int:
    """How many inputs libFuzzer led through the target tests/native/`name`.c in so long; any failure is the test's."""
    with_libfuzzer = clang()
    sources = [NATIVE_TESTS / f"{name}.c", NATIVE_TESTS / "check.c", *native("channel"), *more]
    sanitized = ["-O1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined", *GUARDED, SPILL]
    program = build(f"{name}-libfuzzer", sources, [*sanitized, *flags], cc=with_libfuzzer)
    (kept := directory / "kept").mkdir()
    (found := directory / "found").mkdir()
    unpack(name, kept)
    bounds = ["-max_len=400", f"-max_total_time={seconds:.0f}", f"-artifact_prefix={directory}/"]
    said = run([program, *bounds, found, kept], ADDRESS, timeout_s=seconds + RUN_TIMEOUT_S).stderr
    runs = re.search(r"Done (\d+) runs", said)
    assert runs is not None, said
    if os.environ.get("SIDESTEP_KEEP_CORPORA") == "1":
        (least := directory / "least").mkdir()
        run([program, "-merge=1", "-max_len=400", least, kept, found], ADDRESS, timeout_s=seconds + RUN_TIMEOUT_S)
        pack(name, least)
    return int(runs[1])


def unpack(name: str, folder: Path) -> None:
    """The inputs that are kept for a libFuzzer target, a file each: a line of tests/native/corpora/`name` is one."""
    for number, line in enumerate((CORPORA / name).read_text().split()):
        (folder / str(number)).write_bytes(base64.b64decode(line, validate=True))


def pack(name: str, folder: Path) -> None:
    """Keeps the inputs of a folder in the tree, the shortest first, as far as there is room."""
    lines, left = [], CORPUS_MAX
    for data in sorted((path.read_bytes() for path in folder.iterdir()), key=lambda data: (len(data), data)):
        left -= len(line := base64.b64encode(data).decode()) + 1
        if data and left >= 0:
            lines.append(f"{line}\n")
    (CORPORA / name).write_text("".join(lines))
