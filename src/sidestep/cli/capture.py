"""`sidestep capture`: what goes over the connections of RDMA devices made of software, for Wireshark."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import click

from sidestep.cli.options import json_option, parsed
from sidestep.errors import Unavailable
from sidestep.observe.capture.remote import RemoteCapture
from sidestep.observe.capture.segments import SegmentWriter
from sidestep.rdma.tools.devices import Place, resolve

_ANY_PORT = 0
_TURN_S = 0.1


@click.command()
@click.argument(
    "place", required=False, metavar="[HOST[:PORT]]", callback=parsed(lambda text: Place.parse(text, _ANY_PORT))
)
@click.option("-w", "--write", "file", required=True, metavar="FILE", help="Where to write pcapng; -: stdout.")
@click.option("-i", "--interface", metavar="NAME", help="Only devices of this name, as `sidestep rdma list` shows it.")
@click.option("-c", "--count", type=click.IntRange(1), help="End after so many frames.")
@click.option("--duration", type=click.FloatRange(0), metavar="SECONDS", help="End after so long.")
@json_option
def capture(
    place: Place | None, file: str, interface: str | None, count: int | None, duration: float | None, as_json: bool
) -> None:
    """Capture what the software RDMA devices of running processes send and receive, as pcapng for Wireshark.

    Needs no privilege for processes of this user; root captures those of all. It is written from inside the devices:
    the very bytes of each connection, both ways, as TCP segments with an FPDU each, also of connections that began
    before, and of processes that start later. With HOST only connections to or from there. Between two processes that
    are both captured one end is written.

    Ends at Ctrl-C, and says on stderr what there was (with --json on stdout, unless that has the capture). A reader
    that is too slow stops nobody: what is dropped is counted, in the file as well.

    Exit code 1 if the file cannot be written.
    """
    if as_json and file == "-":
        raise click.UsageError("stdout cannot have the capture and the summary: leave --json out, or name a file")
    places = None if place is None else [(one, place.port or None) for one in resolve(place.host)]
    until = time.monotonic() + duration if duration is not None else float("inf")
    frames_max = count if count is not None else sys.maxsize
    with _opened(file) as stream, _stopped() as stopped:
        try:
            writer = SegmentWriter(stream)
            stream.flush()
            with RemoteCapture(writer, interface, places) as remote:
                remote.turn(0, frames_max)
                if not remote.following:
                    click.echo("sidestep: no process has such a device yet; waiting", err=True)
                else:
                    click.echo(f"capturing from {remote.processes} processes", err=True)
                while not stopped and writer.frames < frames_max and (left := until - time.monotonic()) > 0:
                    remote.turn(min(left, _TURN_S), frames_max)
                    stream.flush()
            writer.close()
        except BrokenPipeError:  # whoever read it has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is buffered goes nowhere at exit
            sys.exit(0)
        except OSError as error:
            raise Unavailable(f"{file} cannot be written: {error.strerror}") from error
    _tell(writer, remote, as_json=as_json)


def _tell(writer: SegmentWriter, remote: RemoteCapture, *, as_json: bool) -> None:
    if as_json:
        found = {
            "frames": writer.frames,
            "connections": writer.connections,
            "processes": remote.processes,
            "dropped": writer.dropped,
        }
        click.echo(json.dumps(found))
        return
    click.echo(
        f"{writer.frames} frames of {writer.connections} connections captured, {writer.dropped} pieces dropped",
        err=True,
    )


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdout.buffer
        return
    try:
        stream = Path(file).open("wb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise Unavailable(f"{file} cannot be written: {error.strerror}") from error
    with stream:
        yield stream


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
