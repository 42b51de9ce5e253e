"""Tools for tests of programs under sidestep: a private provider, and programs that run with it.

    with testing.Sidestep() as s:
        server = s.popen(["my-server", str(port := testing.free_port())])
        ...  # until it listens
        client = s.popen(["my-client", str(port)])
        s.wait_for(lambda found: any(c.promoted for c in found))

Ended connections are not listed, so look while the programs talk.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from sidestep import limits
from sidestep.config import ShimSettings
from sidestep.errors import Misuse, Unavailable
from sidestep.observe import connections as observed
from sidestep.observe import demotion, preload_check
from sidestep.observe.connections import Connection
from sidestep.observe.demotion import Outcome
from sidestep.provider import control
from sidestep.settings import PolicyPlace, PromoteAfter, Proof, ProviderSettings, RemoteSettings

__all__ = ["Connection", "Outcome", "Sidestep", "free_port"]

RUN_TIMEOUT_S: Final = 60.0
WAIT_TIMEOUT_S: Final = 60.0  # a busy machine promotes late
_POLL_S: Final = 0.01
_PORT_FIRST: Final = 10_000  # `free_port` tries ports from here; services of the machine are below
_PORT_TRIES: Final = 1000


def argv_under_shim(argv: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Command to be executed in `Sidestep.env`: sidestep's loader starts programs without this C library."""
    command = [os.fspath(word) for word in argv]
    path = preload_check.which(command[0])
    return preload_check.inspect(path).argv(command) if path else command


def free_port() -> int:
    """A free TCP port below those that the kernel gives to clients: none of them takes it before its server.

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
        self.socket: Path = Path(self._directory.name) / "private" / "provider"
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
        program: subprocess.Popen[Any] = subprocess.Popen(
            argv_under_shim(argv), env=self.env() if env is None else env, **options
        )
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
        return run(argv_under_shim(argv), env=self.env() if env is None else env, timeout=timeout, **options)

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
