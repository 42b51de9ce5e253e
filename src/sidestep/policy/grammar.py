"""The language of policy files: libsdp.conf, extended. Bytes in, statements and problems out; no I/O.

    use both|tcp|PROTOCOL [over TRANSPORT] connect|listen PROGRAM ADDRESS[/PREFIX]:PORT[-PORT] [user USER] [group GROUP]
    pair USER|@GROUP|* USER|@GROUP|*
    rings files|sockets PROGRAM
    include FILE
    log [destination stderr|syslog|file NAME] [min-level 1..9]

One statement a line, `#` begins a comment, names may stand in double quotes. A line that is not understood is a
problem, never an exception. Reading goes on with the next line, so that all problems are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final
from unicodedata import category

from sidestep import limits
from sidestep.policy.model import (
    ALL_PORTS,
    ANY,
    BOTH,
    FILES,
    ID_MAX,
    PORT_MAX,
    ROLE_WORDS,
    SOCKETS,
    TCP,
    Identity,
    Include,
    Log,
    Origin,
    Pair,
    Problem,
    Rings,
    Rule,
    Side,
    Statement,
    plain_network,
)  # fmt: skip
from sidestep.routing import Network

USE_FORM: Final = (
    "use both|tcp|PROTOCOL [over TRANSPORT] connect|listen PROGRAM ADDRESS[/PREFIX]:PORT[-PORT] "
    "[user USER] [group GROUP]"
)
_TARGET_HINT: Final = f"write {BOTH}, {TCP}, or the name of a protocol, such as sdp or local"
_OVER_HINT: Final = (
    "write the name of a transport, such as iwarp, roce or verbs, behind a protocol: use sdp over roce ..."
)
_ROLE_HINT: Final = "write connect (or client) for the end that connects, listen (or server) for the one that accepts"
_ADDRESS_HINT: Final = "write ADDRESS[/PREFIX]:PORT[-PORT], as in 10.0.0.0/8:5000-5010, [2001:db8::]/32:80 or *:*"
_PORT_HINT: Final = f"give a port from 0 to {PORT_MAX} without leading zeros, two of them as in 80-90, or * for all"
_PAIR_HINT: Final = "the form is: pair USER|@GROUP|* USER|@GROUP|*"
_RINGS_HINT: Final = "the form is: rings files|sockets PROGRAM"
_INCLUDE_HINT: Final = "the form is: include FILE, where FILE may be a glob"
_LOG_HINT: Final = "the form is: log [destination stderr|syslog|file NAME] [min-level 1..9]"
_STATEMENTS_HINT: Final = "statements begin with use, pair, rings, include or log; # begins a comment"

OVER: Final = "over"
_STATEMENT_WORDS: Final = ("use", "pair", "rings", "include", "log")
_CLAUSES: Final = ("user", "group")
_LOG_WORDS: Final = ("destination", "min-level")
_RING_WORDS: Final = (FILES, SOCKETS)
_TARGETS: Final = (BOTH, TCP, "sdp", "local")
_DESTINATIONS: Final = ("stderr", "syslog", "file")
_JOINTS: Final = (":", "/", "-")  # spaces may stand around these in an address, as libsdp allows
_PROTOCOL: Final = re.compile(r"[a-z][a-z0-9-]*")
_PIECE: Final = re.compile(r'"[^"]*"|#|[^"#]+|"')
_WORD: Final = re.compile(r'"(?P<quoted>[^"]*)"(?=\s|$)|(?P<bare>[^\s"]+)(?=\s|$)|(?P<broken>\S+)')
_BLANKS: Final = frozenset("\t\v\f\r")
_IPV6_BITS: Final = 128
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Document:
    """A file that was read."""

    statements: tuple[Statement, ...]
    problems: tuple[Problem, ...]


def parse(data: bytes, file: str = "policy") -> Document:
    """Reads a whole file; never raises."""
    statements: list[Statement] = []
    problems: list[Problem] = []
    for number, line in enumerate(data.removeprefix(_BOM).split(b"\n"), start=1):
        text = line.decode(errors="surrogateescape").rstrip()
        statement_text = _without_comment(text)
        if not statement_text or statement_text.isspace():
            continue
        origin = Origin(file, number, printable(statement_text.strip()[: limits.POLICY_LINE_MAX]))
        try:
            statements.append(_parse_statement(statement_text, origin))
        except _BadWord as bad:
            shown = printable(text[: limits.POLICY_LINE_MAX])
            problems.append(Problem(file, number, bad.column, printable(bad.word), bad.message, bad.remedy, shown))
            if len(problems) >= limits.POLICY_PROBLEMS_MAX:
                problems.append(Problem(file, number, 0, "", "too much is wrong here; later words were not read"))
                break
    return Document(tuple(statements), tuple(problems))


def printable(text: str) -> str:
    """`text` without anything that moves a cursor or cannot be written, column for column."""
    if text.isprintable():
        return text
    return "".join(" " if letter.isspace() else letter if letter.isprintable() else "?" for letter in text)


class _BadWord(Exception):
    """A word that cannot stand where it stands."""

    def __init__(self, column: int, word: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.column = column
        self.word = word
        self.message = message
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    column: int
    quoted: bool = False

    def bad(self, message: str, remedy: str = "") -> _BadWord:
        shown = f'"{self.text}"' if self.quoted else self.text
        return _BadWord(self.column, shown, message, remedy)


@dataclass(slots=True)
class _Words:
    """The words of a line, and how far they have been read."""

    words: list[_Word]
    end: int  # column behind the last one
    position: int = 0

    def peek(self) -> _Word | None:
        return self.words[self.position] if self.position < len(self.words) else None

    def take(self, expected: str, remedy: str) -> _Word:
        word = self.peek()
        if word is None:
            raise _BadWord(self.end, "", f"the line ends where {expected} is expected", remedy)
        self.position += 1
        return word

    def take_keyword(self, expected: str, remedy: str) -> _Word:
        word = self.take(expected, remedy)
        if word.quoted:
            raise word.bad(f"{expected} is expected here, not a name in quotes", remedy)
        return word

    def take_name(self, expected: str, remedy: str) -> _Word:
        word = self.take(expected, remedy)
        if not word.text:
            raise word.bad(f"{expected} is empty", remedy)
        if len(word.text) > limits.POLICY_NAME_MAX:
            raise word.bad(f"{expected} is longer than {limits.POLICY_NAME_MAX} characters", remedy)
        return word

    def finish(self, remedy: str) -> None:
        if (word := self.peek()) is not None:
            raise word.bad(f"{_shown(word.text)} is one word too many", remedy)


def _parse_statement(text: str, origin: Origin) -> Statement:
    if len(text) > limits.POLICY_LINE_MAX:
        raise _BadWord(0, "", f"a statement of more than {limits.POLICY_LINE_MAX} characters", "make two of it")
    if (column := _unprintable(text)) is not None:
        raise _BadWord(column, " ", "this character is not text, or not UTF-8", "retype the line, or save it as UTF-8")
    words = _Words(list(_split(text)), len(text) + 1)
    first = words.take_keyword("a statement", _STATEMENTS_HINT)
    parser = _STATEMENTS.get(first.text)
    if parser is None:
        raise first.bad(
            f"{_shown(first.text)} does not begin a statement", _suggest(first.text, _STATEMENT_WORDS, _STATEMENTS_HINT)
        )
    return parser(words, origin)


def _unprintable(text: str) -> int | None:
    """The column of the first character that is neither printed nor a blank; bytes that were not UTF-8 are such."""
    if not text.isprintable():
        for column, letter in enumerate(text, start=1):
            if not letter.isprintable() and letter not in _BLANKS and category(letter) != "Zs":
                return column
    return None


def _without_comment(text: str) -> str:
    """The text up to a `#` that does not stand in quotes."""
    if "#" in text:
        for piece in _PIECE.finditer(text):
            if piece[0] == "#":
                return text[: piece.start()].rstrip()
    return text


def _split(text: str) -> Iterator[_Word]:
    for found in _WORD.finditer(text):
        column = found.start() + 1
        if found["broken"] is not None:
            raise _BadWord(
                column, found["broken"], "a double quote stands for itself nowhere, and none closes it here",
                'put quotes around the whole name, as in "java*"',
            )  # fmt: skip
        yield _Word(found["bare"] if found["quoted"] is None else found["quoted"], column, found["quoted"] is not None)


# ---- statements ----


def _parse_use(words: _Words, origin: Origin) -> Rule:
    target = _target(words)
    over = _over(words, target)
    role = words.take_keyword("a role", _ROLE_HINT)
    if role.text not in ROLE_WORDS:
        raise role.bad(f"{_shown(role.text)} is not a role", _suggest(role.text, ROLE_WORDS, _ROLE_HINT))
    program = words.take_name("a program", f"the form is: {USE_FORM}; * stands for every program")
    network, ports = _take_endpoint(words).parse()
    identities: dict[str, Identity | None] = {}
    while (clause := words.peek()) is not None:
        if clause.quoted or clause.text not in _CLAUSES:
            raise clause.bad(
                f"{_shown(clause.text)} is not expected behind the port",
                _suggest(clause.text, _CLAUSES, "behind it only 'user USER' and 'group GROUP' may follow"),
            )
        if clause.text in identities:
            raise clause.bad(f"a second {clause.text!r}", "write one rule for each of them")
        words.position += 1
        identities[clause.text] = _identity(words, clause.text)
    return Rule(
        target, ROLE_WORDS[role.text], program.text, network, ports, identities.get("user"), identities.get("group"),
        origin, over,
    )  # fmt: skip


def _over(words: _Words, target: str) -> str:
    """The transport that the protocol is to take; empty: any."""
    word = words.peek()
    if word is None or word.quoted or word.text != OVER:
        return ""
    if target in (BOTH, TCP):
        raise word.bad(f"{target!r} goes over no transport", _OVER_HINT)
    words.position += 1
    transport = words.take_keyword("a transport", _OVER_HINT)
    if transport.text in ROLE_WORDS:
        raise transport.bad(f"{transport.text!r} is a role; a transport comes before it", _OVER_HINT)
    if not _PROTOCOL.fullmatch(transport.text) or len(transport.text) > limits.POLICY_PROTOCOL_MAX:
        raise transport.bad(f"{_shown(transport.text)} cannot be the name of a transport", _OVER_HINT)
    return transport.text


def _target(words: _Words) -> str:
    word = words.take_keyword("what to use", _TARGET_HINT)
    if word.text in ROLE_WORDS:
        raise word.bad(f"{word.text!r} is a role; what to use comes before it", f"the form is: {USE_FORM}")
    if not _PROTOCOL.fullmatch(word.text) or len(word.text) > limits.POLICY_PROTOCOL_MAX:
        raise word.bad(
            f"{_shown(word.text)} cannot be the name of a protocol", _suggest(word.text, _TARGETS, _TARGET_HINT)
        )
    return word.text


def _identity(words: _Words, kind: str) -> Identity | None:
    word = words.take_name(f"a {kind}", f"give a name, a number, or * for every {kind}")
    return None if word.text == ANY else _number_or_name(word, word.text, kind)


def _number_or_name(word: _Word, name: str, kind: str) -> Identity:
    if not (name.isascii() and name.isdigit()):
        return name
    if len(name) > len(str(ID_MAX)) or int(name) > ID_MAX:
        raise word.bad(f"{_shown(name)} is not the number of a {kind}", f"numbers go from 0 to {ID_MAX}")
    return int(name)


def _parse_pair(words: _Words, origin: Origin) -> Pair:
    sides = _side(words), _side(words)
    words.finish(_PAIR_HINT)
    return Pair(sides, origin)


def _side(words: _Words) -> Side:
    word = words.take_name("a user", _PAIR_HINT)
    if word.text == ANY:
        return Side()
    is_group = word.text.startswith("@")
    name = word.text.removeprefix("@")
    if not name or name.startswith("@") or (is_group and name == ANY):
        raise word.bad(f"{_shown(word.text)} names no group", _PAIR_HINT)
    return Side(_number_or_name(word, name, "group" if is_group else "user"), is_group)


def _parse_rings(words: _Words, origin: Origin) -> Rings:
    what = words.take_keyword("what they have", _RINGS_HINT)
    if what.text not in _RING_WORDS:
        raise what.bad(f"{_shown(what.text)} is nothing that rings have", _suggest(what.text, _RING_WORDS, _RINGS_HINT))
    program = words.take_name("a program", _RINGS_HINT)
    words.finish(_RINGS_HINT)
    return Rings(what.text == FILES, program.text, origin)


def _parse_include(words: _Words, origin: Origin) -> Include:
    pattern = words.take_name("a file", _INCLUDE_HINT)
    words.finish('a name with spaces stands in quotes: include "my rules.conf"')
    return Include(pattern.text, origin)


def _parse_log(words: _Words, origin: Origin) -> Log:
    found: dict[str, tuple[str, str | None]] = {}
    while (word := words.peek()) is not None:
        if word.quoted or word.text not in ("destination", "min-level") or word.text in found:
            raise word.bad(f"{_shown(word.text)} is not expected here", _suggest(word.text, _LOG_WORDS, _LOG_HINT))
        words.position += 1
        if word.text == "destination":
            place = words.take_keyword("a destination", _LOG_HINT)
            if place.text not in _DESTINATIONS:
                raise place.bad(
                    f"{_shown(place.text)} is not a destination", _suggest(place.text, _DESTINATIONS, _LOG_HINT)
                )
            found[word.text] = place.text, words.take_name("a file", _LOG_HINT).text if place.text == "file" else None
        else:
            level = words.take_keyword("a level", _LOG_HINT)
            if not re.fullmatch("[1-9]", level.text):
                raise level.bad(f"{_shown(level.text)} is not a level", "levels go from 1, everything, to 9, errors")
            found[word.text] = level.text, None
    destination, file = found.get("destination", (None, None))
    level_text, _ = found.get("min-level", (None, None))
    return Log(destination, file, int(level_text) if level_text else None, origin)


# ---- addresses ----


@dataclass(slots=True)
class _Endpoint:
    """`ADDRESS[/PREFIX]:PORT[-PORT]`, put together from words that may stand apart at the joints."""

    text: str = ""
    columns: list[int] = field(default_factory=list)  # column of each character
    gaps: set[int] = field(default_factory=set)  # characters before which a space stood

    def append(self, word: _Word) -> None:
        if self.text:
            self.gaps.add(len(self.text))
        self.columns += range(word.column, word.column + len(word.text))
        self.text += word.text

    def bad(self, start: int, end: int, message: str, remedy: str = "") -> _BadWord:
        if start >= len(self.text):
            return _BadWord(self.columns[-1] + 1, "", message, remedy)
        return _BadWord(self.columns[start], self.text[start : max(end, start + 1)], message, remedy)

    def parse(self) -> tuple[Network | None, tuple[int, int]]:
        text = self.text
        if text.startswith("["):
            address_end, prefix_start, prefix_end = self._bracketed()
            address_start = 1
        elif "/" in text:
            address_start, address_end = 0, text.index("/")
            prefix_start = address_end + 1
            prefix_end = self._colon_after(prefix_start)
        else:
            address_start, address_end = 0, self._last_colon()
            prefix_start = prefix_end = address_end
        network = self._network(address_start, address_end, prefix_start, prefix_end)
        return network, self._ports(text.index(":", prefix_end) + 1)

    def _bracketed(self) -> tuple[int, int, int]:
        """End of the address, and place of the prefix length: `[ADDRESS]`, `[ADDRESS]/N` or `[ADDRESS/N]`."""
        close = self.text.find("]")
        if close < 0:
            raise self.bad(0, len(self.text), "no bracket closes this one", "write [ADDRESS]/PREFIX:PORT")
        slash = self.text.find("/", 0, close)
        address_end = close if slash < 0 else slash
        if ":" not in self.text[1:address_end]:
            raise self.bad(1, address_end, "brackets are for IPv6 addresses", "write IPv4 addresses without them")
        behind = close + 1
        if slash >= 0:
            prefix = slash + 1, close
        elif self.text.startswith("/", behind):
            prefix = behind + 1, self._colon_after(behind + 1)
            behind = prefix[1]
        else:
            prefix = behind, behind
        if not self.text.startswith(":", behind):
            raise self.bad(behind, len(self.text), "a colon and a port are missing here", _PORT_HINT)
        return address_end, *prefix

    def _colon_after(self, start: int) -> int:
        colon = self.text.find(":", start)
        if colon < 0:
            raise self.bad(len(self.text), len(self.text), "a colon and a port are missing here", _PORT_HINT)
        return colon

    def _last_colon(self) -> int:
        """The colon before the port of an address without brackets and prefix length."""
        colon = self.text.rfind(":")
        if colon < 0:
            raise self.bad(len(self.text), len(self.text), "a colon and a port are missing here", _PORT_HINT)
        apart = not self.gaps.isdisjoint((colon, colon + 1))
        if self.text.count(":") > 1 and not apart and _address(self.text) is not None:
            raise self.bad(
                0, len(self.text), f"{self.text!r} may be an address without a port, or with one",
                f"write [{self.text[:colon]}]{self.text[colon:]} or [{self.text}]:*",
            )  # fmt: skip
        return colon

    def _network(self, start: int, end: int, prefix_start: int, prefix_end: int) -> Network | None:
        text = self.text[start:end]
        if text == ANY:
            self._prefix_len(prefix_start, prefix_end, _IPV6_BITS)
            return None
        address = _address(text)
        if address is None:
            remedy = "give an IPv4 or IPv6 address, or * for every one"
            if "%" in text:
                remedy = "leave out the interface: rules match addresses"
            elif re.search("[g-zG-Z]", text):
                remedy += "; names of hosts are not looked up"
            raise self.bad(start, end, f"{_shown(text)} is not an address", remedy)
        prefix_len = self._prefix_len(prefix_start, prefix_end, address.max_prefixlen)
        if isinstance(address, IPv4Address):
            return IPv4Network((address, prefix_len), strict=False)
        return plain_network(IPv6Network((address, prefix_len), strict=False))

    def _prefix_len(self, start: int, end: int, max_len: int) -> int:
        text = self.text[start:end]
        if start == end and not self.text.startswith("/", start - 1):
            return max_len
        number = _number(text, max_len)
        if number is None:
            remedy = f"give a length from 0 to {max_len}"
            if "." in text:
                remedy += ", as in 10.0.0.0/8, not a mask"
            raise self.bad(start, end, f"{_shown(text)} is not the length of a prefix", remedy)
        return number

    def _ports(self, start: int) -> tuple[int, int]:
        text = self.text[start:]
        if text == ANY:
            return ALL_PORTS
        first_text, dash, last_text = text.partition("-")
        first = self._port(start, first_text)
        if not dash:
            return first, first
        last = self._port(start + len(first_text) + 1, last_text)
        if first > last:
            raise self.bad(
                start, len(self.text), f"{text!r} goes from a higher port to a lower one", f"write {last}-{first}"
            )
        return first, last

    def _port(self, start: int, text: str) -> int:
        number = _number(text, PORT_MAX)
        if number is None:
            message = f"{_shown(text)} is not a port" if text else "a port is missing here"
            raise self.bad(start, start + len(text), message, _PORT_HINT)
        return number


def _take_endpoint(words: _Words) -> _Endpoint:
    endpoint = _Endpoint()
    while (word := words.peek()) is not None:
        joined = endpoint.text.endswith(_JOINTS) or word.text.startswith(_JOINTS)
        if endpoint.text and (not joined or word.text in _CLAUSES):
            break
        if word.quoted:
            raise word.bad("an address and a port are expected here, not a name in quotes", _ADDRESS_HINT)
        words.position += 1
        endpoint.append(word)
    if not endpoint.text:
        words.take("ADDRESS:PORT", f"the form is: {USE_FORM}; *:* stands for every address and port")
    return endpoint


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return IPv6Address(text) if ":" in text and "%" not in text else IPv4Address(text)
    except ValueError:
        return None


def _number(text: str, largest: int) -> int | None:
    """A decimal number without leading zeros."""
    if not re.fullmatch("0|[1-9][0-9]{0,4}", text):
        return None
    number = int(text)
    return number if number <= largest else None


_STATEMENTS: Final[dict[str, Callable[[_Words, Origin], Statement]]] = {
    "use": _parse_use,
    "pair": _parse_pair,
    "rings": _parse_rings,
    "include": _parse_include,
    "log": _parse_log,
}


def _suggest(word: str, known: Iterable[str], hint: str) -> str:
    """`hint`, preceded by the known word that was probably meant."""
    close = get_close_matches(word.lower()[:32], known, n=1)
    return f"did you mean {close[0]!r}? {hint}" if close else hint


def _shown(text: str) -> str:
    return repr(text if len(text) <= 64 else text[:61] + "...")
