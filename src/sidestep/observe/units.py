"""Services of systemd: what their units say, and the drop-in that brings the shim into one, in spite of its sandbox.

Systemd says which files make a unit; where it does not run, and in an image, the disk is looked at. What the
sandbox of a service denies to the shim is allowed in the drop-in, line by line; what cannot be is an error.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from sidestep import config
from sidestep.config import ENV_FROM_ROOT, ShimSettings
from sidestep.errors import Misuse, Unavailable, did_you_mean
from sidestep.installation import native_library
from sidestep.observe import preload_check

SUFFIX: Final = ".service"
DROP_IN: Final = "sidestep.conf"
_BOOTED: Final = Path("/run/systemd/system")  # the test of sd_booted(3)
_SYSTEM: Final = tuple(map(Path, (
    "/etc/systemd/system", "/run/systemd/system", "/run/systemd/generator", "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system", "/lib/systemd/system",
)))  # fmt: skip
_USER: Final = tuple(map(Path, ("/etc/systemd/user", "/run/systemd/user", "/usr/lib/systemd/user")))
_HOMES: Final = (Path("/home"), Path("/root"), Path("/run/user"))  # the directories of ProtectHome=
_TEMPORARY: Final = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - what PrivateTmp= is about
_PREFIXES: Final = "@-:+!|"  # prefixes of a command line in ExecStart=
_YES: Final = frozenset({"1", "yes", "true", "on"})
# Calls that the shim makes: a program may have been let do without them.
_CALLS: Final = (
    "bind close_range connect dup3 epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 eventfd2 fcntl fstat fstatfs "
    "ftruncate getdents64 getpeername getsockname getsockopt ioctl madvise memfd_create munlock newfstatat openat "
    "pipe2 ppoll prctl preadv2 pwritev2 readlinkat recvfrom recvmsg rt_sigpending rt_sigprocmask rt_sigtimedwait "
    "rt_tgsigqueueinfo sched_setaffinity sched_yield sendmsg setsockopt shutdown socket stat"
)


class Unit(NamedTuple):
    """A service, and what its files say of it under [Service]."""

    name: str
    settings: dict[str, list[str]]  # an empty value has emptied what stood before it

    def last(self, key: str) -> str:
        return (self.settings.get(key) or [""])[-1]

    def words(self, key: str) -> list[str]:
        return [word for value in self.settings.get(key, ()) for word in _split(value)]

    def enabled(self, key: str) -> bool:
        return self.last(key).lower() in _YES


class Units(NamedTuple):
    """The units of the system, or of this user; `root`: those in a directory that holds another system."""

    user: bool = False
    root: Path = Path("/")

    @property
    def places(self) -> tuple[Path, ...]:
        """Directories of their files; a file in an earlier one goes before the same in a later one."""
        if not self.user:
            return tuple(self._inside(place) for place in _SYSTEM)
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return (home / "systemd/user", *_USER)

    @property
    def running(self) -> bool:
        """True if there is a systemd that has read them."""
        manager = Path(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"), "systemd/private") if self.user else _BOOTED
        return self.root == Path("/") and manager.exists()

    def drop_in(self, name: str) -> Path:
        return self.places[0] / f"{name}.d" / DROP_IN

    def with_drop_in(self) -> list[str]:
        """The names of those that have ours."""
        return sorted(path.parent.name.removesuffix(".d") for path in self.places[0].glob(f"*{SUFFIX}.d/{DROP_IN}"))

    def instances(self, stem: str) -> list[str]:
        """The instances of STEM@.service that STEM.service starts; of PostgreSQL, its clusters as Debian has them."""
        found = {path.name for place in self.places for path in place.glob(f"{stem}{SUFFIX}.wants/{stem}@*{SUFFIX}")}
        if any((place / f"{stem}@{SUFFIX}").exists() for place in self.places):
            clusters = self._inside(Path("/etc") / stem).glob("*/*/start.conf")
            found |= {f"{stem}@{path.parts[-3]}-{path.parts[-2]}{SUFFIX}" for path in clusters}
        return sorted(found)

    def systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs it; raises Unavailable if there is none."""
        command = ["systemctl", *(["--user"] if self.user else []), *words]
        try:
            return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            raise Unavailable(f"systemctl cannot be run: {error.strerror}", remedy="is this a systemd host?") from error

    def find(self, name: str) -> Unit:
        """The unit of that name or alias, with or without its suffix, and without our drop-in.

        Raises:
            Misuse: It is no service.
            Unavailable: There is none.
        """
        kind = Path(name).suffix
        full = name if kind == SUFFIX else name + SUFFIX
        if "/" in name or (kind != SUFFIX and kind in (".socket", ".timer", ".target", ".mount", ".path", ".slice")):
            raise Misuse(f"{name!r} is not a service", remedy="name the service, such as redis or redis.service")
        files = (self._by_systemctl(full) if self.running else []) or self._on_disk(full)
        if not files:
            if any((place / full).is_symlink() for place in self.places):
                raise Unavailable(f"{full} is masked", remedy=f"systemctl unmask {full}")
            known = {path.name.removesuffix(SUFFIX) for place in self.places for path in place.glob(f"*{SUFFIX}")}
            looked = f"there is no service {full}" + (f" below {self.root}" if self.root != Path("/") else "")
            named = f"systemctl {'--user ' if self.user else ''}list-unit-files"
            close = did_you_mean(full.removesuffix(SUFFIX), known)
            raise Unavailable(looked, remedy=close or f"'{named}' shows all")
        real = files[0][0].name  # name behind an alias; an instance's file is its template's
        name = full if real.endswith(f"@{SUFFIX}") else real
        return Unit(name, _settings([text for path, text in files if path != self.drop_in(name)]))

    def _by_systemctl(self, full: str) -> list[tuple[Path, str]]:
        shown = self.systemctl("show", "--property=FragmentPath,DropInPaths", "--", full).stdout
        paths = dict(line.partition("=")[::2] for line in shown.splitlines())
        return _read([Path(paths.get("FragmentPath") or "/dev/null"), *map(Path, paths.get("DropInPaths", "").split())])

    def _on_disk(self, full: str) -> list[tuple[Path, str]]:
        template = re.sub(r"@.+(?=\.service$)", "@", full)
        fragment = next((place / one for one in (full, template) for place in self.places
                         if os.path.lexists(place / one)), None)  # fmt: skip
        if fragment is None:
            return []
        if fragment.is_symlink() and (target := fragment.readlink().name) != fragment.name:
            return self._on_disk(target)  # an alias
        drop_ins: dict[str, Path] = {}
        for place in self.places:
            for one in (full, template):
                for path in place.glob(f"{one}.d/*.conf"):
                    drop_ins.setdefault(path.name, path)
        return _read([fragment, *(drop_ins[key] for key in sorted(drop_ins))])

    def _inside(self, path: Path) -> Path:
        return self.root / path.relative_to("/")


def _read(paths: list[Path]) -> list[tuple[Path, str]]:
    """The files of a unit, its own first; none if that is missing, or masked, which is a link to a device."""
    if not paths[0].is_file():
        return []
    return [(path, path.read_text(encoding="utf-8", errors="replace")) for path in paths if path.is_file()]


def _settings(texts: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in texts:
        section = ""
        lines = [line for line in text.splitlines() if not line.lstrip().startswith(("#", ";"))]
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            key, equals, value = (part.strip() for part in line.partition("="))
            if line.startswith("["):
                section = line.strip()
            elif section == "[Service]" and equals:
                found[key] = [*found.get(key, ()), value] if value else []
    return found


def _split(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:  # a quote that does not end
        return value.split()


# ---- the drop-in ----


class Wanted(NamedTuple):
    """A drop-in, and what its administrator should know."""

    text: str
    notes: tuple[str, ...]


def wanted(units: Units, unit: Unit, socket: Path) -> Wanted:
    """The drop-in that brings the shim into a service, for the provider at `socket`; raises Unavailable if none can."""
    library = native_library()
    _check_serves(units, unit)
    starts = _starts(units, unit)
    _check_reached(unit, library)
    mine = {"LD_PRELOAD": " ".join(preloaded)} if (preloaded := _preloaded(unit)) else {}
    variables = ShimSettings(socket).environment(mine) | ({} if units.user else {ENV_FROM_ROOT: "1"})
    lines = [f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items()]
    if starts != unit.settings.get("ExecStart", []):
        lines += ["# The library does not get into it by itself: sidestep's loader starts it.", "ExecStart="]
        lines += [f"ExecStart={line}" for line in starts]
    allowed = list(_allowed(unit, library, socket))
    for why, line in allowed:
        lines += [f"# {why}", line]
    name = unit.name.removesuffix(SUFFIX)
    undo = f"sidestep service disable {'--user ' if units.user else ''}{name}"
    text = "\n".join((f"# Made by 'sidestep service enable'. To take it away: {undo}", "[Service]", *lines, ""))
    return Wanted(text, tuple(_notes(unit, preloaded, [line for _, line in allowed])))


def _starts(units: Units, unit: Unit) -> list[str]:
    """Lines of ExecStart=, with the loader where that starts the program; Unavailable if the shim is kept out."""
    root = units.root / unit.last("RootDirectory").lstrip("/")
    lines = []
    for line in unit.settings.get("ExecStart", ()):
        command = line.lstrip(_PREFIXES)
        program = Path((_split(command) or [""])[0])
        path = root / str(program).lstrip("/")
        found = preload_check.inspect(path) if program.is_absolute() and path.is_file() else None
        for obstacle in found.obstacles if found else ():
            if obstacle.code != "unreadable":
                raise Unavailable(f"{unit.name}: {program} {obstacle.verdict}", remedy=obstacle.remedy)
        if found and found.loader:
            if unit.enabled("MemoryDenyWriteExecute"):
                raise Unavailable(f"{unit.name} has MemoryDenyWriteExecute=, and sidestep's loader changes {program}",
                                  remedy=f"take it out: systemctl edit {unit.name}")  # fmt: skip
            prefix = line[: len(line) - len(command)]
            named = command.partition(" ")[2].lstrip() if "@" in prefix else command  # @: the next word is argv[0]
            lines.append(f"{prefix.replace('@', '')}{_quoted(found.loader)} --run {_quoted(str(program))} {named}")
        else:
            lines.append(line)
    return lines


def _check_serves(units: Units, unit: Unit) -> None:
    """Raises Unavailable if the unit only stands for others, as Debian's postgresql.service does."""
    programs = {Path((_split(line.lstrip(_PREFIXES)) or [""])[0]).name for line in unit.settings.get("ExecStart", ())}
    if programs != {"true"} or unit.last("Type") != "oneshot":
        return
    stem = unit.name.removesuffix(SUFFIX)
    others = units.instances(stem)
    text = f"{unit.name} runs no program but 'true': it stands for other units"
    if others:
        raise Unavailable(
            f"{text}: {', '.join(others)}",
            remedy="; ".join(f"sidestep service enable {other.removesuffix(SUFFIX)}" for other in others),
        )
    raise Unavailable(text, remedy=f"name one of them: 'systemctl list-dependencies {unit.name}' shows which")


def _check_reached(unit: Unit, library: Path) -> None:
    """Raises Unavailable if the shim would not get into it with any drop-in."""
    if "LD_PRELOAD" in unit.words("UnsetEnvironment"):
        raise Unavailable(
            f"{unit.name} has UnsetEnvironment=LD_PRELOAD", remedy=f"take it out: systemctl edit {unit.name}"
        )
    for line in unit.settings.get("EnvironmentFile", ()):
        file = Path(line.removeprefix("-"))
        if os.access(file, os.R_OK) and file.is_file() and re.search(r"(?m)^\s*LD_PRELOAD=", file.read_text()):
            raise Unavailable(f"{file}, read by {unit.name}, sets LD_PRELOAD, and goes before a drop-in",
                              remedy=f"add {library} to it there")  # fmt: skip
    hiding = [f"InaccessiblePaths={path}" for path in _paths(unit, "InaccessiblePaths") if _holds((path,), library)]
    if unit.enabled("ProtectHome") and _holds(_HOMES, library):
        hiding.append("ProtectHome=yes")
    if hiding:
        raise Unavailable(f"{unit.name} does not see {library}: it has {hiding[0]}",
                          remedy="install sidestep where the service sees it")  # fmt: skip
    if (user := _runs_as(unit)) and not _for_everybody(library):
        raise Unavailable(f"{library} cannot be read by {user}, as whom {unit.name} runs",
                          remedy="install sidestep where all can read it, for example in /opt")  # fmt: skip


def _allowed(unit: Unit, library: Path, socket: Path) -> Iterator[tuple[str, str]]:
    """Lines that let the shim through the sandbox of a service, each with what makes it necessary."""
    if unit.words("NoExecPaths"):
        yield "The unit has NoExecPaths=, and the library is code.", f"ExecPaths={_quoted(str(library))}"
    if unit.words("SystemCallFilter"):
        yield "The unit has SystemCallFilter=: what the library calls.", f"SystemCallFilter={_CALLS}"
    if _denies_unix(unit):
        yield "The unit denies AF_UNIX, by which the provider is reached.", "RestrictAddressFamilies=AF_UNIX"
    elsewhere = next((key for key in ("RootDirectory", "RootImage") if unit.last(key)), "")
    empty = _paths(unit, "TemporaryFileSystem")
    if unit.last("ProtectHome") == "tmpfs":
        empty += _HOMES
    if unit.enabled("PrivateTmp"):
        empty += _TEMPORARY
    seen = [path for path in (library, socket.parent) if elsewhere or _holds(empty, path)]
    if seen:
        why = f"{elsewhere}=" if elsewhere else "directories of its own"
        # Services start without the provider all the same.
        paths = " ".join(_quoted(f"{'-' if path == socket.parent else ''}{path}") for path in seen)
        yield f"The unit has {why}, in which the library or the provider is not seen.", f"BindReadOnlyPaths={paths}"


def _denies_unix(unit: Unit) -> bool:
    """True if the service may have no UNIX sockets. Its first value says if those listed are allowed, or denied."""
    values = unit.settings.get("RestrictAddressFamilies", [])
    allow, listed = not values or not values[0].startswith("~"), not values
    for value in values:
        if "AF_UNIX" in value.lstrip("~").split():
            listed = value.startswith("~") != allow
    return listed != allow


def _runs_as(unit: Unit) -> str:
    """The user; empty for root."""
    user = unit.last("User") or (unit.name.removesuffix(SUFFIX) if unit.enabled("DynamicUser") else "")
    return "" if user in ("root", "0") else user


def _notes(unit: Unit, preloaded: list[str], allowed: list[str]) -> Iterator[str]:
    if preloaded:
        yield f"it preloads {' '.join(preloaded)} as well, before sidestep's library"
    for line in allowed:
        setting, _, value = line.partition("=")
        yield f"its sandbox lets through {line if len(value) < 200 else f'{setting}= (the calls of the library)'}"
    if user := _runs_as(unit):
        yield f"it runs as {user}: others than that and root are paired by 'pair {user} USER' in {config.SYSTEM_POLICY}"


def _preloaded(unit: Unit) -> list[str]:
    """Libraries that the unit preloads by itself."""
    variables = dict(word.partition("=")[::2] for word in unit.words("Environment"))
    return variables.get("LD_PRELOAD", "").replace(":", " ").split()


def _paths(unit: Unit, key: str) -> tuple[Path, ...]:
    return tuple(Path(word.lstrip("-+").partition(":")[0]) for word in unit.words(key))


def _holds(places: tuple[Path, ...], path: Path) -> bool:
    return any(path.is_relative_to(place) for place in places)


def _for_everybody(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o004) and all(parent.stat().st_mode & 0o001 for parent in path.parents)


def _quoted(text: str) -> str:
    """Text quoted as for systemd.syntax(7); a per cent sign begins a specifier."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
