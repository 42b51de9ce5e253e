"""An RDMAP stream in full operation over one TCP connection: reading, writing, and the ways in which it ends.

    ends by                     what goes out                              what the other end sees
    disconnect                  the rest of a begun FPDU, FIN              the end of the stream
    a fault of the other end    that rest, Terminate with its code, FIN    Terminate
    its Terminate               that rest, FIN                             the end of the stream
    its FIN, all messages whole that rest, FIN                             the end of the stream
    its FIN, something left     that rest, Terminate, FIN                  Terminate
    modify_to_error, destroy    RST                                        RST
    its first message is late   RST                                        RST

Once it ends it needs nobody: its queue pair may be destroyed, and the last bytes still go out.

After FIN everything is read and thrown away until the other end's FIN: closing a socket with unread bytes would make
the kernel send RST, and the Terminate might be lost (RFC 5040 5.4 wants a graceful close). After a while, RST.
"""

from __future__ import annotations

import os
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep.native._framing import Inbound, Outbound
from sidestep.rdma.iwarp.ddp import QUEUE_TERMINATE, RdmapOp
from sidestep.rdma.iwarp.receiver import Receiver
from sidestep.rdma.iwarp.sender import Sender
from sidestep.rdma.iwarp.terminate import Condition, Terminate
from sidestep.rdma.verbs import LentStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidestep.errors import InternalError
    from sidestep.loop import Loop, Timer
    from sidestep.rdma.iwarp.counting import StreamTally
    from sidestep.rdma.iwarp.device import IwarpSettings
    from sidestep.rdma.iwarp.qp import IwarpQueuePair
    from sidestep.rdma.iwarp.receiver import Fault
    from sidestep.rdma.iwarp.startup.terms import Agreed
    from sidestep.rdma.iwarp.tcp import Tcp

# Of one turn: other connections want theirs.
_FILLS_MAX: Final = 4  # reads
_RUNS_MAX: Final = 4096  # runs, after which no more is read: a hostile peer makes one of each 20 bytes
_WRITES_MAX: Final = 16
_SEEN_LEN: Final = 64 << 10  # bytes that are read at a time while somebody looks on
_TERMINATE: Final = 0x40 | RdmapOp.TERMINATE
_LARGE_MULPDU: Final = 64768  # FRAMING_MULPDU_MAX


class _Phase(Enum):
    OPEN = "open"
    ENDING = "ending"  # the last bytes go out
    DRAINING = "draining"  # FIN went out; the other end's is awaited
    CLOSED = "closed"


class RdmapStream:
    """One connection's."""

    __slots__ = (
        "_agreed", "_first", "_inbound", "_large", "_loop", "_markers", "_outbound", "_phase", "_qp", "_reclaim",
        "_returned", "_settings", "_tcp", "_timer", "_wire", "receiver", "sender",
    )  # fmt: skip

    def __init__(self, tcp: Tcp, qp: IwarpQueuePair, agreed: Agreed, loop: Loop, settings: IwarpSettings) -> None:
        self._tcp = tcp
        self._wire = tcp.wire
        self._qp = qp
        self._loop = loop
        self._settings = settings
        self._phase = _Phase.OPEN
        self._reclaim: Callable[[], object] | None = None  # while the engine has it
        self._returned = False  # it is back, and what has come has still to be looked at
        self._large = False  # frames do not follow TCP's segments
        self._timer: Timer | None = None
        self._first: Timer | None = None  # for the other end's first message
        self._inbound = Inbound(crc=agreed.crc, markers=agreed.markers_in)
        self._agreed = agreed
        self._markers = agreed.markers_out
        self._outbound = Outbound(mulpdu(tcp.mss, markers=self._markers), crc=agreed.crc, markers=self._markers)
        self.sender = Sender(self._outbound, qp, qp.sink_stag)
        self.sender.depth = agreed.ord
        self.sender.resources = agreed.ird
        self.receiver = Receiver(qp, qp.remote_access, self.sender.reads, self.sender.tally)
        tcp.handler = self
        tcp.wire.streams(self, len(agreed.leftover))
        qp.device.streams.add(self)

    def begin(self, leftover: bytes, *, first_s: float | None = None) -> None:
        """Bytes may flow.

        Args:
            leftover: What came with the last of the start-up.
            first_s: Seconds for the first message of the other end, if it has to come in time.
        """
        if first_s is not None:
            self._first = self._loop.call_later(first_s, self._too_late)
        self._tcp.watch()
        if leftover:
            view = memoryview(leftover)
            while view and self._phase is _Phase.OPEN:
                view = view[self._inbound.feed(view) :]
                self._process()
            self.pump()

    @property
    def remote_address(self) -> str:
        return self._tcp.remote_address

    @property
    def unsent(self) -> int:
        """Bytes that are framed and that TCP has not taken."""
        return self._outbound.waiting

    @property
    def leaving(self) -> bool:
        """Whether it ends in order, or has ended: nobody is needed for that."""
        return self._phase is not _Phase.OPEN

    def heard(self) -> None:
        self.sender.held = False
        self._stop_timers()

    def pump_soon(self) -> None:
        self._loop.soon(self._pump_in_turn)

    def _pump_in_turn(self) -> None:
        self._tcp.run(self.pump)

    @property
    def tally(self) -> StreamTally:
        tally = self.sender.tally
        tally.stream_bytes_sent = self._outbound.written
        tally.stream_bytes_received = self._inbound.position + self._inbound.pending
        return tally

    def details(self) -> dict[str, object]:
        sender = self.sender
        return {
            "remote_address": self.remote_address,
            "reads_outstanding": len(sender.reads),
            "reads_max": sender.depth,
            "answers_max": sender.resources,
            "crc": self._agreed.crc,
            "markers_sent": self._agreed.markers_out,
            "markers_received": self._agreed.markers_in,
            "mulpdu": self._outbound.mulpdu,
            "bytes_waiting": self._outbound.waiting,
            "phase": self._phase.value,
        }

    # --- what a wire asks; see `tap.Wire.introduce` ---

    def sent_len(self) -> tuple[int, int]:
        """Bytes that went out, and those up to the next FPDU."""
        self.reclaim()
        return self._outbound.written, self._outbound.rest

    def received_len(self) -> tuple[int, bytes]:
        """Bytes that came in, and those of them that are the beginning of an FPDU."""
        return self._inbound.position + self._inbound.pending, self._inbound.staged()

    def own(self) -> None:
        """Memory that waits to be sent is its owner's again."""
        if self._reclaim is None:  # what the engine sends is not of the device's users
            self._outbound.own()

    def use_large_frames(self) -> None:
        """An FPDU may fill many TCP segments: RFC 5044 3 would have it fit one, for who places each by itself."""
        if not self._markers:
            self._large = True
            self._outbound.mulpdu = _LARGE_MULPDU

    # --- lending it to the engine ---

    def lend(self, record: dict[str, int], reclaim: Callable[[], object]) -> LentStream | None:
        """Its wire, if nothing is under way here; nobody looks at it then until `take_back`, which `reclaim` brings."""
        if (
            self._phase is not _Phase.OPEN
            or self._reclaim is not None
            or self._returned
            or self._wire.live
            or self._timer is not None
            or self._first is not None
            or self._markers
            or self._agreed.markers_in
            or self._outbound.waiting
            or not self.sender.lend(record)
            or not self.receiver.lend(record)
        ):
            return None
        self._tcp.watch(read=False)
        self._reclaim = reclaim
        return LentStream(self._inbound, self._outbound, self._tcp.fileno())

    def take_back(self, record: dict[str, int], error: int) -> None:
        """What has come and was not taken is looked at in this turn; `error`: the errno that broke the connection."""
        self._reclaim, self._returned = None, True
        self.sender.take_back(record)
        self.receiver.take_back(record)
        self._loop.soon(partial(self._tcp.run, partial(self._go_on, error)))

    def reclaim(self) -> None:
        """Somebody here has to do with the wire."""
        if self._reclaim is not None:
            self._reclaim()

    def _go_on(self, error: int) -> None:
        self._returned = False
        if self._phase is not _Phase.OPEN:
            return
        if error:
            self._lost(f"the connection broke: {os.strerror(error)}")
            return
        self._tcp.watch()
        self._process()
        self.pump()

    # --- reading ---

    def on_readable(self) -> None:
        if self._reclaim is not None:  # it was told before the engine had it
            return
        if self._phase is not _Phase.OPEN:
            self._drain()
            return
        runs_max = self.receiver.run_count + _RUNS_MAX
        for _ in range(_FILLS_MAX):
            try:
                count = self._fill_seen() if self._wire.live else self._inbound.fill(self._tcp.fileno())
            except BlockingIOError:
                break
            except OSError as why:
                self._lost(f"the connection broke: {why.strerror}")
                return
            if not count:
                self._ended_by_peer()
                return
            self._process()
            if self._phase is not _Phase.OPEN:
                return
            if count < _SEEN_LEN or self.receiver.run_count >= runs_max:  # less than there was room for: that was all
                break
        self.pump()

    def _fill_seen(self) -> int:
        """As `Inbound.fill`, by way of those who look on."""
        found = self._tcp.read(_SEEN_LEN)
        if found is None:
            raise BlockingIOError
        taken = self._inbound.feed(found) if found else 0
        assert taken == len(found), "there is room for more once everything is parsed"
        return taken

    def _process(self) -> None:
        fault = self.receiver.take_all(self._inbound)
        if fault is not None and self._phase is _Phase.OPEN:
            self.fault(fault)

    def _ended_by_peer(self) -> None:
        if self._inbound.pending:
            self._lost("the connection ended within a frame")
        elif self.receiver.amid_message:  # RFC 5041 6.2.1: who ends in order finishes what he has begun
            self._qp.connection_lost("the other end ended its direction within a message")
            self.terminate(Condition.END_TOO_EARLY)
        elif self.sender.idle:
            self._qp.disconnected_by_peer()
            self.leave()
        else:  # the verbs draft for iWARP 6.2.2.2: an end with work left is an error
            self._qp.disconnected_by_peer()
            self.terminate(Condition.END_TOO_EARLY)

    # --- writing ---

    def pump(self) -> None:
        if self._reclaim is not None and not self.sender.idle:
            self.reclaim()  # which comes here again
        if self._phase is not _Phase.OPEN or self._reclaim is not None:
            return
        sender, outbound = self.sender, self._outbound
        for _ in range(_WRITES_MAX):
            sender.pump()
            if self._phase is not _Phase.OPEN:
                return
            if not outbound.waiting:
                self._tcp.watch()
                return
            if not self._write():
                return
            sender.written()
            if self._phase is not _Phase.OPEN:
                return
            if outbound.waiting:
                self._tcp.watch(write=True)
                return
        self.pump_soon()  # the other end takes it as fast as it is made

    def nudge_after(self, delays_s: tuple[float, ...]) -> None:
        """Makes the other end look again after each of these times, until something is heard of it.

        Linux siw as a responder hands the socket to its queue pair after the Reply has gone out, without looking.
        What arrives in between lies there unread until something else comes (6.1 and 6.12): both ends would wait.
        """
        if delays_s and self._phase is _Phase.OPEN and not self.receiver.heard:
            nudge = partial(self._tcp.run, partial(self._nudge, delays_s[1:]))
            self._first = self._loop.call_later(delays_s[0], nudge)

    def _nudge(self, later_s: tuple[float, ...]) -> None:
        self._first = None
        self.sender.nudge()
        self.pump()
        self.nudge_after(later_s)

    def on_writable(self) -> None:
        if self._reclaim is not None:
            return
        if self._phase is _Phase.OPEN:
            if not self._large:
                self._outbound.mulpdu = mulpdu(self._tcp.mss, markers=self._markers)
            self.pump()
        elif self._phase is _Phase.ENDING:
            self._write_last()

    def _write(self) -> bool:
        try:
            if self._wire.live:
                self._send_seen()
            else:
                self._outbound.send(self._tcp.fileno())
        except OSError as why:
            self._lost(f"the connection broke: {why.strerror}")
            return False
        return True

    def _send_seen(self) -> None:
        """As `Outbound.send`, and shows what TCP has taken to those who look on."""
        waiting = self._outbound.peek()
        count = self._outbound.send(self._tcp.fileno())
        self._wire.sent(waiting[:count])

    # --- ending ---

    def fault(self, fault: Fault) -> None:
        self._qp.peer_failed(fault)
        self._leave(fault.message.encode())

    def terminate(self, condition: Condition) -> None:
        self._leave(Terminate.about(condition).encode())

    def leave(self) -> None:
        """Ends it without a word: FIN."""
        self._leave(b"")

    def abort(self) -> None:
        """Ends it at once: RST."""
        self.reclaim()
        if self._phase is not _Phase.CLOSED:
            self._close()
            self._tcp.abort()

    def _leave(self, last: bytes) -> None:
        self.reclaim()
        if self._phase is not _Phase.OPEN:
            return
        self._phase = _Phase.ENDING
        self._outbound.own()
        self._outbound.clear()
        self._stop_timers()
        if last:
            self._qp.device.events.add("terminate_sent", f"{int.from_bytes(last[:2]):#06x}")
            self.sender.tally.messages_sent[RdmapOp.TERMINATE] += 1
            self.sender.tally.bytes_sent[RdmapOp.TERMINATE] += len(last)
            self._outbound.untagged(_TERMINATE, 0, QUEUE_TERMINATE, 1, (last,), 0, len(last), True)
        self._timer = self._loop.call_later(self._settings.close_s, partial(self._tcp.run, self._close_by_force))
        self._write_last()

    def _write_last(self) -> None:
        if not self._write():
            return
        if self._outbound.waiting:
            self._tcp.watch(write=True)
            return
        self._phase = _Phase.DRAINING
        self._tcp.end_writing()
        self._tcp.watch()
        self._drain()

    def _drain(self) -> None:
        try:
            for _ in range(_FILLS_MAX):
                if self._tcp.discard():
                    self._finish(close_now=self._phase is _Phase.DRAINING)
                    return
        except OSError as why:
            self._lost(f"the connection broke: {why.strerror}")

    def _finish(self, *, close_now: bool) -> None:
        if not close_now:  # ours goes on until its last bytes are out
            self._tcp.watch(read=False, write=True)
            return
        self._close()
        self._tcp.close()
        self._qp.stream_closed(confirmed=True)

    def _close_by_force(self) -> None:
        self._timer = None
        self._close()
        self._tcp.abort()
        self._qp.stream_closed(confirmed=False)

    def _lost(self, why: str) -> None:
        self.reclaim()
        if self._phase is _Phase.CLOSED:
            return
        was_open = self._phase is _Phase.OPEN
        self._close()
        self._tcp.abort()
        if was_open:
            self._qp.connection_lost(why)
        else:
            self._qp.stream_closed(confirmed=False)

    def on_broken(self, why: InternalError) -> None:
        self._lost(str(why))

    def _too_late(self) -> None:
        self._first = None
        self._tcp.run(partial(self._lost, "the other end did not begin"))

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._first):
            if timer is not None:
                timer.cancel()
        self._timer = self._first = None

    def _close(self) -> None:
        self._phase = _Phase.CLOSED
        self._stop_timers()
        self._outbound.clear()
        self._qp.device.stream_closed(self)
        self._outbound.own()


def mulpdu(mss: int, *, markers: bool) -> int:
    """Bytes of the largest ULPDU that leaves an FPDU in one TCP segment (RFC 5044 3, 5.1)."""
    overhead = 6 + mss % 4
    if markers:
        overhead += 4 * -(-mss // 512)
    return max(128, min(64768, mss - overhead))
