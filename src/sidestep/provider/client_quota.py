"""Quotas of users: their clients, and descriptors that were sent to these and not received.

The kernel charges descriptors in flight to their sender, here the provider, for all its clients together. It lets a
user have RLIMIT_NOFILE of them. A client keeps them in flight as long as it lives and does not read, even after it was
dropped. So each user has a share, and a dropped client counts until its queue is empty.
"""

from __future__ import annotations

import errno
import resource
import socket
import termios
from collections import Counter
from collections.abc import Callable
from fcntl import ioctl

from sidestep.provider.clients import Client


class ClientQuota:
    """The clients of all users."""

    def __init__(self, share: Callable[[int, int], int], clients_max: int) -> None:
        """`share` returns how much of so many things a user may have."""
        self._share = share
        self._clients_max = clients_max
        self._descriptors_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._clients: Counter[int] = Counter()  # clients by user; those that left something unread among them
        self._sent: dict[int, dict[socket.socket, int]] = {}  # descriptors by user, since all was read
        self._left: set[socket.socket] = set()  # sockets of dropped clients

    def full(self, uid: int) -> bool:
        """True if this user, or all together, can have no more clients."""
        if self._crowded(uid):
            for user in list(self._sent):
                self._look(user)
        return self._crowded(uid)

    def enter(self, uid: int) -> None:
        """A client of this user has come."""
        self._clients[uid] += 1

    def count(self, client: Client, descriptors: int) -> None:
        """Counts descriptors about to be sent; OSError (ETOOMANYREFS), as from the kernel, if they are too many."""
        if not descriptors:
            return
        sent = self._sent.setdefault(client.uid, {})
        sent[client.sock] = descriptors + (sent.get(client.sock, 0) if _unread(client.sock) else 0)
        share = self._share(self._descriptors_max, client.uid)
        if sum(sent.values()) > share:
            self._look(client.uid, but=client.sock)
        if sum(sent.values()) > share:
            raise OSError(errno.ETOOMANYREFS, "too many descriptors are on their way to this user")

    def leave(self, client: Client) -> None:
        """Ends a client's connection."""
        if client.sock in self._sent.get(client.uid, ()):
            client.sock.shutdown(socket.SHUT_RDWR)
            self._left.add(client.sock)
            self._look(client.uid)
        else:
            client.sock.close()
            self._forget(client.uid)

    def close(self) -> None:
        """Gives up what dropped clients have not read."""
        for sock in self._left:
            sock.close()

    def _crowded(self, uid: int) -> bool:
        return (
            self._clients.total() >= self._clients_max
            or self._clients[uid] >= self._share(self._clients_max, uid)
        )  # fmt: skip

    def _look(self, uid: int, *, but: socket.socket | None = None) -> None:
        """Finds the user's clients that have read all, and forgets their descriptors."""
        sent = self._sent[uid]
        for sock in [one for one in sent if one is not but and not _unread(one)]:
            del sent[sock]
            if sock in self._left:
                self._left.remove(sock)
                sock.close()
                self._forget(uid)
        if not sent:
            del self._sent[uid]

    def _forget(self, uid: int) -> None:
        self._clients[uid] -= 1
        if not self._clients[uid]:
            del self._clients[uid]


def _unread(sock: socket.socket) -> bool:
    """True if the other end has not taken all that was sent."""
    return any(ioctl(sock, termios.TIOCOUTQ, bytes(4)))
