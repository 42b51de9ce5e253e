"""What a gateway relays: one rule a line.

    tcp LISTEN to sdp TARGET [via PORT] [max COUNT] [from NETWORKS] [else tcp]
    sdp LISTEN to tcp TARGET [at PORT]  [max COUNT] [from NETWORKS]

LISTEN and TARGET are ADDRESS:PORT; TCP may listen at port 0, any that is free. `via` names the RDMA port of the other
host, which its port mapper is asked for otherwise; `at` the RDMA port of the gateway, which its port mapper tells
otherwise. A line may end in a comment (#).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.policy.grammar import printable
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from sidestep.routing import Address

ValueT = TypeVar("ValueT")

_EXAMPLE: Final = "for example: tcp 0.0.0.0:8080 to sdp 192.0.2.7:80 else tcp"
_PORT_MAX: Final = 0xFFFF
_COUNT_DIGITS: Final = 9


@dataclass(frozen=True, slots=True)
class Rule:
    """Connections that come to one place by one protocol, and go on to another by the other one."""

    listens_tcp: bool  # and goes on by SDP; else the other way round
    listen: Endpoint
    target: Endpoint
    rdma_port: int = 0  # `via` or `at`; 0: the port mapper's business
    connections_max: int = limits.GATEWAY_CONNECTIONS
    hosts: tuple[IPv4Network | IPv6Network, ...] = ()  # who may come; empty: everybody
    falls_back: bool = False  # to TCP, where SDP is not to be had

    @classmethod
    def parse(cls, text: str) -> Self:
        """From one line.

        Raises:
            Misuse: It is none.
        """
        line = _Line(text)
        words = line.words
        from_tcp = words[:1] == ["tcp"]
        for at, allowed in enumerate((("tcp", "sdp"), (), ("to",), ("sdp" if from_tcp else "tcp",), ())):
            if len(words) <= at or (allowed and words[at] not in allowed):
                raise line.bad(at, f"{' or '.join(allowed) or 'ADDRESS:PORT'} is expected here", _EXAMPLE)
        listen, target = line.read(1, partial(_endpoint, least=0 if from_tcp else 1)), line.read(4, _endpoint)
        if not from_tcp and listen.address.is_unspecified:
            raise line.bad(1, "SDP listens at one address", "name that address of this host")
        if target.address.is_unspecified:
            raise line.bad(4, f"{target} is no place to connect to")
        rule = cls(from_tcp, listen, target)
        parsers: dict[str, tuple[str, Callable[[str], Any]]] = {
            "max": ("connections_max", partial(_number, most=limits.GATEWAY_CONNECTIONS_MAX)),
            "from": ("hosts", _networks),
            "via" if from_tcp else "at": ("rdma_port", partial(_number, most=_PORT_MAX, least=0)),
        }
        if from_tcp:
            parsers["else"] = ("falls_back", _tcp_alone)
        seen = set[str]()
        for at in range(5, len(words), 2):
            if words[at] not in parsers:
                raise line.bad(at, f"{words[at]!r} is not understood", f"allowed: {', '.join(sorted(parsers))}")
            if words[at] in seen:
                raise line.bad(at, f"{words[at]!r} stands there twice")
            seen.add(words[at])
            name, parse = parsers[words[at]]
            rule = replace(rule, **{name: line.read(at + 1, parse)})
        return rule

    def __str__(self) -> str:
        words = [*(("tcp", "sdp") if self.listens_tcp else ("sdp", "tcp"))]
        text = f"{words[0]} {self.listen} to {words[1]} {self.target}"
        if self.rdma_port:
            text += f" {'via' if self.listens_tcp else 'at'} {self.rdma_port}"
        return text + (" else tcp" if self.falls_back else "")

    def admits(self, host: Address) -> bool:
        return not self.hosts or any(host in each for each in self.hosts if each.version == host.version)


def read_rules(path: Path) -> list[Rule]:
    """The rules of a file.

    Raises:
        Misuse: It cannot be read, or a line of it is none; the message names it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(limits.POLICY_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise Misuse(f"{path} cannot be read: {error}") from error
    if len(text) > limits.POLICY_BYTES_MAX:
        raise Misuse(f"{path} is longer than {limits.POLICY_BYTES_MAX} characters")
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.partition("#")[0].strip():
            try:
                rules.append(Rule.parse(line))
            except Misuse as error:
                raise Misuse(f"{path}, line {number}: {error.message}", remedy=error.remedy) from error
    return rules


def check_rules(rules: list[Rule]) -> None:
    """Raises Misuse if there are none, too many, or two for one place."""
    if not rules:
        raise Misuse("there is nothing to relay", remedy="give a rule: tcp 0.0.0.0:8080 to sdp 192.0.2.7:80")
    if len(rules) > limits.GATEWAY_RULES_MAX:
        raise Misuse(f"{len(rules)} rules; {limits.GATEWAY_RULES_MAX} at most")
    places: set[tuple[bool, Endpoint]] = set()
    for rule in rules:
        if (place := (rule.listens_tcp, rule.listen)) in places and rule.listen.port:
            raise Misuse(f"two rules for {'tcp' if rule.listens_tcp else 'sdp'} {rule.listen}")
        places.add(place)


class _Line:
    """A rule's text and its words, each of which may be pointed at."""

    def __init__(self, text: str) -> None:
        self._text = printable(text.rstrip())
        self._found = list(re.finditer(r"\S+", self._text.partition("#")[0]))
        self.words = [each[0] for each in self._found]

    def read(self, at: int, parse: Callable[[str], ValueT]) -> ValueT:
        """What a word means; raises Misuse that points at it."""
        if at >= len(self.words):
            raise self.bad(at, f"something is expected behind {self.words[-1]!r}")
        try:
            return parse(self.words[at])
        except Misuse as error:
            raise self.bad(at, error.message, error.remedy) from error

    def bad(self, at: int, message: str, remedy: str = "") -> Misuse:
        """That a word, or the end of the line, cannot stand there."""
        start, end = self._found[at].span() if at < len(self._found) else (len(self._text) + 1,) * 2
        marks = "^" + "~" * (end - start - 1)
        return Misuse(f"{message}:\n    {self._text}\n    {' ' * start}{marks}", remedy=remedy)


def _tcp_alone(text: str) -> bool:
    if text != "tcp":
        raise Misuse("a gateway falls back to TCP only", remedy="else tcp")
    return True


def _networks(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    try:
        return tuple(ip_network(each) for each in text.split(","))
    except ValueError as error:
        raise Misuse(str(error), remedy="for example: from 192.0.2.0/24,2001:db8::/64") from error


def _endpoint(text: str, *, least: int = 1) -> Endpoint:
    host, colon, port = text.rpartition(":")
    try:
        address = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise Misuse(f"{text!r} is not ADDRESS:PORT", remedy="for example 192.0.2.7:80 or [2001:db8::7]:80") from None
    if not colon or (address.version == 6) is not host.startswith("["):
        raise Misuse(f"{text!r} is not ADDRESS:PORT", remedy="for example 192.0.2.7:80 or [2001:db8::7]:80")
    return Endpoint(address, _number(port, most=_PORT_MAX, least=least))


def _number(text: str, *, most: int, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _COUNT_DIGITS) or not least <= int(text) <= most:
        raise Misuse(f"{text!r} is not a number from {least} to {most}")
    return int(text)
