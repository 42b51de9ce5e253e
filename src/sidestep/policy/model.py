"""Records of a policy: each prints as the line of the file that it came from. No I/O.

An IPv4-mapped IPv6 address counts as its IPv4 address, in rules and in connections alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Final

from sidestep.errors import Misuse
from sidestep.routing import Network

BOTH: Final = "both"  # any offload protocol that is installed, in order of preference, else TCP
TCP: Final = "tcp"  # never offloaded
ANY: Final = "*"
FILES: Final = "files"
SOCKETS: Final = "sockets"
PORT_MAX: Final = 65535
ALL_PORTS: Final = (0, PORT_MAX)
ID_MAX: Final = (1 << 32) - 2  # the largest uid or gid; the one above it means "no one"

_MAPPED: Final = IPv6Network("::ffff:0:0/96")  # RFC 4291 2.5.5.2
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789*?[]!^@%+=,.:/_-~\\")

Identity = int | str  # a user or a group: its number, or its name


class Role(Enum):
    """End of a connection that a rule is about."""

    CONNECT = "connect"
    LISTEN = "listen"


ROLE_WORDS: Final = {"connect": Role.CONNECT, "client": Role.CONNECT, "listen": Role.LISTEN, "server": Role.LISTEN}


@dataclass(frozen=True, slots=True)
class Origin:
    """Place of a statement."""

    file: str = ""
    line: int = 0  # counted from 1; 0: nowhere
    text: str = ""  # the line as it stands

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Subject:
    """The program a decision is about."""

    programs: tuple[str, ...]  # the names it goes by: of argv[0], of its process, of its file; any may match
    uid: int
    gids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Rule:
    """`use TARGET [over TRANSPORT] ROLE PROGRAM ADDRESS:PORT [user USER] [group GROUP]`."""

    target: str  # `both`, `tcp`, or the name of an offload protocol
    role: Role
    program: str = ANY  # a glob
    network: Network | None = None  # network; None: every address
    ports: tuple[int, int] = ALL_PORTS  # first and last
    user: Identity | None = None  # user; None: everybody
    group: Identity | None = None
    origin: Origin = field(default=Origin(), compare=False)
    over: str = ""  # the transport beneath the protocol; empty: any

    def __str__(self) -> str:
        over = ["over", self.over] if self.over else []
        words = ["use", self.target, *over, self.role.value, quoted(self.program), self._endpoint()]
        for word, identity in (("user", self.user), ("group", self.group)):
            if identity is not None:
                words += [word, quoted(str(identity))]
        return " ".join(words)

    @property
    def text(self) -> str:
        return self.origin.text or str(self)

    def _endpoint(self) -> str:
        first, last = self.ports
        port = ANY if self.ports == ALL_PORTS else str(first) if first == last else f"{first}-{last}"
        if self.network is None:
            return f"{ANY}:{port}"
        host = str(self.network.network_address)
        if isinstance(self.network, IPv6Network):
            host = f"[{host}]"
        if self.network.prefixlen < self.network.max_prefixlen:
            host += f"/{self.network.prefixlen}"
        return f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a `pair` statement: a user, the members of a group, or everybody."""

    identity: Identity | None = None  # user or group; None: everybody
    is_group: bool = False

    def __str__(self) -> str:
        if self.identity is None:
            return ANY
        return quoted(f"{'@' if self.is_group else ''}{self.identity}")


@dataclass(frozen=True, slots=True)
class Pair:
    """`pair SIDE SIDE`: whose processes a system-wide provider may pair although their users differ."""

    sides: tuple[Side, Side]
    origin: Origin = field(default=Origin(), compare=False)

    def __str__(self) -> str:
        return f"pair {self.sides[0]} {self.sides[1]}"


@dataclass(frozen=True, slots=True)
class Rings:
    """`rings files|sockets PROGRAM`: whether io_urings of a program that no shim sees into have sockets."""

    files: bool  # operations that move bytes of files alone
    program: str  # a glob
    origin: Origin = field(default=Origin(), compare=False)

    def __str__(self) -> str:
        return f"rings {FILES if self.files else SOCKETS} {quoted(self.program)}"


@dataclass(frozen=True, slots=True)
class Log:
    """`log ...` of libsdp: kept, without effect; `sidestep policy trace` shows more."""

    destination: str | None = None  # stderr, syslog, file
    file: str | None = None
    min_level: int | None = None
    origin: Origin = field(default=Origin(), compare=False)

    def __str__(self) -> str:
        words = ["log"]
        if self.destination is not None:
            words += ["destination", self.destination]
        if self.file is not None:
            words.append(quoted(self.file))
        if self.min_level is not None:
            words += ["min-level", str(self.min_level)]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Include:
    """`include FILE`: the statements of another file, or of all that a glob matches, in place of this one."""

    pattern: str
    origin: Origin = field(default=Origin(), compare=False)

    def __str__(self) -> str:
        return f"include {quoted(self.pattern)}"


Statement = Rule | Pair | Rings | Log | Include


class Level(Enum):
    """Severity of a problem."""

    ERROR = "error"  # the file is not taken
    WARNING = "warning"  # the file is taken, and probably does not do what its author meant


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a policy file: its place, the word, and the remedy."""

    file: str
    line: int  # counted from 1; 0: the file as a whole
    column: int  # column of the word, counted from 1; 0: the line as a whole
    word: str
    message: str
    remedy: str = ""
    text: str = field(default="", repr=False)  # the line as it stands
    level: Level = Level.ERROR

    def __str__(self) -> str:
        place = ":".join([self.file, *(str(number) for number in (self.line, self.column) if number)])
        return f"{place}: {self.level.value}: {self.message}"

    def report(self) -> str:
        """The problem as compilers show one: the place, the line, the word underlined, the remedy."""
        lines = [str(self)]
        if self.text:
            lines.append(f"    {self.text}")
        if self.text and self.column:
            lines.append(f"    {' ' * (self.column - 1)}^{'~' * (len(self.word) - 1)}")
        if self.remedy:
            lines.append(f"    hint: {self.remedy}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The problem as `sidestep policy check --json` shows it."""
        return {
            "level": self.level.value,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "word": self.word,
            "message": self.message,
            "remedy": self.remedy,
        }


class PolicyError(Misuse):
    """A policy that is not taken; `problems` holds every bad line, in the order of the files."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        super().__init__(f"{first}{more}", remedy=first.remedy)


def quoted(text: str) -> str:
    """A name as a policy file takes it: in quotes where it would not be one word otherwise."""
    return text if text and _PLAIN.issuperset(text) else f'"{text}"'


def plain_network(network: Network) -> Network:
    """The network that `network` stands for: IPv4 where all of it is v4-mapped."""
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        low = int(network.network_address) & 0xFFFF_FFFF
        return IPv4Network((low, network.prefixlen - 96))
    return network


def is_glob(program: str) -> bool:
    return not {*"*?["}.isdisjoint(program)
