"""Setting up: Hello and HelloAck, and what may come instead (docs/wire/sdp.md §7).

Both headers say how many private buffers their sender has posted, so neither leaves before the buffers are there:
`NeedBuffers` is ordered first, and `supplied` goes on. Messages of an other end that is quicker than the connection
manager (`early`) wait for its HelloAck. What is wrong with a HelloAck (`judge_reply`) is why the attempt ends, whoever
tells of the end first.

The same serves a stream that goes on over a new transport connection (`suspend`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep import limits
from sidestep.errors import PeerViolation, SidestepError, Unavailable
from sidestep.rdma.cm import REJECT_CONSUMER
from sidestep.rdma.work import Receive
from sidestep.sdp.hello import AnyHello, AnyHelloAck, Version, agreed, hello_ack_refusal, hello_refusal
from sidestep.sdp.requests import Accept, Connect, Disconnect, NeedBuffers, Reject, ReturnBuffer, SdpCause
from sidestep.sdp.settings import Addresses, Carrier
from sidestep.sdp.states import SdpState, Stimulus
from sidestep.sdp.wire import Bsdh, Header, Hello, HelloAck, IwarpHello, IwarpHelloAck, decode, encode, service_id

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection


class Handshake:
    """Either side of it."""

    __slots__ = (
        "_fault", "_flow", "_halves", "_host", "_resize", "_settings", "_wanted", "early", "resuming", "version",
    )  # fmt: skip

    def __init__(self, host: SdpConnection) -> None:
        self._host = host
        self._flow, self._halves, self._resize, self._settings = host._flow, host._halves, host._resize, host._settings
        self._wanted = 0  # private buffers, until Hello or HelloAck can say how many there are
        self._fault: PeerViolation | None = None  # what is wrong with the HelloAck
        self.early: list[tuple[Receive, int]] = []  # messages that came before the HelloAck, with their lengths
        self.resuming = False  # this is not the stream's first transport connection
        self.version = Version.of_byte(self._settings.wire_version)

    @property
    def waits(self) -> bool:
        """Whether private buffers are awaited."""
        return self._wanted > 0

    @property
    def _iwarp(self) -> bool:
        return self._settings.carrier is Carrier.IWARP

    # --- asking ---

    def connect(self, addresses: Addresses) -> None:
        self._host.addresses = addresses
        self._host.move(Stimulus.CONNECT)
        self._want_buffers()

    def reconnect(self, addresses: Addresses) -> None:
        """Asks for another transport connection for a stream that goes on."""
        self.resuming = True
        self._host.addresses = addresses
        self._host.move(Stimulus.RECONNECT)
        self._want_buffers()

    # --- answering ---

    def accept(self, private_data: bytes | memoryview, addresses: Addresses | None) -> bool:
        """Answers a request with this Hello; False, and a Reject in the work, if it must be refused."""
        host = self._host
        host.accepting = True
        try:
            bsdh, hello, _ = decode(memoryview(private_data))
            majors = {1, 2} if self.version.major == 1 and not self._iwarp else {self.version.major}
            reason = hello_refusal(bsdh, hello, iwarp=self._iwarp, majors=majors)
            if reason is not None:
                raise PeerViolation(f"a Hello that is refused: {reason.value}", rule=f"hello_{reason.value}")
        except PeerViolation as violation:
            self.refuse(violation, SdpCause.VIOLATION)
            self._flow.work.append(Reject(REJECT_CONSUMER))
            return False
        assert isinstance(hello, Hello | IwarpHello)
        if isinstance(hello, Hello):
            local_port = addresses.local_port if addresses else 0
            host.addresses = Addresses(hello.dst_ip, local_port, hello.src_ip, hello.local_port)
        else:
            host.addresses = addresses
        self._adopt(bsdh, hello, hello.local_rcv_sz)
        host.move(Stimulus.REQUEST)
        self._want_buffers()
        return True

    # --- buffers, and then the word ---

    def _want_buffers(self) -> None:
        self._wanted = self._settings.receive_count
        self._flow.work.append(NeedBuffers(self._wanted, self._resize.target))

    def supplied(self, count: int) -> None:
        """So many more of the buffers, which are posted already."""
        self._wanted = max(0, self._wanted - count)
        if not self._wanted:
            self._introduce()

    def failed(self, error: SidestepError) -> None:
        """There are no buffers."""
        self._wanted = 0
        self._flow.work.append(Reject(REJECT_CONSUMER) if self._host.accepting else Disconnect())
        self.refuse(error, SdpCause.RESOURCES)

    def _introduce(self) -> None:
        """Hello or HelloAck: our receives are posted, so they can be counted on."""
        flow, settings, addresses = self._flow, self._settings, self._host.addresses
        flow.last_bufs_sent = bufs = min(flow.posted, 0xFFFF)
        depth = settings.reads_max
        size = self._resize.local
        header: Header
        if self._host.accepting:
            if self._iwarp:
                header = IwarpHelloAck(settings.max_adverts, size, depth, depth, self.version)
            else:
                header = HelloAck(settings.max_adverts, size, self.version)
            flow.work.append(Accept(encode(header, bufs=bufs, mseq=0, mseq_ack=0)))
            return
        assert addresses is not None
        if self._iwarp:
            header = IwarpHello(settings.max_adverts, settings.remote_size, size, depth, depth, self.version)
        else:
            header = Hello(
                settings.max_adverts,
                settings.remote_size,
                size,
                addresses.local_port,
                addresses.local,
                addresses.remote,
                self.version,
                addresses.local.version,
            )
        hello = encode(header, bufs=bufs, mseq=0, mseq_ack=0)
        flow.work.append(Connect(service_id(addresses.remote_port), hello))

    # --- what comes of it ---

    def judge_reply(self, private_data: bytes | memoryview) -> bool:
        """Whether this HelloAck can be taken."""
        try:
            self._reply(private_data)
        except PeerViolation as violation:
            self._fault = violation
            return False
        return True

    def _reply(self, private_data: bytes | memoryview) -> tuple[Bsdh, HelloAck | IwarpHelloAck]:
        bsdh, ack, _ = decode(memoryview(private_data))
        reason = hello_ack_refusal(bsdh, ack, iwarp=self._iwarp, major=self.version.major)
        if reason is not None:
            raise PeerViolation(f"a HelloAck that is refused: {reason.value}", rule=f"hello_{reason.value}")
        assert isinstance(ack, HelloAck | IwarpHelloAck)
        return bsdh, ack

    def accepted(self, private_data: bytes | memoryview) -> None:
        """The other end has accepted, with this HelloAck."""
        try:
            bsdh, ack = self._reply(private_data)
        except PeerViolation as violation:
            self._flow.work.append(Disconnect())
            self.refuse(violation, SdpCause.VIOLATION)
            return
        self._adopt(bsdh, ack, ack.act_rcv_sz)
        self._host.establish(Stimulus.REPLY)

    def ready(self) -> None:
        """Ready to use, or the first message, has come."""
        if self._host.state is SdpState.REP_SENT:
            self._host.establish(Stimulus.READY)

    def _adopt(self, bsdh: Bsdh, header: AnyHello | AnyHelloAck, size: int) -> None:
        """What the other end says of itself."""
        flow, halves = self._flow, self._halves
        flow.credit = bsdh.bufs
        flow.payload_credit = 4 if bsdh.bufs >= limits.SDP_BUFFERS_MIN else 3
        flow.remote_size = min(size, limits.SDP_BUFFER_SIZE_MAX)
        halves.peer_max_adverts = header.adverts_max
        halves.source.one_advert = header.adverts_max == 1
        if isinstance(header, IwarpHello | IwarpHelloAck):  # InfiniBand's connection manager sees to it (§23.3 rule 3)
            halves.sink.reads_max = min(self._settings.reads_max, header.loc_ird)
        # An end that is set to 1.1 takes 2.2 as well, and then answers in kind: who asked accepts its own major only.
        if header.version.major == self.version.major:
            self.version = agreed(self.version, header.version)
        else:
            self.version = header.version
        halves.remote_size_changed()

    def rejected(self, reason: int) -> None:
        """The connection manager says no."""
        if self.resuming:  # to the program it is still the connection that it had
            self.refuse(Unavailable("the socket is not at its new place"), SdpCause.RESET)
            return
        remedy = "is a program listening there?" if not self._host.accepting else ""
        self.refuse(Unavailable(f"refused (reason {reason})", remedy=remedy), SdpCause.REFUSED)

    def withdraw(self, error: SidestepError, cause: SdpCause) -> None:
        """This end gives the attempt up; a request that is not answered yet is rejected."""
        unanswered = self._host.accepting and self.waits
        self._flow.work.append(Reject(REJECT_CONSUMER) if unanswered else Disconnect())
        self.refuse(error, cause)

    def refuse(self, error: SidestepError, cause: SdpCause) -> None:
        """Nothing comes of it."""
        if self._fault is not None:  # why it ends, whoever tells of the end first
            error, cause = self._fault, SdpCause.VIOLATION
        self._host._teardown.refuse(error, cause)

    def return_early(self) -> None:
        """Gives the receives back whose messages nobody will read."""
        early, self.early = self.early, []
        self._flow.work.extend(ReturnBuffer(buffer) for buffer, _ in early)
