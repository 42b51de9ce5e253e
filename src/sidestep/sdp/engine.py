"""Fields of a connection that the engine borrows, and that it brings back (`engine.h`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.sdp.states import SdpState

if TYPE_CHECKING:
    from sidestep.sdp.connection import SdpConnection


def is_plain(connection: SdpConnection) -> bool:
    """Whether nothing unusual goes on, however much there is to send and to receive."""
    resize, suspend = connection._resize, connection._suspend
    return not (
        connection.state is not SdpState.ESTABLISHED or not connection._fast or resize.busy or resize.asked is not None
        or suspend.port is not None or suspend.sent or connection._teardown.reader_closed
    )  # fmt: skip


def filled(connection: SdpConnection) -> int:
    """Bytes that have come for receives which are not done."""
    return connection._sink.filled


def may_lend(connection: SdpConnection, record: dict[str, int]) -> bool:
    """Whether nothing unusual goes on and nobody waits; then the record has all that plain Data needs."""
    if not is_plain(connection) or not connection.quiet() or connection.timers or connection._control:
        return False
    if not (connection._source.lend() and connection._sink.lend() and connection._flow.lend(record)):
        return False
    record["local_size"] = connection._resize.local
    return True


def lend(connection: SdpConnection) -> None:
    """The engine has it. Receives are forgotten: the user asks anew after `take_back`."""
    connection._sink.receives.clear()


def take_back(connection: SdpConnection, record: dict[str, int], now: float) -> None:
    """The engine has given it back; what it has not taken comes by `handle_message`."""
    connection.now = now
    connection._flow.take_back(record)
    connection._source.take_back(record)
    connection._sink.take_back(record)
    connection.dirty = True
