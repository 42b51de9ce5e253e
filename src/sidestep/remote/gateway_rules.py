"""What a gateway relays: one rule a line.

    tcp LISTEN to sdp TARGET [via PORT] [max COUNT] [from NETWORKS] [else tcp]
    sdp LISTEN to tcp TARGET [at PORT]  [max COUNT] [from NETWORKS]

LISTEN and TARGET are ADDRESS:PORT; TCP may listen at port 0, any that is free. `via` names the RDMA port of the other
host, which its port mapper is asked for otherwise; `at` the RDMA port of the gateway, which its port mapper tells
otherwise. A line may end in a comment (#).
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from sidestep.routing import Address

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
        words = text.partition("#")[0].split()
        if len(words) < 5 or words[2] != "to" or (words[0], words[3]) not in (("tcp", "sdp"), ("sdp", "tcp")):
            raise Misuse(f"{text!r} is not a rule", remedy="for example: tcp 0.0.0.0:8080 to sdp 192.0.2.7:80 else tcp")
        from_tcp = words[0] == "tcp"
        listen, target = _endpoint(words[1], least=0 if from_tcp else 1), _endpoint(words[4])
        if not from_tcp and listen.address.is_unspecified:
            raise Misuse(f"{text!r}: SDP listens at one address", remedy="name that address of this host")
        if target.address.is_unspecified:
            raise Misuse(f"{text!r}: {target} is no place to connect to")
        allowed = {"max", "from", *(("via", "else") if from_tcp else ("at",))}
        found: dict[str, str] = {}
        rest = words[5:]
        while rest:
            if rest[0] not in allowed or rest[0] in found or len(rest) < 2:
                raise Misuse(
                    f"{text!r}: {rest[0]!r} is not understood", remedy=f"allowed: {', '.join(sorted(allowed))}"
                )
            found[rest[0]] = rest[1]
            rest = rest[2:]
        if found.get("else", "tcp") != "tcp":
            raise Misuse(f"{text!r}: a gateway falls back to TCP only", remedy="else tcp")
        count = _number(found.get("max", str(limits.GATEWAY_CONNECTIONS)), limits.GATEWAY_CONNECTIONS_MAX)
        try:
            hosts = tuple(ip_network(each) for each in found["from"].split(",")) if "from" in found else ()
        except ValueError as error:
            raise Misuse(f"{text!r}: {error}", remedy="for example: from 192.0.2.0/24,2001:db8::/64") from error
        port = _number(found.get("via", found.get("at", "0")), _PORT_MAX, least=0)
        return cls(from_tcp, listen, target, port, count, hosts, "else" in found)

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


def _endpoint(text: str, *, least: int = 1) -> Endpoint:
    host, colon, port = text.rpartition(":")
    try:
        address = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise Misuse(f"{text!r} is not ADDRESS:PORT", remedy="for example 192.0.2.7:80 or [2001:db8::7]:80") from None
    if not colon or (address.version == 6) is not host.startswith("["):
        raise Misuse(f"{text!r} is not ADDRESS:PORT", remedy="for example 192.0.2.7:80 or [2001:db8::7]:80")
    return Endpoint(address, _number(port, _PORT_MAX, least=least))


def _number(text: str, most: int, *, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _COUNT_DIGITS) or not least <= int(text) <= most:
        raise Misuse(f"{text!r} is not a number from {least} to {most}")
    return int(text)
