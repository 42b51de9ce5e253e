"""A device at one address of this host, with SDP on top."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from sidestep.loop import Loop, Timer
from sidestep.rdma.verbs import Device
from sidestep.sdp.settings import SdpSettings
from sidestep.sdp.stack import Stack

DeviceT = TypeVar("DeviceT", bound=Device)


class Node(Generic[DeviceT]):
    """One device, driven by a loop that it shares with others, and ended with it; `options` go to `Stack`."""

    def __init__(
        self,
        loop: Loop,
        device: DeviceT,
        settings: SdpSettings | None = None,
        **options: Any,
    ) -> None:
        self._loop = loop
        self._timer: Timer | None = None
        self.device = device
        try:
            self.stack = Stack(
                self.device,
                lambda: loop.now,
                settings,
                wake_at=self._wake_at,
                **options,
            )
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
