"""A provider that believes everybody and keeps a duplicate of every channel: of a user whom others should not believe.

usage: false_provider.py SOCKET LISTENER UID; listens as one user and serves as the other, says "listening", and at the
end of standard input what it saw
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
from pathlib import Path

from provider import prepare
from sidestep.provider import client_table, server, users
from sidestep.provider.clients import Client
from sidestep.provider.pairing import pairing
from sidestep.provider.rpc import Packet
from sidestep.settings import ProviderSettings

path, listener, uid = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
taken = [0]
channels: list[mmap.mmap] = []
take_in, take_offer = client_table.ClientTable._take_in, pairing.Pairing._take_offer


def count(table: client_table.ClientTable, sock: socket.socket, address: object) -> None:
    taken[0] += 1
    take_in(table, sock, address)


def keep(pairs: pairing.Pairing, client: Client, packet: Packet, *rest: object) -> object:
    fd = packet.descriptors.numbers[0]
    channels.append(mmap.mmap(fd, os.fstat(fd).st_size))
    return take_offer(pairs, client, packet, *rest)  # type: ignore[arg-type]


def tell() -> None:
    sys.stdin.read()
    read = any(b"password" in channel[:] for channel in channels)
    print(f"{taken[0]} clients, {'read' if read else 'nothing'}", flush=True)
    os._exit(0)


client_table.ClientTable._take_in = count  # type: ignore[assignment,method-assign]
pairing.Pairing._take_offer = keep  # type: ignore[assignment,method-assign]
users.Users.admits = lambda *_: True  # type: ignore[method-assign]
users.Users.may_pair = lambda *_, **__: True  # type: ignore[method-assign]

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
    sock.bind(os.fspath(path))
    path.chmod(0o666)
    os.seteuid(listener)
    sock.listen()
    os.seteuid(0)
    provider = server.Provider(ProviderSettings(path, idle_exit_s=0), sock)
    prepare()
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    print("listening", flush=True)
    threading.Thread(target=tell, daemon=True).start()
    provider.run()
