"""Offload protocols of the tests, as a distribution of its own brings them; see ledger.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import ClassVar

from queue_link import QueueLink

from sidestep.errors import Unavailable
from sidestep.native.layout import IPPROTO_SDP
from sidestep.switch.protocol import Capabilities, Endpoint, OffloadProtocol, Pair, Request

WITNESS_NUMBER = IPPROTO_SDP + 1
WHERE = "SIDESTEP_TEST_LEDGER"  # environment: the directory in which they write


class Ledger(OffloadProtocol):
    """Carries whatever it is given, by shared memory."""

    name: ClassVar[str] = "ledger"
    capabilities: ClassVar[Capabilities] = Capabilities(self_routing=True)
    ip_protocol: ClassVar[int] = IPPROTO_SDP

    def join(self, pair: Pair) -> None:
        self._write(f"join {pair.request.remote}")
        if self._wanted() == "open and give up":
            pair.carry(QueueLink(), QueueLink())
            raise Unavailable("the other side of it does not answer")
        pair.attach()

    def refusal(self, request: Request) -> str | None:
        wanted = self._wanted()
        if wanted == "raise":
            raise RuntimeError("a strange protocol")
        return "there is no way" if wanted == "no way" else None

    def bind(self, endpoint: Endpoint) -> None:
        wanted = self._wanted()
        if wanted == "raise":
            raise RuntimeError("a strange protocol")
        if wanted.startswith("E"):
            self._write(f"refuse {endpoint}")
            raise OSError(getattr(errno, wanted), "as it was told to")
        self._write(f"bind {endpoint}")

    def release(self, endpoint: Endpoint) -> None:
        self._write(f"release {endpoint}")

    def stop(self) -> None:
        self._write("stop")

    def _wanted(self) -> str:
        path = Path(os.environ[WHERE], f"refuse-{self.name}")
        return path.read_text(encoding="ascii") if path.exists() else ""

    def _write(self, line: str) -> None:
        with Path(os.environ[WHERE], "book").open("a", encoding="ascii") as book:
            book.write(f"{self.name} {line}\n")


class Witness(Ledger):
    """Asked after it; for IPv4 only, and for no end that accepted."""

    name: ClassVar[str] = "witness"
    capabilities: ClassVar[Capabilities] = Capabilities(families=frozenset({4}), accept=False, self_routing=True)
    ip_protocol: ClassVar[int] = WITNESS_NUMBER
