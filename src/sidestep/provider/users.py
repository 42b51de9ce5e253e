"""Rules among the users of one provider: ends that may be paired, and requests that a client may make.

The user is the one that connected, as the kernel saw it then (SO_PEERCRED). Two ends are paired if they are one user's,
or if the policy pairs their users. They are also paired if one of them belongs to a server that root started and that
has dropped its privileges since.

A server is known as root's by its first message, made before it dropped anything: its process family shares one arena.
An exec ends the family's memory, not the process. So root's processes are followed by pidfd, which names a process and
not a number that another one may have next.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

from sidestep import limits
from sidestep.loop import Loop
from sidestep.policy import Subject
from sidestep.provider.clients import Arena, Client

ROOT: Final = 0
_SO_PEERPIDFD: Final = 77  # Linux 6.5
_ALL_USERS: Final = (0, 0, (1 << 32) - 1)  # the uid_map of the first user namespace


class Users:
    """Rights of the users of a provider, towards each other and towards it."""

    def __init__(self, *, system: bool, policy: Callable[[Subject, Subject], bool]) -> None:
        """`policy` returns whether it pairs two users."""
        self._system = system
        self._own = os.geteuid()
        self._policy_pairs = policy
        self._nobody = _unknown_uid()

    def admits(self, uid: int) -> bool:
        """True if a user may connect at all."""
        return self._system or uid in (self._own, ROOT)

    def may_pair(self, one: Client, other: Client, *, across: bool) -> bool:
        """True if the ends of these two may share a channel; `across`: they are in different network namespaces."""
        if one.uid == other.uid:
            return one.uid != self._nobody
        if not self._system:
            return True  # the user's own, and root, which was admitted
        # Across namespaces the proof excludes strangers, not a process beside one of the ends (path.py): there the
        # user decides, or the administrator.
        if not across and (_from_root(one) or _from_root(other)):
            return True
        return self._policy_pairs(one.subject, other.subject)

    def governs(self, client: Client) -> bool:
        """True if a client may stop the provider and change what it does."""
        return self.sees_all(client) or client.uid == self._own != ROOT

    def sees_all(self, client: Client) -> bool:
        """True if a client may look at everything: root, but not that of a container."""
        return not self._system or (client.uid == ROOT and client.at_home)

    def sees(self, client: Client, arena: Arena) -> bool:
        """True if a client may look into a family's connections."""
        return self.sees_user(client, arena.uid)

    def sees_user(self, client: Client, uid: int) -> bool:
        """True if a client may see the records of a user's connections."""
        return self.sees_all(client) or (client.uid == uid and uid not in (ROOT, self._nobody))

    def share(self, whole: int, uid: int) -> int:
        """Part of a bounded thing that one user may have."""
        if not self._system or uid in (self._own, ROOT):
            return whole
        return max(1, whole // limits.USER_SHARE)


class Lineage:
    """The live processes that were root's when they became known, whatever their user is now."""

    def __init__(self, loop: Loop, *, processes_max: int = limits.LINEAGE_MAX) -> None:
        self._loop = loop
        self._processes_max = processes_max
        self._pidfds: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pidfds)

    def __contains__(self, client: Client) -> bool:
        known = self._pidfds.get(client.pid)
        if known is None or _ended(known) or (pidfd := _process(client)) is None:
            return False
        os.close(pidfd)
        return True  # both live, so the number that they have in common is one process's

    def remember(self, client: Client) -> None:
        """Remembers a process as root's, also after an exec."""
        if client.pid <= 0 or client in self or (pidfd := _process(client)) is None:
            return  # 0: in a pid namespace that we do not see
        if client.pid in self._pidfds:
            self._forget(client.pid)  # that process has ended, and its number is another's
        if len(self._pidfds) >= self._processes_max:
            self._forget(next(iter(self._pidfds)))
        self._pidfds[client.pid] = pidfd
        self._loop.on_readable(pidfd, lambda: self._forget(client.pid))  # readable: it has ended

    def close(self) -> None:
        for pid in list(self._pidfds):
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        self._loop.forget(pidfd)
        os.close(pidfd)


def in_container(client: Client) -> bool:
    """True if it is in a pid namespace of its own; False where the kernel, older than 6.5, does not show that."""
    if not _tells_processes():
        return False
    if (pidfd := _process(client)) is None:
        return True  # the process has ended: its namespace is unknown
    try:
        facts = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines()
    finally:
        os.close(pidfd)
    return not any(re.fullmatch(r"NSpid:\t[1-9]\d*", fact) for fact in facts)  # numbers in each namespace, ours first


@cache
def _tells_processes() -> bool:
    one, other = socket.socketpair()
    with one, other:
        try:
            os.close(one.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            return False
    return True


def _process(client: Client) -> int | None:
    """A pidfd of the very process that connected, which its number alone does not name; None: it has gone.

    Or the kernel is older than 6.5: not known is not trusted.
    """
    try:
        pidfd: int = client.sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.ESRCH, errno.EINVAL, errno.ENODATA):
            raise
        return None
    if _ended(pidfd):
        os.close(pidfd)
        return None
    return pidfd


def _ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _from_root(client: Client) -> bool:
    return client.uid == ROOT or (client.arena is not None and client.arena.from_root)


def _unknown_uid() -> int:
    """The uid as which all users without one in our user namespace appear; -1 where every user has one."""
    fields = tuple(map(int, Path("/proc/self/uid_map").read_text(encoding="ascii").split()))
    if fields == _ALL_USERS:
        return -1
    return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
