"""The consumer of verbs in the guest, as a test uses it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from defects import DEPTH, RECEIVE_LEN, Memory, Place
from lab_guest import Lab
from raw_iwarp import Depths, RawPeer, Terminate, request

from sidestep.rdma.iwarp.ddp import RdmapOp

_PROGRAM: Final = Path(__file__).parent / "guest" / "verbs_consumer.py"
_PLACE: Final = "/run/verbs_consumer.py"  # in the guest
_PORT: Final = 7200


class SiwConsumer:
    """Takes one connection after the other and does on each what the peer wishes."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._number = 0
        lab.push(_PROGRAM, _PLACE)
        self._program = lab.background("verbs_consumer", f"exec python3 {_PLACE} {lab.siw_address} {_PORT}")

    def dial(self) -> socket.socket:
        """A TCP connection, before anything has been said."""
        self._program.wait_for(f'"listening": {self._number + 1}}}')
        return self._lab.connect(_PORT)

    @contextmanager
    def connection(self, *, crc: bool = True, **wish: Any) -> Iterator[tuple[RawPeer, Memory]]:
        """A connection on which the wish has been granted, and the memory that was told."""
        with RawPeer(self.dial(), terminate=Terminate.decode_mirrored) as peer:
            peer.ask(request(Depths(DEPTH, DEPTH), crc=crc))
            peer.send_message(RdmapOp.SEND, json.dumps({"size": RECEIVE_LEN, **wish}).encode())
            _, told = peer.expect(RdmapOp.SEND)
            self._number += 1
            yield peer, {name: Place(*where) for name, where in json.loads(told).items()}

    def report(self) -> dict[str, Any]:
        """How everything on the last connection has completed, and what the memory holds."""
        log = self._program.wait_for(f'"connection": {self._number},')
        found: dict[str, Any] = next(
            line for line in map(json.loads, log.splitlines()) if line.get("connection") == self._number
        )
        return found

    def close(self) -> None:
        """It ends, and its port is free."""
        self._program.kill()
