"""Common parts of the tools of `sidestep rdma`: options, opening devices, finding the server, sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import click

from sidestep.cli.options import CommandT, parsed, together
from sidestep.errors import Misuse, SidestepError, Unavailable
from sidestep.loop import Loop
from sidestep.rdma.cm import CmState
from sidestep.rdma.control import Control
from sidestep.rdma.tools import client
from sidestep.rdma.tools.client import Session
from sidestep.rdma.tools.devices import DEVICES, HostPort, ToolDevice, open_device, resolve, sources_for
from sidestep.rdma.tools.talk import Talk
from sidestep.rdma.tools.terms import DEFAULT_PORT

TalkT = TypeVar("TalkT", bound=Talk)
_LEAVE_S = 2.0  # for the other end to say good-bye as well
_DIGITS_MAX = 20  # of 64 bits
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes, with K, M or G as a suffix; raises Misuse."""
    digits, unit = (text[:-1], text[-1:].lower()) if text[-1:].isalpha() else (text, "")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX) or unit not in _UNITS:
        raise Misuse(f"{text!r} is not a size", remedy="for example 64, 4K or 1M")
    return int(digits) * _UNITS[unit]


def size_option(default: str, text: str) -> Callable[[CommandT], CommandT]:
    return click.option(
        "-s", "--size", metavar="BYTES", callback=parsed(parse_size), default=default, show_default=True, help=text
    )


server_argument = click.argument(
    "server", metavar="HOST[:PORT]", callback=parsed(lambda text: HostPort.parse(text, DEFAULT_PORT))
)

# The device, and what connections it makes.
device_options = together(
    click.option("--device", default="iwarp", show_default=True, type=click.Choice(list(DEVICES)),
                 help="Kind of device to use: iwarp and roce, of software, or verbs, of the kernel."),
    click.option("--no-crc", is_flag=True, help="Do without CRC32C, if the other end does without as well."),
    click.option("--markers", is_flag=True, help="Ask for MPA markers in what this end receives."),
)  # fmt: skip

timeout_option = click.option(
    "--timeout", type=click.FloatRange(0.01, 3600), default=10.0, show_default=True,
    help="Seconds to wait for the other end.",
)  # fmt: skip


def offered(loop: Loop, devices: list[ToolDevice], title: str) -> Control | None:
    """The socket by which others see the devices; without it they do their work all the same."""
    try:
        return Control(loop, devices, title)
    except SidestepError as error:
        click.echo(f"sidestep: others cannot look at this process: {error.message}", err=True)
        return None


class ToolClient:
    """A connection to a server; use it in a `with` block."""

    def __init__(self, kind: str, title: str, *, no_crc: bool, markers: bool) -> None:
        self._kind, self._title = kind, title
        self._crc, self._markers = not no_crc, markers
        self.loop = Loop()
        self.session = Session()
        self._device: ToolDevice | None = None
        self._control: Control | None = None
        self._talk: Talk | None = None
        self.place: HostPort | None = None  # where the server is, as an address

    def __enter__(self) -> ToolClient:
        return self

    def __exit__(self, *_: object) -> None:
        talk = self._talk
        if talk is not None and talk.connection is not None:
            connection = talk.connection
            connection.disconnect()
            self.loop.run_until(lambda: connection.state is CmState.CLOSED, _LEAVE_S)
        self._close_device()
        self.loop.close()

    def connect(
        self, server: HostPort, make: Callable[[ToolDevice, Callable[[str], object]], TalkT], timeout_s: float
    ) -> TalkT:
        """Tries each address of the server; raises the error of the last one."""
        problem: Unavailable | None = None
        for address in resolve(server.host):
            place = HostPort(address, server.port)
            try:
                device = self._device = self._opened(address)
                self._control = offered(self.loop, [device], self._title)
                talk = make(device, self.session.failed)
                client.connect(self.loop, talk, place, self.session, timeout_s)
            except Unavailable as error:
                self._close_device()
                problem = error
                self.session = Session(stopped=self.session.stopped)
                if self.session.stopped:
                    break
            else:
                self._talk, self.place = talk, place
                return talk
        assert problem is not None
        raise problem

    def _opened(self, address: str) -> ToolDevice:
        """A device that reaches the address; raises Unavailable."""
        problem: Unavailable | None = None
        for source in sources_for(self._kind, address):
            try:
                return open_device(self._kind, source, self.loop, crc=self._crc, markers=self._markers)
            except Unavailable as error:
                problem = error
        assert problem is not None
        raise problem

    def details(self) -> dict[str, object]:
        found = self._device.queue_pairs() if self._device is not None else []
        return found[0] if found else {}

    def stop(self) -> None:
        """Stops the session, as the user does not want to wait any more."""
        self.session.stopped = True

    def _close_device(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._device is not None:
            self._device.close()
            self._device = None


def flush() -> None:
    """Flushes stdout, so that lines are seen as they come, also in a pipe; its reader may have gone."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
