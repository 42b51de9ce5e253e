"""`sidestep sdp decode`: messages and captures in words."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path
from typing import BinaryIO

import click

from sidestep import limits
from sidestep.cli.shown import printable, show
from sidestep.errors import Misuse, Unavailable
from sidestep.observe.capture.decode import Decoder, looks_like_hex, messages_in
from sidestep.observe.capture.events import What
from sidestep.observe.capture.files import is_capture
from sidestep.sdp import dissect

_INDENT = " " * 8
_GIVE = "give a pcap or pcapng file, or messages in hex"


@click.command()
@click.argument("source", required=False, default="-", metavar="[HEX|FILE]")
@click.option("-v", "--verbose", is_flag=True, help="Every field of every message, in a line of its own.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def decode(source: str, verbose: bool, as_json: bool) -> None:
    """Show SDP messages in words.

    HEX is a message. FILE, or else standard input, is either messages in hex, a blank line between two, or a capture:
    pcap or pcapng, of RoCE (both versions), InfiniBand or iWARP. Of a capture the connections that carry SDP are found
    by their beginnings, and messages of several packets are put together. RDMA Reads and Writes, the connection
    manager and trouble beneath have a line each.

    Broken messages are shown as far as they can be read.

    Exit code 1 if there is nothing to show, a message given in hex is broken, or the hex or the capture is damaged:
    what lies before that place is shown.
    """
    stream, name = _opened(source)
    with stream:
        try:
            start = stream.read(4)
        except OSError as error:  # a directory, for one
            raise _unreadable(name, error) from error
        if is_capture(start):
            shown = _show_capture(Decoder(stream, name, start), name, verbose=verbose, as_json=as_json)
        else:
            text = start + stream.read(limits.CAPTURE_HEX_MAX)  # what is more is refused
            shown = _show_messages(text, name, verbose=verbose, as_json=as_json)
    if not shown:
        sys.exit(1)


def _show_capture(decoder: Decoder, name: str, *, verbose: bool, as_json: bool) -> bool:
    shown = False
    for event in decoder.events():
        shown = True
        if as_json:
            show(event.as_json(), (), as_json=True)
            continue
        seconds = (event.time_ns - decoder.begin_ns) / 1e9
        click.echo(f"{event.frame:6} {seconds:12.6f}  {event.source} > {event.destination}  {printable(event.line())}")
        if verbose and event.what is What.SDP:
            for line in dissect.lines_of(dissect.read(event.message, event.missing)):
                click.echo(_INDENT + line)
    if not shown:
        click.echo(f"sidestep: no SDP in the {decoder.frames} frames of {name}", err=True)
        click.echo(f"hint: {_why_nothing(decoder)}", err=True)
    return shown


def _why_nothing(decoder: Decoder) -> str:
    if decoder.unknown_links:
        links = ", ".join(map(str, sorted(decoder.unknown_links)))
        return f"link types {links} cannot be read: capture on an Ethernet, IP or InfiniBand link"
    return "a capture must hold the beginning of a connection: the CM REQ, or over TCP the MPA Request"


def _show_messages(text: bytes, name: str, *, verbose: bool, as_json: bool) -> bool:
    try:
        text.split(b"\n", 1)[0].decode("ascii")
    except UnicodeDecodeError as error:
        raise Misuse(
            f"{name} is neither a capture nor hex: byte {error.start} is {text[error.start]:#04x}", remedy=_GIVE
        ) from error
    count, broken, first = 0, 0, ""
    for line, message in messages_in(text.decode("ascii", "backslashreplace"), name):
        count += 1
        reading = dissect.read(message)
        if reading.fault is not None:
            broken += 1
            first = first or f"{name}, line {line}: {reading.name}, {reading.fault.rule}: {reading.fault.message}"
        lines = dissect.lines_of(reading) if verbose else [dissect.line_of(reading)]
        show(dissect.as_json(reading), lines, as_json=as_json)
    if broken:
        more = f" (and {broken - 1} more broken of {count})" if broken > 1 else ""
        raise Misuse(f"{first}{more}", remedy="all that can be read is shown; check that the messages are whole")
    if not count:
        click.echo(f"sidestep: {name} is empty", err=True)
        click.echo(f"hint: {_GIVE}", err=True)
    return count > 0


def _unreadable(name: str, error: OSError) -> Unavailable:
    return Unavailable(f"{name} cannot be read: {error.strerror}", remedy="give a file that you may read")


def _opened(source: str) -> tuple[BinaryIO, str]:
    if source == "-":
        return sys.stdin.buffer, "standard input"
    path = Path(source)
    directory = False
    try:
        directory = path.is_dir()
        if path.exists() and not directory:  # a pipe too: <(command)
            return path.open("rb"), source
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # as a message may be
            raise _unreadable(source, error) from error
    if looks_like_hex(source):
        return io.BytesIO(source.encode()), "the message"
    if not source:
        raise Misuse("neither a file nor a message was named", remedy=_GIVE)
    if directory:
        raise Misuse(f"{source} is a directory", remedy="give a capture in it")
    raise Misuse(f"there is no file {source[:200]}, and it is not hex", remedy="give a file, or a message in hex")
