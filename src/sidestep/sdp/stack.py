"""SDP over a device: what all connections of one device share, see `endpoint`, and what drives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from ipaddress import IPv4Address, ip_address
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from sidestep import limits
from sidestep.errors import Misuse, SidestepError, Unavailable
from sidestep.loop import Loop
from sidestep.loop import Timer as LoopTimer
from sidestep.rdma import cm
from sidestep.rdma.cm import REJECT_CONSUMER, ConnectionRequest
from sidestep.rdma.pools import MessagePool, RdmaPool
from sidestep.rdma.verbs import AsyncEvent, Device, EventKind, MemoryRegion
from sidestep.rdma.work import Access, Completion, Status
from sidestep.sdp.buffers import PrivateBuffers
from sidestep.sdp.connection import SdpCause
from sidestep.sdp.endpoint import (
    SPARE_REQUESTS,
    Acceptor,
    SdpStream,
    StreamHandler,
    capabilities_of,
    ignore_event,
    ip_of,
)
from sidestep.sdp.private_data import check_room, whole
from sidestep.sdp.registration import PermanentRegions
from sidestep.sdp.requests import StreamEvent, Suspended
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.wire import BSDH_LEN, SinkAvail, service_id

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from sidestep.rdma.loopback import Fabric, Timer
    from sidestep.rdma.verbs import EventHandler, QpCapabilities, QueuePair

_DONE: Final = Status.SUCCESS
_CQ_SIZE: Final = 65536  # completions; queues with a handler are emptied as they fill
_HEADERS_MAX: Final = BSDH_LEN + SinkAvail.LENGTH  # bytes of the longest headers that payload follows
_LISTENERS_LOOKED_AT: Final = 32  # listeners until those that were closed are forgotten
DeviceT = TypeVar("DeviceT", bound=Device)


class Stack:
    """One device, as SDP uses it.

    Args:
        device: Whose events come here from now on, and then go where they went before.
        clock: Gives monotonic seconds.
        settings: Of connections for which no others are given.
        wake_at: Called with the time at which `handle_timeouts` is to be called next, in place of the one before.
        private_bytes_max: Of private buffers.
        private_waits: Whether connections beyond that, or beyond what can be registered, wait for some.
        private_bytes_kept: Of private buffers that nobody uses and that are kept for the next connection.
        registered_bytes_max: Of users' buffers that are registered.
        keep_registered: Whether users' buffers stay registered after use, closed to the other end, for the next time.
            That saves time, but keeps them alive, and a `bytearray` cannot be resized meanwhile.
        manager: What makes connections, in the place of the device's own connection manager.
        private_data_max: Bytes of private data that it carries.

    Raises:
        Unavailable: The device does not carry SDP.
    """

    def __init__(
        self,
        device: Device,
        clock: Callable[[], float],
        settings: SdpSettings | None = None,
        *,
        wake_at: Callable[[float], None] | None = None,
        private_bytes_max: int = limits.SDP_PRIVATE_BYTES_MAX,
        private_bytes_kept: int = 0,
        private_waits: bool = True,
        registered_bytes_max: int = limits.RDMA_POOL_BYTES_MAX,
        keep_registered: bool = False,
        manager: cm.ConnectionManager | None = None,
        private_data_max: int = 0,
    ) -> None:
        _check(device)
        self.device = device
        self.manager = manager or device.cm
        self.request_data_max = private_data_max or device.attributes.request_private_data_max
        self.reply_data_max = private_data_max or device.attributes.reply_private_data_max
        self.clock = clock
        self.wake_at = wake_at
        self.settings = settings or SdpSettings()
        self.keep_registered = keep_registered
        self.domain = device.alloc_pd()
        depth = min(_CQ_SIZE, device.attributes.completions_max)
        self.send_cq = device.create_cq(depth, self._sent)
        self.recv_cq = device.create_cq(depth, self._received)
        self.streams: dict[int, SdpStream] = {}  # by number of the queue pair
        self.buffers = PrivateBuffers(
            self.domain, bytes_max=private_bytes_max, kept=private_bytes_kept, waits=private_waits
        )
        self.regions = RdmaPool(self.domain, bytes_max=registered_bytes_max)
        self.permanent = PermanentRegions()
        self.spares: MessagePool | None = None  # registered buffers for payload that cannot be registered
        if device.attributes.checks_local_memory:
            self.spares = MessagePool(self.domain, size=limits.SDP_CHECKED_MESSAGE_MAX, count=limits.SDP_SPARE_BUFFERS)
        self._listeners: list[cm.Listener] = []
        self._listeners_most = _LISTENERS_LOOKED_AT
        self._deadlines: list[tuple[float, int, SdpStream]] = []
        self._deadline_count = 0
        self._woken_at: float | None = None  # what `wake_at` was told last
        self._events_before = device.on_event
        device.on_event = self._on_event

    # --- connections ---

    def connect(
        self,
        address: str,
        addresses: Addresses,
        tell: StreamHandler,
        settings: SdpSettings | None = None,
        *,
        beside_hello: Callable[[bytes], bytes] | None = None,
        uid: int | None = None,
    ) -> SdpStream:
        """Begins a connection to the device at `address`; what comes of it is told.

        `beside_hello` gives, for the Hello, private data of the caller's own behind it, which only a listener of his
        own takes; `uid` is whose connection it is.

        Raises:
            LimitReached, Unavailable: No queue pair or buffers, or no private data long enough for a Hello.
        """
        chosen = settings or self.settings
        check_room(self.request_data_max, self.reply_data_max, chosen.carrier)
        stream = SdpStream(self, chosen, tell, uid)
        stream.address = address
        stream.beside_hello = beside_hello
        stream.make_ready(partial(self.manager.take_joined, address))
        stream.connection.connect(addresses, self.clock())
        stream.run()
        return stream

    def listen(
        self,
        port: int,
        accepted: Acceptor,
        *,
        match: cm.PrivateDataMatch | None = None,
        backlog: int = limits.RDMA_BACKLOG_DEFAULT,
        settings: SdpSettings | None = None,
        admit: Callable[[ConnectionRequest], bool] | None = None,
    ) -> cm.Listener:
        """Takes connections to a port; `accepted` is called with each, and sets its `tell` before it returns.

        `match` is what Hello must say (`private_data.match_address`), `admit` has the last word on each request.
        `backlog` bounds the requests that are not answered yet; see `listening` for one as sockets have it.
        """
        check_room(self.request_data_max, self.reply_data_max, (settings or self.settings).carrier)

        def requested(request: ConnectionRequest) -> None:
            if admit is None or admit(request):
                self.serve(request, accepted, port, settings)
            else:
                request.reject(REJECT_CONSUMER)

        return self.take_requests(port, requested, match=match, backlog=backlog)

    def take_requests(
        self,
        port: int,
        handler: cm.RequestHandler,
        *,
        match: cm.PrivateDataMatch | None = None,
        backlog: int = limits.RDMA_BACKLOG_DEFAULT,
    ) -> cm.Listener:
        """Hands requests for a port to a handler, which answers each, now or later: by `serve`, or by rejecting it."""
        listener = self.manager.listen(service_id(port), handler, match=match, backlog=backlog)
        if len(self._listeners) >= self._listeners_most:
            self._listeners = [each for each in self._listeners if not each.closed]
            self._listeners_most = 2 * len(self._listeners) + _LISTENERS_LOOKED_AT
        self._listeners.append(listener)
        return listener

    def serve(
        self,
        request: ConnectionRequest,
        accepted: Acceptor,
        port: int,
        settings: SdpSettings | None = None,
        suspended: Suspended | None = None,
        *,
        beside_hello: int = 0,
        uid: int | None = None,
        why_not: Callable[[SidestepError], bytes] = lambda _why: b"",
    ) -> None:
        """Answers a request: with the connection that `accepted` is told of, or by rejecting it.

        With `suspended` the connection goes on with what another process has handed over. The last `beside_hello` bytes
        of the private data are not the Hello's, and are the caller's business. `uid` is whose connection it is, and
        `why_not` gives private data for the refusal of one for which there is no queue pair, or no buffers.
        """
        stream = SdpStream(self, settings or self.settings, _nobody, uid)
        stream.request = request
        stream.address = request.remote_address  # to come after it when it moves
        if suspended is not None:
            stream.connection.take_over(suspended)
        stream.tell = ignore_event
        hello = request.private_data[: len(request.private_data) - beside_hello]
        if stream.connection.accept(whole(hello), _addresses_of(request, port), self.clock()):
            try:
                stream.make_ready(request.take_joined)
            except SidestepError as why:
                stream.reject_with = why_not(why)
                stream.connection.handle_failure(why, SdpCause.RESOURCES, self.clock())
            else:
                stream.tell = _nobody
                accepted(stream)
        stream.run()

    def register(self, buffer: Buffer, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """Registers memory for good, for streams that send from it and receive into it; see `deregister`.

        Raises:
            Misuse, LimitReached, Unavailable: As `ProtectionDomain.register` does.
        """
        region = self.domain.register(buffer, access)
        self.permanent.add(region)
        return region

    def deregister(self, region: MemoryRegion) -> None:
        """Ends what `register` began; no request may use that memory any more."""
        self.permanent.remove(region)
        region.deregister()

    def close(self) -> None:
        """Resets all connections and gives everything back to the device at once."""
        for listener in self._listeners:
            listener.close()
        for stream in list(self.streams.values()):
            stream.abort()
            stream.lose_device()
        self.buffers.close()
        for region in self.permanent.take_all():
            region.deregister()
        if self.spares is not None:
            self.spares.close()
        if self.device.on_event == self._on_event:
            self.device.on_event = self._events_before
        self.send_cq.destroy()
        self.recv_cq.destroy()
        self.regions.close(self.domain.deallocate)  # a registration may be under way

    def make_qp(self, capabilities: QpCapabilities, on_event: EventHandler) -> QueuePair:
        """Raises LimitReached if the device has no more."""
        return self.domain.create_qp(self.send_cq, self.recv_cq, capabilities, on_event=on_event)

    def make_usual_qp(self, on_event: EventHandler) -> QueuePair:
        """One for a connection to come, with the settings of the stack."""
        return self.make_qp(capabilities_of(self.suited(self.settings)), on_event)

    # --- what the device says ---

    def _received(self, completions: list[Completion]) -> None:
        now = self.clock()
        streams = self.streams
        touched: SdpStream | None = None
        for completion in completions:
            stream = streams.get(completion.qp_number)
            if stream is None:
                continue
            if stream is not touched:
                if touched is not None:
                    touched.run()
                touched = stream
            buffer = stream.posted.pop(completion.wr_id)
            if completion.status is _DONE:
                if completion.invalidated is not None:
                    stream.connection.handle_invalidated(completion.invalidated, now)
                stream.connection.handle_message(buffer, completion.byte_len, now)
            else:
                stream.flushed(buffer, completion.status)
        if touched is not None:
            touched.run()

    def _sent(self, completions: list[Completion]) -> None:
        now = self.clock()
        streams = self.streams
        touched: SdpStream | None = None
        for completion in completions:
            stream = streams.get(completion.qp_number)
            if stream is None:
                continue
            if stream is not touched:
                if touched is not None:
                    touched.run()
                touched = stream
            if completion.status is _DONE:
                stream.connection.handle_completion(completion.wr_id, _DONE, now)
            else:
                stream.failed(completion.wr_id, completion.status)
        if touched is not None and not touched.connection.quiet():
            touched.run()

    def _on_event(self, event: AsyncEvent) -> None:
        if event.kind is EventKind.DEVICE_FATAL:
            for stream in list(self.streams.values()):
                stream.fail(Unavailable(f"the device failed: {event.why or 'no more is known'}"), SdpCause.TRANSPORT)
                stream.lose_device()
        if self._events_before is not None:
            self._events_before(event)

    # --- memory ---

    def suited(self, settings: SdpSettings) -> SdpSettings:
        """The settings, as far as the device goes along with them."""
        attributes = self.device.attributes
        local_access: Access | None = None
        message_max = settings.message_max
        if attributes.checks_local_memory:
            message_max = min(message_max, limits.SDP_CHECKED_MESSAGE_MAX)
            local_access = Access.LOCAL_WRITE
            if attributes.read_sink_remote_write:
                local_access |= Access.REMOTE_WRITE
        return replace(
            settings,
            send_queue=min(settings.send_queue, attributes.work_requests_max - SPARE_REQUESTS),
            receive_count=min(settings.receive_count, (attributes.work_requests_max - SPARE_REQUESTS) // 2),
            reads_max=min(settings.reads_max, attributes.read_depth_max),
            message_max=message_max,
            local_access=local_access,
        )

    # --- time ---

    def next_deadline(self) -> float | None:
        """When `handle_timeouts` is to be called, or None."""
        deadlines = self._deadlines
        while deadlines:
            entry = deadlines[0]
            at, _, stream = entry
            if stream.timer is entry:
                if stream.deadline is not None and stream.deadline <= at:
                    return at
                stream.timer = None
            heappop(deadlines)
            if stream.timer is None and stream.deadline is not None:  # it was put off
                self._push(stream, stream.deadline)
        return None

    def handle_timeouts(self) -> None:
        now = self.clock()
        self._woken_at = None
        while (at := self.next_deadline()) is not None and at <= now:
            _, _, stream = heappop(self._deadlines)
            stream.timer = stream.deadline = None
            stream.connection.handle_timeout(now)
            stream.run()
        if at is not None:
            self._wake(at)

    def arm(self, stream: SdpStream, at: float) -> None:
        """Remembers the deadline of a stream. One that comes sooner serves as well: it is then put off."""
        if stream.timer is None or at < stream.timer[0]:
            self._push(stream, at)
            self._wake(at)

    def _push(self, stream: SdpStream, at: float) -> None:
        deadlines = self._deadlines
        if len(deadlines) > 2 * len(self.streams) + 64:  # most of them were overtaken by earlier ones
            kept: list[tuple[float, int, SdpStream]] = []
            for entry in deadlines:
                if entry[2].timer is entry:
                    if entry[2].deadline is not None:
                        kept.append(entry)
                    else:
                        entry[2].timer = None  # or a stream that is over would be kept until then
            heapify(kept)
            self._deadlines = deadlines = kept
        self._deadline_count += 1
        stream.timer = entry = (at, self._deadline_count, stream)
        heappush(deadlines, entry)

    def _wake(self, at: float) -> None:
        if self.wake_at is not None and (self._woken_at is None or at < self._woken_at):
            self._woken_at = at
            self.wake_at(at)


class Node(Generic[DeviceT]):
    """One device, driven by a loop that it shares with others, and ended with it; `options` go to `Stack`."""

    def __init__(self, loop: Loop, device: DeviceT, settings: SdpSettings | None = None, **options: Any) -> None:
        self._loop = loop
        self._timer: LoopTimer | None = None
        self.device = device
        try:
            self.stack = Stack(device, lambda: loop.now, settings, wake_at=self._wake_at, **options)
        except BaseException:
            self.device.close()
            raise

    def close(self) -> None:
        """Ends everything at once."""
        self.stack.close()
        if self._timer is not None:
            self._timer.cancel()
        self.device.close()

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, at - self._loop.now), self.stack.handle_timeouts)


def stack_on(fabric: Fabric, device: Device, settings: SdpSettings | None = None, **options: Any) -> Stack:
    """A stack whose clock and timers are those of a loopback fabric; `options` go to `Stack`."""
    timer: Timer | None = None

    def wake_at(at: float) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
        timer = fabric.call_at(at, stack.handle_timeouts)

    stack = Stack(device, lambda: fabric.now, settings, wake_at=wake_at, **options)
    return stack


def _nobody(stream: SdpStream, event: StreamEvent) -> None:
    raise Misuse("an accepted stream has nobody to tell", remedy="set stream.tell when it is accepted")


def _addresses_of(request: ConnectionRequest, port: int) -> Addresses:
    """What the transport says; a Hello of InfiniBand knows better."""
    if request.transport is not None and all(address for address, _ in request.transport):  # else it is gone again
        own, other = request.transport
        return Addresses(ip_of(own[0]), port, ip_of(other[0]), other[1])
    unknown = IPv4Address(0)
    try:
        remote = ip_address(request.remote_address)
    except ValueError:
        remote = unknown
    return Addresses(unknown, port, remote, 0)


def _check(device: Device) -> None:
    """Raises Unavailable if a device cannot carry SDP at all."""
    attributes = device.attributes
    if attributes.gather_max < limits.SDP_GATHER_MAX + 1:
        raise Unavailable(f"the device gathers {attributes.gather_max} pieces; SDP needs {limits.SDP_GATHER_MAX + 1}")
    if attributes.inline_max < _HEADERS_MAX:
        raise Unavailable(f"the device copies {attributes.inline_max} bytes inline; SDP needs {_HEADERS_MAX}")
