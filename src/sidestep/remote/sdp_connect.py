"""Connections of this host's programs that begin with SDP: TCP leads from the program to this provider only.

    program ── TCP, loopback ──► place ── Pump ── SDP stream ──► the other host's provider, or whoever has SDP there

Theory of operation. The program waits in connect() (`switch.protocol.PendingConnect`). The other host's provider is
asked for, and gets a Hello with `Purpose.INBOUND` beside it; a host that has none may still know the service by the
standard: its port mapper is asked for it, and it gets the ordinary Hello of iWARP. When the stream is established the
program's socket is sent to a *place*: a listening socket that takes in that very socket, whose cookie the kernel tells,
and nothing else. The program is told by its shim that it is connected with the other host.

Who insists on SDP and gets no verdict in time is sent to a place that is *shut*: a filter drops what comes, so the
kernel goes on sending SYNs and the connect() is truly in progress. It opens when the stream is established, and goes
away, which resets, when the other host refuses. No answer at all stays none: TCP then says ETIMEDOUT itself.

A caller that does not insist gets TCP. Where SDP has failed, TCP comes first for a while (`limits.REACH_UNANSWERED_S`).

Places are at 127.83.68.80, or, for IPv6, at the address of this host that the program's connection comes from: IPv6 has
one loopback address only, which a socket bound to another address could not reach from there by it.
"""

from __future__ import annotations

import ctypes
import errno
import secrets
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.accepting import Acceptor
from sidestep.errors import SidestepError, Unavailable
from sidestep.rdma.tools.devices import source_for
from sidestep.remote.dial import reset
from sidestep.remote.inbound import BY_CARRIER
from sidestep.remote.peers import PROVIDER_ITSELF, Peers
from sidestep.remote.promotion import Promotion, Purpose
from sidestep.remote.pump import Pieces, Pump
from sidestep.remote.serving import NAMED
from sidestep.sdp.endpoint import ignore_event
from sidestep.sdp.errnos import BY_CAUSE
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent
from sidestep.sdp.settings import Addresses, Carrier
from sidestep.switch.protocol import Endpoint, Ends, PendingConnect, Request, Row

if TYPE_CHECKING:
    from sidestep.loop import Loop, Timer
    from sidestep.remote.protocol import Sdp
    from sidestep.routing import Address
    from sidestep.sdp.endpoint import SdpStream
    from sidestep.sdp.stack import Stack

_SO_ATTACH_FILTER: Final = 26  # asm-generic/socket.h
_SO_DETACH_FILTER: Final = 27
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, 0: of every packet no byte is kept
_NEVER: Final = 0.0  # it is where SDP was had
_BACKLOG: Final = 8  # strangers may knock as well


class SdpConnects:
    """Those of one provider."""

    def __init__(self, sdp: Sdp, peers: Peers, stack_for: Callable[[Request], Stack]) -> None:
        self.sdp: Final = sdp
        self.peers: Final = peers
        self.stack_for: Final = stack_for
        self.pieces: Final = Pieces()
        self._there: dict[_SdpConnect, None] = {}
        self._tcp_until: OrderedDict[Endpoint, float] = OrderedDict()  # until when TCP comes first there

    def close(self) -> None:
        for reach in list(self._there):
            reach.abandon("the provider stops")

    def links(self) -> Iterator[Row]:
        """Those that are established, each with its user."""
        for one in self._there:
            if one.pump is not None:
                ends = Ends(one.local, one.remote)
                yield one.asked.uid, {"protocol": self.sdp.name} | ends.as_json() | one.pump.details()

    def open(self, asked: PendingConnect) -> None:
        """Begins one; raises Unavailable."""
        remote = asked.request.remote
        if not remote.port:
            raise Unavailable("no service has port 0")
        until = self._tcp_until.get(remote)
        if not asked.insists and until is not None and until > self.sdp.loop.now:
            raise Unavailable("SDP has failed there a moment ago")
        reach = _SdpConnect(self, asked, self._local_of(asked))
        self._there[reach] = None
        reach.begin()

    def was_unanswered(self, remote: Endpoint) -> None:
        """TCP comes first there, for a while."""
        self._note(remote, self.sdp.loop.now + limits.REACH_UNANSWERED_S)

    def was_late(self, remote: Endpoint) -> None:
        """As unanswered, unless the one before had SDP there: a busy host is late once, a dead one again."""
        if self._tcp_until.pop(remote, None) != _NEVER:
            self.was_unanswered(remote)

    def was_answered(self, remote: Endpoint) -> None:
        """SDP has been had there."""
        self._note(remote, _NEVER)

    def _note(self, remote: Endpoint, tcp_until: float) -> None:
        self._tcp_until.pop(remote, None)
        self._tcp_until[remote] = tcp_until
        while len(self._tcp_until) > limits.REACH_UNANSWERED_MAX:
            self._tcp_until.popitem(last=False)

    def ended(self, reach: _SdpConnect) -> None:
        self._there.pop(reach, None)

    def _local_of(self, asked: PendingConnect) -> Endpoint:
        """Where the program's connection comes from, to the other host."""
        local, remote = asked.request.local, asked.request.remote
        assert local is not None
        address = local.address
        if address.is_unspecified or address.version != remote.address.version:  # [::] serves IPv4 as well
            address = ip_address(source_for(str(remote.address)))
        if address.is_loopback or address.is_link_local:
            raise Unavailable(f"other hosts are not reached from {address}")
        return Endpoint(address, local.port)


class _SdpConnect:
    """One connection."""

    def __init__(self, connects: SdpConnects, asked: PendingConnect, local: Endpoint) -> None:
        self._connects = connects
        self._loop = connects.sdp.loop
        self.asked = asked
        self.local = local
        self.remote = asked.request.remote
        self._began_at = self._loop.now
        self._answered = False  # the program knows where to connect to, or that nothing comes of it
        self._asked_of: Endpoint | None = None  # who has told where to connect to, and where that is
        self._port = 0
        self._silent: dict[Endpoint, bool] = {}  # who has told of nowhere, and whether he has said anything
        self._stream: SdpStream | None = None
        self._place: _RedirectListener | None = None
        self.pump: Pump | None = None
        self._unname: Callable[[], None] | None = None
        self._over = False
        self._late = self._loop.call_later(asked.wait_s, self._handle_late)
        self._end: Timer = self._loop.call_later(limits.REACH_S, self._handle_silence)
        asked.on_gone = self._handle_close

    def begin(self) -> None:
        """Asks for the other host's provider, and if that does not answer at once for the service itself."""
        self._ask(self._provider_there)
        if not self._over and self._stream is None:
            self._loop.call_later(limits.PEER_ANSWER_S, self._ask_for_service)

    def abandon(self, why: str) -> None:
        if self.pump is not None:
            self.pump.abort(why)
        else:
            self._fail(errno.ECONNREFUSED, why)
            self._finish()

    @property
    def _provider_there(self) -> Endpoint:
        return Endpoint(self.remote.address, PROVIDER_ITSELF)

    def _ask(self, whom: Endpoint) -> None:
        self._connects.peers.ask(self.local, whom, partial(self._handle_port, whom), anew=self.asked.insists)

    # ---- the way there ----

    def _ask_for_service(self) -> None:
        """As the standard has it; that request cannot show a key."""
        wanted = self._stream is None and not self._over and self.remote not in self._silent
        if wanted and self._connects.sdp.key is None:
            self._ask(self.remote)

    def _handle_port(self, whom: Endpoint, port: int | None) -> None:
        """Where to connect to."""
        if self._over or self._stream is not None:
            return
        if self._asked_of == whom and port in (None, self._port):
            self._fail_there(errno.ECONNREFUSED, "it is refused there")
        elif port is not None:
            self._asked_of, self._port = whom, port
            self._connect()
        else:
            self._silent[whom] = not self._connects.peers.denied(whom)
            self._ask_for_service()
            self._give_up()

    def _give_up(self) -> None:
        """If nobody is left who might answer."""
        asked = {self._provider_there} | ({self.remote} if self._connects.sdp.key is None else set())
        if self._over or self._stream is not None or not asked <= self._silent.keys():
            return
        if all(self._silent.values()):
            self._fail_there(errno.ETIMEDOUT, "no port mapper answers there")
        else:
            self._fail_there(errno.ECONNREFUSED, "there is no such service by SDP")

    def _connect(self) -> None:
        addresses = Addresses(self.local.address, self.local.port, self.remote.address, self._port)
        carrier, beside = Carrier.IWARP, None
        if self._asked_of == self._provider_there:
            carrier, beside = Carrier.INFINIBAND, self._beside_hello
        try:
            stack = self._connects.stack_for(Request(self.local, self.remote, None, self.asked.request.over))
            self._stream = stack.connect(
                str(self.remote.address), addresses, self._handle_event, BY_CARRIER[carrier], beside_hello=beside
            )
        except SidestepError as why:
            self._fail_there(errno.ENETUNREACH, why.message)

    def _beside_hello(self, hello: bytes) -> bytes:
        promotion = Promotion(Purpose.INBOUND, self.remote.port, secrets.token_bytes(16))
        return promotion.encode(hello, self._connects.sdp.key)

    def _handle_event(self, stream: SdpStream, event: StreamEvent) -> None:
        """Until there is a pump."""
        if not isinstance(event, SdpEvent) or self._over:
            return
        if event.kind is SdpEventKind.ESTABLISHED:
            self._established()
        elif event.kind is SdpEventKind.BROKEN:
            stream.tell = ignore_event
            self._loop.soon(partial(self._broken, stream, event))  # it may not even be known yet

    def _broken(self, stream: SdpStream, event: SdpEvent) -> None:
        if stream is self._stream and not self._over:
            cause = stream.connection.cause
            error = BY_CAUSE[cause] if cause is not None else errno.ECONNREFUSED
            self._stream = None
            if error == errno.ECONNREFUSED and self._asked_of is not None and not self._opened:
                # Who was to be there may have been started anew, at another port; or this service is refused.
                self._connects.peers.doubt(self._asked_of, self._port)
                self._ask(self._asked_of)
            else:
                self._fail_there(error, event.error.message if event.error is not None else "it broke")

    @property
    def _opened(self) -> bool:
        return self._place is not None and not self._place.shut

    def _established(self) -> None:
        if self._answered and self._place is None:
            return  # TCP goes on already
        if self._place is None:
            self._send_to_place(shut=False)
            taken_s = limits.REACH_TAKEN_S
        else:
            self._place.open()
            # its kernel comes back after twice the time that it has waited
            taken_s = limits.REACH_TAKEN_S + 2 * (self._loop.now - self._began_at)
        self._end.cancel()
        self._end = self._loop.call_later(taken_s, self._handle_not_taken)
        self._connects.was_answered(self.remote)

    # ---- the way here ----

    def _send_to_place(self, *, shut: bool) -> None:
        address = NAMED if self.remote.address.version == NAMED.version else self.local.address
        try:
            self._place = _RedirectListener(self._loop, address, self.asked, self._taken, shut=shut)
        except OSError as error:
            self._fail(errno.ENOBUFS, f"no place for it: {error.strerror}")
            return
        place = self._place.endpoint
        bound = self.asked.request.local
        assert bound is not None
        comes_from = bound.address
        if comes_from.is_unspecified or comes_from.version != place.address.version:
            comes_from = ip_address("127.0.0.1") if place.address == NAMED else self.local.address
        self._unname = self._connects.sdp.services.map_addresses(
            Ends(Endpoint(comes_from, bound.port), place), Ends(self.local, self.remote)
        )
        self._answer()
        self.asked.redirect(place)

    def _answer(self) -> None:
        self._answered = True
        self._late.cancel()

    def _taken(self, sock: socket.socket) -> None:
        """The program's socket is here."""
        self._place = None
        if self._stream is None:
            reset(sock)
            self._finish()
            return
        self._end.cancel()
        self._log("goes by SDP")
        self.pump = Pump(self._loop, self._stream, sock, self._connects.pieces, self._pumped)

    def _pumped(self, pump: Pump) -> None:
        how = f": {pump.why}" if pump.why else ""
        self._log(f"has ended, {pump.to_sdp} bytes there, {pump.to_tcp} back{how}")
        self._finish()

    # ---- the end ----

    def _handle_late(self) -> None:
        """The program waits no longer for a verdict."""
        if self._answered:
            return
        if self.asked.insists:
            self._send_to_place(shut=True)
        else:
            self._connects.was_late(self.remote)
            self._fail(errno.ETIMEDOUT, "it takes too long")

    def _handle_silence(self) -> None:
        self._fail_there(errno.ETIMEDOUT, "it does not answer")

    def _handle_not_taken(self) -> None:
        self._fail(errno.ECONNREFUSED, "the program has not come")

    def _handle_close(self) -> None:
        """The program; its socket may live on, with another."""
        if self.pump is None:
            self._fail(errno.ECONNREFUSED, "the program has gone")
            self._finish()

    def _fail_there(self, error: int, why: str) -> None:
        """Fails because of the other host: the next connections there are TCP's."""
        if not self._over and not self.asked.insists:
            self._connects.was_unanswered(self.remote)
        self._fail(error, why)

    def _fail(self, error: int, why: str) -> None:
        if self._over:
            return
        self._log(f"does not go by SDP: {why}")
        self._drop_stream()
        if not self._answered:
            self._answer()
            self.asked.refuse(error)
        elif self._place is not None and self._place.shut and error != errno.ECONNREFUSED:
            # Its own kernel says ETIMEDOUT, in its own time.
            self._end.cancel()
            self._end = self._loop.call_later(limits.REACH_SHUT_S, self._finish)
            return
        self._finish()

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.tell = ignore_event
            self._stream.abort()
            self._stream = None

    def _finish(self) -> None:
        if self._over:
            return
        self._over = True
        self._late.cancel()
        self._end.cancel()
        if self.pump is None:
            self._drop_stream()
        if self._place is not None:
            self._place.close()
        if self._unname is not None:
            self._unname()
        self._connects.ended(self)
        self.asked.over()

    def _log(self, what: str) -> None:
        self._connects.sdp.services.log(f"a connection from {self.local} to {self.remote} {what}")


class _RedirectListener:
    """Where one program's socket is taken in; raises OSError."""

    def __init__(
        self,
        loop: Loop,
        address: Address,
        asked: PendingConnect,
        taken: Callable[[socket.socket], object],
        *,
        shut: bool,
    ) -> None:
        self.shut = shut
        self._asked = asked
        self._taken = taken
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        self._sock = sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            if shut:
                program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
                filled = struct.pack("@HP", 1, ctypes.addressof(program))  # struct sock_fprog
                sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filled)
            sock.bind((str(address), 0))
            sock.listen(_BACKLOG)
            self.endpoint = Endpoint(address, sock.getsockname()[1])
            self._acceptor = Acceptor(loop, sock, self._take_in)
        except BaseException:
            sock.close()
            raise

    def open(self) -> None:
        """What comes from now on is taken in."""
        if self.shut:
            self.shut = False
            self._sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def close(self) -> None:
        """Who comes now is refused."""
        self._acceptor.close()

    def _take_in(self, sock: socket.socket, address: tuple[str, int]) -> None:
        if self._asked.is_from(Endpoint(ip_address(address[0].partition("%")[0]), address[1]), self.endpoint):
            self.close()
            self._taken(sock)
        else:
            reset(sock)  # somebody else's
