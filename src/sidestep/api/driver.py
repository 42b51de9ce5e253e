"""The base of a program's SDP: its hosts, and the driver of their devices and timers while a call waits.

There is one of each for the program's own software RNICs (`rnic`, `service`, `engine`), and one for tests, over the
loopback fabric. A device with a thread or a selector of its own needs a driver of some ten lines. Its `wait` waits on a
condition, which the thread that serves the device notifies after each turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

    from sidestep.sdp.hello import IpAddress
    from sidestep.sdp.host import Host
    from sidestep.switch.protocol import Endpoint

_T = TypeVar("_T")
Found: TypeAlias = "Callable[[int | None], None]"


class Driver(ABC):
    """Drives the stacks that the sockets of a program use."""

    def __enter__(self) -> Self:
        """Holds the stacks: nothing happens to them but what this thread does, until it waits."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, error, traceback

    @abstractmethod
    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Lets things happen until `ready` is true, or for so many seconds; returns whether it is.

        To be called while the stacks are held. A timeout of 0 lets what is due happen.
        """

    def call(self, function: Callable[[], _T]) -> _T:
        """Makes a call of a socket, with the stacks held."""
        with self:
            return function()

    def later(self, function: Callable[[], object]) -> None:
        """Calls as `call` does, for a finalizer, which may run in the midst of another call."""
        self.call(function)


class Hosts(ABC):
    """The hosts that a program has, and how it finds services of others."""

    @abstractmethod
    def at(self, address: IpAddress) -> Host:
        """SDP at an address of this host, or at all of a family.

        Raises:
            OSError, SidestepError: There is none.
        """

    @abstractmethod
    def towards(self, remote: IpAddress, local: IpAddress | None) -> Host:
        """SDP at the address that packets to there come from, or at this one."""

    @abstractmethod
    def free_port(self, address: IpAddress) -> int:
        """A port at which no socket listens at the moment."""

    @abstractmethod
    def find(self, host: Host, remote: Endpoint, found: Found) -> None:
        """Calls `found`, now or soon, with the RDMA port of a service; None: its host has no such service."""

    def announce(self, local: Endpoint) -> bool:
        """Lets other hosts find a service of this process; False: they cannot, or ask another program."""
        del local
        return False

    def withdraw(self, local: Endpoint) -> None:
        """Ends the service."""
        del local

    def hold(self) -> None:  # noqa: B027 - devices that outlive their users do not care
        """A connection or server of an event loop begins."""

    def let_go(self) -> None:  # noqa: B027
        """The connection or server has ended."""
