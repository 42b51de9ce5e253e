"""A host whose SDP obeys the standard and knows nothing of sidestep: the port mapper's message, and SDP over iWARP."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from ipaddress import ip_address

from common import PATIENCE_S
from virtual_time import OneHost

from sidestep.api.driver import Driver
from sidestep.api.sockets import SdpSocket
from sidestep.loop import Loop
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.sdp.host import Host
from sidestep.sdp.portmapper import UDP_PORT, PortMap, PortMapKind
from sidestep.sdp.settings import Carrier, SdpSettings
from sidestep.sdp.stack import Stack

WAIT_S = PATIENCE_S
_AGAIN_S = 0.25
_TRIES = 80


class LoopDriver(Driver):
    """Drives a loop, in the one thread that there is."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """See `Driver.wait`."""
        if timeout_s == 0:
            while self._loop.turn(0):
                """What is due."""
            return ready()
        return self._loop.run_until(ready, WAIT_S if timeout_s is None else timeout_s)


class StandardPeer:
    """At an address of the network namespace that this thread is in."""

    def __init__(self, closing: ExitStack, address: str, carrier: Carrier = Carrier.IWARP) -> None:
        self.loop = Loop()
        closing.callback(self.loop.close)
        self.driver = LoopDriver(self.loop)
        device = IwarpDevice(address, self.loop)
        closing.callback(device.close)
        stack = Stack(device, lambda: self.loop.now, SdpSettings(carrier=carrier), wake_at=self._wake_at)
        closing.callback(stack.close)
        self._stack = stack
        self._host = Host(stack, [address])
        self._udp = closing.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._udp.bind((address, 0))
        self._udp.settimeout(_AGAIN_S)
        self.address = address

    def _wake_at(self, at: float) -> None:
        self.loop.call_later(max(0.0, at - self.loop.now), self._stack.handle_timeouts)

    def ask(self, host: str, service: int) -> PortMap:
        """What the port mapper there says of a service."""
        handle = secrets.randbits(64)
        asked = PortMap(PortMapKind.REQUEST, service, 40000, handle, ip_address(self.address), ip_address(host))
        data, source = self._exchange(asked.encode(), (host, UDP_PORT))
        answer = PortMap.decode(memoryview(data))
        assert source == (host, UDP_PORT)
        assert (answer.assoc_handle, answer.cp_port, answer.cp_ip) == (handle, 40000, asked.cp_ip)
        if answer.kind is PortMapKind.ACCEPT:
            self._udp.sendto(
                PortMap(PortMapKind.ACK, answer.ap_port, 40000, handle, asked.cp_ip, asked.ap_ip).encode(), source
            )
        return answer

    def _exchange(self, request: bytes, where: tuple[str, int]) -> tuple[bytes, tuple[str, int]]:
        """Repeats the request until it is answered, as the draft says."""
        for _ in range(_TRIES):
            self._udp.sendto(request, where)
            try:
                return self._udp.recvfrom(128)
            except TimeoutError:
                continue
        raise TimeoutError(f"no port mapper answers at {where}")

    def connect(self, host: str, rdma_port: int) -> SdpSocket:
        made = SdpSocket(driver=self.driver, hosts=OneHost(self._host))
        made.settimeout(WAIT_S)
        made.connect((host, rdma_port))
        return made

    def listen(self, rdma_port: int) -> SdpSocket:
        made = SdpSocket(driver=self.driver, hosts=OneHost(self._host))
        made.bind(("", rdma_port))
        made.listen()
        return made
