"""Devices by name, as the tools open them: the one place here that knows what there is."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, TypeAlias

from sidestep.errors import Misuse, Unavailable
from sidestep.loop import READ, Loop
from sidestep.rdma.iwarp.device import IwarpDevice, IwarpSettings
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.kernel.device import KernelDevice
from sidestep.rdma.roce.udp_link import UdpRoceDevice

if TYPE_CHECKING:
    from types import FrameType


_PORT_DIGITS_MAX: Final = 5
_LOOPBACK: Final = tuple(f"127.0.0.{number}" for number in range(2, 18))  # of programs beside a server here
# What tools can open: a `verbs.Device` that `control` can be asked about.
ToolDevice: TypeAlias = IwarpDevice | UdpRoceDevice | KernelDevice


def _iwarp(address: str, loop: Loop, *, crc: bool, markers: bool, name: str) -> IwarpDevice:
    startup = MpaSettings(peer_to_peer=True, crc=crc, markers=markers)
    return IwarpDevice(address, loop, IwarpSettings(startup=startup), name=name)


def _roce(address: str, loop: Loop, *, crc: bool, markers: bool, name: str) -> UdpRoceDevice:
    if markers or not crc:
        raise Misuse("RoCE has a checksum always, and no markers", remedy="leave out --no-crc and --markers")
    return UdpRoceDevice(address, loop, name=name)


def _verbs(address: str, loop: Loop, *, crc: bool, markers: bool, name: str) -> KernelDevice:
    if not crc or markers:
        raise Misuse("checksums and markers are the business of the adapter", remedy="leave the option out")
    return KernelDevice(address, loop, name=name)


DEVICES: Final[dict[str, Callable[..., ToolDevice]]] = {"iwarp": _iwarp, "roce": _roce, "verbs": _verbs}


@dataclass(frozen=True, slots=True)
class HostPort:
    """Where somebody is, or listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int) -> HostPort:
        """`HOST`, `HOST:PORT`, `[ADDRESS]:PORT`, or an IPv6 address as it is; raises Misuse."""
        host, port = text, ""
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            if not bracket or (rest and not rest.startswith(":")):
                raise Misuse(f"{text!r} is not [ADDRESS]:PORT")
            port = rest[1:]
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        known = port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS_MAX and 0 < int(port) < 1 << 16
        if not host or (port and not known):
            raise Misuse(f"{text!r} is not HOST or HOST:PORT", remedy="for example server.example:7174 or [::1]:7174")
        return cls(host, int(port) if port else default_port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolve(host: str) -> list[str]:
    """Its addresses, in the order in which they should be tried; raises Unavailable."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a name"
        raise Unavailable(f"{host!r} is not known: {why}", remedy="give an address, or look at the name") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def source_for(address: str) -> str:
    """The address of this host that packets to there come from; raises Unavailable if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # nothing is sent
            host, _, *rest = probe.getsockname()
    except OSError as error:
        raise Unavailable(
            f"there is no way to {address}: {error.strerror}", remedy=f"look at 'ip route get {address}'"
        ) from error
    scope = address.partition("%")[2]
    return f"{host}%{scope}" if rest and scope and "%" not in host else str(host)


def sources_for(kind: str, address: str) -> list[str]:
    """The addresses of this host to try, in order, for a device that talks to there; raises Unavailable.

    An address has one RoCE device. What talks to this host leaves the address of the other end alone.
    """
    source = source_for(address)
    if kind != "roce" or not (source == address or ip_address(source.partition("%")[0]).is_loopback):
        return [source]
    others = [one for one in _LOOPBACK if one != address] if ":" not in address else []
    return others if source == address and others else [source, *others]


def open_device(
    kind: str, address: str, loop: Loop, *, crc: bool = True, markers: bool = False, name: str = ""
) -> ToolDevice:
    """A device of this kind at an address of this host; raises Misuse for a kind that is not known."""
    if kind not in DEVICES:
        raise Misuse(f"there is no device {kind!r}", remedy=f"one of: {', '.join(DEVICES)}")
    return DEVICES[kind](address, loop, crc=crc, markers=markers, name=name or kind)


@contextmanager
def interruptible(loop: Loop, stop: Callable[[], object]) -> Iterator[None]:
    """SIGINT and SIGTERM call `stop` from the loop, so that nothing is left half done. Main thread only."""
    with signals(loop, (signal.SIGINT, signal.SIGTERM), lambda _number: stop()):
        yield


@contextmanager
def signals(loop: Loop, numbers: tuple[signal.Signals, ...], arrived: Callable[[int], object]) -> Iterator[None]:
    """These signals call `arrived` with their number from the loop. Main thread only."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)

    def ready(_events: int) -> None:
        for number in reader.recv(64):
            arrived(number)

    def handle(number: int, frame: FrameType | None) -> None:
        """The wakeup descriptor tells."""

    before = {number: signal.signal(number, handle) for number in numbers}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    loop.watch(reader.fileno(), READ, ready)
    try:
        yield
    finally:
        loop.forget(reader.fileno())
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
