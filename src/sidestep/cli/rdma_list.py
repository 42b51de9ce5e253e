"""`sidestep rdma list`: the devices of the kernel, and those of running processes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from sidestep.cli.options import json_option
from sidestep.cli.shown import printable, show
from sidestep.observe.rdma import DeviceView, ProcessView, processes
from sidestep.rdma.kernel.sysfs import KernelDeviceView, kernel_devices

_BRIEF: Final = (
    "type", "sends_outstanding", "receives_posted", "reads_outstanding", "crc", "remote_number", "mtu",
    "packets_resent", "naks_received",
)  # fmt: skip


@click.command(name="list")
@click.option("-v", "--verbose", is_flag=True, help="All counters, and all that a queue pair tells.")
@json_option
def list_(verbose: bool, as_json: bool) -> None:
    """List the RDMA devices of the kernel, and of running processes: addresses, connections and counters.

    Of the kernel's each port is shown with its state and addresses. Of processes those of this user are seen, and root
    sees those of all users. Counters are explained in docs/guides/rdma-without-hardware.md.

    Exit code 0 also if there is none.
    """
    kernel = kernel_devices()
    found = processes()
    of_kernel = [line for device in kernel for line in _kernel_lines(device)]
    of_processes = (
        line for process in found for device in process.devices for line in _lines(process, device, verbose=verbose)
    )
    document = {
        "kernel_devices": [asdict(device) for device in kernel],
        "processes": [asdict(process) for process in found],
    }
    show(document, map(printable, (*of_kernel, *of_processes)), as_json=as_json)
    if not found and not kernel and not as_json:
        click.echo("sidestep: the kernel has no RDMA device, and no process with one is running", err=True)
        click.echo("hint: start one of software with 'sidestep rdma server'", err=True)


def _kernel_lines(device: KernelDeviceView) -> list[str]:
    lines = [f"{device.name}  {device.node_type}  of the kernel"]
    for port in device.ports:
        lines.append(f"  port {port.number}  {port.state}  {port.link_layer}  {port.rate}")
        lines += [f"    GID {each.index}  {each.gid}  {each.type}  {each.interface}".rstrip() for each in port.gids]
    return lines


def _lines(process: ProcessView, device: DeviceView, *, verbose: bool) -> list[str]:
    ports = ", ".join(map(str, device.listening))
    counters = device.counters
    head = f"{device.name}  {device.address}  {process.program} {process.pid}"
    lines = [head + (f"  listens on {ports}" if ports else "")]
    unit = "packets" if "packets_sent" in counters else "bytes"
    names = (
        ("packets_sent", "packets_received") if unit == "packets" else ("stream_bytes_sent", "stream_bytes_received")
    )
    sent, received = (counters.get(name, 0) for name in names)
    lines.append(
        f"  {counters.get('connections', 0)} connections, {counters.get('queue_pairs', 0)} queue pairs, "
        f"{counters.get('regions', 0)} regions{_pinned(counters)}; {sent} {unit} sent, {received} received"
    )
    for queue_pair in device.queue_pairs:
        lines.append("  " + _queue_pair(queue_pair, verbose=verbose))
    if verbose:
        lines += [f"    {name} {value}" for name, value in counters.items()]
    return lines


def _pinned(counters: dict[str, int]) -> str:
    return f" of {counters['pinned_bytes'] >> 10} KiB pinned" if "pinned_bytes" in counters else ""


def _queue_pair(found: dict[str, object], *, verbose: bool) -> str:
    names = [name for name in found if name not in ("number", "state", "remote_address")]
    if not verbose:
        names = [name for name in names if name in _BRIEF]
    told = ", ".join(f"{name} {found[name]}" for name in names)
    return f"queue pair {found.get('number')}  {found.get('state')}  {found.get('remote_address', '-')}  {told}"
