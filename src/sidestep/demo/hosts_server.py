"""The host of `sidestep rdma bench` that waits: it starts the other end of each measurement, one client at a time.

A line of JSON asks, and one answers. A peer that reaches the port can make this host measure, and nothing else.
Programs and their arguments are made here, out of a way, a work and a number.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Final

from sidestep import __version__
from sidestep.demo.hosts import ITERATIONS_MAX, Run, Way, Work
from sidestep.demo.machine import Machine
from sidestep.demo.world import World
from sidestep.errors import SidestepError, Unavailable
from sidestep.rdma.kernel.sysfs import kernel_devices

LINE_MAX: Final = 1 << 16  # bytes: of a host with many devices
RUN_MAX_S: Final = 120.0  # of one measurement, and of a client that says nothing
_END_S: Final = 5.0  # for a program to end once its work is done


def host() -> dict[str, Any]:
    """Facts of this host to go with its figures."""
    found = [asdict(device) for device in kernel_devices()]
    return {"version": __version__, "machine": Machine.now().as_json(), "devices": found}


def serve(listener: socket.socket, provider: Path, tell: Callable[[str], None]) -> None:
    """Answers one client after the other, without end; `tell` hears of each, `provider` is this host's socket."""
    while True:
        client, (address, *_) = listener.accept()
        tell(f"{address} measures")
        client.settimeout(RUN_MAX_S)
        with client, client.makefile("rwb") as stream:
            try:
                _answer(client, stream, provider)
                tell(f"{address} is done")
            except (OSError, ValueError, KeyError, TypeError) as error:  # gone, silent, or none of ours
                tell(f"{address} is sent away: {str(error) or type(error).__name__}")


def send(stream: BufferedRWPair, document: dict[str, Any]) -> None:
    """Sends a document."""
    stream.write(json.dumps(document).encode() + b"\n")
    stream.flush()


def receive(stream: BufferedRWPair) -> dict[str, Any]:
    """Document of the other host; raises EOFError where it is gone and ValueError for what is no such line."""
    line = stream.readline(LINE_MAX)
    if not line:
        raise EOFError
    try:
        document = json.loads(line)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if not isinstance(document, dict):
        raise ValueError("not an object")
    return document


def _answer(client: socket.socket, stream: BufferedRWPair, provider: Path) -> None:
    own, port = client.getsockname()[:2]
    send(stream, host())
    with contextlib.suppress(EOFError):
        while True:
            asked = receive(stream)
            run = Run(Way(asked["way"]), Work(asked["work"]), int(asked["iterations"]))
            if not 0 < run.iterations <= ITERATIONS_MAX:
                raise ValueError(f"{run.iterations} iterations")
            try:
                run.check(own)
            except SidestepError as why:
                send(stream, {"problem": f"{why.message}: {why.remedy}" if why.remedy else why.message})
                continue
            with World(run.tool) as world:
                program = world.start(run.argv(port + 1, provider, at=own, to=None))
                send(stream, {"problem": ""})
                receive(stream)  # it is done
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(_END_S)


def listening(address: str, port: int) -> socket.socket:
    """Socket for clients; raises Unavailable."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise Unavailable(
            f"cannot listen at {address} port {port}: {error.strerror}", remedy="choose another with --port"
        ) from error
