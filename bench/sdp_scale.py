"""How much memory SDP connections take: `python bench/sdp_scale.py [--connections N]`.

So many connections between two devices of one loopback fabric, all on one event queue. Each carries a little data both
ways, then all are open at once; the resident memory of the process, which holds both ends, is read before and after.
Private buffers are as few and as small as `--buffers` and `--buffer-size` say.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from ipaddress import IPv4Address
from pathlib import Path

from sidestep.demo.machine import Machine
from sidestep.rdma.loopback import NO_DELAY, Fabric
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import StreamEvent, StreamReceive
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.stack import Stack
from sidestep.sdp.strategy import bcopy_only

PORT = 5001
MESSAGE = 64  # bytes each way


def resident_bytes() -> int:
    """Of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def run(count: int, settings: SdpSettings) -> None:
    """Opens them, talks over each, and prints what it took."""
    fabric = Fabric(random.Random(0), timing=NO_DELAY, run_limit=1000 * count)
    attributes = DeviceAttributes(checks_local_memory=False, queue_pairs_max=count + 16, regions_max=8 * count)
    unlimited = 4 * count * settings.receive_count * settings.receive_size
    left, right = (
        Stack(fabric.device(name, attributes), lambda: fabric.now, settings, private_bytes_max=unlimited)
        for name in ("left", "right")
    )
    data = memoryview(bytes(range(MESSAGE)))
    answered = 0
    streams: list[SdpStream] = []

    def serve(stream: SdpStream, event: StreamEvent) -> None:
        if isinstance(event, StreamReceive) and event.filled:
            stream.send(data)

    def told(stream: SdpStream, event: StreamEvent) -> None:
        nonlocal answered
        if isinstance(event, StreamReceive):
            assert event.view == data
            answered += 1

    def take(stream: SdpStream) -> None:
        stream.tell = serve
        streams.append(stream)

    right.listen(PORT, take)
    gc.collect()
    gc.disable()  # nothing that is made here ends before the run does, and looking for it again and again takes minutes
    before, start = resident_bytes(), time.perf_counter()
    for number in range(count):
        here = Addresses(
            IPv4Address(0x0A000000 + number // 60000), 1024 + number % 60000, IPv4Address(0x0B000001), PORT
        )
        streams.append(left.connect("right", here, told))
        fabric.run()
    opened_s = time.perf_counter() - start
    assert len(streams) == 2 * count, len(streams)
    start = time.perf_counter()
    for stream in streams:
        if stream.tell is serve:
            stream.receive(memoryview(bytearray(MESSAGE)))
        else:
            stream.receive(memoryview(bytearray(MESSAGE)))
            stream.send(data)
    fabric.run()
    talked_s = time.perf_counter() - start
    assert answered == count, (answered, count)
    took = resident_bytes() - before
    print(f"machine: {Machine.now()}")
    print(
        f"{count:,} connections, both ends in this process: {took / 2**20:,.0f} MiB, {took / count / 2048:.1f} KiB "
        f"an end, {settings.receive_count} private buffers of {settings.receive_size} bytes among it"
    )
    print(
        f"opened in {opened_s:.1f} s ({opened_s / count * 1e6:.0f} us each); a message and its answer on every one in "
        f"{talked_s:.1f} s ({talked_s / count * 1e6:.0f} us each)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--buffers", type=int, default=5)
    parser.add_argument("--buffer-size", type=int, default=256)
    options = parser.parse_args()
    settings = SdpSettings(
        receive_count=options.buffers,
        receive_size=options.buffer_size,
        remote_size=options.buffer_size,
        send_queue=8,
        strategy=bcopy_only,
    )
    run(options.connections, settings)


if __name__ == "__main__":
    main()
