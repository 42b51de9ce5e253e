"""sidestep runs any TCP program over shared memory, unchanged.

Two processes on one host that talk TCP, both started by ``sidestep run``, exchange their bytes through shared memory. A
connection begins on TCP, and moves once it has shown that it lives. Everything else stays kernel TCP.
``libsidestep.so`` inside the programs does the work, with a small provider that pairs the two ends.

A Python program can also do without ``sidestep run``. `socket` stands in for the standard module of that name,
`open_connection` and `start_server` for those of asyncio, and `EventLoop` for its loop. `install()` takes over every
TCP socket that the process makes. These names are imported when they are first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # see places.py
if TYPE_CHECKING:
    from typing import Any, Final

    from sidestep import aio, socket
    from sidestep.aio import EventLoop, open_connection, start_server
    from sidestep.embed import install, installed, uninstall
    from sidestep.installation import include_dir, native_library
    from sidestep.socket import create_connection, create_server
else:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        """Imports what the commands do not need when it is asked for: `sidestep run` starts quickly."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module = import_module(_PLACES[name])
        return module if name in ("aio", "socket") else getattr(module, name)


# The one place of the version: meson.build reads this line.
__version__ = "0.2.0"

__all__ = [
    "EventLoop",
    "__version__",
    "aio",
    "create_connection",
    "create_server",
    "include_dir",
    "install",
    "installed",
    "native_library",
    "open_connection",
    "socket",
    "start_server",
    "uninstall",
]

_PLACES: Final = {  # name -> module that has it
    "EventLoop": "sidestep.aio",
    "aio": "sidestep.aio",
    "create_connection": "sidestep.socket",
    "create_server": "sidestep.socket",
    "include_dir": "sidestep.installation",
    "install": "sidestep.embed",
    "installed": "sidestep.embed",
    "native_library": "sidestep.installation",
    "open_connection": "sidestep.aio",
    "socket": "sidestep.socket",
    "start_server": "sidestep.aio",
    "uninstall": "sidestep.embed",
}
