"""Sending from memory that nobody has registered, on devices that want it registered (`checks_local_memory`).

A `RegisteringPoster` stands before a queue pair. A message whose payload lies in no region waits until it does, and all
that is behind it waits too, for the order of messages is the protocol. The whole of the user's send is registered, for
local use only, and the region belongs to the send from then on: the connection releases it before it tells that the
send has ended. A `bytes` object that fits goes as it is: what is inline needs no region.

Where the memory cannot be registered, or not without waiting for others, the payload of the message goes through a
spare buffer that is registered already. That is the only copy there is on the way out.

What RDMA Reads and Writes use is registered by the connection's own order (`SdpSettings.local_access`), for it has
other ways if that fails: an advertisement that cannot be read is refused, a write goes by messages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidestep.errors import InternalError, LimitReached, SidestepError, Unavailable
from sidestep.rdma.address import buffer_address
from sidestep.rdma.work import Access, RKey, Send
from sidestep.sdp.requests import Region, StreamSend

if TYPE_CHECKING:
    from sidestep.rdma.pools import Element, MessagePool, RdmaElement, RdmaPool
    from sidestep.rdma.verbs import MemoryRegion, QueuePair
    from sidestep.rdma.work import Receive, SendRequest
    from sidestep.sdp.connection import SdpConnection


class PermanentRegions:
    """What the user has registered for good, such as the rings of channels."""

    def __init__(self) -> None:
        self._regions: list[tuple[int, int, MemoryRegion]] = []  # first address and one behind the last, sorted

    def add(self, region: MemoryRegion) -> None:
        """It is registered until `remove`."""
        first = buffer_address(region.view)
        insort(self._regions, (first, first + region.length, region), key=_first_address)

    def remove(self, region: MemoryRegion) -> None:
        at = bisect_left(self._regions, buffer_address(region.view), key=_first_address)
        while self._regions[at][2] is not region:
            at += 1
        del self._regions[at]

    def take_all(self) -> list[MemoryRegion]:
        regions = [region for _, _, region in self._regions]
        self._regions.clear()
        return regions

    def covers(self, view: memoryview, access: Access) -> bool:
        """Whether one region holds all of it, with these rights; of regions that overlap, the last to begin before it.

        Nothing else can be at these addresses: a region keeps its memory.
        """
        if not self._regions:
            return False
        start = buffer_address(view)
        at = bisect_right(self._regions, start, key=_first_address)
        while at:
            at -= 1
            first, end, region = self._regions[at]
            if start + view.nbytes <= end and region.access & access == access:
                return True
            if self._regions[at - 1][0] < first:
                return False
        return False


def _first_address(entry: tuple[int, int, MemoryRegion]) -> int:
    return entry[0]


class Registration:
    """The registrations of one request's memory: what `Region.handle` is."""

    __slots__ = ("_element", "_pool", "_under")

    def __init__(self, pool: RdmaPool, element: RdmaElement | None, under: object = None) -> None:
        self._pool = pool
        self._element = element  # None: it lies in a permanent region
        self._under = under  # an earlier one, of which work requests under way may make use

    def release(self, *, keep: bool) -> None:
        """Not used any more; `keep`: it may stay registered for the next time."""
        if isinstance(self._under, Registration):
            self._under.release(keep=keep)
        if self._element is not None:
            self._pool.put(self._element, keep=keep)


class RegisteringPoster:
    """Posts to a queue pair what its device may touch, in order.

    Args:
        qp: Where the requests go.
        inline_max: Bytes that one of them may hold in `bytes` objects.
        connection: Whose they are.
        permanent: What is registered anyway.
        pool: Registers what is not.
        spares: Buffers for what cannot be; each holds a whole message.
        proceed: Called when something of the connection has changed outside of a call of its user.
        fail: Called with why nothing can be sent any more.
    """

    __slots__ = (
        "_asked", "_closed", "_connection", "_fail", "_held", "_inline_max", "_permanent", "_pool", "_proceed", "_qp",
        "_refused", "_spare", "_spared", "_spares", "_waits_for_spare", "post_recv",
    )  # fmt: skip

    def __init__(
        self,
        qp: QueuePair,
        inline_max: int,
        connection: SdpConnection,
        permanent: PermanentRegions,
        pool: RdmaPool,
        spares: MessagePool,
        proceed: Callable[[], None],
        fail: Callable[[SidestepError], None],
    ) -> None:
        self._qp = qp
        self._inline_max = inline_max
        self._connection = connection
        self._permanent = permanent
        self._pool = pool
        self._spares = spares
        self._proceed = proceed
        self._fail = fail
        self._held: deque[SendRequest] = deque()  # in order; nothing overtakes them
        self._asked: set[StreamSend] = set()  # being registered
        self._refused: set[StreamSend] = set()  # could not be
        self._spare: Element | None = None  # was waited for, and is to be used next
        self._spared: dict[int, Element] = {}  # in use, by number of the request
        self._waits_for_spare = False
        self._closed = False
        self.post_recv: Callable[[Receive], None] = qp.post_recv

    def post_send(self, request: SendRequest) -> None:
        """Posts it, now or when its turn comes."""
        if self._held or not self._is_ready(request):
            self._held.append(request)
        else:
            self._post(request)

    def close(self) -> None:
        """The queue pair is done: what waits is never posted, spare buffers are free."""
        self._closed = True
        self._held.clear()
        self._give_spare_back()
        while self._spared:
            self._spares.put(self._spared.popitem()[1])

    def _is_ready(self, request: SendRequest) -> bool:
        """Whether the device can send this; if not, what is missing has been asked for."""
        if not isinstance(request, Send):
            return True  # the connection has seen to it
        if self._goes_inline(request):
            return True
        senders = self._connection.senders(request.wr_id)
        if not senders:
            return True  # the payload of a SrcAvail lies in the region that it shows
        if len(senders) >= len(request.gather):  # the first is the header
            raise InternalError(f"{len(request.gather)} pieces of memory, {len(senders)} sends")
        ready = True
        for send, part in zip(senders, request.gather[-len(senders) :], strict=True):
            if isinstance(part, bytes) or send.region is not None or self._permanent.covers(part, Access.LOCAL_READ):
                continue
            if send not in self._refused:
                self._register(send)
            if send in self._refused:
                return self._goes_by_spare(request)
            ready = ready and send.region is not None
        return ready

    def _goes_inline(self, request: Send) -> bool:
        """Makes whole `bytes` objects inline, as far as there is room: the device copies them. Whether that is all."""
        gather = request.gather
        if not any(isinstance(part, memoryview) for part in gather):
            return True
        room = self._inline_max - sum(len(part) for part in gather if isinstance(part, bytes))
        found: list[memoryview | bytes] = []
        whole = True
        for part in gather:
            if isinstance(part, memoryview) and (inline := _whole_bytes(part)) is not part and len(part) <= room:
                room -= len(part)
                found.append(inline)
            else:
                whole = whole and isinstance(part, bytes)
                found.append(part)
        request.gather = tuple(found)
        return whole

    def _register(self, send: StreamSend) -> None:
        """Begins it; `send.region`, or its name among the refused, tells if it is done already."""
        if send in self._asked:
            return
        self._asked.add(send)
        later = False

        def answered(found: RdmaElement | SidestepError) -> None:
            self._asked.discard(send)
            if isinstance(found, SidestepError):
                self._refused.add(send)
            else:
                region = Region(Registration(self._pool, found, _registration_of(send)), RKey(0), 0, remote=False)
                self._connection.handle_registered(send, region, self._connection.now)
            if later:
                self._go_on()
                self._proceed()

        try:
            self._pool.get(send.view, Access.LOCAL_READ, answered, wait=False)
        except SidestepError as why:
            answered(why)
        later = True

    def _goes_by_spare(self, request: Send) -> bool:
        """Whether there is a spare buffer for the payload; if not, one is waited for."""
        element = self._spare or self._spares.take()
        self._spare = None
        if element is None:
            if not self._waits_for_spare:
                self._waits_for_spare = True
                self._spares.get(self._spare_found)
            return False
        used = 0
        for part in request.gather[1:]:
            element.view[used : used + len(part)] = part
            used += len(part)
        request.gather = (request.gather[0], element.view[:used])
        request.signaled = True  # the buffer is wanted back
        self._spared[request.wr_id] = element
        self._connection.when_sent(request.wr_id, lambda: self._spare_done(request.wr_id))
        return True

    def _spare_found(self, found: Element | SidestepError) -> None:
        self._waits_for_spare = False
        if isinstance(found, SidestepError):
            if not self._closed:
                self._fail(found)
            return
        self._spare = found
        if not self._closed:
            self._go_on()
        self._give_spare_back()

    def _give_spare_back(self) -> None:
        if self._spare is not None:
            spare, self._spare = self._spare, None
            self._spares.put(spare)

    def _spare_done(self, wr_id: int) -> None:
        self._spares.put(self._spared.pop(wr_id))
        self._refused = {send for send in self._refused if not send.done}

    def _go_on(self) -> None:
        held = self._held
        while held and self._is_ready(held[0]):
            self._post(held.popleft())

    def _post(self, request: SendRequest) -> None:
        try:
            self._qp.post_send(request)
        except (LimitReached, Unavailable) as why:  # such as no memory for what it copies
            self._fail(why)


def _registration_of(request: StreamSend) -> object:
    return request.region.handle if request.region is not None else None


def _whole_bytes(part: memoryview | bytes) -> memoryview | bytes:
    if isinstance(part, memoryview) and isinstance(part.obj, bytes) and len(part) == len(part.obj):
        return part.obj
    return part
