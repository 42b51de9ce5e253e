"""One SDP connection request that is answered once TCP has connected with somebody, and joined with that connection."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.remote.dial import Dial
from sidestep.remote.pump import Pieces, Pump
from sidestep.sdp.hello import Hello, IwarpHello, hello_refusal
from sidestep.sdp.private_data import whole
from sidestep.sdp.settings import Carrier, SdpSettings
from sidestep.sdp.wire import decode

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.rdma.cm import ConnectionRequest
    from sidestep.sdp.endpoint import SdpStream
    from sidestep.sdp.stack import Stack
    from sidestep.switch.protocol import Endpoint

_SETTINGS: Final = SdpSettings(
    receive_count=limits.REMOTE_RECEIVES,
    receive_size=limits.REMOTE_RECEIVE_SIZE,
    receive_size_max=limits.REMOTE_RECEIVE_SIZE_MAX,
    remote_size=limits.REMOTE_RECEIVE_SIZE,
    urgent_inline=True,
)
BY_CARRIER: Final = {carrier: replace(_SETTINGS, carrier=carrier) for carrier in Carrier}  # of streams with a pump


class Inbound:
    """One request.

    Args:
        loop, stack, pieces: Where it has come to.
        request: Not answered yet.
        settings: Of its stream, see `settings_for`.
        target: Where TCP connects to.
        on_over: Called once, when nothing is left of it.
        tell: Gets half sentences for a log.
        timeout_s: For the target to take the connection.
        source: The address that TCP connects from; None leaves it to the kernel.
        name: Called with where TCP comes from, before anybody can ask; what it gives is called at the end.
        beside_hello: Bytes at the end of the request's private data that are not the Hello's.
    """

    def __init__(
        self,
        loop: Loop,
        stack: Stack,
        pieces: Pieces,
        request: ConnectionRequest,
        settings: SdpSettings,
        target: Endpoint,
        on_over: Callable[[Inbound], object],
        tell: Callable[[str], object],
        *,
        timeout_s: float,
        source: IPv4Address | IPv6Address | None = None,
        name: Callable[[Endpoint], Callable[[], None]] | None = None,
        beside_hello: int = 0,
    ) -> None:
        self.pump: Pump | None = None
        self.refused = ""  # why nothing came of it
        self._loop, self._stack, self._pieces = loop, stack, pieces
        self._request = request
        self._settings = settings
        self._target = target
        self._on_over = on_over
        self._tell = tell
        self._over = False
        self._beside_hello = beside_hello
        self._unname: Callable[[], None] | None = None
        self._dial = Dial(loop, target, self._dialled, timeout_s=timeout_s, source=source)
        if name is not None and (comes_from := self._dial.local) is not None:
            self._unname = name(comes_from)

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes to TCP, and from there."""
        return (self.pump.to_tcp, self.pump.to_sdp) if self.pump is not None else (0, 0)

    def abandon(self, why: str) -> None:
        if self.pump is not None:
            self.pump.abort(why)
        elif not self._over:
            self._dial.cancel()
            self._refuse(why)

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._tell(f"is refused: {why}")
        self._request.reject()  # 28, or what the device has for it (docs/wire/sdp.md §2.4)
        self._end()

    def _dialled(self, sock: socket.socket | None, why: str) -> None:
        """TCP has connected, or has not."""
        if sock is None:
            self._refuse(why)
            return

        def accepted(stream: SdpStream) -> None:
            self.pump = Pump(self._loop, stream, sock, self._pieces, self._pumped)

        self._tell(f"goes to {self._target} by TCP")
        self._stack.serve(self._request, accepted, self._target.port, self._settings, beside_hello=self._beside_hello)
        if self.pump is None:  # the Hello was refused, or there was no queue pair
            self.refused = "there is no stream for it"
            sock.close()
            self._end()

    def _pumped(self, pump: Pump) -> None:
        how = f": {pump.why}" if pump.why else ""
        self._tell(f"has ended, {pump.to_tcp} bytes to TCP, {pump.to_sdp} back{how}")
        self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            if self._unname is not None:
                self._unname()
            self._on_over(self)


def settings_for(
    private_data: bytes, host: IPv4Address | IPv6Address, local: IPv4Address | IPv6Address | None
) -> SdpSettings:
    """The settings of a stream that begins with this Hello.

    Raises:
        PeerViolation: It is none, or one that must be refused, so that nobody has to listen to its connection; or it
            names other addresses than those that it comes from and goes to.
    """
    bsdh, hello, _ = decode(memoryview(whole(private_data)))
    iwarp = isinstance(hello, IwarpHello)
    reason = hello_refusal(bsdh, hello, iwarp=iwarp, majors=frozenset({1 if iwarp else 2}))
    if reason is not None:
        raise PeerViolation(f"a Hello that is refused: {reason.value}", rule=f"hello_{reason.value}")
    if isinstance(hello, Hello) and (hello.src_ip != host or local not in (None, hello.dst_ip)):
        raise PeerViolation("it concerns other addresses than it comes from", rule="service_host")
    return BY_CARRIER[Carrier.IWARP if iwarp else Carrier.INFINIBAND]
