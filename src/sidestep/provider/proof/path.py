"""Proof of the path: packets from one end's network namespace to the other end's address arrive there.

Two sockets in different namespaces may show the same four addresses and ports and have nothing to do with each other.
So each end brings, beside the duplicate of its TCP socket, a UDP socket of the same namespace, bound to the address of
the connection. The provider sends a nonce from each to the other. If both arrive from the right address, the two
namespaces are each other's way to these addresses. A process on that way could take the connection itself.

Not covered: a process in one true end's namespace that may bind UDP ports there and owns a namespace with the same
addresses. The page docs/internals/security.md says what keeps it out.

Nothing is waited for: arrivals come through the provider's loop, and a proof that is not there in time has failed.
"""

from __future__ import annotations

import errno
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Final

from sidestep import limits
from sidestep.errors import LimitReached, PeerViolation
from sidestep.loop import Loop
from sidestep.provider.proof import duplicate as possession
from sidestep.provider.proof import lookup as proof
from sidestep.routing import plain_address

_NONCE_LEN: Final = 16
_READS_PER_TURN: Final = 32


@dataclass(slots=True, eq=False)
class Way:
    """One end's UDP socket, and the nonces that are expected there."""

    sock: socket.socket
    host: str
    port: int
    expected: dict[bytes, Proof] = field(default_factory=dict)
    loop: Loop | None = None  # that watches the socket; None: nothing is expected

    @classmethod
    def take(cls, fd: int, *, netns_cookie: int, address: bytes) -> Way:
        """Checks the descriptor and owns it from now on.

        Raises:
            PeerViolation: It is not an unconnected UDP socket of that namespace, bound to that address and a port.
        """
        sock = possession.as_socket(fd, "UDP socket")
        host = plain_address(IPv6Address(address))
        family = socket.AF_INET if host.version == 4 else socket.AF_INET6
        try:
            if (sock.family, sock.type, sock.proto) != (family, socket.SOCK_DGRAM, socket.IPPROTO_UDP):
                raise PeerViolation("the UDP socket is something else", rule="descriptor")
            if proof.netns_cookie_of(sock) != netns_cookie:
                raise PeerViolation("the UDP socket is of another network namespace", rule="descriptor")
            name = sock.getsockname()
            if proof.mapped_address(name[0]) != address or not name[1]:
                raise PeerViolation("the UDP socket is not bound to the connection's address", rule="descriptor")
            if possession.bound_to_interface(sock) or _connected(sock):
                raise PeerViolation("the UDP socket is bound to an interface or connected", rule="descriptor")
        except BaseException:
            sock.close()
            raise
        return cls(sock, str(host), name[1])

    def expect(self, nonce: bytes, waiting: Proof, loop: Loop) -> None:
        """Calls `waiting` from now on when `nonce` arrives."""
        if self.loop is None:
            loop.on_readable(self.sock.fileno(), self._read)
            self.loop = loop
        self.expected[nonce] = waiting

    def forget(self, nonce: bytes) -> None:
        """Expects `nonce` no longer."""
        self.expected.pop(nonce, None)
        if not self.expected and self.loop is not None:
            self.loop.forget(self.sock.fileno())
            self.loop = None

    def close(self) -> None:
        """Closes the socket; proofs that need it run into their deadline."""
        for nonce in list(self.expected):
            self.forget(nonce)
        self.sock.close()

    def _read(self) -> None:
        for _ in range(_READS_PER_TURN):
            try:
                data, source = self.sock.recvfrom(_NONCE_LEN + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:  # an earlier datagram's error, from the network; the next read goes on
                if error.errno in (errno.EBADF, errno.ENOTSOCK):
                    raise
                continue
            waiting = self.expected.get(data)
            if waiting is not None:
                waiting.handle_arrival(data, source[0], source[1])
            if self.loop is None:
                return


@dataclass(slots=True, eq=False)
class Proof:
    """Two nonces under way between two ends."""

    uid: int  # id of the client that asked for it
    on_done: Callable[[bool], None]
    missing: dict[bytes, tuple[Way, Way]]  # nonce -> from, to
    finish: Callable[[Proof], None]
    done: bool = False

    def handle_arrival(self, nonce: bytes, host: str, port: int) -> None:
        """A nonce arrived where it was expected."""
        source, target = self.missing[nonce]
        if (proof.mapped_address(host), port) != (proof.mapped_address(source.host), source.port):
            return
        target.forget(nonce)
        del self.missing[nonce]
        if not self.missing:
            self.end(True)

    def end(self, proven: bool) -> None:
        """Reports the outcome, once."""
        if self.done:
            return
        self.done = True
        for nonce, (_, target) in self.missing.items():
            target.forget(nonce)
        self.missing.clear()
        self.finish(self)
        self.on_done(proven)


class PathProofs:
    """All proofs under way in one provider."""

    def __init__(self, loop: Loop, *, pending_max: int = limits.PATH_PROOFS_MAX) -> None:
        self._loop = loop
        self._pending_max = pending_max
        self._of_user: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._of_user.total()

    def start(self, one: Way, other: Way, *, uid: int, on_done: Callable[[bool], None]) -> Proof:
        """Sends a nonce each way; `on_done` is called later with whether both arrived in time.

        Raises:
            LimitReached: Too many proofs are under way, of this user or of all.
        """
        if len(self) >= self._pending_max or self._of_user[uid] >= limits.PATH_PROOFS_PER_USER_MAX:
            raise LimitReached("too many proofs are under way")
        nonces = secrets.token_bytes(_NONCE_LEN), secrets.token_bytes(_NONCE_LEN)
        started = Proof(uid, on_done, {nonces[0]: (one, other), nonces[1]: (other, one)}, self._finish)
        self._loop.call_later(limits.PATH_PROOF_S, lambda: started.end(False))
        self._of_user[uid] += 1
        for nonce, (source, target) in list(started.missing.items()):
            target.expect(nonce, started, self._loop)
            with suppress(OSError):  # the deadline ends it, as silence: the client must learn nothing of the network
                source.sock.sendto(nonce, socket.MSG_DONTWAIT, (target.host, target.port))
        return started

    def _finish(self, ended: Proof) -> None:
        self._of_user[ended.uid] -= 1
        if not self._of_user[ended.uid]:
            del self._of_user[ended.uid]


def _connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return False
    return True
