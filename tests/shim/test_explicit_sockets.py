"""Explicit and direct sockets in real programs: what only they can do, and what the provider hears of it.

That they behave like the kernel's sockets otherwise is what the scenes show.
"""

# mypy: disable-error-code="union-attr"
from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import toolchain
from common import PATIENCE_S, eventually, load_protocols, standing_still
from ledger import Book, install

from sidestep import limits
from sidestep.native.layout import AF_INET_OFFLOAD
from sidestep.testing import Connection, Sidestep, free_port

pytestmark = pytest.mark.slow

ROUNDS_MIN, FORKS_MIN = 50, 30  # of each thread, and children, of the test in which both go on
EXAMPLES = toolchain.ROOT / "examples"
LATE = "1000000:1000000000"  # calls, or bytes: only what is opened as explicit is promoted

PRELUDE = """
import errno, fcntl, os, select, signal, socket, subprocess, sys, threading, time
from sidestep.constants import *

def explicit(family=AF_INET_OFFLOAD, protocol=0, kind=socket.SOCK_STREAM):
    raw = socket.socket(family, kind, protocol)
    return socket.socket(fileno=raw.detach())

def outcome(function, *args):
    try:
        function(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"

def talk(one, other, rounds=200):
    for _ in range(rounds):
        one.sendall(b"ping")
        assert other.recv(4, socket.MSG_WAITALL) == b"ping"
        other.sendall(b"pong")
        assert one.recv(4, socket.MSG_WAITALL) == b"pong"

def pair(family=AF_INET_OFFLOAD, protocol=0):
    listener = explicit(family, protocol)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    client = explicit(family, protocol)
    client.connect(listener.getsockname())
    return listener, client, listener.accept()[0]

def told(text):
    print(text, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def sidestep() -> Iterator[Sidestep]:
    with Sidestep(promote_after=LATE) as private:
        load_protocols(private)
        yield private


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    return install(tmp_path, monkeypatch)


@pytest.fixture
def with_protocols(book: Book) -> Iterator[Sidestep]:
    """A provider that has the protocols of ledger.py; the first is IPPROTO_SDP."""
    with Sidestep(promote_after=LATE) as private:
        load_protocols(private)
        yield private


def python(sidestep: Sidestep, script: str, **env: str | None) -> str:
    """What a Python program says under the shim."""
    done = sidestep.run(
        [sys.executable, "-c", PRELUDE + script],
        env=sidestep.env(**env),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


class Talking:
    """A Python program under the shim that says something and goes on when it is told."""

    def __init__(self, sidestep: Sidestep, script: str) -> None:
        self.program = sidestep.popen(
            [sys.executable, "-c", PRELUDE + script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> str:
        """Its next line."""
        return str(self.program.stdout.readline()).strip()

    def go_on(self) -> None:
        """Lets it go on."""
        self.program.stdin.write("\n")
        self.program.stdin.flush()

    def end(self) -> None:
        """It goes on to its end, which must be a good one."""
        self.go_on()
        assert self.program.wait(PATIENCE_S) == 0


def until(book: Book, line: str, count: int = 1) -> None:
    """Waits until the protocols have been told that so often."""
    eventually(lambda: book.lines().count(line) >= count)


def promoted(found: list[Connection]) -> bool:
    return len(found) == 2 and all(one.promoted for one in found)


# ---- opening ----

OPENED = """
for family in (AF_INET_OFFLOAD, AF_INET6_OFFLOAD):
    print(outcome(explicit, family), outcome(explicit, family, 0, socket.SOCK_DGRAM),
          outcome(explicit, family, 0, socket.SOCK_RAW), outcome(explicit, family, IPPROTO_SDP),
          outcome(explicit, family, IPPROTO_SDP + 5), outcome(explicit, family, socket.IPPROTO_TCP),
          outcome(explicit, family, socket.IPPROTO_UDP), outcome(explicit, family, -2))
"""


def test_what_can_be_opened(sidestep: Sidestep) -> None:
    line = "ok ESOCKTNOSUPPORT ESOCKTNOSUPPORT {0} {0} ok EPROTONOSUPPORT EINVAL"
    assert python(sidestep, OPENED).splitlines() == [line.format("EPROTONOSUPPORT")] * 2


def test_without_the_shim_there_is_no_such_family(sidestep: Sidestep) -> None:
    for off in ({"LD_PRELOAD": None}, {"SIDESTEP_DISABLE": "1"}):
        assert python(sidestep, OPENED, **off).split() == ["EAFNOSUPPORT"] * 16


def test_the_number_of_sdp_alone_makes_an_explicit_socket(with_protocols: Sidestep, book: Book) -> None:
    """The family may be the ordinary one, where the kernel knows no such number; others are left to the kernel."""
    script = """
for family in (socket.AF_INET, socket.AF_INET6):
    print(outcome(explicit, family, IPPROTO_SDP), outcome(explicit, family, IPPROTO_SDP, socket.SOCK_DGRAM),
          outcome(explicit, family, IPPROTO_SDP + 1))
listener, client, server = pair(socket.AF_INET, IPPROTO_SDP)
print("talks", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    talk(client, server)
"""
    running = Talking(with_protocols, script)
    for _ in range(2):
        assert running.hear() == "ok ESOCKTNOSUPPORT EINVAL"
    assert running.hear() == "talks"
    with_protocols.wait_for(promoted)  # at once, as only explicit sockets are here
    running.end()
    assert [line.split()[1] for line in book.lines() if line.startswith("ledger")] == ["bind", "join", "release"]


def test_without_a_provider_any_protocol_means_tcp_and_a_named_one_fails(sidestep: Sidestep) -> None:
    sidestep.kill_provider()
    script = """
listener, client, server = pair()
talk(client, server)
print(outcome(explicit, AF_INET_OFFLOAD, IPPROTO_SDP))
"""
    assert python(sidestep, script) == "EPROTONOSUPPORT\n"


def test_a_provider_that_does_not_answer_is_waited_for_once(sidestep: Sidestep) -> None:
    """And what it would have said is not missed later."""
    running = Talking(
        sidestep,
        """
listener, client, server = pair()
told("connected")
for call in (lambda: explicit().bind(("127.0.0.1", 0)), lambda: explicit().connect(listener.getsockname())):
    before = time.monotonic()
    call()
    print(time.monotonic() - before, flush=True)
print(outcome(explicit, AF_INET_OFFLOAD, IPPROTO_SDP), flush=True)
told("stalled")
talk(client, server)
explicit().bind(("127.0.0.1", 0))
print(outcome(explicit, AF_INET_OFFLOAD, IPPROTO_SDP), flush=True)
""",
    )
    assert running.hear() == "connected"
    with standing_still(sidestep.provider_pid):
        running.go_on()
        timeout_s = limits.EXPLICIT_ASK_TIMEOUT_S
        assert timeout_s * 0.99 < float(running.hear()) < timeout_s + 10
        assert float(running.hear()) < timeout_s / 2
        assert [running.hear() for _ in range(2)] == ["EPROTONOSUPPORT", "stalled"]
    # it answers what was asked before
    eventually(lambda: sidestep.status()["counters"].get("explicit_asked{OPEN}") == 1)
    running.end()
    asked = sidestep.status()["counters"]
    assert asked["explicit_asked{BIND}"] == 3
    assert asked["explicit_asked{OPEN}"] == 2


def test_a_named_protocol_is_waited_for_longer_than_one_that_can_be_done_without(with_protocols: Sidestep) -> None:
    """A provider that is only slow, as on a busy machine, is not taken for none."""
    begin = 'told("ready")\nprint("asks", flush=True)\n'
    named = Talking(with_protocols, begin + "told(outcome(explicit, AF_INET_OFFLOAD, IPPROTO_SDP))")
    unnamed = Talking(with_protocols, begin + 'told(outcome(explicit().bind, ("127.0.0.1", 0)))')
    assert [each.hear() for each in (named, unnamed)] == ["ready", "ready"]
    with standing_still(with_protocols.provider_pid):
        for each in (named, unnamed):
            each.go_on()
            assert each.hear() == "asks"
        assert unnamed.hear() == "ok"  # EXPLICIT_ASK_TIMEOUT_S later
    assert named.hear() == "ok"
    named.end()
    unnamed.end()


# ---- promotion ----


@pytest.mark.parametrize("family", ["AF_INET_OFFLOAD", "AF_INET6_OFFLOAD"])
def test_explicit_connections_are_promoted_at_once(sidestep: Sidestep, family: str) -> None:
    host = "127.0.0.1" if family == "AF_INET_OFFLOAD" else "::1"
    running = Talking(
        sidestep,
        f"""
listener = explicit({family})
listener.bind(("{host}", 0))
listener.listen()
client = explicit({family})
client.connect(listener.getsockname())
server = listener.accept()[0]
while not select.select([sys.stdin], [], [], 0)[0]:
    talk(client, server, 10)
""",
    )
    sidestep.wait_for(promoted)
    running.end()


@pytest.mark.parametrize("preloaded", [True, False])
def test_python_programs_open_them_without_detours(sidestep: Sidestep, preloaded: bool) -> None:
    """By `sidestep.socket`, which also works where the shim was not preloaded; other sockets stay what they are."""
    script = """
import errno, os, select, sys
from sidestep import socket
listener = socket.socket(socket.AF_INET6_OFFLOAD)
listener.bind(("::1", 0))
listener.listen()
client, direct = socket.socket(socket.AF_INET6_OFFLOAD), socket.socket(socket.AF_INET6_DIRECT)
client.settimeout(60)
pairs = []
for sock in (client, direct):
    assert sock.family == socket.AF_INET6 and sock.type == socket.SOCK_STREAM
    sock.connect(listener.getsockname())
    pairs.append((sock, listener.accept()[0]))
for kind, proto in ((socket.SOCK_DGRAM, 0), (socket.SOCK_STREAM, socket.IPPROTO_SDP)):
    try:
        socket.socket(socket.AF_INET_OFFLOAD, kind, proto)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for one, other in pairs:
        one.sendall(b"ping")
        assert other.recv(4, socket.MSG_WAITALL) == b"ping"
        other.sendall(b"pong")
        assert one.recv(4, socket.MSG_WAITALL) == b"pong"
"""
    env = sidestep.env() if preloaded else sidestep.env(LD_PRELOAD=None)
    program = sidestep.popen(
        [sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert [program.stdout.readline().strip() for _ in range(2)] == ["ESOCKTNOSUPPORT", "EPROTONOSUPPORT"]
    sidestep.wait_for(lambda found: sorted(c.state for c in found) == ["native", "pinned", "promoted", "promoted"])
    program.communicate("\n", timeout=PATIENCE_S)
    assert program.returncode == 0


def test_direct_connections_are_never_offered(sidestep: Sidestep) -> None:
    running = Talking(
        sidestep,
        """
listener, client, server = pair(AF_INET_DIRECT)
tcp = pair(AF_INET_OFFLOAD, socket.IPPROTO_TCP)
ordinary = socket.create_connection(listener.getsockname())
accepted = listener.accept()[0]
talk(client, server, 2000)
talk(*tcp[1:], 2000)
talk(ordinary, accepted, 2000)
told("quiet")
""",
    )
    running.hear()
    found = sidestep.connections()
    assert [c.reason for c in found if c.state == "pinned"] == ["DIRECT"] * 5, found
    assert all(c.local.startswith("127.0.0.1:") for c in found if c.state == "pinned"), found
    assert [c.state for c in found if c.state != "pinned"] == ["native"], found
    assert not any("offer" in name for name in sidestep.status()["counters"])
    running.end()


def test_direct_sockets_may_be_datagram_sockets(sidestep: Sidestep) -> None:
    script = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
one, other = explicit(AF_INET_DIRECT, 0, socket.SOCK_DGRAM), explicit(AF_INET6_DIRECT, 0, socket.SOCK_DGRAM)
print(one.family.name, other.family.name, one.type.name, one.proto == socket.IPPROTO_UDP)
one.bind(("127.0.0.1", 0))

# an address of the family that the socket was opened with, which only C can write
port = one.getsockname()[1].to_bytes(2, "big")
address = AF_INET_DIRECT.to_bytes(2, sys.byteorder) + port + bytes([127, 0, 0, 1]) + bytes(8)
sender = explicit(AF_INET_DIRECT, 0, socket.SOCK_DGRAM)
assert libc.sendto(sender.fileno(), b"hello", 5, 0, address, 16) == 5
print(one.recv(10))
copy = os.dup(sender.fileno())
assert libc.connect(copy, address, 16) == 0
os.write(copy, b"again")
print(one.recv(10))
os.close(copy)
sender.close()
ordinary = socket.socket(type=socket.SOCK_DGRAM)
print(libc.sendto(ordinary.fileno(), b"x", 1, 0, address, 16), ctypes.get_errno())
"""
    assert python(sidestep, script).splitlines() == [
        "AF_INET AF_INET6 SOCK_DGRAM True", "b'hello'", "b'again'", f"-1 {errno.EAFNOSUPPORT}",
    ]  # fmt: skip


# ---- a protocol by its number ----


def test_a_named_protocol_carries_the_connection(with_protocols: Sidestep, book: Book) -> None:
    running = Talking(
        with_protocols,
        """
listener, client, server = pair(AF_INET_OFFLOAD, IPPROTO_SDP)
print(listener.getsockname()[1], flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    talk(client, server, 10)
""",
    )
    port = running.hear()
    with_protocols.wait_for(promoted)
    running.end()
    assert [line for line in book.lines() if "witness" not in line] == [
        f"ledger bind 127.0.0.1:{port}", f"ledger join 127.0.0.1:{port}", f"ledger release 127.0.0.1:{port}",
    ]  # fmt: skip


def test_who_insists_is_told_what_is_missing(with_protocols: Sidestep, book: Book) -> None:
    """A protocol without accepted connections, one without a way, and one that has gone meanwhile."""
    running = Talking(
        with_protocols,
        """
listener = explicit(AF_INET_OFFLOAD, IPPROTO_SDP + 1)
listener.bind(("127.0.0.1", 0))
print(outcome(listener.listen) == errno.errorcode[errno.EOPNOTSUPP],
      outcome(explicit, AF_INET6_OFFLOAD, IPPROTO_SDP + 1), flush=True)
listener, client, server = pair(AF_INET_OFFLOAD, IPPROTO_SDP)
unbound, other = explicit(AF_INET_OFFLOAD, IPPROTO_SDP), explicit()
told("no way now")
print(outcome(unbound.connect, listener.getsockname()), outcome(other.connect, listener.getsockname()), flush=True)
talk(client, server)
told("no provider now")
print(outcome(unbound.connect, listener.getsockname()), outcome(unbound.bind, ("127.0.0.1", 0)),
      outcome(unbound.listen), outcome(explicit().connect, listener.getsockname()), flush=True)
talk(client, server)
""",
    )
    assert running.hear() == "True EPROTONOSUPPORT"
    assert running.hear() == "no way now"
    book.refuse("ledger", "no way")
    running.go_on()
    assert running.hear() == "ENETUNREACH ok"
    assert running.hear() == "no provider now"
    with_protocols.kill_provider()
    running.go_on()
    assert running.hear() == "EPROTONOSUPPORT EPROTONOSUPPORT EPROTONOSUPPORT ok"
    assert running.program.wait(PATIENCE_S) == 0


def test_what_the_policy_keeps_on_tcp_is_pinned_before_it_is_offered(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("use tcp connect * *:*\nuse both listen * *:*\n")
    with Sidestep(promote_after="0", policy=rules) as strict:
        load_protocols(strict)
        running = Talking(strict, "listener, client, server = pair()\ntalk(client, server)\ntold('quiet')\n")
        running.hear()
        (pinned,) = [c for c in strict.connections() if c.role == "active"]
        assert (pinned.state, pinned.reason) == ("pinned", "POLICY")
        assert not any("offer" in name for name in strict.status()["counters"])
        running.end()


# ---- ports ----


def test_a_failing_protocol_fails_the_bind_and_leaves_the_socket_as_it_was(
    with_protocols: Sidestep, book: Book
) -> None:
    """The kernel cannot unbind: another socket takes its place, with the same options, under the same numbers."""
    book.refuse("witness", "EADDRNOTAVAIL")
    script = """
OPTIONS = [(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), (socket.SOL_SOCKET, socket.SO_SNDBUF, 30000),
           (socket.SOL_SOCKET, socket.SO_RCVBUF, 50000), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
           (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77),
           (socket.IPPROTO_IP, socket.IP_TTL, 9), (socket.IPPROTO_IP, socket.IP_TOS, 16)]
def look(sock):
    return [sock.getsockopt(*option[:2]) for option in OPTIONS] + [
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8),
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16),
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16), fcntl.fcntl(sock, fcntl.F_GETFL),
        fcntl.fcntl(sock, fcntl.F_GETFD), os.get_inheritable(sock.fileno())]
sock = explicit()
for option in OPTIONS:
    sock.setsockopt(*option)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 5, 0, 0, 0]))
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes([3] + [0] * 15))
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
sock.setblocking(False)
os.set_inheritable(sock.fileno(), True)
copy = socket.socket(fileno=os.dup(sock.fileno()))
before = look(sock), look(copy)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
print(outcome(sock.bind, ("127.0.0.1", port)), outcome(copy.bind, ("127.0.0.1", 0)))
print((look(sock), look(copy)) == before, sock.getsockname(), copy.getsockname())
with socket.socket() as other:
    other.bind(("127.0.0.1", port))  # without SO_REUSEADDR: nobody has it
print(outcome(sock.listen))
tcp = explicit(AF_INET_OFFLOAD, IPPROTO_SDP)  # which does not want the protocol that fails
tcp.bind(("127.0.0.1", port))
tcp.listen()
sock.close()
copy.setblocking(True)
copy.connect(("127.0.0.1", port))
talk(copy, tcp.accept()[0])
print(os.fstat(copy.fileno()).st_ino != os.fstat(tcp.fileno()).st_ino)
"""
    assert python(with_protocols, script).splitlines() == [
        "EADDRNOTAVAIL EADDRNOTAVAIL", "True ('0.0.0.0', 0) ('0.0.0.0', 0)", "EADDRNOTAVAIL", "True",
    ]  # fmt: skip


def test_a_native_failure_is_not_heard_of(with_protocols: Sidestep, book: Book) -> None:
    script = """
first = explicit()
first.bind(("127.0.0.1", 0))
print(outcome(explicit().bind, first.getsockname()), outcome(first.bind, first.getsockname()),
      outcome(explicit().bind, ("192.0.2.1", 0)))
"""
    assert python(with_protocols, script) == "EADDRINUSE EINVAL EADDRNOTAVAIL\n"
    assert len([line for line in book.lines() if " bind " in line]) == 2, book.lines()


def test_listening_without_a_bind_binds(with_protocols: Sidestep, book: Book) -> None:
    script = "sock = explicit(); sock.listen(); print(sock.getsockname()[1]); sock.listen()"
    port = python(with_protocols, script).strip()
    until(book, f"ledger release 0.0.0.0:{port}")
    assert book.lines()[:2] == [f"ledger bind 0.0.0.0:{port}", f"witness bind 0.0.0.0:{port}"]


def test_a_port_taken_later_is_not_taken_before(with_protocols: Sidestep, book: Book) -> None:
    """IP_BIND_ADDRESS_NO_PORT: the kernel gives a port at connect()."""
    script = """
listener = socket.create_server(("127.0.0.1", 0))
sock = explicit()
sock.setsockopt(socket.IPPROTO_IP, 24, 1)
sock.bind(("127.0.0.1", 0))
sock.connect(listener.getsockname())
"""
    python(with_protocols, script)
    assert book.lines() == []


@pytest.mark.parametrize("how", ["close", "dup", "exit", "kill", "exec", "fork", "daemon"])
def test_the_protocols_keep_a_port_as_long_as_somebody_has_the_socket(
    with_protocols: Sidestep, book: Book, how: str
) -> None:
    ways = {
        "close": "told(port); sock.close(); told('')",
        "dup": "copy = os.dup(sock.fileno()); sock.close(); told(port); os.close(copy); told('')",
        "exit": "told(port); os._exit(0)",
        "kill": "told(port); os.kill(os.getpid(), signal.SIGKILL)",
        # the next program has the socket as an ordinary one
        "exec": "told(port); os.set_inheritable(sock.fileno(), True); os.execvp('sh', ['sh', '-c', 'read line'])",
        "fork": "child = os.fork()\nif child: sock.close(); told(port); os.kill(child, 9); told('')\nsignal.pause()",
        "daemon": "if os.fork(): os._exit(0)\ntold(port); sock.close(); told('')",
    }
    running = Talking(
        with_protocols,
        f"""
sock = explicit(AF_INET_OFFLOAD, IPPROTO_SDP)
sock.bind(("127.0.0.1", 0))
sock.listen()
port = str(sock.getsockname()[1])
{ways[how]}
""",
    )
    port = running.hear()
    if how == "daemon":
        assert running.program.wait(PATIENCE_S) == 0
    assert [line for line in book.lines() if port in line] == [f"ledger bind 127.0.0.1:{port}"]
    assert with_protocols.status()["explicit_binds"] == 1
    running.go_on()
    until(book, f"ledger release 127.0.0.1:{port}")
    assert with_protocols.status()["explicit_binds"] == 0


def test_a_descriptor_that_fork_left_behind_keeps_no_port(with_protocols: Sidestep, book: Book) -> None:
    """Threads bind, connect and close, while others fork and signals come: every port is given back in the end."""
    script = f"""
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
counts = [0] * 4
forks = 0
faults = []
threading.excepthook = faults.append
def enough():
    return faults or (min(counts) > {ROUNDS_MIN} and forks > {FORKS_MIN})
def named_or_not(number):
    while True:
        try:
            return explicit(AF_INET_OFFLOAD, IPPROTO_SDP if number % 2 else 0)
        except OSError as error:  # what a provider without a CPU does not answer in time is as if there were none
            if error.errno != errno.EPROTONOSUPPORT:
                raise
listener = explicit()
listener.bind(("127.0.0.1", 0))
listener.listen(100)
def work(number):
    while not enough():
        sock = named_or_not(number)
        sock.bind(("127.0.0.1", 0))
        if number < 2:
            sock.listen()
        else:
            sock.connect(listener.getsockname())
            listener.accept()[0].close()
        sock.close()
        counts[number] += 1
def leave(child, ends):
    os.write(ends, b".")
    os.close(ends)
    os.waitpid(child, 0)
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
children = []
while not enough():
    stays, ends = os.pipe()  # a child keeps what it has inherited until three others have come
    child = os.fork()
    if not child:
        select.select([stays], [], [], 60)
        os._exit(0)
    os.close(stays)
    children.append((child, ends))
    forks += 1
    if len(children) > 3:
        leave(*children.pop(0))
for thread in threads:
    thread.join()
for child in children:
    leave(*child)
signal.setitimer(signal.ITIMER_REAL, 0)
assert not faults, faults
own = len(os.listdir("/proc/self/fd"))
told(f"{{sum(counts)}} {{own}}")
listener.close()
told("")
"""
    running = Talking(with_protocols, script)
    bound, descriptors = map(int, running.hear().split())
    assert descriptors < 20

    def written(what: str) -> int:
        return sum(f" {what} " in line for line in book.lines() if line.startswith("ledger"))

    # a question that was given up may still be on its way to the provider
    eventually(lambda: written("bind") == with_protocols.status()["counters"]["explicit_asked{BIND}"])
    eventually(lambda: with_protocols.status()["explicit_binds"] <= 1)
    assert ROUNDS_MIN < written("bind") <= bound + 1
    running.go_on()
    running.end()
    assert with_protocols.status()["explicit_binds"] == 0
    assert not any("internal_error" in name for name in with_protocols.status()["counters"])
    assert written("release") == written("bind")


# ---- one accept queue, and the examples ----


def c_example() -> Path:
    """examples/explicit.c, compiled."""
    return toolchain.build("example-explicit", [EXAMPLES / "explicit.c"], ["-O2", f"-I{toolchain.HEADERS}"])


def argv(language: str, *arguments: str) -> list[str]:
    """The example's command line."""
    program = [str(c_example())] if language == "c" else [sys.executable, str(EXAMPLES / "explicit.py")]
    return [*program, *arguments]


PLAIN_CLIENT = """
import socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("port", sock.getsockname()[1], flush=True)
while True:
    sock.sendall(b"question")
    assert sock.recv(8, socket.MSG_WAITALL) == b"question"
"""


@pytest.mark.parametrize("language", ["c", "python"])
def test_one_accept_queue_serves_native_and_offloaded_connections(language: str) -> None:
    """A client without sidestep, one with ordinary sockets, one with explicit ones: in the order in which they came."""
    with Sidestep(promote_after=None) as sidestep:
        server = sidestep.popen(argv(language, "serve", "0"), stdout=subprocess.PIPE, text=True)
        port = server.stdout.readline().split()[1]
        os.kill(server.pid, signal.SIGSTOP)  # so that all three are in the queue
        plain = [sys.executable, "-c", PLAIN_CLIENT, port]
        clients = []
        for command, env in (
            (plain, sidestep.env(LD_PRELOAD=None)),
            (plain, sidestep.env()),
            (argv(language, "talk", port, "1000000000"), sidestep.env()),
        ):
            client = sidestep.popen(command, env=env, stdout=subprocess.PIPE, text=True)
            clients.append((client.stdout.readline().split()[1], client))
        os.kill(server.pid, signal.SIGCONT)
        accepted = [server.stdout.readline().split() for _ in clients]
        assert accepted == [["accepted", client_port] for client_port, _ in clients]

        def both_ways(found: list[Connection]) -> bool:
            ends = {c.local.rpartition(":")[2] for c in found if c.promoted and c.pid != server.pid}
            others = {c.remote.rpartition(":")[2] for c in found if c.promoted and c.pid == server.pid}
            return ends == others == {client_port for client_port, _ in clients[1:]}

        found = sidestep.wait_for(both_ways)
        assert [c.state for c in found if c.remote.endswith(f":{clients[0][0]}")] == ["native"]
        assert [client.poll() for _, client in clients] == [None] * 3


@pytest.mark.parametrize("language", ["c", "python"])
@pytest.mark.parametrize("reached", [True, False])
def test_the_examples_work_with_and_without_sidestep(sidestep: Sidestep, language: str, reached: bool) -> None:
    env = sidestep.env() if reached else sidestep.env(LD_PRELOAD=None)
    server = sidestep.popen(argv(language, "serve", "0"), env=env, stdout=subprocess.PIPE, text=True)
    port = server.stdout.readline().split()[1]
    done = sidestep.run(argv(language, "talk", port, "2000"), env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["2000 rounds"]), done.stderr
    wrong = sidestep.run(argv(language, "talk", str(free_port()), "1"), env=env, capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "refused" in wrong.stderr


def test_the_kernel_has_no_such_family() -> None:
    with pytest.raises(OSError, match="not supported") as told:
        socket.socket(AF_INET_OFFLOAD)
    assert told.value.errno == errno.EAFNOSUPPORT
