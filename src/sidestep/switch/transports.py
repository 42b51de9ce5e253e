"""The transports, and which of them carries a connection: by policy, route and capability, in the user's order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Final

from sidestep.errors import SidestepError, Unavailable
from sidestep.switch.modules import Modules
from sidestep.switch.protocol import OffloadTransport, Request, Services

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.rdma.verbs import Device
    from sidestep.routing import Address, Route

TRANSPORTS_GROUP: Final = "sidestep.transports"  # group of entry points


class Transports(Modules[OffloadTransport]):
    """All installed transports.

    Args:
        order: Transports for a connection of which no rule names one, the first one first.
        route: Gives the kernel's route, as `Network.route` does.
        on_stopped: Gets the name of each that has been removed, or has failed.
    """

    def __init__(
        self,
        find: Callable[[], Mapping[str, EntryPoint]],
        services: Services,
        on_broken: Callable[[str, BaseException], None],
        on_started: Callable[[OffloadTransport], None] = lambda _module: None,
        *,
        order: Sequence[str],
        route: Callable[..., Route],
        on_stopped: Callable[[str], None] = lambda _name: None,
    ) -> None:
        super().__init__(
            OffloadTransport,  # type: ignore[type-abstract]  # a base class, never instantiated
            find, services, on_broken, on_started,
        )  # fmt: skip
        self._order = order
        self._route = route
        self._on_stopped = on_stopped

    def choose(self, request: Request, *, wire: str = "", without: Collection[str] = ()) -> OffloadTransport:
        """Transport for a connection over that wire, of those that have not been tried.

        Raises:
            Unavailable: There is none; the message has the reason of each.
        """
        wanted = [name for name in ((request.over,) if request.over else self._order) if name not in without]
        reasons = []
        why: str | None
        for name in wanted:
            transport = self.get(name)
            if transport is None:
                why = self.absence(name)
            elif wire and transport.wire != wire:
                why = f"it does not speak {wire}"
            else:
                why = self._unfit(transport, request)
            if transport is not None and why is None:
                return transport
            reasons.append(f"{name}: {why}")
        raise Unavailable(
            "; ".join(reasons) or "no transport is left", remedy="'sidestep provider modules' shows what there is"
        )

    def __getitem__(self, name: str) -> OffloadTransport:
        """Raises Unavailable."""
        transport = self.get(name)
        if transport is None:
            raise Unavailable(f"{name}: {self.absence(name)}", remedy="'sidestep provider modules' lists what there is")
        return transport

    def device(self, name: str, local: Address, loop: Loop) -> Device:
        """Device of that transport.

        Raises:
            Unavailable: There is none at that address.
        """
        transport = self[name]
        try:
            return transport.open(local, loop)
        except SidestepError:
            raise
        except Exception as error:  # a stranger's code
            self.fail(name, error)
            raise Unavailable(f"{name} failed") from error

    def _unfit(self, transport: OffloadTransport, request: Request) -> str | None:
        able = transport.capabilities
        if request.remote.address.version not in able.families:
            return f"it does not carry IPv{request.remote.address.version}"
        try:
            if not able.self_routing:
                source = request.local.address if request.local is not None else None
                request = replace(request, route=self._route(request.remote.address, source=source))
            return transport.refusal(request)
        except Unavailable as error:
            return error.message
        except Exception as error:  # a stranger's code
            self.fail(transport.name, error)
            return "it failed"

    def _stop(self, name: str) -> None:
        started = name in self._started
        super()._stop(name)
        if started:
            self._on_stopped(name)
