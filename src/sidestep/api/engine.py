"""The software RNICs of an asyncio event loop: they go with its last connection or server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from sidestep.api.rnic import Rnics
from sidestep.api.service import service

if TYPE_CHECKING:
    from sidestep.switch.protocol import Endpoint


class Engine(Rnics):
    """The devices of one event loop; closed with their last user."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio = loop
        self._scheduled: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._users = 0
        super().__init__(self.kick)
        loop.add_reader(self.loop.fileno(), self._turn)

    def announce(self, local: Endpoint) -> bool:
        """A process has one part in the port mapper, and `service` drives it."""
        by = service()
        return by.call(lambda: by.rnics.announce(local))

    def withdraw(self, local: Endpoint) -> None:
        by = service()
        by.call(lambda: by.rnics.withdraw(local))

    def hold(self) -> None:
        self._users += 1

    def let_go(self) -> None:
        """One less; the last one turns off the light, in its own turn."""
        self._users -= 1
        if not self._users:
            self._asyncio.call_soon(self._close_unless_used)

    def kick(self) -> None:
        if self._scheduled is None and not self.loop.closed and not self.orphaned:
            self._scheduled = self._asyncio.call_soon(self._turn)

    def _turn(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self.loop.closed:
            return
        self.turn()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self.loop.next_in_s
        if due_s == 0:
            self.kick()
        elif due_s is not None:
            self._timer = self._asyncio.call_later(due_s, self._turn)

    def _close_unless_used(self) -> None:
        if not self._users:
            self.close()

    def close(self) -> None:
        """Ends everything at once."""
        _engines.pop(self._asyncio, None)
        for handle in (self._scheduled, self._timer):
            if handle is not None:
                handle.cancel()
        if not self.loop.closed:
            if self.orphaned:
                self.forsake()
            else:
                self._asyncio.remove_reader(self.loop.fileno())
            super().close()

    @property
    def orphaned(self) -> bool:
        """True if its event loop is closed."""
        return self._asyncio.is_closed()


_engines: Final[dict[asyncio.AbstractEventLoop, Engine]] = {}  # one each, while it is used


def engine() -> Engine:
    """Engine of the running event loop."""
    loop = asyncio.get_running_loop()
    for each in [each for each in _engines.values() if each.orphaned]:  # asyncio.run() ended with connections open
        each.close()
    if loop not in _engines:
        _engines[loop] = Engine(loop)
    return _engines[loop]
