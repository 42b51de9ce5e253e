"""`sidestep capture`: what goes over the connections of RDMA devices made of software, for Wireshark."""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, cast

import click

from sidestep.cli.options import json_option, parsed
from sidestep.cli.shown import show
from sidestep.errors import Misuse, Unavailable, counted
from sidestep.observe.capture.conversation import ConversationWriter
from sidestep.observe.capture.devices import DeviceWriter
from sidestep.observe.capture.places import Place as End
from sidestep.observe.capture.remote import RemoteCapture
from sidestep.observe.capture.segments import SegmentWriter
from sidestep.rdma.roce.packet import MTU_CODES
from sidestep.rdma.tools.devices import HostPort, resolve

_ANY_PORT = 0
_TURN_S = 0.1
_LAST_S = 5.0  # seconds, at most, for processes to tell what came before the end
_SNAPLEN_MIN = 14  # a header of Ethernet


@click.command()
@click.argument(
    "place", required=False, metavar="[HOST[:PORT]]", callback=parsed(lambda text: HostPort.parse(text, _ANY_PORT))
)
@click.option("-w", "--write", "file", required=True, metavar="FILE", help="File for pcapng; -: stdout.")
@click.option(
    "-i",
    "--interface",
    metavar="HOST:PORT|NAME",
    help="One end of a connection, a program's or a device's, to see SDP; or only devices of this name, as "
    "`sidestep rdma list` shows it.",
)
@click.option(
    "--as",
    "form",
    type=click.Choice(("sdp", "iwarp")),
    help="Form of the file. [default: sdp with -i HOST:PORT, else iwarp]",
)
@click.option("-s", "--snaplen", type=click.IntRange(_SNAPLEN_MIN), metavar="BYTES", help="Keep so much of each frame.")
@click.option(
    "--mtu",
    type=click.Choice([str(size) for size in MTU_CODES.values()]),
    help="Cut SDP messages into packets of this path MTU; dissectors may not put them together.",
)
@click.option("-c", "--count", type=click.IntRange(1), help="End after so many frames.")
@click.option("--duration", type=click.FloatRange(0), metavar="SECONDS", help="End after so long.")
@json_option
def capture(
    place: HostPort | None, file: str, interface: str | None, form: str | None, snaplen: int | None, mtu: str | None,
    count: int | None, duration: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Capture what the software RDMA devices of running processes send and receive, as pcapng for Wireshark.

    Needs no privilege for processes of this user; root captures those of all. It is written from inside the devices,
    also of connections that began before, and of processes that start later. With HOST or HOST:PORT only connections
    to or from there. Between two processes that are both captured one end is written.

    As iwarp: the very bytes of each connection, both ways, as TCP segments with an FPDU each. Of devices that speak
    RoCEv2 the very packets, in either form; sdp leaves out connections that carry no SDP.

    As sdp: what SDP connections say, those that carry programs' connections to other hosts among them, as packets of
    RoCEv2, since Wireshark knows SDP over InfiniBand only. Messages, RDMA, keys, times and addresses are what they
    were; the packets around them are made up, and the file says so. HOST:PORT is an end of the programs' TCP connection
    here, or of the connection between the devices.

    Ends at Ctrl-C, and says on stderr what there was (with --json on stdout, unless that has the capture). A reader
    that is too slow stops nobody: what is dropped is counted, in the file as well.

    A FILE that is there is replaced once the capture has begun. Exit code 1 if the file cannot be written.
    """
    if as_json and file == "-":
        raise click.UsageError("stdout cannot have the capture and the summary: leave --json out, or name a file")
    device, given = (None, _end(interface)) if interface is not None and _is_end(interface) else (interface, None)
    if place is not None and given is not None:
        raise click.UsageError("one HOST:PORT is enough: as the argument or with -i")
    as_sdp = form == "sdp" or (form is None and given is not None)
    if mtu is not None and not as_sdp:
        raise click.UsageError("--mtu is for --as sdp")
    ends = _ends(place or given)
    until = time.monotonic() + duration if duration is not None else float("inf")
    frames_max = count if count is not None else sys.maxsize
    try:
        with _output(file) as (stream, begun), _stopped() as stopped:
            writer: DeviceWriter[Any]
            if as_sdp:
                writer = ConversationWriter(
                    stream, places=ends, path_mtu=int(mtu) if mtu is not None else None, snaplen=snaplen or 0
                )
            else:
                writer = SegmentWriter(stream, places=ends, snaplen=snaplen or 0)
            stream.flush()
            begun()
            # The port of a program is not one of the device's: only what is said there tells it.
            with RemoteCapture(writer, device, _hosts(ends)) as remote:
                for _ in _turns(remote, writer, stopped, frames_max, until):
                    stream.flush()
            writer.close()
    except BrokenPipeError:  # the reader has seen enough
        if file == "-":
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # buffered output goes nowhere at exit
        sys.exit(0)
    except OSError as error:
        raise Unavailable(f"{file} cannot be written: {error.strerror}") from error
    _tell(writer, remote, as_json=as_json)


@contextmanager
def _output(file: str) -> Iterator[tuple[BinaryIO, Callable[[], object]]]:
    """Where to write, and what is called once the file has begun: until then one of that name stays as it is."""
    path = Path(file).resolve()
    if file == "-" or (path.exists() and not path.is_file()):  # stdout, a pipe, a device
        with click.open_file(file, "wb") as opened:
            yield cast("BinaryIO", opened), lambda: None
        return
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    with open(new, "xb") as stream:
        try:
            if path.exists():
                os.fchmod(stream.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield stream, lambda: new.rename(path)
        finally:
            new.unlink(missing_ok=True)


def _is_end(text: str) -> bool:
    """True if `text` is HOST:PORT, and no device: the names of a provider's have an @."""
    return ":" in text and "@" not in text


def _end(text: str) -> HostPort:
    try:
        return HostPort.parse(text, _ANY_PORT)
    except Misuse as error:
        raise click.BadParameter(error.message, param_hint="-i") from error


def _ends(place: HostPort | None) -> list[End] | None:
    """All addresses of a place; None: any."""
    return None if place is None else [(one, place.port or None) for one in resolve(place.host)]


def _hosts(ends: list[End] | None) -> list[End] | None:
    return None if ends is None else [(host, None) for host in dict.fromkeys(host for host, _ in ends)]


def _turns(
    remote: RemoteCapture, writer: DeviceWriter[Any], stopped: list[int], frames_max: int, until: float
) -> Iterator[None]:
    """Captures until it is to end, and what came before the end; yields whenever something may have been written."""
    remote.turn(0, frames_max)
    if not remote.following:
        click.echo("sidestep: no process has such a device yet; waiting", err=True)
    else:
        click.echo(f"capturing from {counted(remote.processes, 'process')}", err=True)
    while not stopped and writer.frames < frames_max and (left := until - time.monotonic()) > 0:
        remote.turn(min(left, _TURN_S), frames_max)
        yield
    remote.stop()
    last = time.monotonic() + _LAST_S
    while remote.following and writer.frames < frames_max and (left := last - time.monotonic()) > 0:
        remote.turn(min(left, _TURN_S), frames_max)
        yield
    if remote.following and writer.frames < frames_max:
        click.echo(f"sidestep: no last frames from {counted(remote.following, 'process')} in {_LAST_S:.0f} s", err=True)


def _tell(writer: DeviceWriter[Any], remote: RemoteCapture, *, as_json: bool) -> None:
    found = {
        "frames": writer.frames,
        "connections": writer.connections,
        "processes": remote.processes,
        "dropped": writer.dropped,
    }
    text = f"{counted(writer.frames, 'frame')} of {counted(writer.connections, 'connection')} captured"
    text += f", {counted(writer.dropped, 'piece')} dropped"
    show(found, [text], as_json=as_json, talk=True)


@contextmanager
def _stopped() -> Iterator[list[int]]:
    """A list that is not empty once SIGINT or SIGTERM came: a block is never cut in two."""
    found: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        found.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
