"""A queue pair of the software HCA: a requester and a responder, and what the user sees of them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import Misuse, Unavailable
from sidestep.native import layout
from sidestep.rdma.roce.counting import Tally, nak_reason
from sidestep.rdma.roce.mad import address_of, gid
from sidestep.rdma.roce.numbers import timeout_s
from sidestep.rdma.roce.packet import MTU_CODES, READ_RESPONSES, Aeth, Op, Packet
from sidestep.rdma.roce.path import Path
from sidestep.rdma.roce.requester import Requester
from sidestep.rdma.roce.responder import Delivered, Refused, Responder
from sidestep.rdma.roce.tap import Joined, PacketWire
from sidestep.rdma.soft.ordered import OrderedQueuePair
from sidestep.rdma.soft.qp import ERROR, FLUSHED, INIT, OP_RECEIVE, RESET, RTR, RTS, SUCCESS
from sidestep.rdma.verbs import EventKind, JoinedBy, LentDatagrams, QpEndpoint, SendRing
from sidestep.rdma.work import Completion

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidestep.native._engine import Datagrams
    from sidestep.rdma.roce.device import RoceDevice
    from sidestep.rdma.soft.keys import Memory
    from sidestep.rdma.soft.memory import AccessRefusal, QpInit
    from sidestep.rdma.soft.ordered import Sent
    from sidestep.rdma.verbs import Beginning
    from sidestep.rdma.work import SendRequest

_RESPONSES: Final = READ_RESPONSES | {Op.ACK, Op.ATOMIC_ACK}


class RoceQueuePair(OrderedQueuePair):
    """One end of a reliable connection."""

    __slots__ = (
        "_counted", "_datagrams", "_psn", "_reclaim", "_requester", "_responder", "_resumed", "path", "remote_port",
        "returned", "tally", "wire",
    )  # fmt: skip

    device: RoceDevice
    connection: JoinedBy | None

    def __init__(self, device: RoceDevice, init: QpInit) -> None:
        super().__init__(device.next_qp_number(), device, init)
        self.path: Path | None = None  # once the two ends have agreed on one
        self._psn: int | None = None  # of the first packet to it, where `join` connects it
        self.tally = Tally()
        self.wire: PacketWire | None = None  # once it is connected
        self._requester: Requester | None = None
        self._responder: Responder | None = None
        self.remote_port: int | None = None  # that packets of the other end come from
        self._datagrams: Datagrams | None = None  # while the engine has it
        self._counted: dict[str, int] = {}  # of what that has done since
        self._reclaim: Callable[[], object] | None = None
        self.returned = False  # it is back, and what has come has still to be looked at
        self._resumed: deque[Sent] = deque()  # what the engine has sent, and is not acknowledged
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
            self._requester = self._responder = None
            self.device.forget_qp(self)

    def stop_waiting(self) -> None:
        if self._requester is not None:
            self._requester.stop()
        if self._responder is not None:
            self._responder.stop()

    def details(self) -> dict[str, object]:
        self.count()
        found = super().details()
        if self.path is not None and self._requester is not None:
            found["remote_number"] = self.path.remote_qp
            found["mtu"] = self.path.mtu
            found["resent"] = self._requester.resent
            found["packets_resent"] = self._requester.packets_resent
            found |= self.tally.as_json()
        return found

    # --- lending it to the engine ---

    def lend(
        self, record: dict[str, int], reclaim: Callable[[], object], ring: Callable[[], SendRing]
    ) -> LentDatagrams | None:
        """Its sockets, if nothing is under way here, and packets that come are told apart by the kernel."""
        requester, responder, path = self._requester, self._responder, self.path
        if (
            self.state is not RTS or self._datagrams is not None or self.returned or self._sent or self._waiting
            or path is None or requester is None or responder is None or self.wire is None or self.wire.live
        ):  # fmt: skip
            return None
        numbers = dict.fromkeys((name for name, _, _ in layout.RECORDS["rc_record"]), 0)
        if self.srq is not None or not requester.lend(numbers) or (datagrams := self.device.datagrams_of(self)) is None:
            return None
        partial = responder.lend(numbers)
        if partial is None or self.remote_port is None:
            return None
        numbers |= {
            "source_port": self.device.source_port(self), "remote_port": self.remote_port, "local_qp": self.number,
            "remote_qp": path.remote_qp, "mtu": path.mtu, "window": limits.ROCE_ENGINE_WINDOW,
            "timeout_ns": round(path.timeout_s * 1e9),
        }  # fmt: skip
        datagrams.begin(layout.pack("rc_record", **numbers), partial)
        self._datagrams, self._reclaim, self._counted = datagrams, reclaim, numbers
        self.wire.reclaim = self.reclaim
        self.device.leave_to_engine(self)
        return LentDatagrams(datagrams)

    def take_back(self, record: dict[str, int], error: int) -> None:
        """What has come and was not taken is looked at in this turn; no error is the end of this wire."""
        del record, error
        datagrams, self._datagrams, self._reclaim = self._datagrams, None, None
        requester, responder = self._requester, self._responder
        assert datagrams is not None and requester is not None and responder is not None  # noqa: PT018
        numbers = layout.unpack("rc_record", datagrams.record())
        self._resumed += requester.take_back(numbers, datagrams.unacknowledged())
        responder.take_back(numbers)
        self._add_counts(numbers)
        left = datagrams.left()
        datagrams.release()
        self.returned = True
        self.device.take_from_engine(self, left)

    def catch_up(self) -> None:
        self.reclaim()
        self.device.catch_up(self)

    def count(self) -> None:
        """What the engine has done up to now is counted."""
        if self._datagrams is not None:
            self._add_counts(layout.unpack("rc_record", self._datagrams.record()))

    def _add_counts(self, numbers: dict[str, int]) -> None:
        before, self._counted = self._counted, numbers
        grown = {name: count - before[name] for name, count in numbers.items()}
        tally, add = self.tally, self.device.events.add_many
        for name in ("packets_sent", "packets_received", "naks_sent", "naks_received"):
            setattr(tally, name, getattr(tally, name) + grown[name])
        for name in ("packets_sent", "packets_received", "packets_resent"):
            add(grown[name], name)
        add(grown["naks_sent"], "nak_sent", "sequence")
        add(grown["naks_received"], "nak_received", "sequence")
        add(grown["packets_dropped"], "packet_dropped", "engine")

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
                rnr_timer_code=settings.rnr_timer_code, window=settings.window,
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
        self._requester = Requester(path, self, depth=0)
        resources = self.capabilities.responder_resources if responder_resources is None else responder_resources
        self._responder = Responder(path, self, resources=resources)

    def ready_to_send(self) -> None:
        super().ready_to_send()
        if self._requester is not None:
            self._requester.depth = self.initiator_depth

    # --- the device's side ---

    def handle_packet(self, packet: Packet, now: float) -> bool:
        """Takes in a packet that came from the other end; False if this state drops it."""
        if self._datagrams is not None:
            return False  # it went astray as the engine got it, and will be sent again
        self.tally.packets_received += 1
        if packet.bth.opcode in _RESPONSES:
            if self.state is not RTS or self._requester is None:
                return False
            self._count_nak("nak_received", packet)
            if self._requester.handle(packet, now):
                self._statuses_changed()
        elif self._responder is None:
            return False
        elif self.state is RTS or self.state is RTR:
            self._request(packet, self._responder)
        elif self.state is ERROR:
            self._responder.insist(packet.bth.psn)
        else:
            return False
        return True

    def poll_packet(self, now: float) -> tuple[str, Packet] | None:
        """The next one to send, if there is any now, and where to."""
        packet = self._next_packet(now) if self._datagrams is None else None
        if packet is None:
            return None
        assert self.path is not None
        return self.path.address, packet

    def _next_packet(self, now: float) -> Packet | None:
        if self._responder is not None:
            packet = self._polled(self._responder)
            if self._responder.refused is not None:
                refused, self._responder.refused = self._responder.refused, None
                self._refuse(refused)
            if packet is not None:
                return packet
        requester = self._requester
        if requester is None or self.state is not RTS:
            return None
        again = requester.packets_resent
        packet = requester.poll(now)
        if packet is not None:
            self.tally.packets_sent += 1
            if requester.packets_resent != again:
                self.device.events.add("packets_resent")
        if requester.changed:
            requester.changed = False
            self._statuses_changed()
        return packet

    def _polled(self, responder: Responder) -> Packet | None:
        packet = responder.poll()
        if packet is not None:
            self.tally.packets_sent += 1
            self._count_nak("nak_sent", packet)
        return packet

    def _count_nak(self, name: str, packet: Packet) -> None:
        aeth = packet.find(Aeth)
        if aeth is None or (reason := nak_reason(aeth.syndrome)) is None:
            return
        self.device.events.add(name, reason)
        if name == "nak_sent":
            self.tally.naks_sent += 1
        else:
            self.tally.naks_received += 1

    @property
    def deadline(self) -> float | None:
        if self._requester is None or self.state is not RTS or self._datagrams is not None:
            return None
        return self._requester.deadline

    def handle_timeout(self, now: float) -> None:
        if self.deadline is not None and self._requester is not None and self._requester.handle_timeout(now):
            self._statuses_changed()

    # --- what the requester and the responder ask ---

    def grant(self, key: int, va: int, length: int, right: int) -> memoryview | AccessRefusal:
        return self.domain.grant(key, va, length, right, self)

    def may_be_invalidated(self, key: int) -> Memory | AccessRefusal:
        return self.domain.may_be_invalidated(key, self)

    # --- what follows ---

    def _leave(self, sent: Sent) -> None:
        assert self._requester is not None
        self._requester.begin(sent)
        self.device.has_work(self)

    def _statuses_changed(self) -> None:
        while self._resumed and (status := self._resumed[0].status) is not None:
            self._resumed.popleft()
            if status is not SUCCESS:
                self.break_off(EventKind.QP_FATAL, f"what the engine has sent ended by {status.name}")
        self._complete_answered()
        if self.state is RTS:
            self._go_on()

    def _request(self, packet: Packet, responder: Responder) -> None:
        if self.state is RTR and packet.bth.psn == responder.expected:
            # IBTA 12.9.6: the first message is as good as the RTU that it overtook.
            self.tell(EventKind.COMMUNICATION_ESTABLISHED)
            if self.connection is not None:
                self.connection.communication_established()
        outcome = responder.handle(packet)
        if isinstance(outcome, Delivered):
            self.recv_cq.add(
                Completion(
                    outcome.receive.wr_id, SUCCESS, OP_RECEIVE, outcome.length, self.number, outcome.solicited,
                    outcome.invalidated, outcome.immediate,
                )
            )  # fmt: skip
        elif isinstance(outcome, Refused):
            self._refuse(outcome)

    def _refuse(self, refused: Refused) -> None:
        """What the other end sent ends this one; it is told by the responder."""
        if refused.receive is not None:
            self.recv_cq.add(Completion(refused.receive.wr_id, refused.status, OP_RECEIVE, 0, self.number))
        self.end()
        if refused.event is not None:
            self.tell(refused.event, refused.why)

    def _flush_receives(self) -> None:
        taken = self._responder.give_up() if self._responder is not None else None
        if taken is not None:
            self.recv_cq.add(Completion(taken.wr_id, FLUSHED, OP_RECEIVE, 0, self.number))
        super()._flush_receives()
