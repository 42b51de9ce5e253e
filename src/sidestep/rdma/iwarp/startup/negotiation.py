"""MPA start-up: how two ends of a TCP connection agree to speak iWARP on it (RFC 5044 7.1, RFC 6581).

Theory of operation. The initiator, as a rule the TCP client, sends a Request and waits; the responder hands it to its
user, who accepts or rejects by the Reply. No other byte may be on the connection until then. After a good Reply each
direction is a row of FPDUs, and the first one is the initiator's: before it has come the responder may only receive
(`FULL_RX_ONLY`, RFC 5044 7.1.2 rule 4), which its stream sees to. If both want to be peers (RFC 6581 5) that first FPDU
is an RTR, a message of no length that both ends can take, so that the responder's user need not wait for the
initiator's user to say something.

    initiator                                     responder
    WAIT_REPLY    -- Request ------------------>  WAIT_REQUEST
                                                  DECIDING      Asked -> accept() or reject()
    Agreed, FULL  <------------------ Reply ----  FULL_RX_ONLY  Agreed
                  == RTR, or first message ====>
                  <======== FPDUs ============>

Each end says what it wants of the direction that it receives: markers if its own frame has M. The checksum is in use
if either frame has C. How many RDMA Reads an end holds and makes at a time (IRD, ORD) is told by revision 2 only: the
initiator's wishes go out first, the responder fits its own to them, and the initiator what is left.

What the standards leave open, and where other ends do not keep to them:

- A Reply repeats the Request's revision and S, and has C if the Request had it: Linux siw as an initiator looks only
  at the Reply for it.
- siw takes bytes behind a Request or a Reply for an error. So does the responder here: nothing may come before its
  Reply. But siw as a responder may send FPDUs right behind its Reply, against rule 4; they are handed on (`leftover`).
- A Reply that says peer-to-peer without having been asked (hardware RNICs do) is taken as one that does not.
- A Reply without any common RTR, or that is not peer-to-peer though asked to be, ends in a Terminate 2/0/07.
- Revision 0 (RDMA Consortium) is answered by a rejection of revision 1 and a close (RFC 5044 C).
- Who does not know revision 2 closes, or answers with 1: the attempt has failed. There is no second one with revision 1
  (RFC 6581 10).
- The standards ask for timers and give no numbers. The first two are siw's. The user's decision must come before siw
  has given up. An RTR needs no user, so it gets a timer; a first message does, so it gets none unless asked for.

Nothing here moves a socket: `handle_*` takes what has happened, `poll_send` gives bytes and `poll_event` tells what
came of it. After `Refused` or `Failed`, or `reject`, the TCP connection is to be closed once the bytes are sent. With
`Agreed` all later bytes of the connection are the stream's, and no more are taken here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Final

from sidestep.errors import Misuse, PeerViolation, Rules
from sidestep.rdma.iwarp.mpa import fpdu
from sidestep.rdma.iwarp.startup.frame import ENHANCED_LEN, NO_RTR, PRIVATE_DATA_MAX, Enhanced, MpaRole, Rtr, StartFrame
from sidestep.rdma.iwarp.startup.frame import RULES as FRAME_RULES
from sidestep.rdma.iwarp.startup.terms import (
    CONSORTIUM_REVISION,
    OVER,
    REVISIONS,
    TRANSITIONS,
    Agreed,
    Asked,
    Failed,
    MpaCause,
    MpaEvent,
    MpaSettings,
    MpaState,
    MpaStimulus,
    ReadDepths,
    Refused,
)
from sidestep.rdma.iwarp.terminate import Condition, Terminate

RULES: Final = {
    "mpa_revision": "MPA is of revision 1 or 2",
    "mpa_role": "an initiator waits for a Reply and a responder for a Request: two of a kind cannot start",
    "mpa_early": "nothing follows a Request before the Reply to it",
}
_RULES: Final = Rules(FRAME_RULES | RULES)


# In the order of preference: a Write is seen by nobody, a Read occupies a slot, a Send a receive of the user.
_RTRS: Final = (Rtr.WRITE, Rtr.READ, Rtr.SEND)


# ---- the two machines ----


class _CannotAgreeError(Exception):
    """Both frames are good, and do not go together."""

    def __init__(self, cause: MpaCause, condition: Condition, text: str) -> None:
        super().__init__(text)
        self.cause, self.condition, self.text = cause, condition, text


class _Startup:
    """What both ends have in common."""

    _EXPECTED: MpaRole

    def __init__(self, settings: MpaSettings, state: MpaState) -> None:
        self.settings = settings
        self.state = state
        self._unread = bytearray()
        self._unsent = bytearray()
        self._events: deque[MpaEvent] = deque()
        self._deadline: float | None = None

    def poll_send(self) -> bytes:
        """What is to be sent now, in order; empty if nothing."""
        piece = bytes(self._unsent)
        self._unsent.clear()
        return piece

    def poll_event(self) -> MpaEvent | None:
        """What has happened, the oldest first; None if nothing."""
        return self._events.popleft() if self._events else None

    def next_deadline(self) -> float | None:
        """When to call `handle_timeout`; None: no timer runs."""
        return self._deadline

    def handle_closed(self, *, lost: bool = False) -> None:
        """The other end has closed the TCP connection, or it is lost (reset, timed out)."""
        if self.state not in OVER and self.state is not MpaState.FULL:
            text = f"the connection was {'lost' if lost else 'closed'}: {self.state.value}"
            self._fail(MpaCause.ENDED, Condition.TCP_LOST, text)

    def handle_timeout(self, *, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            self._expire()

    def _expire(self) -> None:
        self._fail(MpaCause.SILENT, Condition.TCP_LOST, f"nothing came in time: {self.state.value}")

    def _receive(self, piece: bytes | memoryview) -> tuple[StartFrame, bytes] | None:
        """The frame that is waited for and what is behind it; None if there is not all of it yet."""
        if self.state not in (MpaState.WAIT_REPLY, MpaState.WAIT_REQUEST):
            raise Misuse("the bytes behind the start-up are the stream's")
        self._unread += piece
        key = bytes(self._unread[: len(self._EXPECTED.value)])
        if not self._EXPECTED.value.startswith(key) and any(role.value.startswith(key) for role in MpaRole):
            raise _RULES.broken("mpa_role", "the other end has the same part")
        if (found := StartFrame.decode(self._unread)) is None:
            return None
        frame, end = found
        behind = bytes(self._unread[end:])
        self._unread.clear()
        return frame, behind

    def _arm(self, now: float, after_s: float | None) -> None:
        self._deadline = None if after_s is None else now + after_s

    def _move(self, stimulus: MpaStimulus) -> None:
        self.state = TRANSITIONS[self.state, stimulus]
        self._deadline = None

    def _fail(self, cause: MpaCause, condition: Condition, text: str, *, rule: str = "") -> None:
        self._move(MpaStimulus.FAILURE)
        self._events.append(Failed(cause=cause, text=text, code=condition.code, rule=rule))

    def _fail_by(self, broken: PeerViolation) -> None:
        # RFC 5044 8: for a bad frame the connection is closed at once. The code is for the report at this end.
        self._fail(MpaCause.VIOLATION, Condition.START_FRAME, broken.message, rule=broken.rule)


class Initiator(_Startup):
    """The end that asks; to be made when the TCP connection is up.

    Raises:
        Misuse: More private data than fits.
    """

    _EXPECTED = MpaRole.REPLY

    def __init__(self, settings: MpaSettings, private_data: bytes = b"", *, now: float) -> None:
        super().__init__(settings, MpaState.WAIT_REPLY)
        self._told = self._wishes() if settings.revision == 2 and settings.enhanced else None
        self._agreed: Agreed | None = None
        self._unsent += _frame(
            MpaRole.REQUEST, private_data, self._told, settings.revision, crc=settings.crc, markers=settings.markers
        ).encode()
        self._arm(now, settings.reply_s)

    def handle_bytes(self, piece: bytes | memoryview) -> None:
        """Bytes of the connection, up to `Agreed`; what comes after a failure is dropped.

        Raises:
            Misuse: After `Agreed`: they are the stream's.
        """
        if self.state in OVER or not piece:
            return
        try:
            if (found := self._receive(piece)) is not None:
                self._judge(*found)
        except PeerViolation as broken:
            self._fail_by(broken)

    def abandon(self, why: str) -> None:
        """Our user does not want the connection, after all: not even what was just agreed, of which no FPDU was sent.

        Then the other end is told by a Terminate (RFC 6581 8); before, there is nothing that could be sent.

        Raises:
            Misuse: The start-up is over.
        """
        if self.state in OVER:
            raise Misuse("the start-up is over")
        condition = Condition.START_LOCAL if self._told is not None else Condition.USER
        if self._agreed is not None:
            self._terminate(condition, crc=self._agreed.crc, markers=self._agreed.markers_out)
        self._fail(MpaCause.ABANDONED, condition, why)

    def _wishes(self) -> Enhanced:
        settings, depths = self.settings, self.settings.depths
        wanted = depths.ord
        rtr = _within(settings.rtr, wanted)
        if settings.peer_to_peer and Rtr.READ in rtr:
            wanted = max(wanted, 1)  # a Read of no length is one, too
        return Enhanced(
            ird=depths.ird if depths.ird_announced else None,
            ord=wanted if depths.ord_announced else None,
            peer_to_peer=settings.peer_to_peer,
            rtr=rtr if settings.peer_to_peer else NO_RTR,
        )

    def _judge(self, reply: StartFrame, behind: bytes) -> None:
        if reply.revision not in REVISIONS:
            raise _RULES.broken("mpa_revision", f"revision {reply.revision}")
        if reply.rejected:
            self._refuse(reply)
        elif reply.enhanced != (self._told is not None):
            raise _RULES.broken("mpa_enhanced", f"a Reply {'with' if reply.enhanced else 'without'} S")
        else:
            self._accept(reply, behind)

    def _refuse(self, reply: StartFrame) -> None:
        # siw rejects with S and without the four bytes when it is the frame that it does not like
        short = reply.enhanced and len(reply.private_data) < ENHANCED_LEN
        remote = Enhanced() if short else reply.enhanced_data or Enhanced()
        self._move(MpaStimulus.REJECT)
        self._events.append(Refused(private_data=reply.upper_data, remote_ird=remote.ird, remote_ord=remote.ord))

    def _accept(self, reply: StartFrame, behind: bytes) -> None:
        crc = self.settings.crc or reply.crc
        remote = reply.enhanced_data or Enhanced()
        try:
            ird, ord_ = self._depths(remote)
            rtr = self._rtr(remote, ord_)
        except _CannotAgreeError as problem:
            self._terminate(problem.condition, crc=crc, markers=reply.markers)
            self._fail(problem.cause, problem.condition, problem.text)
            return
        self._move(MpaStimulus.ACCEPT)
        self._agreed = Agreed(
            revision=reply.revision, crc=crc, markers_in=self.settings.markers, markers_out=reply.markers,
            ird=ird, ord=ord_, remote_ird=remote.ird, remote_ord=remote.ord,
            peer_to_peer=self.settings.peer_to_peer, rtr=rtr, private_data=reply.upper_data, leftover=behind,
        )  # fmt: skip
        self._events.append(self._agreed)

    def _depths(self, remote: Enhanced) -> tuple[int, int]:
        """IRD and ORD of this end, after what the responder said (RFC 6581 9.1)."""
        depths, told = self.settings.depths, self._told or Enhanced()
        ird = depths.ird
        if remote.ord is not None and told.ird is not None and remote.ord > ird:
            if remote.ord > depths.ird_max:
                text = f"the other end wants to make {remote.ord} reads at a time, {depths.ird_max} can be held"
                raise _CannotAgreeError(MpaCause.READS, Condition.START_IRD, text)
            ird = remote.ord
        if remote.ird is None or told.ord is None:
            return ird, depths.ord
        if remote.ird < depths.ord_min:
            text = f"the other end holds {remote.ird} reads at a time, {depths.ord_min} are needed"
            raise _CannotAgreeError(MpaCause.READS, Condition.START_LOCAL, text)
        return ird, min(told.ord, remote.ird)

    def _rtr(self, remote: Enhanced, ord_: int) -> Rtr:
        """The one to send first."""
        if not self.settings.peer_to_peer:
            return NO_RTR
        common = self.settings.rtr & remote.rtr if remote.peer_to_peer else NO_RTR
        for each in _RTRS:
            if each in common and (each is not Rtr.READ or ord_):
                return each
        raise _CannotAgreeError(MpaCause.NO_RTR, Condition.START_RTR, MpaCause.NO_RTR.value)

    def _terminate(self, condition: Condition, *, crc: bool, markers: bool) -> None:
        self._unsent += fpdu(Terminate.about(condition).segment.encode(), 0, markers=markers, crc=crc)


class Responder(_Startup):
    """The end that is asked; to be made when the TCP connection is up."""

    _EXPECTED = MpaRole.REQUEST

    def __init__(self, settings: MpaSettings, *, now: float) -> None:
        super().__init__(settings, MpaState.WAIT_REQUEST)
        self._request: StartFrame | None = None
        self._wanted = Enhanced()  # what the Request said
        self._agreed: Agreed | None = None
        self._arm(now, settings.request_s)

    @property
    def private_data_max(self) -> int:
        """Bytes that a Reply has room for."""
        enhanced = self._request is not None and self._request.enhanced
        return PRIVATE_DATA_MAX - ENHANCED_LEN if enhanced else PRIVATE_DATA_MAX

    def handle_bytes(self, piece: bytes | memoryview, *, now: float) -> None:
        """Bytes of the connection, up to `Agreed`; what comes after a failure is dropped.

        Raises:
            Misuse: After `Agreed`: they are the stream's.
        """
        if self.state in OVER or not piece:
            return
        try:
            if self.state is MpaState.DECIDING:
                raise _RULES.broken("mpa_early", f"{len(piece)} bytes")
            if (found := self._receive(piece)) is not None:
                self._judge(*found, now=now)
        except PeerViolation as broken:
            self._fail_by(broken)

    def accept(self, private_data: bytes = b"", *, depths: ReadDepths | None = None, now: float) -> None:
        """Our user wants the connection: `Agreed` follows, or `Failed` if the read depths do not go together.

        `depths` are those of the settings unless given. Does nothing if the start-up has failed meanwhile.

        Raises:
            Misuse: Nobody has asked, it was answered, or more private data than fits.
        """
        if (request := self._answerable(private_data)) is None:
            return
        depths = depths or self.settings.depths
        if self._wanted.ird is not None and self._wanted.ird < depths.ord_min:
            # RFC 6581 9.1: then the Reply rejects, and says how many would be needed
            ird = self._own_ird(depths)
            self._send_reply(request, Enhanced(ird, depths.ord_min), b"", rejected=True)
            text = f"the other end holds {self._wanted.ird} reads at a time, {depths.ord_min} are needed"
            self._fail(MpaCause.READS, Condition.START_IRD, text)
            return
        own = self._answer(depths)
        self._send_reply(request, own, private_data)
        self._move(MpaStimulus.ACCEPT)
        self._agreed = Agreed(
            revision=request.revision, crc=request.crc or self.settings.crc,
            markers_in=self.settings.markers, markers_out=request.markers,
            ird=self._own_ird(depths), ord=self._own_ord(depths),
            remote_ird=self._wanted.ird, remote_ord=self._wanted.ord,
            peer_to_peer=own.peer_to_peer, rtr=own.rtr, private_data=request.upper_data,
        )  # fmt: skip
        self._arm(now, self.settings.rtr_s if own.peer_to_peer else self.settings.first_fpdu_s)
        self._events.append(self._agreed)

    def reject(self, private_data: bytes = b"") -> None:
        """Our user does not want the connection. Does nothing if the start-up has failed meanwhile.

        Raises:
            Misuse: Nobody has asked, it was answered, or more private data than fits.
        """
        if (request := self._answerable(private_data)) is not None:
            self._send_reply(request, self._answer(self.settings.depths), private_data, rejected=True)
            self._move(MpaStimulus.REJECT)

    def _expire(self) -> None:
        if self.state is MpaState.DECIDING and self._request is not None:
            self._send_reply(self._request, self._answer(self.settings.depths), b"", rejected=True)
            self._fail(MpaCause.UNDECIDED, Condition.START_LOCAL, MpaCause.UNDECIDED.value)
        else:
            super()._expire()

    def _judge(self, request: StartFrame, behind: bytes, *, now: float) -> None:
        if behind:
            raise _RULES.broken("mpa_early", f"{len(behind)} bytes")
        if request.revision == CONSORTIUM_REVISION:
            self._send_reply(replace(request, revision=1), Enhanced(), b"", rejected=True)
        if request.revision not in REVISIONS or request.revision > self.settings.revision:
            raise _RULES.broken("mpa_revision", f"revision {request.revision}")
        self._wanted = request.enhanced_data or Enhanced()
        self._request = request
        self._move(MpaStimulus.REQUEST)
        self._arm(now, self.settings.decision_s)
        wanted = self._wanted
        self._events.append(
            Asked(
                revision=request.revision, private_data=request.upper_data, peer_to_peer=wanted.peer_to_peer,
                rtr=wanted.rtr if wanted.peer_to_peer else NO_RTR, remote_ird=wanted.ird, remote_ord=wanted.ord,
            )
        )  # fmt: skip

    def _answerable(self, private_data: bytes) -> StartFrame | None:
        if self.state is MpaState.CLOSED and self._agreed is None and self._request is not None:
            return None  # it failed while the user was deciding, and `Failed` says so
        if self.state is not MpaState.DECIDING or self._request is None:
            raise Misuse("there is no Request to answer")
        if len(private_data) > self.private_data_max:
            raise Misuse(f"{len(private_data)} bytes of private data", remedy=f"at most {self.private_data_max}")
        return self._request

    def _own_ird(self, depths: ReadDepths) -> int:
        """RFC 6581 9.1: at least as many as the initiator wants to make, as far as possible."""
        ird = depths.ird
        if self._wanted.ord is not None:
            ird = min(max(ird, self._wanted.ord), depths.ird_max)
        if self._wanted.peer_to_peer and Rtr.READ in self._taken_rtr(depths):
            ird = max(ird, 1)  # a Read of no length is one, too
        return ird

    def _own_ord(self, depths: ReadDepths) -> int:
        """RFC 6581 9.1: no more than the initiator holds."""
        return depths.ord if self._wanted.ird is None else min(depths.ord, self._wanted.ird)

    def _taken_rtr(self, depths: ReadDepths) -> Rtr:
        """Of those that the initiator can send; without any, all that this end takes (RFC 6581 9.2)."""
        return _within(self._wanted.rtr & self.settings.rtr or self.settings.rtr, depths.ird_max)

    def _answer(self, depths: ReadDepths) -> Enhanced:
        announced_ird = depths.ird_announced and self._wanted.ord is not None
        announced_ord = depths.ord_announced and self._wanted.ird is not None
        return Enhanced(
            ird=self._own_ird(depths) if announced_ird else None,
            ord=self._own_ord(depths) if announced_ord else None,
            peer_to_peer=self._wanted.peer_to_peer,
            rtr=self._taken_rtr(depths) if self._wanted.peer_to_peer else NO_RTR,
        )

    def _send_reply(self, request: StartFrame, own: Enhanced, private_data: bytes, *, rejected: bool = False) -> None:
        frame = _frame(
            MpaRole.REPLY, private_data, own if request.enhanced else None, request.revision,
            crc=request.crc or self.settings.crc, markers=self.settings.markers and not rejected,
        )  # fmt: skip
        self._unsent += replace(frame, rejected=rejected).encode()


def _within(rtr: Rtr, depth: int) -> Rtr:
    """Without the Read where no Reads are wanted, unless it is the only one."""
    return rtr if depth else rtr & ~Rtr.READ or rtr


def _frame(
    role: MpaRole, private_data: bytes, told: Enhanced | None, revision: int, *, crc: bool, markers: bool
) -> StartFrame:
    front = b"" if told is None else told.encode()
    return StartFrame(role, front + private_data, markers, crc, enhanced=told is not None, revision=revision)
