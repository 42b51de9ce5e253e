"""The `local` protocol: two programs of one host share a channel, with no process between them."""

from __future__ import annotations

from typing import ClassVar

from sidestep.switch.protocol import Capabilities, OffloadProtocol, Pair


class Local(OffloadProtocol):
    """Shared memory between two processes of one host."""

    name: ClassVar[str] = "local"
    capabilities: ClassVar[Capabilities] = Capabilities(self_routing=True)

    def join(self, pair: Pair) -> None:
        """Hands each end the other's memory."""
        pair.attach()
