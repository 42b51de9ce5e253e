"""One directory by which programs come under sidestep in a root without glibc, such as Alpine's.

It holds the loader, the shim, and of this system's glibc its loader and the libraries that those two need. The kernel
starts our loader by the name of glibc's that stands in the file, and that is an absolute path. So a bundle is made for
one place, and nowhere else does it start. The libraries are found beside our loader.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from sidestep.errors import Misuse, Unavailable

PLACE: Final = PurePosixPath("/opt/sidestep")
ENTRY: Final = "run"  # the program to execute there: the loader, which looks for a program as a shell does

_PATH_LEN_MAX: Final = 4095  # bytes, of the kernel's PATH_MAX without the final zero
_HEADER: Final = struct.Struct("=32xQ14xHH")  # Elf64_Ehdr: e_phoff, e_phentsize, e_phnum
_SEGMENT: Final = struct.Struct("=IIQQQQQQ")  # Elf64_Phdr
_PT_DYNAMIC: Final = 2
_PT_INTERP: Final = 3
_DYNAMIC: Final = struct.Struct("=qQ")  # Elf64_Dyn
_DT_NULL, _DT_RPATH, _DT_RUNPATH = 0, 15, 29


def write(directory: Path, place: PurePosixPath, loader: Path, libraries: Sequence[Path]) -> list[Path]:
    """Writes a bundle to `directory`, for use at `place`; returns its files.

    `libraries` are those of `loader`, and among them the loader of glibc.

    Raises:
        Misuse: The directory holds something: programs may have the files of a bundle mapped. Or no program could be
            started at the place.
        Unavailable: A file cannot be read or written.
    """
    interpreter = str(place / _glibc_loader(libraries).name)
    if not place.is_absolute() or ".." in place.parts or len(os.fsencode(interpreter)) > _PATH_LEN_MAX:
        raise Misuse(f"{place} is no place for a bundle", remedy=f"give the path it will have, such as {PLACE}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise Misuse(f"{directory} is not empty", remedy="name a new one: programs may be using what is there")
        directory.chmod(0o755)  # a mode for any user of a container
        made = [_put(directory / loader.name, _moved(loader.read_bytes(), interpreter))]
        made += [_put(directory / library.name, library.read_bytes()) for library in libraries]
        (entry := directory / ENTRY).symlink_to(loader.name)
    except OSError as error:
        raise Unavailable(f"a bundle cannot be written to {directory}: {error}", remedy="name another one") from error
    return [entry, *made]


def _glibc_loader(libraries: Sequence[Path]) -> Path:
    for library in libraries:
        if library.name.startswith("ld-linux"):
            return library
    raise Unavailable("this system's programs are not loaded by glibc", remedy="make the bundle on one with glibc")


def _put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o755)
    return path


def _moved(program: bytes, interpreter: str) -> bytes:
    """A dynamic program that the kernel starts by another interpreter, and whose libraries' own are also beside it.

    The name of the new interpreter comes at the end of the file, where only the kernel reads it, by its offset. The
    loader of glibc reads the name where it is mapped, to know itself by it, and finds the old one. That does no harm,
    because it also knows itself by its soname. Of a program's two search paths only DT_RPATH counts for the libraries
    of its libraries (ld.so(8)).
    """
    name = os.fsencode(interpreter) + b"\0"
    made = bytearray(program + name)
    table, size, count = _HEADER.unpack_from(program)
    interpreted = False
    for at in range(table, table + size * count, size):
        kind, flags, offset, *addresses, length, memory, align = _SEGMENT.unpack_from(program, at)
        if kind == _PT_INTERP:
            _SEGMENT.pack_into(made, at, kind, flags, len(program), *addresses, len(name), memory, align)
            interpreted = True
        elif kind == _PT_DYNAMIC:
            for entry in range(offset, offset + length, _DYNAMIC.size):
                tag, value = _DYNAMIC.unpack_from(program, entry)
                if tag == _DT_NULL:
                    break
                if tag == _DT_RUNPATH:
                    _DYNAMIC.pack_into(made, entry, _DT_RPATH, value)
    if not interpreted:
        raise Unavailable("sidestep-loader names no interpreter", remedy="install sidestep again")
    return bytes(made)
