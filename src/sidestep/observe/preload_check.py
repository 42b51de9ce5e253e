"""Check of a program's file for the shim: whether it reaches the program. Nothing of it is run.

The shim comes in by LD_PRELOAD into programs of the C library it was built for, which make their socket calls through
that library. A loader of ours starts others, static ones among them, if it can replace all their system calls.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys

from sidestep.errors import Unavailable, did_you_mean
from sidestep.places import loader

TYPE_CHECKING = False  # see places.py
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO, Final

_ELF_MAGIC: Final = b"\x7fELF"
_HEADER: Final = struct.Struct("=HHIQQQIHHHHHH")  # Elf64_Ehdr after e_ident
_SEGMENT: Final = struct.Struct("=IIQQQQQQ")  # Elf64_Phdr
_SECTION: Final = struct.Struct("=IIQQQQIIQQ")  # Elf64_Shdr
_PT_INTERP: Final = 3
_IDENT_LEN: Final = 16
_CLASS_64: Final = 2
_TABLE_MAX: Final = 1 << 20  # bytes of a table in the file; larger ones are not looked at
_INTERPRETERS_MAX: Final = 4  # the kernel's own limit
_SHEBANG_MAX: Final = 256  # bytes, as BINPRM_BUF_SIZE
_SCAN_MAX: Final = 256 << 20  # bytes of a file that are searched for system calls; what lies behind is not looked at
_NAMES_MAX: Final = 1 << 20  # bytes of a file in which the names of its libraries stand
_LOADER_TIMEOUT_S: Final = 20.0  # seconds for listing the libraries of a program


class PreloadObstacle:
    """Reason why the shim does not get into a program."""

    __slots__ = ("code", "remedy", "text")

    def __init__(self, code: str, text: str, remedy: str) -> None:
        self.code = code
        self.text = text
        self.remedy = remedy

    @property
    def verdict(self) -> str:
        return f"{'cannot be executed' if self.stops_it else 'stays on TCP'}: {self.text}"

    @property
    def stops_it(self) -> bool:
        """True if the kernel itself refuses to execute the program."""
        return self.code in _STOPPING

    @property
    def forbids_it(self) -> bool:
        """True if the program's own loader ends it because of the shim, instead of doing without."""
        return self.code == _MUSL[0]


class Program:
    """Facts from the file of a program.

    Args:
        path: Of the program.
        chain: The program and, for a script, its interpreters; the last one is what is loaded.
        obstacles: None: the shim gets in.
        loader: Ours, where it starts the program.
    """

    __slots__ = ("chain", "loader", "obstacles", "path")

    def __init__(
        self, path: str, chain: tuple[str, ...], obstacles: tuple[PreloadObstacle, ...], loader: str | None = None
    ) -> None:
        self.path = path
        self.chain = chain
        self.obstacles = obstacles
        self.loader = loader

    def argv(self, command: Sequence[str]) -> list[str]:
        """Command that starts the program under the shim."""
        return [self.loader, "--run", self.path, *command] if self.loader else [*command]


class Calls:
    """System calls that the code of a file seems to make by itself, past the C library. A guess from its bytes."""

    __slots__ = ("io_uring", "sockets")

    def __init__(self, io_uring: bool, sockets: bool) -> None:
        self.io_uring = io_uring
        self.sockets = sockets


_STATIC = (
    "static",
    "it is linked statically, so it has no loader to bring the shim in",
    "use a dynamically linked build",
)
_FOREIGN = ("machine", "it is made for another machine or word size than the shim", "use a native 64-bit build")
_MUSL = ("libc", "its C library is not the one that the shim was built for ({})", "use a build for this system's libc")
_GO = (
    "go",
    "it is a Go program, which calls the kernel without the C library",
    "nothing helps; its peers stay on TCP too",
)
_SETID = (
    "setid",
    "it runs with other rights than its caller's ({}), and the loader ignores LD_PRELOAD then",
    "start it as the user it runs as, without the bit",
)
_CAPABILITIES = (
    "setid",
    "it has file capabilities, and the loader ignores LD_PRELOAD then",
    "run a copy of it, which has none, or take them away (setcap -r)",
)
_NO_INTERPRETER = ("interpreter", "its interpreter {} is not found", "install that, or correct the script's first line")
_NO_SHEBANG = (
    "shebang",
    "it is a text whose first line does not name an interpreter (#!)",
    "run it by its shell: sidestep run -- sh {}",
)
_NOT_A_PROGRAM = ("format", "it is neither an ELF program nor a script", "name the program that is executed")
_UNLOADABLE = ("its system calls cannot be replaced: {}", "use a dynamic build for this system's libc")
_LOADABLE: Final = frozenset({_STATIC[0], _MUSL[0], _GO[0]})  # start by our own loader
_STOPPING: Final = frozenset({_NO_INTERPRETER[0], _NO_SHEBANG[0]})
_UNREADABLE = ("unreadable", "it cannot be read ({})", "run as a user who may read it")


def find(name: str) -> str:
    """The file that `name` would run, through PATH; raises Unavailable."""
    from pathlib import Path

    found = which(name)
    if found is not None:
        return found
    path = Path(name)
    here = os.access(path, os.F_OK)
    if here and path.is_dir():
        raise Unavailable(f"{name} is a directory", remedy="name the program in it")
    if path.name == name:
        known = (entry for place in os.get_exec_path() for entry in _listed(Path(place)))
        remedy = f"give its path: ./{name}" if here else did_you_mean(name, known) or "install it, or give its path"
        raise Unavailable(f"{name} is in no directory of PATH", remedy=remedy)
    if here:
        raise Unavailable(f"{name} is not executable", remedy=f"make it so: chmod +x {name}")
    raise Unavailable(
        f"{name} does not exist", remedy=did_you_mean(path.name, _listed(path.parent)) or "look at the path"
    )


def _listed(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # PATH may name what is not there
        return []


def which(name: str) -> str | None:
    """Path of a command, as `shutil.which` finds it; that is slow to load."""
    for place in ("",) if os.path.dirname(name) else os.get_exec_path():
        path = os.path.join(place, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def obstacles(path: str | Path) -> tuple[PreloadObstacle, ...]:
    """Obstacles that keep the shim out of the program at `path`; none: it gets in."""
    return inspect(path).obstacles


def inspect(program: str | Path) -> Program:
    path = os.fspath(program)
    chain = [path]
    while len(chain) <= _INTERPRETERS_MAX:
        try:
            with open(chain[-1], "rb") as file:
                # Set-id bits of a script are ignored by the kernel; those of its interpreter are not.
                interpreter = _interpreter(file)
                if interpreter is None and _is_text(file):
                    return Program(path, tuple(chain), (_obstacle(_NO_SHEBANG, chain[-1]),))
                if interpreter is None:
                    rights, found = tuple(_rights(chain[-1])), tuple(_elf(file))
                    code = next((obstacle.code for obstacle in found if obstacle.code in _LOADABLE), None)
                    if code and not rights and (tool := loader()):
                        found = tuple(_loading(code, tool, chain[-1]))
                        return Program(path, tuple(chain), found, None if found else tool)
                    return Program(path, tuple(chain), (*rights, *found))
        except _NoInterpreter as missing:
            return Program(path, tuple(chain), (_obstacle(_NO_INTERPRETER, missing.shown),))
        except OSError as error:
            return Program(path, tuple(chain), (_obstacle(_UNREADABLE, error.strerror or ""),))
        chain.append(interpreter)
    return Program(path, tuple(chain), (_obstacle(_NOT_A_PROGRAM),))


def is_address_sanitized(path: str) -> bool:
    """True if the program names AddressSanitizer's library: its runtime refuses to be loaded behind another library.

    The names of needed libraries (ELF, DT_NEEDED) stand in a table near the beginning of the file.
    """
    with open(path, "rb") as file:
        return b"\0libasan.so." in file.read(_NAMES_MAX)


def libraries(program: str | Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The libraries that a dynamic program is loaded with, and the names of those that are not found.

    As ldd has it: the program's own loader lists them, and runs nothing of the program or the libraries.

    Raises:
        Unavailable: The loader cannot be asked.
    """
    import re  # a late import: `sidestep run` reads this file before each program
    import subprocess
    from pathlib import Path

    path = Path(program)
    with open(path, "rb") as file:
        header = _HEADER.unpack(_read_at(file, _IDENT_LEN, _HEADER.size))
        loader = _loader(file, header[4], header[9])
    if loader is None:
        return (), ()
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {"LD_TRACE_LOADED_OBJECTS": "1"}
    try:
        listed = subprocess.run(
            # Resolved, as /proc/self/exe is when the kernel starts it: $ORIGIN of a link's target is the target's.
            [loader, path.resolve()], env=env, capture_output=True, text=True, errors="replace", check=False,
            timeout=_LOADER_TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{loader} does not list the libraries of {path}: {error}") from error
    found = re.findall(r"(?m)^\t(?:\S+ => )?(/\S+) \(0x", listed.stdout)
    missing = re.findall(r"(?m)^\t(\S+) => not found$", listed.stdout)
    return tuple(map(Path, found)), tuple(dict.fromkeys(missing))


# x86-64: the number goes into eax, and `syscall` follows at once, or soon where a few arguments come in between.
_CALL_IO_URING: Final = rb"(?s)\xb8[\xa9-\xab]\x01\x00\x00.{0,24}?\x0f\x05"
_CALL_SOCKETS: Final = rb"\xb8(?:[\x29-\x37]\x00|\x20\x01|\x2b\x01|\x33\x01)\x00\x00\x0f\x05"
_LIBURING: Final = b"\0io_uring_queue_init"  # the name that its programs import


def calls(path: Path) -> Calls:
    """Calls that the code of an ELF file on x86-64 seems to make; elsewhere only the names it imports are looked at."""
    import re

    with open(path, "rb") as file:
        data = file.read(_SCAN_MAX)
    return Calls(bool(_LIBURING in data or re.search(_CALL_IO_URING, data)), bool(re.search(_CALL_SOCKETS, data)))


def _obstacle(template: tuple[str, str, str], *details: str) -> PreloadObstacle:
    code, text, remedy = template
    return PreloadObstacle(code, text.format(*details), remedy.format(*details))


class _NoInterpreter(Exception):
    """The interpreter that a `#!` line names does not exist."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.shown = name if name.isprintable() else ascii(name)  # a file with carriage returns: they must be seen


def _interpreter(file: BinaryIO) -> str | None:
    """The interpreter named in a `#!` line, looked up through PATH where the line goes through env; None if none."""
    start = file.read(_SHEBANG_MAX)
    file.seek(0)
    if not start.startswith(b"#!"):
        return None
    # The kernel's way to split it: by spaces and tabs only.
    words = start[2:].split(b"\n", 1)[0].decode(errors="surrogateescape").replace("\t", " ").split(" ")
    words = [word for word in words if word]
    if not words:
        return None
    if os.path.basename(words[0]) == "env" and (found := _through_env(words[1:])):
        return found
    if not os.path.exists(words[0]):
        raise _NoInterpreter(words[0])
    return words[0]


def _through_env(words: list[str]) -> str | None:
    """Program that env would run, given these words; None where its options are not looked into."""
    for index, word in enumerate(words):
        if word.startswith("-") or "=" in word:
            continue
        if found := which(word):
            return found
        if any(before.startswith("-") and before != "-S" for before in words[:index]):
            return None  # the word may be the value of that option
        raise _NoInterpreter(word)
    return None


def _is_text(file: BinaryIO) -> bool:
    """True if a shell would take it for a script: no zero byte where it begins."""
    start = file.read(_SHEBANG_MAX)
    file.seek(0)
    return bool(start) and b"\0" not in start and not start.startswith(_ELF_MAGIC)


def _rights(path: str) -> Iterator[PreloadObstacle]:
    found = os.stat(path)
    if found.st_mode & stat.S_ISUID and found.st_uid not in (os.getuid(), os.geteuid()):
        yield _obstacle(_SETID, "set-user-ID")
    if (
        found.st_mode & stat.S_ISGID
        and found.st_mode & stat.S_IXGRP
        and found.st_gid not in (os.getgid(), os.getegid())
    ):
        yield _obstacle(_SETID, "set-group-ID")
    if os.getuid() != 0:  # root gets nothing new by capabilities of a file
        try:
            os.getxattr(path, "security.capability")
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise
        else:
            yield _obstacle(_CAPABILITIES)


def _elf(file: BinaryIO) -> Iterator[PreloadObstacle]:
    ident = _read_at(file, 0, _IDENT_LEN)
    if len(ident) < _IDENT_LEN or not ident.startswith(_ELF_MAGIC):
        yield _obstacle(_NOT_A_PROGRAM)
        return
    with open(sys.executable, "rb") as own:  # a program of this machine, to compare with
        own_ident = _read_at(own, 0, _IDENT_LEN)
        own_machine = _HEADER.unpack(_read_at(own, _IDENT_LEN, _HEADER.size))[1]
    header = _read_at(file, _IDENT_LEN, _HEADER.size)
    if ident[4] != _CLASS_64 or ident[5] != own_ident[5] or len(header) < _HEADER.size:
        yield _obstacle(_FOREIGN)
        return
    (_, machine, _, _, phoff, shoff, _, _, phentsize, phnum, shentsize, shnum, shstrndx) = _HEADER.unpack(header)
    if machine != own_machine or phentsize != _SEGMENT.size:
        yield _obstacle(_FOREIGN)
        return
    its_loader = _loader(file, phoff, phnum)
    sections = _section_names(file, shoff, shnum, shstrndx) if shentsize == _SECTION.size else set()
    if its_loader is None:
        yield _obstacle(_STATIC)
    elif "ld-linux" not in its_loader:
        yield _obstacle(_MUSL, "musl" if "musl" in its_loader else f"loaded by {its_loader}")
    elif b".go.buildinfo" in sections:
        yield _obstacle(_GO)


def _loading(code: str, tool: str, program: str) -> Iterator[PreloadObstacle]:
    """Reason why our loader cannot start a program; it maps the file to find out, and runs nothing."""
    import json  # a late import: see `libraries`
    import subprocess

    try:
        answer = subprocess.run([tool, "--check", program], capture_output=True, timeout=_LOADER_TIMEOUT_S, check=False)
        refused = json.loads(answer.stdout)["refused"]
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        refused = f"{os.path.basename(tool)} cannot look at it: {error}"
    if refused:
        yield _obstacle((code, *_UNLOADABLE), refused)


def _read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """Bytes of the file from `offset`, as far as it goes: offsets and lengths come from the file itself."""
    if offset > sys.maxsize:
        return b""
    file.seek(offset)
    return file.read(min(length, _TABLE_MAX))


def _loader(file: BinaryIO, offset: int, count: int) -> str | None:
    table = _read_at(file, offset, count * _SEGMENT.size)
    for at in range(0, len(table) - _SEGMENT.size + 1, _SEGMENT.size):
        kind, _, where, _, _, length, _, _ = _SEGMENT.unpack_from(table, at)
        if kind == _PT_INTERP:
            return _read_at(file, where, length).rstrip(b"\0").decode(errors="replace")
    return None


def _section_names(file: BinaryIO, offset: int, count: int, names_index: int) -> set[bytes]:
    table = _read_at(file, offset, count * _SECTION.size)
    headers = [_SECTION.unpack_from(table, at) for at in range(0, len(table) - _SECTION.size + 1, _SECTION.size)]
    if names_index >= len(headers):
        return set()
    _, _, _, _, names_at, names_len, *_ = headers[names_index]
    names = _read_at(file, names_at, names_len)
    return {names[header[0] :].split(b"\0", 1)[0] for header in headers if header[0] < len(names)}
