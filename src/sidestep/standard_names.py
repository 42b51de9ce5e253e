"""The names of the standard `socket` that `sidestep.socket` does not define, for type checkers alone.

A checker that reads two definitions of a name reports a conflict. pyright takes what `__all__` has. mypy cannot compute
`__all__`, and keeps the first definition of a name.
"""

# pyright: reportUnknownMemberType=none, reportUnknownVariableType=none, reportWildcardImportFromLibrary=none

from __future__ import annotations

import socket as _stdlib
from socket import *  # noqa: F403

MYPY = False  # a condition that is true for mypy
if not MYPY:
    __all__: list[str] = []
    __all__ += _stdlib.__all__
    __all__.remove("create_connection")
    __all__.remove("create_server")
    __all__.remove("fromfd")
    __all__.remove("socket")
    __all__.remove("socketpair")
