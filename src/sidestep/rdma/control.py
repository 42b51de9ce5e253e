"""What other processes may ask of the RDMA devices of this one: what they are and do, and to see what passes.

    control = Control(loop, [device], "sidestep rdma server")     # a socket in config.rdma_dir(), until `close`

Each process of ours that has a device offers a UNIX socket (SOCK_SEQPACKET, mode 0600, in a directory of mode 0700),
and answers root and its own user, as the kernel tells who connects. A question is a packet of JSON:

    {"op": "list"}                     a packet of JSON for the process, each device, each queue pair; {"end": true}
    {"op": "capture", "device": NAME,  a packet of JSON, then one for each thing that is seen: `encode`
     "address": HOST, "port": PORT}    (all three may be left out, or null: any)
    {"op": "leave_out", "wire": N}     of a capture: nothing more of that connection; no answer

Whoever has asked enough shuts his direction down, and reads what was seen until then, up to the end.

This is not the provider's RPC (`sidestep.provider.rpc`): that carries the shim's fixed records and descriptors, and a
device must not need a provider.

Nobody who asks can stop a device: answers wait in bounded memory, and what a slow capture cannot take is dropped and
counted. Whoever drives the loop answers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, Protocol

from sidestep import config, limits
from sidestep.accepting import Acceptor
from sidestep.errors import Misuse, PeerViolation, Unavailable
from sidestep.loop import READ, WRITE
from sidestep.rdma.iwarp.tap import Seen, SeenKind, Speech, WireEnds

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.rdma.iwarp.tap import Taps

_HEADER: Final = Struct("!BBQQQQ")  # what, outbound, wire, time, offset, acknowledged
_HEADER_AT_MOST: Final = _HEADER.size + 4096
PACKET_MAX: Final = limits.RDMA_PIECE_MAX + _HEADER_AT_MOST
_PATH_MAX: Final = 107  # bytes of struct sockaddr_un, but for the final zero
_numbers = count(1)


# ---- what a capture is told ----


def encode(seen: Seen) -> bytes:
    data = seen.data
    if seen.ends is not None:
        ends = seen.ends
        told = [ends.local, ends.remote, ends.active, ends.device, ends.began_before, ends.speaks.value]
        data = json.dumps(told).encode()
    return _HEADER.pack(seen.what, seen.outbound, seen.wire, seen.time_ns, seen.offset, seen.acknowledged) + data


def decode(packet: bytes) -> Seen:
    """What `encode` made; raises PeerViolation."""
    if len(packet) < _HEADER.size:
        raise PeerViolation(f"a packet of {len(packet)} bytes", rule="malformed")
    what, outbound, wire, time_ns, offset, acknowledged = _HEADER.unpack_from(packet)
    data, ends = packet[_HEADER.size :], None
    try:
        kind = SeenKind(what)
        if kind is SeenKind.OPENED:
            (here, here_port), (there, there_port), active, device, before, speaks = json.loads(data)
            data, local, remote = b"", (str(here), int(here_port)), (str(there), int(there_port))
            ends = WireEnds(local, remote, bool(active), str(device), bool(before), Speech(speaks))
    except (ValueError, TypeError) as error:
        raise PeerViolation(f"a packet that cannot be read: {error}", rule="malformed") from error
    return Seen(kind, wire, time_ns, bool(outbound), offset, acknowledged, data, ends)


def in_pieces(seen: Seen) -> Iterator[Seen]:
    if len(seen.data) <= limits.RDMA_PIECE_MAX:
        yield seen
        return
    for at in range(0, len(seen.data), limits.RDMA_PIECE_MAX):
        piece = seen.data[at : at + limits.RDMA_PIECE_MAX]
        yield Seen(seen.what, seen.wire, seen.time_ns, seen.outbound, seen.offset + at, seen.acknowledged, piece)


class Observed(Protocol):
    """A device, as far as others may ask about it."""

    name: str
    address: str

    @property
    def taps(self) -> Taps | None:
        """None: what passes cannot be seen."""

    def listening(self) -> list[int]: ...
    def counters(self) -> dict[str, int]: ...
    def queue_pairs(self) -> list[dict[str, object]]: ...


class CaptureFilter:
    """Which connections a capture is about."""

    def __init__(self, address: str | None, port: int | None, devices: Sequence[Observed]) -> None:
        self._address, self._port = address, port
        self._devices = devices
        self._left_out_max = limits.RDMA_LEFT_OUT_MAX
        self.left_out: set[int] = set()

    def __call__(self, seen: Seen) -> bool:
        if seen.ends is not None and not self._fits(seen.ends):
            self.leave_out(seen.wire)
        return seen.wire not in self.left_out

    def leave_out(self, wire: int) -> None:
        self.left_out.add(wire)
        if len(self.left_out) > self._left_out_max:
            self._forget_closed()

    def _forget_closed(self) -> None:
        taps = [device.taps for device in self._devices if device.taps is not None]
        self.left_out &= {wire.number for each in taps for wire in each.wires}
        self._left_out_max = max(limits.RDMA_LEFT_OUT_MAX, 2 * len(self.left_out))

    def _fits(self, ends: WireEnds) -> bool:
        """One end has both: the address, if any is wanted, and the port."""
        return any(
            (self._address is None or address.partition("%")[0] == self._address)
            and (self._port is None or port == self._port)
            for address, port in (ends.local, ends.remote)
        )


# ---- the process that has devices ----


class Control:
    """The socket of this process, for some of its devices."""

    def __init__(self, loop: Loop, devices: Sequence[Observed], title: str, directory: Path | None = None) -> None:
        """Listens.

        Raises:
            Unavailable: There is no place for the socket.
            Misuse: Its path is too long.
        """
        self._loop = loop
        self.devices = list(devices)
        self.title = title
        self._clients: set[_Client] = set()
        self.refused_count = 0  # of other users, or too many
        if directory is None:
            config.make_private_dir(config.runtime_dir())
            directory = config.rdma_dir()
        config.make_private_dir(directory)
        _sweep(directory)
        self.path = directory / f"{os.getpid()}-{next(_numbers)}"
        hidden = directory / f".{self.path.name}"
        if len(os.fsencode(hidden)) > _PATH_MAX:
            raise Misuse(f"{self.path} is too long for a socket", remedy="set XDG_RUNTIME_DIR to a shorter path")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            # It gets its name once it listens: until then others would take it for left over, and sweep it away.
            hidden.unlink(missing_ok=True)  # left by a process that had this number
            self._sock.bind(os.fspath(hidden))
            hidden.chmod(0o600)
            self._sock.listen(limits.RDMA_WATCHERS_MAX)
            hidden.rename(self.path)
        except OSError as error:
            self._sock.close()
            with contextlib.suppress(OSError):
                hidden.unlink()
            raise Unavailable(f"cannot listen at {self.path}: {error.strerror}") from error
        self._acceptor = Acceptor(loop, self._sock, self._take_in)

    def close(self) -> None:
        """Nobody can ask any more. Calling it again does nothing."""
        if self._sock.fileno() < 0:
            return
        for client in list(self._clients):
            client.close()
        self._acceptor.close()
        self.path.unlink(missing_ok=True)

    def forget(self, client: _Client) -> None:
        self._clients.discard(client)

    def _take_in(self, sock: socket.socket, _address: object) -> None:
        _, uid = config.peer(sock)
        if uid not in (0, os.geteuid()) or len(self._clients) >= limits.RDMA_WATCHERS_MAX:
            self.refused_count += 1
            sock.close()
            return
        sock.setblocking(False)
        self._clients.add(_Client(self, self._loop, sock))


class _Client:
    """Somebody who asks."""

    def __init__(self, control: Control, loop: Loop, sock: socket.socket) -> None:
        self._control = control
        self._loop = loop
        self._sock = sock
        self._waiting: deque[bytes] = deque()
        self._waiting_len = 0
        self._lost = 0  # things of a capture that had no room
        self._asked_all = False  # by his own word
        self._wanted: CaptureFilter | None = None
        self._tapped: list[Taps] = []
        self._watched = 0
        self._watch()

    def close(self) -> None:
        self._untap()
        if self._sock.fileno() >= 0:
            self._loop.forget(self._sock.fileno())
            self._sock.close()
        self._control.forget(self)

    def _untap(self) -> None:
        for taps in self._tapped:
            taps.remove(self._see)
        self._tapped.clear()

    # --- questions ---

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & ~WRITE and self._sock.fileno() >= 0:
            self._read()

    def _read(self) -> None:
        try:
            packet = self._sock.recv(limits.RDMA_ASK_MAX + 1)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._untap()
            self._asked_all = True
            self._flush()
            return
        if len(packet) > limits.RDMA_ASK_MAX:
            self.close()
            return
        try:
            asked = json.loads(packet)
            answers = {"list": self._list, "capture": self._capture, "leave_out": self._leave_out}
            answer = answers[asked["op"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            self.close()
            return
        answer(asked)
        self._flush()

    def _list(self, asked: dict[str, Any]) -> None:
        del asked
        self._tell({"process": {"pid": os.getpid(), "program": self._control.title}})
        for device in self._control.devices:
            found = {"name": device.name, "address": device.address, "listening": device.listening()}
            self._tell({"device": found | {"counters": device.counters()}})
            for queue_pair in device.queue_pairs():
                self._tell({"queue_pair": queue_pair})
        self._tell({"end": True})

    def _capture(self, asked: dict[str, Any]) -> None:
        name, address, port = asked.get("device"), asked.get("address"), asked.get("port")
        devices = [each for each in self._control.devices if name in (None, each.name) and each.taps is not None]
        self._tell({"devices": [device.name for device in devices], "pid": os.getpid()})
        if self._tapped or not (isinstance(address, str | None) and isinstance(port, int | None)):
            self.close()
            return
        self._wanted = CaptureFilter(address, port, devices)
        for device in devices:
            assert device.taps is not None  # as looked for
            self._tapped.append(device.taps)
            device.taps.add(self._see)

    def _leave_out(self, asked: dict[str, Any]) -> None:
        wire = asked.get("wire")
        if self._wanted is None or type(wire) is not int:
            self.close()
        else:
            self._wanted.leave_out(wire)

    # --- answers ---

    def _tell(self, document: dict[str, object]) -> None:
        packet = json.dumps(document).encode()
        if self._waiting_len + len(packet) > limits.RDMA_ANSWER_MAX:
            return  # whoever asks again and again and reads nothing
        self._put(packet)

    def _see(self, seen: Seen) -> None:
        assert self._wanted is not None
        if not self._wanted(seen):
            return
        for piece in in_pieces(seen):
            # Once something is lost, one long gap is better than many: nothing is kept before half of the room is free.
            room = limits.RDMA_CAPTURE_WAITING_MAX // (2 if self._lost else 1)
            if self._waiting_len + len(piece.data) > room:
                self._lost += 1
            else:
                self._tell_lost(seen.time_ns)
                self._put(encode(piece))
        self._loop.soon(self._flush)

    def _tell_lost(self, time_ns: int) -> None:
        if self._lost:
            self._put(encode(Seen(SeenKind.LOST, 0, time_ns, offset=self._lost)))
            self._lost = 0

    def _put(self, packet: bytes) -> None:
        self._waiting.append(packet)
        self._waiting_len += len(packet)

    def _flush(self) -> None:
        if self._sock.fileno() < 0:
            return
        while self._waiting or self._lost:
            if not self._waiting:
                self._tell_lost(time.time_ns())
            try:
                self._sock.send(self._waiting[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            self._waiting_len -= len(self._waiting.popleft())
        if self._asked_all and not self._waiting:
            self.close()
        else:
            self._watch()

    def _watch(self) -> None:
        events = (0 if self._asked_all else READ) | (WRITE if self._waiting else 0)
        if events != self._watched:
            self._watched = events
            self._loop.watch(self._sock.fileno(), events, self._on_ready)


def _sweep(directory: Path) -> None:
    """Takes away what processes left that were killed: nobody listens there."""
    for path in directory.iterdir():
        if path.name.startswith(".") and Path("/proc", path.name[1:].partition("-")[0]).exists():
            continue  # it is about to listen
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
            if path.is_socket() and probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED:
                with contextlib.suppress(OSError):
                    path.unlink()
