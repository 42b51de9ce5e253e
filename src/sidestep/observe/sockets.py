"""The TCP sockets of this host, and the processes behind them.

/proc has both. A socket of another user is seen without its process, unless root looks. Only this network namespace is
seen, and that of a process that is asked for by its number.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from socket import SOCK_STREAM, getaddrinfo
from typing import Final

from sidestep import config
from sidestep.errors import Misuse
from sidestep.installation import native_library
from sidestep.observe import other_users, preload_check
from sidestep.observe.processes import program_name, service_of
from sidestep.routing import Address, plain_address
from sidestep.switch.protocol import Endpoint

_COMMAND_MAX: Final = 120  # characters of a command line shown in a hint; a longer one is cut to its program
_LISTENS: Final = "0A"  # states of TCP as /proc/net/tcp has them
_OURS: Final = "SIDESTEP_"  # beginning of the names of all our variables
_AT_SECURE: Final = 23  # linux/auxvec.h
_OVER: Final = frozenset({"06", "07"})  # TIME_WAIT, CLOSE


@dataclass(frozen=True, slots=True)
class HostSocket:
    """A TCP socket as the kernel lists it."""

    pid: int | None  # environment; None: of a process that this user cannot look into
    fd: int
    local: Endpoint
    remote: Endpoint | None  # the other end; None: it listens


def endpoint(text: str) -> Endpoint:
    """`ADDRESS:PORT` or `[ADDRESS]:PORT`; an IPv4 address in IPv6 clothes becomes one. Raises ValueError."""
    host, _, port = text.rpartition(":")
    return Endpoint(_address(host.removeprefix("[").removesuffix("]")), int(port))


def _address(host: str) -> Address:
    return plain_address(ip_address(host.partition("%")[0]))


def addresses(host: str) -> tuple[Address, ...]:
    """Addresses of a host's name or address, in the resolver's order; never empty.

    Raises:
        Misuse: It is neither.
    """
    with suppress(ValueError):
        return (_address(host),)
    try:
        found = getaddrinfo(host, None, type=SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Misuse(f"{host!r} is not an address, nor a name that can be looked up: {error}") from error
    return tuple(_address(str(place[0])) for *_, place in found)


def tcp_sockets(pid: int | None = None) -> list[HostSocket]:
    """Sockets that live and that listen; with `pid` those of that process, in its own network namespace.

    Empty for a process that has gone or cannot be looked into.
    """
    processes = [pid] if pid is not None else [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - a Path each
    holders = {inode: (one, fd) for one in processes for inode, fd in _held(one).items()}
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid or 'self'}/net/{table}").read_text(encoding="utf-8").splitlines()[1:]
        except OSError:  # the process has gone; or there is no IPv6 here
            continue
        for line in lines:
            _, local, remote, state, *_, inode = line.split(maxsplit=10)[:10]
            if state not in _OVER and (pid is None or inode in holders):
                holder, fd = holders.get(inode, (None, -1))
                found.append(HostSocket(holder, fd, _listed(local), None if state == _LISTENS else _listed(remote)))
    return found


def _held(pid: int) -> dict[str, int]:
    """The sockets of a process by inode, with the first descriptor of each; none if it cannot be looked into."""
    found = dict[str, int]()
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # the descriptor has just been closed
                kind, _, inode = os.readlink(entry.path).partition(":")  # noqa: PTH115 - no path, a name
                if kind == "socket":
                    found.setdefault(inode[1:-1], int(entry.name))
    return found


def _listed(text: str) -> Endpoint:
    """An address of /proc/net/tcp: words of 32 bits as this machine has them, in hexadecimal."""
    host, _, port = text.partition(":")
    words = (int(host[at : at + 8], 16) for at in range(0, len(host), 8))
    return Endpoint(
        plain_address(ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))), int(port, 16)
    )


def is_here(address: Address, pid: int) -> bool:
    """True if it is an address of this host, as that process sees it: of its network namespace."""
    if address.is_loopback:
        return True
    try:
        if isinstance(address, IPv4Address):
            routes = Path(f"/proc/{pid}/net/fib_trie").read_text(encoding="ascii")
            return re.search(rf"\|-- {re.escape(str(address))}\n\s+/32 host LOCAL", routes) is not None
        return address.packed.hex() in Path(f"/proc/{pid}/net/if_inet6").read_text(encoding="ascii")
    except OSError:  # the process has gone; or there is no IPv6 here
        return False


def hidden_users(program: str) -> list[str]:
    """Names of the users whose programs of that name this user cannot look into."""
    found = set[str]()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208 - a Path each
        with suppress(OSError):  # gone
            if program_name(pid) == program and not os.access(f"/proc/{pid}/fd", os.R_OK):
                found.add(other_users.name(Path(f"/proc/{pid}").stat().st_uid))
    return sorted(found)


def in_one_network(one: int, other: int) -> bool:
    """True if two processes are known to be in the same network namespace."""
    try:
        return os.path.samefile(f"/proc/{one}/ns/net", f"/proc/{other}/ns/net")  # noqa: PTH121 - a Path each
    except OSError:  # gone, or another user's
        return False


def _parent(pid: int) -> int:
    """The process that started it, or has adopted it."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return int(dict(line.split(":", 1) for line in lines)["PPid"])


class Outside(Enum):
    """Reason why a process is not under sidestep, or not with the provider that was asked: its name and two sentences.

    In both sentences `{}` stands for a fact of the process: its obstacle, its command, its other provider.
    """

    NOT_STARTED = "was started without 'sidestep run'", "sidestep run -- {}"
    UNREACHABLE = "is out of the shim's reach: {}", "{}"
    DISABLED = "was started with SIDESTEP_DISABLE=1, with which the shim does nothing", "start it without: {}"
    NOT_LOADED = (
        "was started under sidestep, but its loader did not bring the shim in",
        "start it again; if that does not help, 'sidestep doctor' shows whether the shim loads",
    )
    LEFT_OUT = "was started by a program under sidestep, and left out: {}", "{}"
    OTHER_PROVIDER = "is under sidestep, but with the provider at {}", "start both ends with the same --socket"
    OTHER_USER = "runs as {}, and a user's own provider leaves out the programs of others", "{}"
    HIDDEN = "is another user's, and cannot be looked into", "ask as its user, or as root"
    GONE = "has gone; the kernel finishes what it left", "nothing to do"
    UNSEEN = "is not seen: it is another user's, in another network namespace, or gone", "ask as its user, or as root"
    UNKNOWN_SOCKET = (
        "is under sidestep, but its shim does not know this socket: another process made it",
        "let the program that is started with 'sidestep run' open or accept the connection by itself",
    )
    HELD_UP = (
        "is under sidestep, and is stopped or waits for a processor: its shim may be about to write of this socket",
        "ask again when it runs",
    )
    NOT_SHOWN = (
        "is under sidestep; the provider shows its connections only to its user, and to root of the host",
        "ask as its user, or as root of the host",
    )
    OTHER_LAYOUT = "is under sidestep of layout {}", "{}"
    OTHER_NETNS = (
        "is in another network namespace, and this provider does not prove paths between namespaces",
        "{}; then start both programs again",
    )
    NO_PROVIDER = (
        "is under sidestep; the connection stays as it is, and its carrier is not known without a provider",
        "sidestep provider start",
    )

    @property
    def text(self) -> str:
        """Statement about the process; goes on after its name."""
        return self.value[0]

    @property
    def remedy(self) -> str:
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Reason why a process, or one socket of it, is not under sidestep."""

    code: Outside
    text: str  # statement about the process: goes on after its name
    remedy: str

    @classmethod
    def of(cls, code: Outside, text: str = "", remedy: str = "") -> Judgement:
        return cls(code, code.text.format(text), code.remedy.format(remedy))

    @classmethod
    def of_unseen(cls) -> Judgement:
        """That a process is not seen, where root has seen those of all users."""
        if os.geteuid():
            return cls.of(Outside.UNSEEN)
        text = "is not seen: it is in another network namespace, or gone"
        return cls(Outside.UNSEEN, text, "if it is not gone, name it by its number: sidestep explain PID")

    @classmethod
    def of_user(cls, uid: int, socket_path: Path) -> Judgement | None:
        """That the provider there does not serve this user; None: it does."""
        if not other_users.left_out(uid, socket_path):
            return None
        return cls.of(Outside.OTHER_USER, other_users.name(uid), other_users.remedy())


class Process:
    """A process of this host, as far as it can be looked into; looked at once."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __str__(self) -> str:
        return f"{self.name or '(gone)'}[{self.pid}]"

    @cached_property
    def name(self) -> str | None:
        """Name of the program; None: the process has gone."""
        return program_name(self.pid)

    @cached_property
    def command(self) -> str:
        """The command line, fit for a shell."""
        try:
            words = Path(f"/proc/{self.pid}/cmdline").read_text(errors="replace").removesuffix("\0").split("\0")
        except OSError:  # the process has gone
            words = [""]
        # A program that writes its title into its arguments (nginx, PostgreSQL) has no command line any more.
        if words == [""] or (len(words) == 1 and " " in words[0]) or words[0].endswith(":"):
            return self.name or "PROGRAM"
        full = shlex.join(words)
        return full if len(full) <= _COMMAND_MAX and full.isprintable() else f"{shlex.quote(words[0])} ..."

    def effective_ids(self) -> tuple[int, int]:
        """User and group of the process; OSError if it has gone."""
        lines = Path(f"/proc/{self.pid}/status").read_text(errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["Uid"].split()[1]), int(fields["Gid"].split()[1])

    def outside(self, socket_path: Path) -> Judgement | None:
        """Reason why it is not under sidestep with the provider at `socket_path`; None: it is."""
        if self.name is None:
            return Judgement.of(Outside.GONE)
        try:
            mapped = f"/{native_library().name}" in Path(f"/proc/{self.pid}/maps").read_text(errors="replace")
            environ = dict(self._environ())
            obstacles = () if mapped else preload_check.obstacles(Path(f"/proc/{self.pid}/exe"))
            uid = Path(f"/proc/{self.pid}").stat().st_uid
        except PermissionError:
            return Judgement.of(Outside.HIDDEN)
        except OSError:  # the process ended meanwhile
            return Judgement.of(Outside.GONE)
        if mapped and environ.get(config.ENV_DISABLE) == "1":
            return Judgement.of(Outside.DISABLED, remedy=self.command)
        if mapped:
            other = self._provider_of(environ)
            if other and Path(other) != socket_path:
                return Judgement.of(Outside.OTHER_PROVIDER, other)
            return Judgement.of_user(uid, socket_path)
        if obstacles:
            return Judgement.of(Outside.UNREACHABLE, obstacles[0].text, obstacles[0].remedy)
        if native_library().name in environ.get("LD_PRELOAD", ""):
            return Judgement.of(Outside.NOT_LOADED)
        if left_out := self._left_out(environ):
            return Judgement.of(Outside.LEFT_OUT, *left_out)
        judgement = Judgement.of(Outside.NOT_STARTED, remedy=self.command)
        return judgement if uid == os.geteuid() else replace(judgement, remedy=self._start_as(uid, judgement.remedy))

    def _provider_of(self, environ: Mapping[str, str]) -> str | None:
        """The provider's socket that it was started with; None: the usual one.

        A program that writes its title into its environment, as PostgreSQL does, has the socket of its starter.
        """
        process: Process | None = self
        while config.ENV_SOCKET not in environ and process is not None:
            found = process._under_sidestep()
            process, environ = found or (None, {})
        return environ.get(config.ENV_SOCKET)

    def _start_as(self, uid: int, command: str) -> str:
        """The command that starts it under sidestep as that user; `command`: by which the user would."""
        if unit := self._service():
            return f"sidestep service enable {unit} --restart"
        return f"as {other_users.name(uid)}: {command}"

    def _service(self) -> str | None:
        """The system's service that it belongs to, without its suffix; None: none."""
        with suppress(OSError):
            return service_of(Path(f"/proc/{self.pid}/cgroup").read_text(errors="replace"))
        return None

    def _left_out(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """The reason why its starter left it out, and the remedy; None: its starter is not under sidestep.

        The shim carries its part of the environment where nothing is left of it: shim_environment.c.
        """
        if (found := self._under_sidestep()) is None:
            return None
        starter, its_environ = found
        remedy = f"let {starter} pass LD_PRELOAD and {config.ENV_SOCKET} on to it"
        if "LD_PRELOAD" in environ:
            return f"{starter} has set LD_PRELOAD to something else", remedy
        if any(name.startswith(_OURS) for name in environ):
            return f"{starter} has taken LD_PRELOAD out of its environment", remedy
        if its_environ.get(config.ENV_CARRY) == "0":
            return f"{starter} has emptied its environment, under --no-carry", "start that without --no-carry"
        library = native_library()
        if not Path(f"/proc/{self.pid}/root{library}").exists():
            return f"{library} is not there in its root directory", "copy or mount it there"
        if self._is_secure():
            return "it got other rights than its caller's, and the loader ignores LD_PRELOAD then", (
                "start it as the user it runs as"
            )
        return f"{starter} has emptied its environment in a way that the shim did not see", remedy

    def _under_sidestep(self) -> tuple[Process, dict[str, str]] | None:
        """The nearest of those that it descends from into which the shim was loaded, and what that was started with."""
        pid = self.pid
        with suppress(OSError, ValueError, KeyError):  # gone, or another user's
            while (pid := _parent(pid)) > 1:
                if f"/{native_library().name}" in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                    return Process(pid), dict(Process(pid)._environ())
        return None

    def _is_secure(self) -> bool:
        """A secure execution started it: getauxval(3), AT_SECURE."""
        with suppress(OSError):
            words = Path(f"/proc/{self.pid}/auxv").read_bytes()
            return any(key == _AT_SECURE and value for key, value in struct.iter_unpack("@LL", words))
        return False

    def _environ(self) -> Iterator[tuple[str, str]]:
        for entry in Path(f"/proc/{self.pid}/environ").read_text(errors="replace").split("\0"):
            name, equals, value = entry.partition("=")
            if equals:
                yield name, value
