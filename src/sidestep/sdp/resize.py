"""Changing the size of private buffers while the connection lives (docs/wire/sdp.md §14).

Either end may ask the other for buffers of another size. Who answers posts buffers of the new size at once, without
waiting for the old ones: an increase is confirmed when all the old ones have been consumed, a decrease immediately.
"""

from __future__ import annotations

from typing import Protocol

from sidestep import limits
from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.work import Receive
from sidestep.sdp.flow import Flow
from sidestep.sdp.requests import NeedBuffers, ReturnBuffer
from sidestep.sdp.wire import ChRcvBuf, ChRcvBufAck


class ResizeHost(Protocol):
    """What resizing needs of its connection."""

    accepting: bool

    def control(self, action: object) -> None:
        """Queue a message without payload."""

    def size_changed(self, *, remote: bool) -> None:
        """The payload that fits has changed, or the answer has come."""


class Resize:
    """Both sides of it."""

    __slots__ = ("_flow", "_host", "asked", "decrease_refused", "increase_refused", "local", "old", "target", "waits")

    def __init__(self, flow: Flow, host: ResizeHost, local: int) -> None:
        self._flow, self._host = flow, host
        self.local = local  # bytes of our private buffers, as the other end knows it
        self.target = local  # bytes of those that we post now
        self.old = 0  # smaller ones that are posted still
        self.waits = False  # an increase is confirmed when there are none
        self.asked: int | None = None  # DesSz of our ChRcvBuf that is not answered
        self.increase_refused = False
        self.decrease_refused = False

    @property
    def busy(self) -> bool:
        """Whether private buffers of more than one size are about."""
        return self.target != self.local or self.old > 0

    def reset(self) -> None:
        """A new transport connection: its Hello says the size anew."""
        self.local = self.target
        self.old = 0
        self.waits = False
        self.asked = None
        self.increase_refused = self.decrease_refused = False

    # --- asking ---

    def ask(self, size: int) -> None:
        """Asks the other end for private buffers of that size, headers included.

        Raises:
            Misuse: a size out of range, an earlier request is not answered, or was refused in this direction.
        """
        present = self._flow.remote_size
        if not limits.SDP_BUFFER_SIZE_MIN <= size <= limits.SDP_ADVERT_MAX:
            raise Misuse(f"private buffers of {size} bytes", remedy=f"choose at least {limits.SDP_BUFFER_SIZE_MIN}")
        if self.asked is not None:
            raise Misuse("an earlier request for another size is not answered yet", remedy="wait for RESIZED")
        if size == present:
            raise Misuse(f"private buffers have {size} bytes already")
        if self.increase_refused if size > present else self.decrease_refused:
            raise Misuse("the other end has refused that on this connection")
        self.asked = size
        self._host.control(ChRcvBuf(size))
        if size < present:  # we keep to the smaller size at once
            self._flow.remote_size = size
            self._host.size_changed(remote=True)

    def handle_answer(self, size: int, before: int) -> None:
        """ChRcvBufAck; `before` is the size that was in force when we asked."""
        asked = self.asked
        if asked is None:
            raise PeerViolation(f"ChRcvBufAck of {size} bytes", rule="resize_unasked")
        if size < before if asked > before else not min(asked, before) <= size <= before:
            raise PeerViolation(
                f"ChRcvBufAck of {size} bytes, {asked} were asked for instead of {before}", rule="resize_range"
            )
        self.asked = None
        if size == before:
            if asked > before:
                self.increase_refused = True
            else:
                self.decrease_refused = True
        self._flow.remote_size = size
        self._host.size_changed(remote=True)

    # --- answering ---

    def handle_request(self, size: int) -> None:
        """ChRcvBuf."""
        if self._host.accepting and self.asked is not None:
            return  # both asked: the connecting end answers, the accepting one does not
        if self.waits:
            raise PeerViolation("a second ChRcvBuf before the first was answered", rule="resize_second")
        size = min(max(size, limits.SDP_BUFFER_SIZE_MIN), limits.SDP_BUFFER_SIZE_MAX)
        if size > self.local:
            self.old += self._flow.posted
            self.target = size
            self.waits = True
            self._host.size_changed(remote=False)
            self._flow.work.append(NeedBuffers(self._flow.receive_count, size))
            self.settle()
            return
        if size < self.local:
            self.target = self.local = size  # larger ones that are posted still do no harm
            self._host.size_changed(remote=False)
        self._host.control(ChRcvBufAck(self.local))

    def received(self, buffer: Receive) -> None:
        """A message has come into this buffer."""
        if self.old and len(buffer.scatter[0]) < self.target:
            self.old -= 1
            self.settle()

    def settle(self) -> None:
        """Confirms an increase once no old buffer is posted."""
        if self.waits and not self.old:
            self.waits = False
            self.local = self.target
            self._host.size_changed(remote=False)
            self._host.control(ChRcvBufAck(self.local))

    def repost(self, buffer: Receive) -> None:
        """A consumed buffer: posted again, or replaced if it has the wrong size."""
        size = len(buffer.scatter[0])
        if size == self.target:
            self._flow.post(buffer)
            return
        self._flow.work.append(ReturnBuffer(buffer))
        if size > self.target:
            self._flow.work.append(NeedBuffers(1, self.target))
