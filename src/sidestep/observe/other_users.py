"""Programs of other users, which a user's own provider leaves out: their names, and the remedy."""

from __future__ import annotations

import os
import pwd
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from sidestep.provider.proof.lookup import endpoint_of, mapped_address
from sidestep.switch.protocol import Endpoint

_UNITS: Final = (Path("/etc/systemd/system/sidestep.socket"), Path("/usr/lib/systemd/system/sidestep.socket"))
_LISTEN: Final = "0A"  # TCP_LISTEN
_SYSTEM_UID_MAX: Final = 999  # highest user of services, as Debian and Fedora number them


class OwnedSocket(NamedTuple):
    """A TCP socket of this network namespace, as the kernel shows it to everybody."""

    local: Endpoint
    remote: Endpoint
    listens: bool
    uid: int


def remedy() -> str:
    """The command that starts a provider for all users."""
    service = any(unit.exists() for unit in _UNITS)
    command = "systemctl enable --now sidestep.socket" if service else "sidestep provider start --system"
    return f"one provider for all users, as root: {command}"


def left_out(uid: int, socket_path: Path) -> bool:
    """True if the provider at `socket_path`, or the one that would be there, does not serve that user's programs."""
    return not _serves_all(socket_path) and uid != owner(socket_path)


def owner(socket_path: Path) -> int:
    """The user whose provider is at `socket_path`, or would be."""
    try:
        return socket_path.parent.stat().st_uid
    except OSError:
        return os.geteuid()


def _serves_all(socket_path: Path) -> bool:
    """The provider lets everybody connect: so says the mode of its socket."""
    try:
        return bool(socket_path.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


def name(uid: int) -> str:
    """Name of a user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def warning(socket_path: Path) -> str | None:
    """Warning to root, and to a service's user, before a program starts: its peers often belong to others."""
    uid = os.getuid()
    if uid > _SYSTEM_UID_MAX or _serves_all(socket_path):
        return None
    return f"only programs of {name(uid)} are paired, not what becomes, or connects as, another user; {remedy()}"


def sockets() -> Iterator[OwnedSocket]:
    """TCP sockets that a process holds."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text(encoding="utf-8").splitlines()[1:]
        except OSError:  # a host without IPv6 has no such table
            continue
        for line in lines:
            _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
            if inode != "0":  # else its process has gone
                yield OwnedSocket(_endpoint(local), _endpoint(remote), state == _LISTEN, int(uid))


def _endpoint(text: str) -> Endpoint:
    """An address as the kernel prints it: words of the machine's byte order, in hexadecimal."""
    host, _, port = text.partition(":")
    address = b"".join(int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8))
    return endpoint_of(address if len(address) == 16 else mapped_address("0.0.0.0")[:12] + address, int(port, 16))  # noqa: S104
