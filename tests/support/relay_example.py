"""The example protocol of examples/sidestep-relay, as another distribution that a provider finds installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import installed_examples

from sidestep.provider import control
from sidestep.testing import Sidestep


def installed() -> Path:
    """A directory with it."""
    return installed_examples.installed("sidestep-relay")


@contextmanager
def relayed(sidestep: Sidestep) -> Iterator[Sidestep]:
    """`sidestep` with the example in the place of `local`."""
    with installed_examples.on_the_path("sidestep-relay"):
        sidestep.__enter__()
    try:
        prefer_relay(sidestep)
        yield sidestep
    finally:
        sidestep.__exit__(None, None, None)


def prefer_relay(sidestep: Sidestep) -> None:
    """Takes `local` out of its provider, so that the next in order is asked."""
    with control.ControlConnection(sidestep.socket) as connection:
        answer, descriptors = connection.request("module_remove", name="local")
        descriptors.close()
    assert answer == {"done": True}, answer
