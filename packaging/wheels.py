"""Wheels for machines without a compiler: `make wheels`, on any Linux machine with Python, its headers and pip.

zig compiles them, because it brings the headers of every glibc, and stubs to link with, for every machine. They need
glibc 2.28. The oldest that pip knows, 2.17, has neither memfd_create nor getrandom; and sidestep needs Linux 5.8, with
which no distribution has a glibc before 2.31. Of newer calls the shim asks the loader when it starts.

They hold no debug information; one of `make wheel` does.

auditwheel gives a wheel its name, and refuses if a library needs more than that name says; abi3audit refuses what is
not of Python's stable ABI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build/wheels"
DIST = ROOT / "dist"
VERSION = f"python{sysconfig.get_python_version()}"
GLIBC = "2.28"
MACHINES = ("x86_64", "aarch64")
CROSS = """\
[binaries]
c = [{python!r}, '-m', 'ziglang', 'cc', '-target', '{machine}-linux-gnu.{glibc}']
ar = [{python!r}, '-m', 'ziglang', 'ar']
[built-in options]
c_args = ['-I{include}']
c_link_args = ['{libgcc}', '-Wl,--strip-all']
[host_machine]
system = 'linux'
cpu_family = '{machine}'
cpu = '{machine}'
endian = 'little'
[properties]
needs_exe_wrapper = true
"""
# A thread that is cancelled unwinds through the shim, by the unwinder that glibc loads: no other than libgcc's will do,
# so zig's own is not linked. What the shim needs of it, for the linker:
LIBGCC = "void _Unwind_Resume(void) {} void __gcc_personality_v0(void) {}"


def pyconfig() -> Path:
    """This machine's pyconfig.h.

    Debian's Python names a file that only includes <MACHINE/pythonX.Y/pyconfig.h>; a copy there would include itself.
    For an extension the files of all machines are the same.
    """
    named = Path(sysconfig.get_config_h_filename())
    of_machine = named.parents[1] / str(sysconfig.get_config_var("MULTIARCH")) / VERSION / named.name
    return of_machine if of_machine.exists() else named


def build(machine: str) -> Path:
    """A wheel for that machine."""
    include = WORK / "include"
    (place := include / f"{machine}-linux-gnu" / VERSION).mkdir(parents=True, exist_ok=True)
    shutil.copy(pyconfig(), place)
    libgcc = include / f"{machine}-linux-gnu/libgcc_s.so.1"
    zig = ("ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}")
    run(*zig, "-shared", "-nostdlib", f"-Wl,-soname,{libgcc.name}", "-o", libgcc, "-x", "c", "-", text=LIBGCC)
    cross = WORK / f"{machine}.ini"
    cross.write_text(CROSS.format(python=sys.executable, machine=machine, glibc=GLIBC, include=include, libgcc=libgcc))
    raw, scratch = WORK / f"raw-{machine}", WORK / f"build-{machine}"
    for path in (raw, scratch):
        shutil.rmtree(path, ignore_errors=True)
    os.environ |= {"_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
    run(
        "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", raw, ROOT,
        f"--config-settings=setup-args=--cross-file={cross}", f"--config-settings=build-dir={scratch}",
    )  # fmt: skip
    (wheel,) = raw.glob("*.whl")
    platform = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    done = DIST / wheel.name.replace(f"linux_{machine}", platform)
    done.unlink(missing_ok=True)
    run("auditwheel", "repair", "--only-plat", "--wheel-dir", DIST, wheel)  # --plat knows this machine's only
    if not done.exists():
        sys.exit(f"auditwheel has another name than {done.name}: see what needs a newer glibc")
    return done


def check_symbols(wheel: Path) -> None:
    """Ends the build if the shim needs a function that the oldest glibc lacks: zig would let it, and no loader."""
    # make release, and tests of this file, do without
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerSymSection
    from elftools.elf.sections import SymbolTableSection

    with zipfile.ZipFile(wheel).open("sidestep/native/libsidestep.so") as file:
        elf = ELFFile(file)
        versions, symbols = elf.get_section_by_name(".gnu.version"), elf.get_section_by_name(".dynsym")
        assert isinstance(versions, GNUVerSymSection)
        assert isinstance(symbols, SymbolTableSection)
        lacking = {
            symbol.name
            for number, symbol in enumerate(symbols.iter_symbols())
            if symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
            and not isinstance(versions.get_symbol(number)["ndx"], int)  # but a word: it has no version
        }  # fmt: skip
    if lacking := {name for name in lacking if name and f" {name}(" not in LIBGCC}:
        sys.exit(
            f"glibc {GLIBC} has no {', '.join(sorted(lacking))}: find them when the shim starts, or make them weak"
        )


def run(module: str, *args: str | Path, text: str | None = None) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig")}
    subprocess.run([sys.executable, "-m", module, *args], check=True, env=env, input=text, text=True)


def main() -> None:
    for machine in sys.argv[1:] or MACHINES:
        wheel = build(machine)
        check_symbols(wheel)
        run("auditwheel", "show", wheel)
        run("abi3audit", "--strict", "--summary", wheel)
        print(wheel.relative_to(ROOT), wheel.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
