"""Completion queues of a device of the kernel: the device's own queue, and before it one of ours.

What is taken from the device goes through the queue pairs, which know what was posted, into the queues that devices
made of software have: one is polled, the other hands over. Those have the bounds and the order that users are promised;
the device's own queue is made larger, so that it never runs over.

Behind a queue with a handler each queue pair has one of the device's to itself, with a channel, so that it can be lent
to the engine with all of its completions and nobody else's: a queue pair cannot move to another queue. It is always
armed. A polled queue is one of the device's, armed as its user wishes, so that solicited events are the device's
matter; where nobody is woken, whoever asks for the state of something looks first (`look`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import byref, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sidestep import limits
from sidestep.errors import LimitReached, SidestepError
from sidestep.rdma.kernel import abi
from sidestep.rdma.kernel.libraries import told
from sidestep.rdma.soft.queues import HandledQueue, PolledQueue
from sidestep.rdma.verbs import EventKind

if TYPE_CHECKING:
    from sidestep.rdma.kernel.device import KernelDevice
    from sidestep.rdma.kernel.qp import KernelQueuePair
    from sidestep.rdma.verbs import CompletionQueue
    from sidestep.rdma.work import Completion

_ANY: Final = 0
_SOLICITED: Final = 1


class Hardware:
    """The device's own queue."""

    __slots__ = ("_batch", "_busy", "_device", "address", "size", "taken")

    def __init__(self, device: KernelDevice, size: int, channel: Any) -> None:
        try:
            self.address: int = device.libraries.ibv_create_cq(device.context, size, None, channel, 0)
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


class OwnHardware(Hardware):
    """That of one queue pair, with a channel, which Python looks at unless the engine does."""

    __slots__ = ("_event", "channel", "fd", "qp")

    def __init__(self, device: KernelDevice, qp: KernelQueuePair, size: int) -> None:
        try:
            self.channel: Any = device.libraries.ibv_create_comp_channel(device.context)
        except OSError as error:
            raise told(error, "no completion channel could be made") from error
        try:
            super().__init__(device, size, self.channel)
        except BaseException:
            device.libraries.ibv_destroy_comp_channel(self.channel)
            raise
        self.qp = qp
        self.fd: int = self.channel.contents.fd
        self._event = c_void_p(), c_void_p()
        os.set_blocking(self.fd, False)
        device.own_queues[self.address] = self
        self.take_back()

    def lend(self) -> None:
        """The engine has it: nobody looks here."""
        self._busy = True
        self._device.loop.forget(self.fd)

    def take_back(self) -> None:
        """What is there is taken, and what comes is heard of."""
        self._busy = False
        self._device.loop.on_readable(self.fd, self._woken)
        self._arm()

    def _woken(self) -> None:
        """The device has something: armed first, so that what comes meanwhile makes another event."""
        libraries = self._device.libraries
        try:
            libraries.ibv_get_cq_event(self.channel, byref(self._event[0]), byref(self._event[1]))
        except OSError:  # EAGAIN
            return
        libraries.ibv_ack_cq_events(self.address, 1)
        self._arm()

    def _arm(self) -> None:
        try:
            self.request(_ANY)
        except SidestepError as why:
            self.qp.break_off(EventKind.QP_FATAL, str(why))
        self.drain()

    def destroy(self) -> None:
        if self.address:
            self._device.loop.forget(self.fd)
            self._device.own_queues.pop(self.address, None)
            super().destroy()
            self._device.libraries.ibv_destroy_comp_channel(self.channel)


class KernelHandledQueue(HandledQueue):
    """Hands each batch to its handler."""

    __slots__ = ()

    device: KernelDevice

    def look(self) -> None:
        """The device will say so if there is something."""

    def has_of(self, number: int) -> bool:
        """Whether a completion of that queue pair is still to be handed over."""
        return any(each.qp_number == number for each in self.entries)


class KernelPolledQueue(PolledQueue):
    """Keeps completions until they are polled."""

    __slots__ = ("_any", "_callback", "hardware")

    device: KernelDevice

    def __init__(self, device: KernelDevice, capacity: int) -> None:
        super().__init__(device, capacity)
        size = min(device.attributes.completions_max, max(capacity, limits.VERBS_QUEUE_MIN))
        self.hardware = Hardware(device, size, device.channel)
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
        self.device.queues.pop(self.hardware.address, None)
        self.hardware.destroy()


KernelQueue = KernelHandledQueue | KernelPolledQueue
