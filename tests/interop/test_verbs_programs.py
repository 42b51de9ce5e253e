"""Programs with forks, epoll and files of their own, over the kernel's rxe: redis with persistence, nginx with workers.

The server is in a guest, whose provider has the transport `verbs`. Its client is on this machine, with `roce`.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from lab_guest import Lab
from test_verbs_hosts import Peer, in_guest, on_this_machine

_PLACE: Final = "/run/programs"  # in the guest
_OF_THE_GUEST: Final = ("libc.so", "libm.so", "ld-linux")  # and of its loader, so not to be replaced
_DATA: Final = random.Random(7).randbytes(1_500_000)
_NGINX: Final = """
daemon off;
worker_processes 2;
user root;
pid {place}/nginx.pid;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
    sendfile on; tcp_nopush on; keepalive_requests 1000000;
    server {{ listen {address}:{port}; root {place}; }}
}}
"""


def bring(lab: Lab, program: str) -> None:
    """The program is in the guest, with its libraries: both are Debian's, of one release."""
    path = shutil.which(program)
    assert path is not None, f"{program} is not installed"
    needed = subprocess.run(["ldd", path], check=True, capture_output=True, text=True).stdout
    libraries = [words[2] for words in map(str.split, needed.splitlines()) if len(words) > 2]
    lab.run(["mkdir", "-p", f"{_PLACE}/lib"])
    lab.push(Path(path), f"{_PLACE}/{program}")
    for library in libraries:
        if not Path(library).name.startswith(_OF_THE_GUEST):
            lab.push(Path(library), f"{_PLACE}/lib/{Path(library).name}")
    lab.run(["chmod", "+x", f"{_PLACE}/{program}"])


def start(peer: Peer, *argv: str) -> None:
    peer.call("start", argv=argv, environment={"LD_LIBRARY_PATH": f"{_PLACE}/lib"})


@pytest.fixture
def peers(lab: Lab) -> Iterator[tuple[Peer, Peer]]:
    with ExitStack() as stack:
        yield stack.enter_context(in_guest(lab)), stack.enter_context(on_this_machine(lab))


def write(lab: Lab, data: bytes, name: str) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        lab.push(Path(file.name), f"{_PLACE}/{name}")


def asks(client: Peer, server: Peer, what: str, port: int) -> list[str]:
    """What it says at its end, having been promoted."""
    said = client.call("ask", what=what, address=server.address, port=port)["says"]
    assert said == "goes on", said
    server.promoted("verbs")
    done = client.call("finish")
    assert done["code"] == 0, done
    for each in (client, server):
        each.nothing_was_reset()
    return str(done["says"][-1]).split()


def test_redis_that_saves_by_forks_and_by_its_log(lab: Lab, peers: tuple[Peer, Peer]) -> None:
    guest, own = peers
    bring(lab, "redis-server")
    port = 6379
    command = (
        f"{_PLACE}/redis-server", "--bind", guest.address, "--port", str(port), "--dir", _PLACE,
        "--protected-mode", "no", "--appendonly", "yes", "--save", "3600", "1",
    )  # fmt: skip
    start(guest, *command)
    listens = f"ss -tln | grep -q {guest.address}:{port}"
    assert lab.wait(listens)
    right, rounds, digest, forked = asks(own, guest, "redis", port)
    assert (right, int(rounds) > 0, forked) == ("right:", True, "1")
    assert guest.call("stop")["code"] == 0
    start(guest, *command)
    assert lab.wait(listens)
    assert own.call("ask", what="stored", address=guest.address, port=port)["says"] == digest, "after a new start"
    assert own.call("finish")["code"] == 0
    assert guest.call("stop")["code"] == 0


def test_nginx_with_two_workers(lab: Lab, peers: tuple[Peer, Peer]) -> None:
    guest, own = peers
    bring(lab, "nginx")
    port = 8080
    write(lab, _DATA, "data")
    write(lab, _NGINX.format(place=_PLACE, address=guest.address, port=port).encode(), "nginx.conf")
    lab.run(["chmod", "644", f"{_PLACE}/data"])
    start(guest, f"{_PLACE}/nginx", "-p", _PLACE, "-e", f"{_PLACE}/error.log", "-c", f"{_PLACE}/nginx.conf")
    assert lab.wait(f"ss -tln | grep -q {guest.address}:{port}")
    right, rounds, *seen = asks(own, guest, "http", port)
    assert (right, int(rounds) > 0) == ("right:", True)
    assert seen == [hashlib.sha256(_DATA).hexdigest()]
    assert guest.call("stop")["code"] == 0
