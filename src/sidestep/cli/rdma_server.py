"""`sidestep rdma server`: what ping, bw and rping talk to."""

from __future__ import annotations

from contextlib import closing

import click

from sidestep.cli.options import json_option
from sidestep.cli.rdma_options import device_options, flush, offered
from sidestep.cli.shown import printable, show
from sidestep.errors import Misuse, Unavailable
from sidestep.loop import Loop
from sidestep.provider.network.routes import Network
from sidestep.rdma.roce.ip_cm import TCP_SERVICE
from sidestep.rdma.tools.devices import HostPort, ToolDevice, interruptible, open_device, resolve
from sidestep.rdma.tools.server import ToolServer
from sidestep.rdma.tools.terms import DEFAULT_PORT
from sidestep.routing import AddressEvent


@click.command()
@click.option("--address", metavar="HOST", help="Address to listen at (default: all addresses of this host).")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True,
              help="TCP port; 0: any that is free.")  # fmt: skip
@device_options
@json_option
def server(address: str | None, port: int, device: str, no_crc: bool, markers: bool, as_json: bool) -> None:
    """Serve `sidestep rdma ping` and `bw`, and rping of librdmacm, until a signal comes.

    Prints where it listens, and on stderr a line for each client that comes or goes. Anybody who reaches the port may
    use it: memory and clients are bounded, and what one of them writes goes to memory of its own.

    Exit code 1 if it cannot listen there.
    """
    loop = Loop()
    devices, servers = _listening(loop, device, address, port, no_crc=no_crc, markers=markers)
    places = [HostPort(one.address, each.port) for one, each in zip(devices, servers, strict=True)]
    document = {"listening": [{"address": place.host, "port": place.port} for place in places]}
    show(document, [f"listening at {place}" for place in places], as_json=as_json)
    flush()
    ended = False

    def stop() -> None:
        nonlocal ended
        ended = True

    control = offered(loop, devices, "sidestep rdma server")
    with interruptible(loop, stop):
        while not ended:
            loop.turn()
    for each in servers:
        each.close()
    if control is not None:
        control.close()
    for one in devices:
        one.close()
    loop.close()


def _everywhere(kind: str) -> list[str]:
    """All addresses of this host: in one, or for RoCE, which has a device for each, one by one."""
    if kind != "roce":
        return ["0.0.0.0", "::"]  # noqa: S104 - what was asked for
    with closing(Network(lambda _: None)) as network:
        events = [one for one in network.present() if isinstance(one, AddressEvent)]
    return [str(one.address) for one in events if not one.address.is_link_local]


def _listening(
    loop: Loop, kind: str, address: str | None, port: int, *, no_crc: bool, markers: bool
) -> tuple[list[ToolDevice], list[ToolServer]]:
    """A device and a server for each address; raises Unavailable if there is none."""
    addresses = _everywhere(kind) if address is None else resolve(address)
    devices: list[ToolDevice] = []
    servers: list[ToolServer] = []
    problem: Unavailable | None = None
    for number, one in enumerate(addresses):
        name = kind if len(addresses) == 1 else f"{kind}{number}"
        device: ToolDevice | None = None
        try:
            device = open_device(kind, one, loop, crc=not no_crc, markers=markers, name=name)
            servers.append(
                ToolServer(device, loop, TCP_SERVICE + port, lambda line: click.echo(printable(line), err=True))
            )
        except Unavailable as error:  # a host without IPv6, for one
            if device is not None:
                device.close()
            problem = error
            continue
        devices.append(device)
        port = servers[-1].port
    if problem is not None and (not servers or address is not None):
        raise problem
    if not servers:
        raise Misuse("there is nowhere to listen")
    return devices, servers
