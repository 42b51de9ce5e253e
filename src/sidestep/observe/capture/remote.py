"""Captures of RDMA devices of other processes, those among them that begin while the capture goes on."""

from __future__ import annotations

import selectors
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sidestep.errors import Unavailable
from sidestep.observe.capture.devices import DeviceWriter
from sidestep.observe.rdma import DeviceClient, sockets

_LOOK_S = 0.1  # between two looks for new processes
_PACKETS_PER_TURN = 256  # of one process: others want theirs written


class RemoteCapture:
    """Follows all processes that can be asked; use it in a `with` block.

    Args:
        writer: Where to.
        device: Only devices of this name.
        places: Only connections with one of these addresses and ports at either end; None: any port.
    """

    def __init__(
        self, writer: DeviceWriter[Any], device: str | None = None, places: list[tuple[str, int | None]] | None = None
    ) -> None:
        self._writer = writer
        self._device = device
        self._places: list[tuple[str, int | None] | None] = [*places] if places else [None]
        self._selector = selectors.DefaultSelector()
        self._known: set[Path] = set()
        self._look_at = 0.0
        self._stopped = False
        self.processes = 0  # that were followed

    def __enter__(self) -> RemoteCapture:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            self._leave(key.data)
        self._selector.close()

    @property
    def following(self) -> int:
        """Connections to processes at the moment."""
        return len(self._selector.get_map())

    def stop(self) -> None:
        """Nothing more is wanted than what has passed until now: `turn` while there is somebody left to tell it."""
        self._stopped = True
        for key in list(self._selector.get_map().values()):
            with suppress(Unavailable):  # it has gone; what it has told is there all the same
                key.data.stop()

    def turn(self, timeout_s: float, frames_max: int) -> None:
        """Writes what there is, up to so many frames in the file; waits for it so long at most."""
        if time.monotonic() >= self._look_at and not self._stopped:
            self._look()
            self._look_at = time.monotonic() + _LOOK_S
        for key, _ in self._selector.select(min(timeout_s, _LOOK_S)):
            asked: DeviceClient = key.data
            source = f"process {asked.pid}"
            try:
                for _ in range(_PACKETS_PER_TURN):
                    if self._writer.frames >= frames_max:
                        return
                    if (seen := asked.seen_now()) is None:
                        break
                    if not self._writer.see(source, seen):
                        with suppress(Unavailable):  # likewise, or it hears us no longer
                            asked.leave_out(seen.wire)
            except Unavailable:  # it has ended, and with it its devices
                self._leave(asked)

    def _look(self) -> None:
        present = set()
        for path, uid in sockets():
            if path in self._known or self._follow(path, uid):
                present.add(path)
        self._known = present

    def _follow(self, path: Path, uid: int) -> bool:
        """False: it is to be tried again."""
        followed = False
        for place in self._places:
            asked: DeviceClient | None = None
            try:
                asked = DeviceClient(path, uid)
                devices = asked.capture(self._device, place)
            except Unavailable:  # nobody is there, or it has gone meanwhile
                if asked is not None:
                    asked.close()
                return followed
            if not devices:
                asked.close()
                return True
            self._selector.register(asked, selectors.EVENT_READ, asked)
            followed = True
        self.processes += 1
        return True

    def _leave(self, asked: DeviceClient) -> None:
        self._selector.unregister(asked)
        asked.close()
