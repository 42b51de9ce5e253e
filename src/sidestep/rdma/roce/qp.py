"""A queue pair of the software HCA: what its user sees of a reliable connection.

`Rc` (native/wire/rc_qp.h) has the connection's requester and responder: all that is done for a packet. Here is what is
done for a request or a message, what ends the queue pair, and whether memory may be used.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from sidestep.errors import Misuse, Unavailable
from sidestep.native._engine import Rc
from sidestep.rdma.roce.counting import NAKS, Tally
from sidestep.rdma.roce.mad import address_of, gid
from sidestep.rdma.roce.numbers import timeout_s
from sidestep.rdma.roce.packet import MTU_CODES
from sidestep.rdma.roce.path import Path
from sidestep.rdma.roce.tap import Joined, PacketWire
from sidestep.rdma.soft.memory import AccessRefusal
from sidestep.rdma.soft.ordered import OrderedQueuePair, Sent
from sidestep.rdma.soft.qp import ERROR, FLUSHED, INIT, OP_RECEIVE, RESET, RTR, RTS, SUCCESS
from sidestep.rdma.verbs import EventKind, JoinedBy, LentDatagrams, QpEndpoint, SendRing
from sidestep.rdma.work import CompareSwap, Completion, FetchAdd, RdmaRead, RdmaWrite, RKey, Send, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidestep.rdma.roce.device import RoceDevice
    from sidestep.rdma.soft.keys import Memory
    from sidestep.rdma.soft.memory import QpInit
    from sidestep.rdma.verbs import Beginning
    from sidestep.rdma.work import Receive, SendRequest

_SEND, _WRITE, _READ, _SWAP, _ADD = range(5)  # native/wire/rc_qp.h::qp_op
_COUNTS: Final = ("packets_sent", "packets_received", "packets_resent", "packets_dropped", "resent")  # Rc.counts
_EVENTS: Final = {  # IBTA 9.7.5.2.8, table 46: what a refusal of this end is to its user
    0x61: EventKind.QP_REQUEST_ERROR,
    0x62: EventKind.QP_ACCESS_ERROR,
    0x63: EventKind.QP_FATAL,
}


class RoceQueuePair(OrderedQueuePair):
    """One end of a reliable connection."""

    __slots__ = (
        "_counts", "_flying", "_loaned", "_psn", "_reclaim", "path", "rc", "remote_port", "returned",
        "tally", "wire",
    )  # fmt: skip

    device: RoceDevice
    connection: JoinedBy | None

    def __init__(self, device: RoceDevice, init: QpInit) -> None:
        super().__init__(device.next_qp_number(), device, init)
        self.path: Path | None = None  # once the two ends have agreed on one
        self._psn: int | None = None  # of the first packet to it, where `join` connects it
        self.tally = Tally()
        self.wire: PacketWire | None = None  # once it is connected
        self.rc: Rc | None = None
        self._counts: list[int] = []  # of that, as they were told
        self._flying: deque[Sent] = deque()  # what that has been given, and is not acknowledged
        self.remote_port: int | None = None  # that packets of the other end come from
        self._loaned = False  # the engine has it
        self._reclaim: Callable[[], object] | None = None
        self.returned = False  # it is back, and what has come has still to be looked at
        device.queue_pairs_by_number[self.number] = self

    # --- the user's side ---

    def post_send(self, request: SendRequest) -> None:
        self.reclaim()
        super().post_send(request)

    def modify_to_error(self) -> None:
        self.end()

    def end(self) -> None:
        self.reclaim()
        super().end()

    def destroy(self) -> None:
        self.reclaim()
        if self.state is not RESET:
            super().destroy()
            if self.wire is not None and self._joined:
                self.wire.closed()
            self.count()
            self.rc = None
            self.device.forget_qp(self)

    def stop_waiting(self) -> None:
        self._flying.clear()
        if self.rc is not None:
            self.rc.stop()

    def details(self) -> dict[str, object]:
        self.count()
        found = super().details()
        if self.path is not None and self.rc is not None:
            found["remote_number"] = self.path.remote_qp
            found["mtu"] = self.path.mtu
            found |= self.tally.as_json()
        return found

    # --- lending it to the engine ---

    def lend(
        self, record: dict[str, int], reclaim: Callable[[], object], ring: Callable[[], SendRing]
    ) -> LentDatagrams | None:
        """Its sockets, if nothing is under way here, and packets that come are told apart by the kernel."""
        rc, path = self.rc, self.path
        if (
            self.state is not RTS or self._loaned or self.returned or self._sent or self._waiting or path is None
            or rc is None or self.wire is None or self.wire.live or self.srq is not None or self.remote_port is None
            or (fds := self.device.sockets_of(self)) is None
        ):  # fmt: skip
            return None
        receive = rc.lend(*fds, self.device.source_port(self), self.remote_port)
        if not receive:
            return None
        if receive is not True:
            self.untake_receive(receive)
        self._loaned, self._reclaim = True, reclaim
        self.wire.reclaim = self.reclaim
        self.device.leave_to_engine(self)
        return LentDatagrams(rc)

    def take_back(self, record: dict[str, int], error: int) -> None:
        """What has come and was not taken is looked at in this turn; no error is the end of this wire."""
        del record, error
        assert self.rc is not None
        self._loaned, self._reclaim = False, None
        fits, left, segment = self.rc.take_back(self)
        self.returned = True
        self.device.take_from_engine(self, left, segment)
        if not fits:
            self.break_off(EventKind.QP_FATAL, "a message came that no receive was posted for")

    def catch_up(self) -> None:
        self.reclaim()
        self.device.catch_up(self)

    def count(self) -> None:
        """What was done up to now is counted."""
        if self.rc is None:
            return
        before, self._counts = self._counts or [0] * (len(_COUNTS) + 2 * len(NAKS)), self.rc.counts()
        grown = [now - then for now, then in zip(self._counts, before, strict=True)]
        tally, add = self.tally, self.device.events.add_many
        naks_sent, naks_received = grown[len(_COUNTS) :][: len(NAKS)], grown[-len(NAKS) :]
        counted = dict(zip(_COUNTS, grown, strict=False), naks_sent=sum(naks_sent), naks_received=sum(naks_received))
        for name in Tally.__slots__:
            setattr(tally, name, getattr(tally, name) + counted[name])
        for name in ("packets_sent", "packets_received", "packets_resent"):
            add(counted[name], name)
        add(counted["packets_dropped"], "packet_dropped", "engine")
        for name, some in (("nak_sent", naks_sent), ("nak_received", naks_received)):
            for reason, count in zip(NAKS, some, strict=True):
                add(count, name, reason)

    def reclaim(self) -> None:
        """Somebody here has to do with it."""
        if self._reclaim is not None:
            self._reclaim()

    @property
    def _joined(self) -> bool:
        """It is connected by others than the device's connection manager."""
        return self._psn is not None

    # --- the connection manager's side ---

    def endpoint(self, address: str) -> QpEndpoint:
        mtu = self.path.mtu if self.path is not None else MTU_CODES[self.device.mtu_code_to(address)]
        return QpEndpoint(gid(self.device.ip), self.number, self._first_psn, mtu)

    @property
    def _first_psn(self) -> int:
        if self._psn is None:
            self._psn = self.device.rng.getrandbits(24)
        return self._psn

    def join(self, other: QpEndpoint, owner: JoinedBy, *, initiator_depth: int, responder_resources: int) -> None:
        if self.state is not INIT or self.connection is not None:
            raise Misuse(f"a queue pair in {self.state.name} that was used before cannot be joined")
        remote, device, settings = address_of(other.gid), self.device, self.device.settings
        if remote.version != device.ip.version:
            raise Unavailable(f"{remote} is not reached from {device.ip}")
        self.connection = owner
        self.initiator_depth = initiator_depth
        self.follow(
            Path(
                address=str(remote), remote=remote, remote_qp=other.number,
                mtu=min(other.mtu, MTU_CODES[device.mtu_code_to(str(remote))]), send_psn=other.psn,
                receive_psn=self._first_psn, timeout_s=timeout_s(settings.ack_timeout_code),
                retry_count=settings.retry_count, rnr_retry=settings.rnr_retry,
                rnr_timer_code=settings.rnr_timer_code, window=device.window,
            ),
            responder_resources,
        )  # fmt: skip
        self.ready_to_receive()

    def tell_beginning(self, beginning: Beginning) -> None:
        """Lets others look on, who cannot see how it began, and are told."""
        path, active = self.path, beginning.active
        assert path is not None
        self.wire = PacketWire(self.device.taps, self.device.address, path.address, active=active)
        qps, psns = (self.number, path.remote_qp), (path.receive_psn, path.send_psn)
        joined = Joined(
            beginning.service_id, beginning.request, beginning.reply, qps if active else qps[::-1],
            psns if active else psns[::-1], path.mtu,
        )  # fmt: skip
        self.wire.opened(self.number, path.remote_qp, joined)

    def follow(self, path: Path, responder_resources: int | None = None) -> None:
        """The way is known; what may be sent and taken the state says."""
        self.path = path
        resources = self.capabilities.responder_resources if responder_resources is None else responder_resources
        self.rc = Rc(
            self.device.ip.packed, path.remote.packed, self.number, path.remote_qp, path.mtu, path.window,
            path.send_psn, path.receive_psn, path.timeout_s, path.retry_count, path.rnr_retry, path.rnr_timer_code,
            resources,
        )  # fmt: skip

    def ready_to_send(self) -> None:
        super().ready_to_send()
        if self.rc is not None:
            self.rc.depth = self.initiator_depth

    # --- the device's side ---

    def take_in(self, data: memoryview, segment: int, port: int, now: float) -> int:
        """Takes in packets that came from the other end, of so many bytes each but the last.

        Returns the bytes taken: up to a packet that is none of this connection's, or that this state drops.
        """
        rc, state = self.rc, self.state
        if rc is None or self._loaned or state not in (RTR, RTS, ERROR):
            return 0  # what went astray as the engine got it will be sent again
        taken = rc.receive(self, data, segment, port, state, self.remote_access, now)
        if state is RTR and rc.begun:
            # IBTA 12.9.6: the first message is as good as the RTU that it overtook.
            self.tell(EventKind.COMMUNICATION_ESTABLISHED)
            if self.connection is not None:
                self.connection.communication_established()
        self.follow_up()
        return taken

    def poll_train(self, room: memoryview, most: int, now: float) -> tuple[int, int, int] | None:
        """Writes the next packets to send, as one datagram: its bytes, those of each but the last, and their number."""
        rc = self.rc
        if rc is None or self._loaned:
            return None
        train = rc.train(self, room, most, self.device.source_port(self), self.state is RTS, now)
        self.follow_up()
        return train

    def send_trains(
        self, fd: int, room: memoryview, most: int, train_max: int, now: float
    ) -> tuple[int, int, int, int]:
        """Sends the next packets by a socket: see `Rc.send`."""
        rc = self.rc
        if rc is None or self._loaned:
            return 0, 0, 0, 0
        sent = rc.send(self, fd, most, train_max, room, self.device.source_port(self), self.state is RTS, now)
        self.follow_up()
        return sent

    @property
    def deadline(self) -> float | None:
        return self.rc.deadline() if self.rc and self.state is RTS and not self._loaned else None

    def handle_timeout(self, now: float) -> None:
        if self.rc is not None and self.state is RTS and not self._loaned:
            self.rc.expire(now)
            self.follow_up()

    # --- what the connection asks ---

    def take_posted(self) -> Receive | None:
        """The next receive; None: none is posted."""
        return self.take_receive() if self._receives else None

    def grant(self, key: int, va: int, length: int, right: int) -> memoryview | AccessRefusal:
        return self.domain.grant(key, va, length, right, self)

    def may_be_invalidated(self, key: int) -> Memory | AccessRefusal:
        return self.domain.may_be_invalidated(key, self)

    def void_key(self, key: int) -> None:
        memory = self.may_be_invalidated(key)
        assert not isinstance(memory, AccessRefusal)
        memory.invalidate()

    # --- what follows ---

    def _leave(self, sent: Sent) -> None:
        rc, request = self.rc, sent.request
        assert rc is not None
        self._flying.append(sent)
        self.device.has_work(self)
        match request:
            case Send():
                key, immediate = request.invalidate, request.immediate
                rc.post(_SEND, request.gather, 0, key or 0, 0, 0, immediate, key is not None, request.solicited)
            case RdmaWrite():
                where = request.remote_va, request.rkey
                rc.post(_WRITE, request.gather, *where, 0, 0, request.immediate, False, request.solicited)
            case RdmaRead():
                rc.post(_READ, request.scatter, request.remote_va, request.rkey)
            case CompareSwap():
                where = request.remote_va, request.rkey
                rc.post(_SWAP, request.scatter, *where, request.swap, request.compare)
            case FetchAdd():
                rc.post(_ADD, request.scatter, request.remote_va, request.rkey, request.add)

    def follow_up(self) -> None:
        """What has come of packets: messages, requests that are done, and the end."""
        rc = self.rc
        if rc is None or (outcome := rc.outcome()) is None:
            return
        finished, index, status, delivered, refusal = outcome
        for each in delivered:
            self._deliver(*each)
        for _ in range(finished):
            self._flying.popleft().status = SUCCESS
        if status and index >= 0:
            self._flying[index].status = Status(status)
        elif status:
            self.break_off(EventKind.QP_FATAL, f"what the engine has sent ended by {Status(status).name}")
        self._complete_answered()
        if self.state is RTS:
            self._go_on()
        if refusal is not None and self.rc is rc:
            self._refuse(*refusal)

    def _deliver(
        self, receive: Receive, length: int, solicited: bool, voided: int | None, immediate: bytes | None
    ) -> None:
        key = None if voided is None else RKey(voided)
        self.recv_cq.add(Completion(receive.wr_id, SUCCESS, OP_RECEIVE, length, self.number, solicited, key, immediate))

    def _refuse(self, nak: int, status: int, why: str) -> None:
        """What the other end sent ends this one; the connection tells it."""
        if status and self.rc is not None and (taken := self.rc.give_up()) is not None:
            self.recv_cq.add(Completion(taken.wr_id, Status(status), OP_RECEIVE, 0, self.number))
        self.end()
        if not status:
            self.tell(_EVENTS[nak], why)

    def _flush_receives(self) -> None:
        taken = self.rc.give_up() if self.rc is not None else None
        if taken is not None:
            self.recv_cq.add(Completion(taken.wr_id, FLUSHED, OP_RECEIVE, 0, self.number))
        super()._flush_receives()
