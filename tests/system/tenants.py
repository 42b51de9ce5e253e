"""A system-wide provider under a user of its own, clients of several users, and network namespaces."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from shim_client import ShimClient

from sidestep.config import ShimSettings
from sidestep.native.layout import Refusal, Rpc
from sidestep.observe import connections as observed
from sidestep.observe.connections import Connection
from sidestep.provider import control
from sidestep.provider.proof import lookup as proof
from sidestep.settings import PolicyPlace, ProviderSettings
from sidestep.testing import Sidestep

SERVICE: Final = 64_100  # the uids need no names
ALICE: Final = 64_101
BOB: Final = 64_102
PROGRAMS: Final = Path(__file__).parent / "programs"
CLONE_NEWNET: Final = 0x40000000
ResultT = TypeVar("ResultT")


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """What connects in here is that user's; one thread, as the effective user is the thread's."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


class System:
    """A provider as the service manager would start it: its own user, no capabilities, a directory it cannot write."""

    def __init__(
        self,
        closing: ExitStack,
        *,
        offer_expiry_s: float = 600,
        budget_bytes: int = 0,
        descriptors: int = 4096,
        policy: str = "",
    ) -> None:
        self._closing = closing
        self.directory = Path(
            tempfile.mkdtemp(prefix="sidestep-system-", dir="/run")
        )  # where only root can put things, as policies want it
        closing.callback(shutil.rmtree, self.directory)
        self.directory.chmod(0o755)
        self.socket = self.directory / "provider"
        listener = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(os.fspath(self.socket))
        self.socket.chmod(0o666)
        listener.listen(128)
        rules = self.directory / "policy.conf"
        rules.write_text(policy)
        settings = ProviderSettings(
            self.socket, offer_expiry_s=offer_expiry_s, idle_exit_s=0, budget_bytes=budget_bytes,
            policy=(PolicyPlace(rules),), system=True,
        )  # fmt: skip
        argv = [sys.executable, str(PROGRAMS / "provider.py"), str(SERVICE), str(descriptors), *settings.arguments()]
        self.log = self.directory / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(argv, stdin=listener.fileno(), stderr=log, cwd="/")
        closing.callback(self._stop)
        closing.enter_context(control.ControlConnection(self.socket)).status()  # it serves

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The provider's process."""
        return self._process.pid

    def counter(self, name: str) -> int:
        """One of the provider's counters."""
        with control.ControlConnection(self.socket) as connection:
            return int(connection.status()["counters"].get(name, 0))

    def client(self, uid: int, netns: int | None = None) -> ShimClient:
        """A client of that user that has said HELLO, for sockets of the namespace of that cookie."""
        made = self.stranger(uid)
        if netns is not None:
            made.netns_cookie = netns
        made.hello()
        return made

    def stranger(self, uid: int) -> ShimClient:
        """A client of that user that has only connected."""
        with as_user(uid):
            return self._closing.enter_context(ShimClient(self.socket))

    def env(self, **changes: str) -> dict[str, str]:
        """The environment of a program under the shim."""
        return ShimSettings(self.socket).environment(os.environ) | {"SIDESTEP_PROMOTE_AFTER": "0"} | changes

    def connections(self) -> list[Connection]:
        """What root's `sidestep ss` shows."""
        return list(observed.connections(self.socket))

    wait_for = Sidestep.wait_for


def answer(client: ShimClient) -> Rpc | Refusal:
    """What the provider says next: the kind of message, or the reason of a refusal."""
    packet = client.receive()
    packet.descriptors.close()
    return Refusal(packet.message.reason) if packet.message.type is Rpc.REFUSED else packet.message.type


# ---- network namespaces ----


@dataclass(frozen=True)
class Namespace:
    """A network namespace with a name."""

    name: str

    def run(self, make: Callable[[], ResultT]) -> ResultT:
        """Calls `make` in there; sockets stay of the namespace in which they were made."""
        found: list[ResultT] = []
        failed: list[BaseException] = []

        def inside() -> None:
            try:
                with open(f"/run/netns/{self.name}", "rb") as handle:
                    if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                found.append(make())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]

    @property
    def cookie(self) -> int:
        """The kernel's."""
        return self.run(proof.netns_cookie)

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs another in there."""
        return ["ip", "netns", "exec", self.name, *argv]


def ip(*words: str) -> None:
    """Runs ip(8)."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@dataclass(frozen=True)
class End:
    """One end of a connection, and the UDP socket that its shim would bring."""

    tcp: socket.socket
    way: socket.socket
    netns: int


def udp_beside(tcp: socket.socket) -> socket.socket:
    way = socket.socket(tcp.family, socket.SOCK_DGRAM)
    way.bind((tcp.getsockname()[0], 0))
    return way


def spawn(argv: Sequence[str | os.PathLike[str]], uid: int, **options: Any) -> subprocess.Popen[Any]:
    """A program of that user."""
    return subprocess.Popen(argv, user=uid, group=uid, extra_groups=[], cwd="/", **options)
