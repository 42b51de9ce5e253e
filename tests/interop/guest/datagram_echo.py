"""Runs in the guest: the datagram service on a device of its kernel; each message comes back, its bytes turned round.

usage: datagram_echo.py ADDRESS QKEY
"""

from __future__ import annotations

import sys

from sidestep.loop import Loop
from sidestep.rdma.datagrams import DatagramService, Message
from sidestep.rdma.kernel.device import KernelDevice


def main() -> None:
    address, qkey = sys.argv[1:]
    loop = Loop()

    def echo(message: Message) -> None:
        service.send(message.address, message.number, bytes(message.data)[::-1])

    service = DatagramService(KernelDevice(address, loop, by_number=True), int(qkey), echo, lambda: loop.now)
    print(f"number {service.number}", flush=True)
    while True:
        loop.turn(1.0)


main()
