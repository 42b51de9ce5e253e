"""For tests of programs under sidestep: a private provider, and programs that run with it.

    with testing.Sidestep() as s:
        server = s.popen(["my-server", str(port := testing.free_port())])
        ...  # until it listens
        client = s.popen(["my-client", str(port)])
        s.wait_for(lambda found: any(c.promoted for c in found))  # while they talk: ended connections are not listed

`ShimClient` speaks the provider's real protocol from Python, as the shim does from C.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import secrets
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from sidestep import limits
from sidestep.config import PolicyPlace, PromoteAfter, Proof, ProviderSettings, RemoteSettings, ShimSettings
from sidestep.errors import Misuse, Unavailable
from sidestep.native import _channel, layout
from sidestep.native.layout import Ask, Rpc, Welcome
from sidestep.observe import connections as observed
from sidestep.observe import demotion
from sidestep.observe.connections import Connection
from sidestep.observe.demotion import Outcome
from sidestep.provider import control, memory, rpc
from sidestep.provider.proof import lookup as proof
from sidestep.provider.rpc import Message

__all__ = ["Channel", "Connection", "Outcome", "ShimClient", "Sidestep", "free_port"]

RUN_TIMEOUT_S: Final = 60.0
WAIT_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.01
_PORT_FIRST: Final = 10_000  # of those that `free_port` tries; services of the machine are below
_PORT_TRIES: Final = 1000


def free_port() -> int:
    """A TCP port nobody uses, below those that the kernel gives to clients: none of them takes it before its server.

    Raises:
        Unavailable: None was found.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for _ in range(_PORT_TRIES):
        port = random.randrange(_PORT_FIRST, max(first_ephemeral, _PORT_FIRST + 1))  # noqa: S311 - any will do
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise Unavailable("no free TCP port was found")


class Sidestep:
    """A provider of its own in a temporary directory, and programs started under the shim with it.

    Programs started with `popen` are killed on leaving the `with` block if they still run.
    """

    def __init__(
        self,
        promote_after: str | None = "0",
        ring_size: int | None = None,
        spin_us: int | None = None,
        *,
        offer_expiry_s: float = limits.OFFER_EXPIRY_S,
        idle_exit_s: float = 0,
        budget_bytes: int = 0,
        policy: Path | None = None,
        prove_by: Proof = Proof.LOOKUP,
        remote: RemoteSettings | None = None,
        workers: int = 0,
        log: Path | None = None,
    ) -> None:
        """The first three are for the shims, None leaves the defaults; the others for the provider.

        `policy` is a file of rules, which may come later; this machine's own are not looked at. The provider's log is
        added to the file `log`.
        """
        self._log = log
        self._directory = tempfile.TemporaryDirectory(prefix="sidestep-")
        self.socket = Path(self._directory.name) / "private" / "provider"
        after = PromoteAfter.parse(promote_after) if promote_after is not None else None
        self._shim = ShimSettings(self.socket, after, ring_size, spin_us)
        self._provider_settings = ProviderSettings(
            self.socket,
            offer_expiry_s=offer_expiry_s,
            idle_exit_s=idle_exit_s,
            budget_bytes=budget_bytes,
            policy=(PolicyPlace(policy),) if policy else (),
            proof=prove_by,
            remote=remote,
            workers=workers,
        )
        self._provider: subprocess.Popen[bytes] | None = None
        self._programs: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        try:
            self.restart_provider()
        except BaseException:
            self._directory.cleanup()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self._programs:
            if program.poll() is None:
                program.kill()
            program.wait()
            for stream in (program.stdin, program.stdout, program.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):  # unsent input of a program that has ended
                        stream.close()
        self.kill_provider()
        self._directory.cleanup()

    # ---- programs ----

    def env(self, /, **overrides: str | None) -> dict[str, str]:
        """This process's environment with the shim preloaded; an override of None takes a variable out."""
        env = self._shim.environment(os.environ)
        for name, value in overrides.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        return env

    def popen(
        self, argv: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a program under the shim; `options` as for subprocess.Popen."""
        program: subprocess.Popen[Any] = subprocess.Popen(argv, env=self.env() if env is None else env, **options)
        self._programs.append(program)
        return program

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = RUN_TIMEOUT_S,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Runs a program under the shim to its end; `options` as for subprocess.run."""
        run: Callable[..., subprocess.CompletedProcess[Any]] = subprocess.run
        return run(argv, env=self.env() if env is None else env, timeout=timeout, **options)

    # ---- looking ----

    def connections(self) -> list[Connection]:
        """The connections that `sidestep ss --json` would show; raises Unavailable without a provider."""
        return list(observed.connections(self.socket))

    def wait_for(
        self, predicate: Callable[[list[Connection]], bool], timeout_s: float = WAIT_TIMEOUT_S
    ) -> list[Connection]:
        """The connections, once `predicate` holds for them; TimeoutError, with what there is, if it never does."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.connections()
            if predicate(found):
                return found
            if time.monotonic() > deadline:
                listed = "\n".join(f"  {c.program} {c.local} {c.remote} {c.state}: {c.why}" for c in found)
                raise TimeoutError(f"no such connections after {timeout_s} s; there are {len(found)}:\n{listed}")
            time.sleep(_POLL_S)

    # ---- demoting in flight ----

    def demote(
        self, wanted: Callable[[Connection], bool] = lambda _: True, timeout_s: float = WAIT_TIMEOUT_S
    ) -> list[Outcome]:
        """Sends the connections that are `wanted` back to TCP, as `sidestep demote` does, and waits until they are."""
        return demotion.order(self.socket, demotion.Order.DEMOTE, wanted, timeout_s)

    def promote(
        self, wanted: Callable[[Connection], bool] = lambda _: True, timeout_s: float = WAIT_TIMEOUT_S
    ) -> list[Outcome]:
        """Takes `demote` back and waits until the connections that had a channel are promoted again."""
        return demotion.order(self.socket, demotion.Order.PROMOTE, wanted, timeout_s)

    # ---- the provider ----

    @property
    def provider_pid(self) -> int:
        """The provider's process; raises Misuse while there is none."""
        if self._provider is None:
            raise Misuse("there is no provider", remedy="call restart_provider()")
        return self._provider.pid

    def status(self) -> dict[str, Any]:
        """The provider's state and counters, as `sidestep provider status --json` shows them."""
        with control.ControlConnection(self.socket) as connection:
            return connection.status()

    def kill_provider(self, number: int = signal.SIGKILL) -> None:
        """Ends the provider by a signal and waits for its end; does nothing if there is none."""
        if self._provider is not None:
            self._provider.send_signal(number)
            self._provider.wait()
            self._provider = None

    def restart_provider(self) -> None:
        """Ends the provider, if there is one, and starts a new one at the same place."""
        self.kill_provider()
        with contextlib.ExitStack() as closing:
            log = closing.enter_context(self._log.open("ab")) if self._log is not None else None
            self._provider = control.spawn(self._provider_settings, background=False, log=log)


@dataclass(frozen=True, slots=True)
class Channel:
    """What one end brings: a doorbell always, a segment when it offers. It owns the descriptors."""

    doorbell: int
    doorbell_page: int
    segment: int | None
    ring_size: tuple[int, int]
    doorbell_page_id: bytes
    segment_id: bytes

    @classmethod
    def make(cls, ring_size: tuple[int, int] | None = (4096, 4096)) -> Self:
        """New ones; `ring_size` None: for a claim."""
        segment = None
        if ring_size is not None:
            segment = memory.sealed_memfd("sidestep-channel", memory.segment_size(ring_size))
        return cls(
            _channel.doorbell_make(),
            memory.sealed_memfd("sidestep-doorbells", 4096),
            segment,
            ring_size or (0, 0),
            secrets.token_bytes(16),
            secrets.token_bytes(16) if ring_size is not None else bytes(16),
        )

    def close(self) -> None:
        """Closes the descriptors."""
        for fd in (self.doorbell, self.doorbell_page, self.segment):
            if fd is not None:
                os.close(fd)


class ShimClient:
    """One process's connection to a provider, as the shim makes it: an arena, HELLO, offers and claims."""

    def __init__(self, path: Path, *, slots_max: int = 16, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Connects; `hello` introduces it."""
        self.arena_id = secrets.token_bytes(16)
        self.arena = memory.sealed_memfd(
            "sidestep-arena", layout.ARENA_SLOTS_OFFSET + slots_max * layout.CONN_SLOT_SIZE
        )
        self._slots_max = slots_max
        self.write_arena([])
        self.netns_cookie = proof.netns_cookie()  # of the sockets it speaks of
        self.wants = Welcome(0)  # what the provider asked for as proof
        self.sock = control.connect(path)
        self.sock.settimeout(timeout_s)
        self._registry: mmap.mmap | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnects, as the end of a process does."""
        self.sock.close()
        if self._registry is not None:
            self._registry.close()
            self._registry = None
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1

    def write_arena(self, slots: Sequence[Mapping[str, Any]]) -> None:
        """Fills the arena with these connection slots, fields as in layout.RECORDS."""
        header = layout.pack(
            "arena_header",
            magic=layout.ARENA_MAGIC,
            version=layout.LAYOUT_VERSION,
            slot_size=layout.CONN_SLOT_SIZE,
            slots_max=self._slots_max,
            slots_used=len(slots),
            arena_id=self.arena_id,
        )
        os.pwrite(self.arena, header, 0)
        for index, slot in enumerate(slots):
            at = layout.ARENA_SLOTS_OFFSET + index * layout.CONN_SLOT_SIZE
            os.pwrite(self.arena, layout.pack("conn_slot", **slot), at)

    def hello(self) -> Message:
        """Says HELLO, maps the registry that comes with the WELCOME, and returns that."""
        read_only = memory.reopen_read_only(self.arena)
        try:
            rpc.send(self.sock, Message(type=Rpc.HELLO, pid=os.getpid(), arena_id=self.arena_id), [read_only])
        finally:
            os.close(read_only)
        packet = self.receive()
        with packet.descriptors:
            self._registry = mmap.mmap(packet.descriptors[0], layout.REGISTRY_SIZE, prot=mmap.PROT_READ)
        self.wants = Welcome(packet.message.flags)
        return packet.message

    def offer(self, tcp: socket.socket, channel: Channel, token: int, *, way: socket.socket | None = None) -> None:
        """Offers `channel` for the connected socket `tcp`; `way`: the UDP socket for the proof of the path."""
        if channel.segment is None:
            raise Misuse("a channel to offer needs a segment")
        message = self.message_about(Rpc.OFFER, tcp, channel, token)
        rpc.send(self.sock, message, [*self._proof(tcp, way), channel.segment, channel.doorbell, channel.doorbell_page])

    def claim(self, tcp: socket.socket, channel: Channel, token: int, *, way: socket.socket | None = None) -> None:
        """Claims the channel offered for the connection of which `tcp` is the other end."""
        message = self.message_about(Rpc.CLAIM, tcp, channel, token)
        rpc.send(self.sock, message, [*self._proof(tcp, way), channel.doorbell, channel.doorbell_page])

    def _proof(self, tcp: socket.socket, way: socket.socket | None) -> list[int]:
        """The descriptors that the provider wants before those of the channel."""
        possession = [tcp] if self.wants & Welcome.POSSESSION else []
        return [one.fileno() for one in (*possession, *([way] if way else []))]

    def withdraw(self, token: int) -> None:
        """Takes an offer back."""
        rpc.send(self.sock, Message(type=Rpc.WITHDRAW, token=token))

    def ask(
        self,
        what: Ask,
        *,
        protocol: int = 0,
        local: tuple[str, int] = ("0.0.0.0", 0),  # noqa: S104 - unspecified
        remote: tuple[str, int] = ("0.0.0.0", 0),  # noqa: S104
        fds: Sequence[int] = (),
    ) -> Message:
        """Asks as an explicit socket does, and returns the ANSWER; `fds` for a bind: the socket and the lease."""
        message = Message(
            type=Rpc.ASK,
            token=secrets.randbits(64),
            flags=what,
            protocol=protocol,
            local_addr=proof.mapped_address(local[0]),
            local_port=local[1],
            remote_addr=proof.mapped_address(remote[0]),
            remote_port=remote[1],
        )
        rpc.send(self.sock, message, fds)
        with (packet := self.receive()).descriptors:
            answer = packet.message
        if (answer.type, answer.token) != (Rpc.ANSWER, message.token):
            raise ConnectionError(f"{answer.type.name} came for an answer")
        return answer

    def offers_waiting(self, tcp: socket.socket) -> int:
        """Pending offers in the registry bucket of this connection, as a shim sees it before it claims."""
        return self.registry_word(tcp) & 0xFF

    def wait_offer(self, tcp: socket.socket, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Looks at the registry until an offer may be waiting for this connection; TimeoutError if none comes."""
        deadline = time.monotonic() + timeout_s
        while not self.offers_waiting(tcp):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no offer was announced in {timeout_s} s")
            os.sched_yield()

    def receive(self) -> rpc.Packet:
        """The provider's next message; the caller closes its descriptors. ConnectionError if it hung up."""
        packet = rpc.receive(self.sock)
        if packet is None:
            raise ConnectionError("the provider closed the connection")
        return packet

    def hung_up(self) -> bool:
        """Waits for the provider to close the connection; False if it says something instead."""
        try:
            packet = rpc.receive(self.sock)
        except ConnectionResetError:
            return True
        if packet is None:
            return True
        packet.descriptors.close()
        return False

    def registry_header(self) -> dict[str, Any]:
        """The first page of the registry."""
        if self._registry is None:
            raise Misuse("there is no registry before hello()")
        return layout.unpack("registry_header", self._registry[: layout.size("registry_header")])

    def registry_word(self, tcp: socket.socket) -> int:
        """The registry word of the bucket of this connection."""
        key = proof.connection_key(tcp, self.netns_cookie)
        bucket = layout.bucket_index(
            self.registry_header()["secret"], key.local_addr, key.local_port, key.remote_addr, key.remote_port
        )
        if self._registry is None:
            raise Misuse("there is no registry before hello()")
        (word,) = struct.unpack_from("=I", self._registry, layout.REGISTRY_BUCKETS_OFFSET + 4 * bucket)
        return int(word)

    def message_about(self, kind: Rpc, tcp: socket.socket, channel: Channel, token: int) -> Message:
        """The OFFER or CLAIM that `offer` or `claim` would send."""
        key = proof.connection_key(tcp, self.netns_cookie)
        return Message(
            type=kind,
            token=token,
            local_addr=key.local_addr,
            local_port=key.local_port,
            remote_addr=key.remote_addr,
            remote_port=key.remote_port,
            cookie=proof.socket_cookie(tcp),
            netns_cookie=key.netns_cookie,
            ring_size=channel.ring_size,
            doorbell_page_id=channel.doorbell_page_id,
            segment_id=channel.segment_id,
        )
