"""Completion queues of a device of the kernel: the device's own queue, and before it one of ours.

What is taken from the device goes through the queue pairs, which know what was posted, into the queues that devices
made of software have: one is polled, the other hands over. Those have the bounds and the order that users are promised;
the device's own queue is made larger, so that it never runs over.

A queue with a handler is always armed. A polled one is armed as its user wishes, so that solicited events are the
device's matter; where nobody is woken, whoever asks for the state of something looks first (`look`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import LimitReached
from sidestep.rdma.kernel import abi
from sidestep.rdma.kernel.libraries import told
from sidestep.rdma.soft.queues import HandledQueue, PolledQueue

if TYPE_CHECKING:
    from sidestep.rdma.kernel.device import KernelDevice
    from sidestep.rdma.verbs import CompletionHandler, CompletionQueue
    from sidestep.rdma.work import Completion

_ANY: Final = 0
_SOLICITED: Final = 1


class _Hardware:
    """The device's own queue."""

    __slots__ = ("_batch", "_busy", "_device", "address", "size", "taken")

    def __init__(self, device: KernelDevice, capacity: int) -> None:
        size = min(device.attributes.completions_max, max(capacity, limits.VERBS_QUEUE_MIN))
        try:
            self.address: int = device.libraries.ibv_create_cq(device.context, size, None, device.channel, 0)
        except OSError as error:
            raise told(error, "no completion queue could be made") from error
        self._device = device
        self._batch = (abi.Wc * limits.VERBS_BATCH)()
        self._busy = False
        self.size = size
        self.taken = 0  # completions that queue pairs may make

    def reserve(self, count: int) -> None:
        """Makes room for more queue pairs; raises LimitReached."""
        wanted = self.taken + count
        if wanted > self.size:
            try:
                self._device.libraries.ibv_resize_cq(self.address, wanted)
            except OSError as error:
                raise LimitReached(
                    f"the completion queue holds {self.size}, its queue pairs would need {wanted}: {error.strerror}",
                    remedy="make it larger, or use several",
                ) from error
            self.size = wanted
        self.taken = wanted

    def request(self, kind: int) -> None:
        """Asks for an event."""
        if error := self._device.ops.req_notify_cq(self.address, kind):
            raise told(OSError(abs(error), f"error {abs(error)}"), "the completion queue could not be armed")

    def drain(self) -> None:
        """Gives the queue pairs all that is there."""
        if self._busy or not self.address:
            return
        self._busy = True
        try:
            poll, completed = self._device.ops.poll_cq, self._device.completed
            while (count := poll(self.address, limits.VERBS_BATCH, self._batch)) > 0:
                for index in range(count):
                    completed(self._batch[index])
        finally:
            self._busy = False

    def destroy(self) -> None:
        if self.address:
            self._device.libraries.ibv_destroy_cq(self.address)
            self.address = 0


class KernelHandledQueue(HandledQueue):
    """Hands each batch to its handler."""

    __slots__ = ("hardware",)

    device: KernelDevice

    def __init__(self, device: KernelDevice, capacity: int, handler: CompletionHandler) -> None:
        super().__init__(device, capacity, handler)
        self.hardware = _Hardware(device, capacity)
        device.queues[self.hardware.address] = self
        self.hardware.request(_ANY)

    def woken(self) -> None:
        """The device has something: armed first, so that what comes meanwhile makes another event."""
        self.hardware.request(_ANY)
        self.hardware.drain()

    def look(self) -> None:
        """The device will say so if there is something."""

    def destroy(self) -> None:
        super().destroy()
        _forget(self)


class KernelPolledQueue(PolledQueue):
    """Keeps completions until they are polled."""

    __slots__ = ("_any", "_callback", "hardware")

    device: KernelDevice

    def __init__(self, device: KernelDevice, capacity: int) -> None:
        super().__init__(device, capacity)
        self.hardware = _Hardware(device, capacity)
        self._callback: Callable[[CompletionQueue], object] | None = None
        self._any = False
        device.queues[self.hardware.address] = self

    def poll(self, max_count: int) -> list[Completion]:
        self.hardware.drain()
        return super().poll(max_count)

    def arm(self, callback: Callable[[CompletionQueue], object], *, solicited_only: bool = False) -> None:
        self._any = not solicited_only or (self._callback is not None and self._any)
        self._callback = callback
        self.look()  # what is there already makes no call
        self.hardware.request(_ANY if self._any else _SOLICITED)

    def woken(self) -> None:
        if self._callback is not None:
            callback, self._callback = self._callback, None
            self.device.notices.append(partial(callback, self))

    def look(self) -> None:
        """Takes what the device has, for whoever asks how things are."""
        self.hardware.drain()

    def destroy(self) -> None:
        super().destroy()
        _forget(self)


def _forget(queue: KernelHandledQueue | KernelPolledQueue) -> None:
    queue.device.queues.pop(queue.hardware.address, None)
    queue.hardware.destroy()


KernelQueue = KernelHandledQueue | KernelPolledQueue
