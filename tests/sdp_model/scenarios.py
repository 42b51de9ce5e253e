"""The conversations that the models are tried on: small enough to be walked through wholly, large enough to break in.

SIDESTEP_MODEL_MORE=1 (2, ...) lengthens each of them, for a run that may take minutes or hours.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from sdp_model.connection import Connection
from sdp_model.peer import Bounds, Peer, Rules
from sdp_model.resize import Peer as ResizePeer
from sdp_model.resize import Resize
from sdp_model.suspend import Peer as SuspendPeer
from sdp_model.suspend import Suspend
from sdp_model.teardown import Peer as TeardownPeer
from sdp_model.teardown import Teardown

MORE = int(os.environ.get("SIDESTEP_MODEL_MORE", "0"))
STATES_MAX = 1_000_000 * 20**MORE


def counted(peer: Peer, own_pool: int, other_pool: int) -> Peer:
    """A peer at the beginning, where credits are counted."""
    return replace(peer, posted=own_pool, last_bufs=own_pool, credit=other_pool)


def source(total: int, mode: str = "Combined", **more: object) -> Peer:
    """A peer that sends."""
    return replace(Peer(total=total + MORE, mode=mode), **more)  # type: ignore[arg-type]  # fields of Peer


def sink(mode: str = "Combined", **more: object) -> Peer:
    """A peer that receives."""
    return replace(Peer(sink_mode=mode), **more)  # type: ignore[arg-type]  # fields of Peer


def both(total: int, mode: str = "Combined", **more: object) -> Peer:
    """A peer that sends and receives."""
    return replace(source(total, mode, **more), sink_mode=mode)


_PIPELINED = "Pipelined"
_CREDITS = Bounds(credits=True, advert_sizes=(9,))
_ADVERTS = Bounds(credits=True, read_sizes=(1,))
_HELD = Bounds(credits=True, read_sizes=(1,), refuse=False, data=False)
_SMALL = Bounds(read_sizes=(2,))

Make = Callable[[Rules], Connection]


def _make(name: str, a: Peer, b: Peer, bounds: Bounds, pools: tuple[int, int] | None = None) -> Make:
    if pools:
        a, b = counted(a, *pools), counted(b, *pools[::-1])
    return lambda rules: Connection(name, (a, b), bounds, rules)


def _table(*made: tuple[str, Make]) -> dict[str, Make]:
    return dict(made)


def _scene(name: str, a: Peer, b: Peer, bounds: Bounds, pools: tuple[int, int] | None = None) -> tuple[str, Make]:
    return name, _make(name, a, b, bounds, pools)


CONNECTIONS = _table(
    # credits
    _scene("credits, one way", source(5, controls_left=1), sink(controls_left=1), _CREDITS, (5, 5)),
    _scene("credits, both ways", source(2, controls_left=1), source(2, controls_left=1), _CREDITS, (5, 5)),
    _scene("credits, pools of 6 and 5", source(3, controls_left=1), source(2), _CREDITS, (6, 5)),
    _scene("credits, both full", source(3, controls_left=1), source(3), _CREDITS, (5, 5)),
    _scene("credits, payload-free", sink(controls_left=5), sink(controls_left=5), _CREDITS, (3, 3)),
    _scene("held MSeqAck, pools of 5", source(2, cancels_left=1), sink(controls_left=12), _HELD, (5, 5)),
    _scene("held MSeqAck, data against it", source(2, cancels_left=1), source(1, controls_left=1), _ADVERTS, (5, 5)),
    _scene(
        "SinkAvails under credits",
        source(3, _PIPELINED),
        sink(_PIPELINED, offers_left=2, takes_back_left=1),
        Bounds(credits=True, read_sizes=(2,), refuse=False),
        (5, 5),
    ),
    # SrcAvail, SendSm, SrcAvailCancel
    _scene("SrcAvail, Combined", source(5, cancels_left=2), sink(), Bounds(advert_sizes=(3,))),
    _scene("SrcAvail, Pipelined", source(5, _PIPELINED, cancels_left=2), sink(_PIPELINED), Bounds()),
    _scene(
        "SrcAvail, three at a time",
        source(6, _PIPELINED, cancels_left=1),
        sink(_PIPELINED),
        Bounds(adverts_max=3, data=False, read_sizes=(1,)),
    ),
    _scene("both send first, Combined", both(4, sends_first=True), both(4, sends_first=True), Bounds(refuse=False)),
    _scene(
        "both send first, Pipelined",
        both(4, _PIPELINED, sends_first=True),
        both(4, _PIPELINED, sends_first=True),
        replace(_SMALL, refuse=False, data=False),
    ),
    # SinkAvail, SinkAvailCancel, Transaction
    _scene("SinkAvail", source(4, _PIPELINED), sink(_PIPELINED, offers_left=3), Bounds()),
    _scene("SinkAvailCancel", source(4, _PIPELINED), sink(_PIPELINED, offers_left=2, takes_back_left=1), Bounds()),
    _scene(
        "both cancels",
        source(3, _PIPELINED, cancels_left=1),
        sink(_PIPELINED, offers_left=2, takes_back_left=2),
        Bounds(),
    ),
    _scene(
        "Transactions across",
        both(2, _PIPELINED, transactions_left=1, offers_left=1),
        both(2, _PIPELINED, transactions_left=1, offers_left=1),
        replace(_SMALL, refuse=False),
    ),
    # modes
    _scene(
        "Pipelined, Combined, Pipelined",
        source(3, _PIPELINED, changes_left=("Combined", _PIPELINED)),
        sink(_PIPELINED, offers_left=2, updates_left=1),
        _SMALL,
    ),
    _scene(
        "mode changes and three SinkAvails",
        source(3, _PIPELINED, changes_left=("Combined", _PIPELINED)),
        sink(_PIPELINED, offers_left=3, updates_left=1),
        Bounds(refuse=False),
    ),
    _scene(
        "mode changes and cancels",
        source(3, _PIPELINED, changes_left=("Combined", _PIPELINED), cancels_left=1),
        sink(_PIPELINED, offers_left=1, updates_left=1, takes_back_left=1),
        Bounds(refuse=False, read_sizes=(1,)),
    ),
    _scene(
        "all four mode changes",
        source(3, "Combined", changes_left=(_PIPELINED, "Combined", "Buffered", _PIPELINED)),
        sink(offers_left=2, updates_left=1, sink_changes_left=1),
        _SMALL,
    ),
    # closing
    _scene("closing, Combined", source(3, closes_left=1, cancels_left=1), source(1, closes_left=1), _SMALL),
    _scene(
        "closing, adverts out",
        source(3, _PIPELINED, closes_left=1, cancels_left=1),
        sink(_PIPELINED, offers_left=2, takes_back_left=1),
        _SMALL,
    ),
    _scene(
        "closing both ways",
        both(1, _PIPELINED, closes_left=1, offers_left=1, transactions_left=1),
        both(2, _PIPELINED, closes_left=1, offers_left=1),
        replace(_SMALL, data=False, refuse=False),
    ),
)

# What a peer with fewer than five receive buffers, or fewer than five left free, comes to.
SMALL_POOLS = _table(
    _scene("credits, pools of 3", source(2, controls_left=1), source(1), _CREDITS, (3, 3)),
    _scene("credits, pools of 4", source(2, controls_left=1), source(2), _CREDITS, (4, 4)),
)

TEARDOWN = (TeardownPeer(to_send=1, abort_allowed=True), TeardownPeer(to_send=1 + MORE, abort_allowed=True))

RESIZES = {
    "increase": (
        ResizePeer(requests=(4,), data_left=3 + MORE, offers_left=1),
        ResizePeer(data_left=2, offers_left=1),
    ),
    "decrease": (
        ResizePeer(requests=(1,), data_left=3 + MORE, offers_left=1),
        ResizePeer(data_left=2, offers_left=1),
    ),
    "both ask": (
        ResizePeer(requests=(4,), data_left=3, offers_left=MORE),
        ResizePeer(requests=(4,), data_left=2, offers_left=1),
    ),
    "one up, one down": (
        ResizePeer(requests=(4,), data_left=2, offers_left=1),
        ResizePeer(requests=(1,), data_left=2, offers_left=MORE),
    ),
}

SUSPENSIONS = {
    "one suspends": (
        SuspendPeer(total=3 + MORE, connecting=True, suspends_left=1),
        SuspendPeer(total=2, connecting=False),
    ),
    "both suspend": (
        SuspendPeer(total=2 + MORE, connecting=True, suspends_left=1),
        SuspendPeer(total=2, connecting=False, suspends_left=1),
    ),
}

__all__ = [
    "CONNECTIONS",
    "RESIZES",
    "SMALL_POOLS",
    "STATES_MAX",
    "SUSPENSIONS",
    "TEARDOWN",
    "Resize",
    "Suspend",
    "Teardown",
]
