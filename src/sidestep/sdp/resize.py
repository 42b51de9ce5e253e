"""Changing the size of private buffers while the connection lives (docs/wire/sdp.md §14).

Either end may ask the other for buffers of another size. Who answers posts buffers of the new size at once, without
waiting for the old ones: an increase is confirmed when all the old ones have been consumed, a decrease immediately.

Receives are consumed in the order of posting: the buffers that are posted when an increase begins are those that the
next so many messages come into. The old ones are given back as they become free (`surplus` counts them), so that there
are never more than twice as many as agreed; until then a further increase is refused. After a decrease the larger
buffers stay, cut to the new size.

Both ends may ask at the same time. Then the accepting one takes no notice of the request it gets, and the connecting
one answers; its own request has come to nothing. As nobody asks while a request of the other end waits for its answer,
a request that comes while an own one is outstanding has always crossed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep import limits
from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.work import Receive
from sidestep.sdp.requests import NeedBuffers, ReturnBuffer, SdpEventKind
from sidestep.sdp.wire import BSDH_LEN, ChRcvBuf, ChRcvBufAck

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection


class Resize:
    """Both sides of it."""

    __slots__ = (
        "_answering", "_before", "_current", "_flow", "_host", "_request", "asked", "busy", "decrease_refused",
        "increase_refused", "local", "local_max", "old", "surplus", "target", "waits",
    )  # fmt: skip

    def __init__(self, host: SdpConnection) -> None:
        self._flow, self._host = host._flow, host
        # Bytes of our private buffers: of those that we post now, and as the other end knows it.
        self.target = self.local = host._settings.receive_size
        self.local_max = host._settings.receive_size_max  # the other end may ask for more, and does not get it
        self._before = 0  # bytes of the other end's when we asked
        self.reset()

    def reset(self) -> None:
        """A new transport connection: its Hello says the size anew."""
        self.local = self.target
        self._answering = False  # ChRcvBufAck is queued and has not gone
        self.old = 0  # buffers posted before an increase began
        self.waits = False  # the increase is confirmed when there are none
        self.surplus = 0  # buffers to be given back
        self.busy = False  # every message and every buffer that becomes free must be looked at
        self._current: set[int] = set()  # wr_ids of those that are to stay, while there is a surplus
        self.asked: int | None = None  # DesSz of our ChRcvBuf that is not answered
        self._request: ChRcvBuf | None = None  # it, as it was queued; None if it is still to be
        self.increase_refused = False
        self.decrease_refused = False

    # --- asking ---

    def ask(self, size: int) -> None:
        """Asks the other end for private buffers of that size, headers included.

        Raises:
            Misuse: a size out of range, an earlier request is not answered, or was refused in this direction.
        """
        present = self._flow.remote_size
        if not limits.SDP_BUFFER_SIZE_MIN <= size <= limits.SDP_BUFFER_SIZE_MAX:
            raise Misuse(
                f"private buffers of {size} bytes",
                remedy=f"choose {limits.SDP_BUFFER_SIZE_MIN} to {limits.SDP_BUFFER_SIZE_MAX}",
            )
        if self.asked is not None:
            raise Misuse("an earlier request for another size is not answered yet", remedy="wait for RESIZED")
        if size == present:
            raise Misuse(f"private buffers have {size} bytes already")
        if self.increase_refused if size > present else self.decrease_refused:
            raise Misuse("the other end has refused that on this connection")
        self.asked, self._before = size, present
        if not self.waits:
            self._queue_request()
        if size < present:  # we keep to the smaller size at once
            self._set_remote(size)

    def _queue_request(self) -> None:
        assert self.asked is not None
        self._request = ChRcvBuf(self.asked)
        self._host.control(self._request)

    def handle_answer(self, size: int) -> None:
        """ChRcvBufAck."""
        asked, before = self.asked, self._before
        if asked is None or self._request is None:
            raise PeerViolation(f"ChRcvBufAck of {size} bytes", rule="resize_unasked")
        least = before if asked > before else min(asked, before)
        if size < least - BSDH_LEN or (size > before >= asked):  # OFED does not count the base header (§14)
            raise PeerViolation(
                f"ChRcvBufAck of {size} bytes, {asked} were asked for instead of {before}", rule="resize_range"
            )
        self.asked = self._request = None
        if before - BSDH_LEN <= size <= before and abs(size - asked) > before - size:
            if asked > before:
                self.increase_refused = True
            else:
                self.decrease_refused = True
        self._set_remote(size)
        self._host.tell(SdpEventKind.RESIZED)

    def _set_remote(self, size: int) -> None:
        self._flow.remote_size = min(size, limits.SDP_BUFFER_SIZE_MAX)
        self._host._halves.remote_size_changed()

    def _give_way(self) -> None:
        """Our request crossed one of the accepting end, which takes no notice of it."""
        self._host.withdraw_control(self._request)  # if it has not even gone
        self.asked = self._request = None
        self._set_remote(self._before)
        self._host.tell(SdpEventKind.RESIZED)

    # --- answering ---

    def handle_request(self, size: int) -> None:
        """ChRcvBuf."""
        if self.waits or self._answering:
            raise PeerViolation("a second ChRcvBuf before the first was answered", rule="resize_second")
        if self.asked is not None:
            if self._host.accepting:
                return
            self._give_way()
        size = min(max(size, limits.SDP_BUFFER_SIZE_MIN), max(self.local, self.local_max))
        if size > self.local and not self.surplus:
            self.target = size
            self.waits = self.busy = True
            self._flow.work.append(NeedBuffers(self._flow.receive_count, size))
            return
        if size < self.local:
            self.target = self.local = size
        self._queue_answer()

    def supplied(self, buffers: list[Receive]) -> None:
        """The larger buffers, which are posted already."""
        self.old = self._flow.posted - len(buffers)  # until now, what became free was posted as before
        self.surplus = self._flow.receive_count
        self._current.update(buffer.wr_id for buffer in buffers)
        self._settle()

    def failed(self) -> None:
        """There are none: the request is refused."""
        self.waits = False
        self.busy = self.surplus > 0
        self.old = 0
        self.target = self.local
        self._answer()

    def received(self) -> None:
        if self.old:
            self.old -= 1
            self._settle()

    def _settle(self) -> None:
        """Confirms an increase once no old buffer is posted and new ones are."""
        if self.waits and not self.old and self.surplus:
            self.waits = False
            self.local = self.target
            self._answer()

    def _queue_answer(self) -> None:
        self._answering = True
        self._host.control(self._send_answer)

    def _send_answer(self) -> None:
        self._answering = False
        self._flow.send_header(ChRcvBufAck(self.local))

    def _answer(self) -> None:
        self._queue_answer()
        if self.asked is not None:  # while the other end waited
            self._queue_request()

    def repost(self, buffer: Receive) -> None:
        """A private buffer that is free again: posted, cut to its size before, or given back."""
        flow = self._flow
        if flow.down or not flow.open:
            flow.work.append(ReturnBuffer(buffer))
            return
        if not self.busy and len(buffer.scatter[0]) == self.target:
            flow.post(buffer)
            return
        if self.surplus and buffer.wr_id not in self._current:
            flow.work.append(ReturnBuffer(buffer))
            self.surplus -= 1
            if not self.surplus:
                self._current.clear()
                self.busy = self.waits
            return
        if len(buffer.scatter[0]) > self.target and not self.waits:
            buffer = Receive(buffer.wr_id, (buffer.scatter[0][: self.target],))
        flow.post(buffer)
