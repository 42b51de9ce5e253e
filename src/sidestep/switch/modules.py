"""The offload protocols and transports that the switch knows: loaded when wanted, added and removed while it runs.

Entry points name what is installed. Nothing of it is imported before a connection, a policy or an explicit socket asks
for it by name. A module that cannot be loaded, declares nonsense or fails is refused with its reason. It is not tried
again until `add`; the others go on.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Generic, NoReturn, TypeVar, cast

from sidestep import limits
from sidestep.errors import SidestepError
from sidestep.loop import Loop
from sidestep.routing import NetworkEvent
from sidestep.switch.protocol import (
    BrokenModule,
    Capabilities,
    OffloadModule,
    OffloadProtocol,
    Services,
)

PROTOCOLS_GROUP: Final = "sidestep.protocols"  # group of entry points
FIRST: Final = "local"  # carries what it can before any other protocol is asked
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
_RESERVED: Final = frozenset({"both", "tcp"})  # words of the policy


@dataclass(frozen=True, slots=True)
class Status:
    """State of a module, for people."""

    name: str
    state: str  # installed, started, broken, removed
    provided_by: str  # `module:object`
    capabilities: Capabilities | None  # abilities; None: not loaded
    why: str  # reason if it is broken; of a started one: what became of its earlier connections; else empty

    def as_json(self, kind: str) -> dict[str, object]:
        """JSON object for `sidestep provider modules`; `kind` is protocol or transport."""
        able = self.capabilities
        found = asdict(able) | {"families": sorted(able.families)} if able else None
        return asdict(self) | {"kind": kind, "capabilities": found, "why": self.why[: limits.WHY_MAX]}


class _Guarded:
    """The switch's services for one module, whose loop is its own: it ends with it, and what it raises is its fault."""

    def __init__(self, services: Services, fail: Callable[[Exception], None]) -> None:
        self._services = services
        self._fail = fail
        self._loop: Loop | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._services, name)  # the switch's own attribute

    @property
    def loop(self) -> Loop:
        if self._loop is None:
            self._loop = Loop(self._fail)
            self._services.loop.nest(self._loop)
        return self._loop

    def close(self) -> None:
        """The module has been stopped: nothing of it is called any more."""
        if self._loop is not None and not self._loop.closed:
            self._services.loop.leave(self._loop)
            self._loop.close()


ModuleT = TypeVar("ModuleT", bound=OffloadModule)


class Modules(Generic[ModuleT]):
    """All modules of one kind. `find` returns the installed ones by name."""

    def __init__(
        self,
        kind: type[ModuleT],
        find: Callable[[], Mapping[str, EntryPoint]],
        services: Services,
        on_broken: Callable[[str, BaseException], None],
        on_started: Callable[[ModuleT], None] = lambda _module: None,
    ) -> None:
        """`on_broken` gets the name and the error of every module that is refused, `on_started` each that works."""
        self._kind = kind
        self._find = find
        self._services = services
        self._on_broken = on_broken
        self._on_started = on_started
        self._installed: dict[str, EntryPoint] = dict(find())
        self._started: dict[str, ModuleT] = {}
        self._guards: dict[str, _Guarded] = {}  # guards of the started ones
        self._broken: dict[str, str] = {}
        self._removed: set[str] = set()
        self._returned: set[str] = set()  # names of modules that were added after their removal or failure

    def names(self) -> list[str]:
        usable = (name for name in self._installed if name not in self._removed and name not in self._broken)
        return sorted(usable, key=lambda name: (name != FIRST, name))

    def get(self, name: str) -> ModuleT | None:
        """The module of that name, started if this is the first time; None if there is none that works."""
        found = self._started.get(name)
        if found is None and name in self._installed and name not in self._removed and name not in self._broken:
            try:
                found = self._start(name)
            except BrokenModule:
                return None
        return found

    def absence(self, name: str) -> str:
        """Reason why `get` finds no module of that name, as a half sentence."""
        if name in self._removed:
            return "it was removed by 'sidestep provider remove'"
        return f"it does not work: {self._broken[name]}" if name in self._broken else "it is not installed"

    def each(self) -> Iterator[ModuleT]:
        """All modules that work, in order of preference; loads one only when it is reached."""
        for name in self.names():
            if (found := self.get(name)) is not None:
                yield found

    def started(self) -> list[ModuleT]:
        """Modules that have been started."""
        return list(self._started.values())

    def add(self, name: str) -> ModuleT:
        """Starts a module, whatever state it was in; modules installed meanwhile are found.

        Raises:
            BrokenModule: It is not installed, or does not work.
        """
        if name in self._started:
            return self._started[name]
        self._installed = dict(self._find())
        if name in self._removed or name in self._broken:
            self._returned.add(name)
        self._removed.discard(name)
        self._broken.pop(name, None)
        if name not in self._installed:
            known = ", ".join(sorted(self._installed)) or "none"
            raise BrokenModule(f"{name} is not installed", remedy=f"installed are: {known}")
        return self._start(name)

    def remove(self, name: str) -> None:
        """Stops a module; it is not asked again until it is added. The connections of others are not touched.

        Raises:
            BrokenModule: There is none of that name.
        """
        if name not in self._installed:
            raise BrokenModule(f"{name} is not installed", remedy="nothing needs to be done")
        self._removed.add(name)
        self._stop(name)

    def fail(self, name: str, error: BaseException) -> None:
        """A started module broke its word: it is stopped and not asked again until it is added."""
        self._broken[name] = f"{type(error).__name__}: {error}"
        self._on_broken(name, error)
        self._stop(name)

    def handle_network(self, event: NetworkEvent) -> None:
        for name, module in list(self._started.items()):
            try:
                module.handle_network(event)
            except Exception as error:
                self.fail(name, error)

    def stop(self) -> None:
        for name in list(self._started):
            self._stop(name)

    def status(self) -> list[Status]:
        return [
            Status(
                name,
                self._state(name),
                self._installed[name].value,
                self._started[name].capabilities if name in self._started else None,
                self._why(name),
            )
            for name in sorted(self._installed)
        ]

    def _why(self, name: str) -> str:
        if name in self._started and name in self._returned:
            return "connections from before its removal stay on TCP"
        return self._broken.get(name, "")

    def _state(self, name: str) -> str:
        if name in self._removed:
            return "removed"
        if name in self._broken:
            return "broken"
        return "started" if name in self._started else "installed"

    def _start(self, name: str) -> ModuleT:
        guard = _Guarded(self._services, lambda error: self.fail(name, error))
        try:
            module = self._checked(name, self._installed[name].load())
            module.start(cast("Services", guard))
            self._on_started(module)
        except (Exception, SystemExit) as error:  # a stranger's code: no exception of it may take the others down
            guard.close()
            self._refuse(name, error)
        self._started[name], self._guards[name] = module, guard
        return module

    def _checked(self, name: str, found: object) -> ModuleT:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise BrokenModule("its name is not a word of lower-case letters, digits and hyphens, or is reserved")
        if not isinstance(found, type) or not issubclass(found, self._kind):
            raise BrokenModule(f"{self._installed[name].value} is not a class derived from {self._kind.__name__}")
        if getattr(found, "name", None) != name:
            raise BrokenModule(f"its class calls itself {getattr(found, 'name', None)!r}")
        if not isinstance(getattr(found, "capabilities", None), Capabilities):
            raise BrokenModule("its class declares no capabilities")
        return found()

    def _refuse(self, name: str, error: BaseException) -> NoReturn:
        why = error.message if isinstance(error, SidestepError) else f"{type(error).__name__}: {error}"
        self._broken[name] = why
        self._on_broken(name, error)
        raise BrokenModule(
            f"{name} is refused: {why}", remedy=f"mend it, then 'sidestep provider add {name}'"
        ) from error

    def _stop(self, name: str) -> None:
        module = self._started.pop(name, None)
        if module is None:
            return
        try:
            module.stop()
        except Exception as error:
            self._broken[name] = f"{type(error).__name__}: {error}"
            self._on_broken(name, error)
        self._guards.pop(name).close()


Protocols = Modules[OffloadProtocol]


def installed(group: str) -> dict[str, EntryPoint]:
    """The modules of a group that are installed now."""
    importlib.invalidate_caches()
    return {point.name: point for point in entry_points(group=group)}
