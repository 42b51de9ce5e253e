"""RDMA devices of other processes: their own reports, and the processes. See `sidestep.rdma.control`.

A process's report is believed no further than it must be: sizes are bounded, and words are printed with care.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidestep import config, limits
from sidestep.errors import PeerViolation, Unavailable
from sidestep.rdma.control import PACKET_MAX, decode
from sidestep.rdma.iwarp.tap import Seen


@dataclass(slots=True)
class DeviceView:
    """One device of a process; its fields are names of `sidestep rdma list --json`."""

    name: str
    address: str
    listening: list[int]
    counters: dict[str, int]
    queue_pairs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class ProcessView:
    """A process that has devices; likewise."""

    pid: int
    uid: int
    program: str
    devices: list[DeviceView] = field(default_factory=list)


def directories() -> list[tuple[Path, int]]:
    """Directories of sockets, and the users that must own them: this user, and for root all."""
    found = {config.rdma_dir(): os.geteuid()}
    if os.geteuid() == 0:
        shared = (parent for place in config.SHARED_PLACES for parent in place.glob("sidestep-*"))  # owners are checked
        for parent in (*Path("/run/user").glob("*/sidestep"), *shared):
            uid = (parent.parent.name if parent.name == "sidestep" else parent.name.split("-")[1]) or "-"
            if uid.isascii() and uid.isdigit():
                found.setdefault(parent / "rdma", int(uid))
        with contextlib.suppress(KeyError):
            found.setdefault(config.SYSTEM_RUNTIME / "sidestep" / "rdma", pwd.getpwnam(config.SYSTEM_USER).pw_uid)
    return list(found.items())


def sockets() -> Iterator[tuple[Path, int]]:
    """Sockets of processes with devices, and the users that must own them."""
    for directory, uid in directories():
        try:
            whole = directory.lstat()
            if stat.S_ISDIR(whole.st_mode) and whole.st_uid == uid:
                yield from ((path, uid) for path in sorted(directory.iterdir()) if not path.name.startswith("."))
        except OSError:  # there is none, or it is not ours to look at
            continue


class DeviceClient:
    """A connection to one process, to be closed."""

    def __init__(self, path: Path, uid: int) -> None:
        """Raises Unavailable if no process listens there, or one of another user."""
        self._path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._sock.settimeout(limits.RDMA_ASK_S)
        try:
            self._sock.connect(os.fspath(path))
        except OSError as error:
            self._sock.close()
            raise Unavailable(f"nobody answers at {path}: {error.strerror}") from error
        self.pid, self.uid = config.peer(self._sock)
        if self.uid not in (uid, 0):
            self._sock.close()
            raise Unavailable(f"{path} is served by uid {self.uid}")

    def close(self) -> None:
        self._sock.close()

    def fileno(self) -> int:
        """Descriptor that is readable when something was seen, once `capture` was asked."""
        return self._sock.fileno()

    def send(self, question: dict[str, Any]) -> None:
        try:
            self._sock.send(json.dumps(question).encode())
        except OSError as error:
            raise self._gone(error) from error

    def receive(self) -> bytes:
        """A packet; raises Unavailable at the end."""
        try:
            packet = self._sock.recv(PACKET_MAX)
        except OSError as error:
            raise self._gone(error) from error
        if not packet:
            raise Unavailable(f"process {self.pid} has gone, or turns others away")
        return packet

    def document(self) -> dict[str, Any]:
        try:
            found = json.loads(self.receive())
        except (ValueError, RecursionError) as error:
            raise Unavailable(f"process {self.pid} answers what cannot be read") from error
        if not isinstance(found, dict):
            raise Unavailable(f"process {self.pid} answers what cannot be read")
        return found

    def capture(self, device: str | None, place: tuple[str, int | None] | None) -> int:
        """Asks to see what passes; how many devices that is about."""
        address, port = place if place is not None else (None, None)
        self.send({"op": "capture", "device": device, "address": address, "port": port})
        devices = self.document().get("devices")
        return len(devices) if isinstance(devices, list) else 0

    def leave_out(self, wire: int) -> None:
        """Wants to see nothing more of a connection; raises Unavailable."""
        self.send({"op": "leave_out", "wire": wire})

    def stop(self) -> None:
        """Wants to see what has passed until now, then the end; raises Unavailable."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise self._gone(error) from error

    def seen_now(self) -> Seen | None:
        """The next thing that was seen; None if there is nothing at the moment. Raises Unavailable at the end."""
        try:
            # recv() of a socket with a time-out waits for that, whatever its flags; its descriptor does not block
            packet = os.read(self._sock.fileno(), PACKET_MAX)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._gone(error) from error
        if not packet:
            raise Unavailable(f"process {self.pid} has gone")
        try:
            return decode(packet)
        except PeerViolation as error:
            raise Unavailable(f"process {self.pid} tells what cannot be read: {error.message}") from error

    def _gone(self, error: OSError) -> Unavailable:
        return Unavailable(f"process {self.pid} does not answer: {error.strerror or 'timeout'}")


def look(path: Path, uid: int) -> ProcessView:
    """One process; raises Unavailable."""
    with contextlib.closing(DeviceClient(path, uid)) as asked:
        asked.send({"op": "list"})
        process = ProcessView(asked.pid, asked.uid, "")
        until, length = time.monotonic() + limits.RDMA_ASK_S, 0
        try:
            while "end" not in (document := asked.document()):
                length += 256
                if length > limits.RDMA_ANSWER_MAX or time.monotonic() > until:
                    raise Unavailable(f"process {asked.pid} does not come to an end")
                if "process" in document:
                    process.program = str(document["process"]["program"])
                elif "device" in document:
                    found = document["device"]
                    ports, counters = [int(port) for port in found["listening"]], dict(found["counters"])
                    process.devices.append(DeviceView(str(found["name"]), str(found["address"]), ports, counters))
                elif "queue_pair" in document:
                    process.devices[-1].queue_pairs.append(dict(document["queue_pair"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Unavailable(f"process {asked.pid} answers what cannot be read") from error
        return process


def processes(pids: set[int] | None = None) -> list[ProcessView]:
    """All processes that answer; with `pids` only these are asked."""
    found = []
    for path, uid in sockets():
        if pids is not None and path.name.partition("-")[0] not in map(str, pids):
            continue
        try:
            found.append(look(path, uid))
        except Unavailable:  # it has gone meanwhile
            continue
    return sorted(found, key=lambda process: process.pid)
