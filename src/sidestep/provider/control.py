"""The commands' side of the provider: starting it, asking it, stopping it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from sidestep import limits
from sidestep.config import ENV_DISABLE, ENV_LOG, answers, connect
from sidestep.errors import PeerViolation, Unavailable
from sidestep.native import layout
from sidestep.native.layout import Rpc
from sidestep.provider import rpc
from sidestep.provider.rpc import Descriptors, Message
from sidestep.provider.rundir import BUSY, READY, AlreadyRunning, lock_path, log_path

if TYPE_CHECKING:
    import subprocess

    from sidestep.settings import ProviderSettings

RESTART = "'sidestep provider stop', then 'sidestep provider start'; promoted connections go on meanwhile"
_POLL_S = 0.01  # pause between two looks at a provider that another process is starting


class ControlConnection:
    """A connection to a provider for requests; use it in a `with` block."""

    def __init__(self, path: Path, *, timeout_s: float = limits.CONTROL_REPLY_TIMEOUT_S) -> None:
        """Connects; raises Unavailable if no provider answers at `path`."""
        self._path = path
        self._sock = connect(path)
        self._sock.settimeout(timeout_s)
        self._introduced = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def request(self, op: str, **arguments: Any) -> tuple[dict[str, Any], Descriptors]:
        """One request and its reply; the caller closes the descriptors.

        Raises:
            Unavailable: The provider went away or does not answer.
        """
        try:
            self._send(json.dumps({"op": op, **arguments}).encode())
            packet = rpc.receive(self._sock, fds_max=limits.CONTROL_FDS_PER_PIECE)
        except TimeoutError as error:
            raise Unavailable(
                f"the provider at {self._path} does not answer: {error}",
                remedy="it may still be starting, or have no CPU: ask again, by 'sidestep provider status'",
            ) from error
        except (OSError, PeerViolation) as error:
            raise Unavailable(f"the provider at {self._path} does not answer: {error}") from error
        if packet is None:
            raise Unavailable(f"the provider at {self._path} has gone, or is of a version that does not know this one")
        document = json.loads(packet.body)
        if "error" in document:
            packet.descriptors.close()
            raise Unavailable(
                f"the provider refused {op!r}: {document['error']}",
                remedy=document.get("remedy", "is it of another version?"),
            )
        return document, packet.descriptors

    def document(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One request and its reply, which brings no descriptors; raises Unavailable."""
        document, descriptors = self.request(op, **arguments)
        descriptors.close()
        return document

    def _send(self, body: bytes) -> None:
        message = Message(type=Rpc.CONTROL, version=layout.LAYOUTS.start)  # the provider before this one answers, too
        if self._introduced:
            rpc.send(self._sock, message, body=body)
            return
        # Root in a container looks like root. What it cannot do is make a socket in the host's network namespace.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as shown:
            rpc.send(self._sock, message, [shown.fileno()], body)
        self._introduced = True

    def status(self) -> dict[str, Any]:
        """The provider's state as `sidestep provider status --json` shows it."""
        return self.document("status")

    def links(self) -> Iterator[dict[str, Any]]:
        """The connections with other hosts; see `RemoteRelay.details`."""
        after: int | None = 0
        while after is not None:
            document = self.document("links", after=after)
            yield from document["links"]
            after = document["next"]

    def ended(self) -> Iterator[dict[str, Any]]:
        """The connections of families that have ended, the last of all at the end; see `history.EndedRow`."""
        after: int | None = 0
        while after is not None:
            document = self.document("ended", after=after)
            yield from document["ended"]
            after = document["next"]

    def arenas(self) -> Iterator[tuple[str, int, tuple[int, int]]]:
        """The id, in hexadecimal, and the arena of each process family; the same of the descriptor.

        And the first process of the family: the number that it had for the provider, behind the pid namespace in which
        that counts. (0, 0) from an older provider.
        """
        after: int | None = 0
        while after is not None:
            document, descriptors = self.request("arenas", after=after)
            with descriptors:
                ids, namespace = document["arenas"], document.get("pid_namespace", 0)
                first = [(namespace, pid) for pid in document.get("pids", [0] * len(ids))]
                yield from zip(ids, descriptors.numbers, first, strict=True)
            after = document["next"]


def layouts(status: dict[str, Any]) -> range:
    """Layouts that a provider serves, by its status; the first providers served their own only."""
    newest = int(status.get("layout_version", 0))
    return range(status.get("layout_oldest", newest), newest + 1)


def spawn(settings: ProviderSettings, *, background: bool, log: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Starts a provider process and returns once it listens; in the background the process returned has ended.

    Args:
        settings: Its own.
        background: Whether it detaches itself; then its log is a file beside its socket.
        log: Where the log of one goes that does not; None: nowhere.

    Raises:
        AlreadyRunning: Another provider was first.
        Unavailable: It did not come up.
    """
    import subprocess  # most commands only ask

    deadline = time.monotonic() + limits.START_TIMEOUT_S
    reader, writer = os.pipe2(os.O_CLOEXEC)
    argv = [sys.executable, "-P", "-m", "sidestep.provider", *settings.arguments(), f"--ready-fd={writer}"]
    if background:
        argv.append("--background")
    # The provider itself must never run under a shim.
    env = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", ENV_DISABLE, ENV_LOG)}
    with open(reader, "rb") as ready:
        try:
            process = subprocess.Popen(
                argv, pass_fds=[writer], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=log if log is not None else subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise Unavailable(f"cannot start {sys.executable}: {error.strerror}") from error
        finally:
            os.close(writer)
        answer = _read_until_end(ready.fileno(), deadline=deadline)
    late = not answer and time.monotonic() >= deadline
    if not late and (background or answer not in (READY, BUSY)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limits.START_TIMEOUT_S)
    if answer == READY:
        return process
    if process.poll() is None:
        process.kill()
        process.wait()
    if answer == BUSY:
        raise AlreadyRunning(f"a provider serves {settings.socket} already")
    if answer:
        raise Unavailable(f"the provider did not start: {answer.decode(errors='replace')}")
    what = f"does not listen after {limits.START_TIMEOUT_S:g} s" if late else "did not start, and ended without a word"
    raise Unavailable(
        f"the provider {what}",
        remedy=f"see {log_path(settings.socket)}, or try 'sidestep provider start --foreground'",
    )


def start(settings: ProviderSettings) -> bool:
    """Makes sure that a provider listens at `settings.socket`; whether this call started it.

    Raises:
        Unavailable: None could be started, or the one that holds the lock does not listen.
    """
    if answers(settings.socket):
        return False
    try:
        spawn(settings, background=True)
    except AlreadyRunning as busy:
        deadline = time.monotonic() + limits.START_TIMEOUT_S
        while not answers(settings.socket):
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"another provider holds {lock_path(settings.socket)} but does not listen",
                    remedy="end it, or give another place with --socket",
                ) from busy
            time.sleep(_POLL_S)
        return False
    return True


def differing(control: ControlConnection, settings: ProviderSettings, options: Sequence[str]) -> list[str]:
    """Options, of these, for which the provider that answers has other settings.

    Raises:
        Unavailable: It does not answer, or is of a version that does not tell.
    """
    running = control.document("settings")["arguments"]
    wanted = settings.arguments()
    return [option for option in options if _values(option, running) != _values(option, wanted)]


def _values(option: str, arguments: Sequence[str]) -> list[str]:
    return [one for one in arguments if one.partition("=")[0] == option]


def stop(path: Path) -> int:
    """Stops the provider at `path` and waits until it has gone; returns its pid.

    Raises:
        Unavailable: There is none, or it does not go.
    """
    with ControlConnection(path) as connection:
        pid = int(connection.status()["pid"])
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return pid
        try:
            connection.request("stop")[1].close()
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not poller.poll(limits.STOP_TIMEOUT_S * 1000):
                raise Unavailable(
                    f"provider {pid} does not stop", remedy=f"end it with 'kill -9 {pid}'; nothing is lost"
                )
        finally:
            os.close(pidfd)
    return pid


def _read_until_end(fd: int, *, deadline: float) -> bytes:
    """Reads a pipe until it is closed or the time is up."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    found = b""
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(fd, 4096)
        if not piece:
            break
        found += piece
    return found
