"""A promoted connection goes on with somebody the shim does not reach: not a byte of what the ring holds is lost.

The peer has filled the ring before, and the giver has read only the first bytes of it. The rest comes again, by TCP.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import toolchain
from common import PATIENCE_S

from sidestep.testing import Connection, Sidestep

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
TOTAL = 200_000  # bytes the ring holds, whose default size is 256 KiB
MUCH = 8 << 20  # what its spill holds, and TCP does not
FIRST = 1000  # bytes that the giver reads and sends itself
NOBODY = 65534

_COMMON = """
import array, fcntl, os, select, socket, sys, termios
def pattern(key, start, end):  # tests/support/pattern.h
    mixed = (((at + key * 0x01000193) * 0x9E3779B1 & 0xFFFFFFFF) >> 24 ^ at >> 20 & 0xFF for at in range(start, end))
    return bytes(mixed)
def take(one, count):
    data = b""
    while len(data) < count and (piece := one.recv(count - len(data))):
        data += piece
    return data
"""

_PEER = (
    _COMMON
    + """
total = int(sys.argv[1])
answer, expected = pattern(0x77, 0, total), pattern(0x11, 0, total)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
one, _ = listener.accept()
while (record := take(one, 64))[:1] == b"p":
    one.sendall(record)
one.sendall(answer)
got = b""
while piece := one.recv(65536):
    got += piece
same = len(os.path.commonprefix([got, expected]))
print("right" if got == expected else f"wrong after {same} of {len(got)}", flush=True)
"""
)

_GIVER = (
    _COMMON
    + """
how, port, total, first, stranger = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
mine, theirs = pattern(0x11, 0, total), pattern(0x77, 0, total)
one = socket.create_connection(("127.0.0.1", port))
print(one.getsockname()[1], flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    one.sendall(b"p" * 64)
    take(one, 64)
sys.stdin.readline()
one.sendall(b"g" * 64)
queued = array.array("i", [0])
while queued[0] < total:
    fcntl.ioctl(one, termios.FIONREAD, queued)
assert take(one, first) == theirs[:first]
one.sendall(mine[:first])
print("full", flush=True)
sys.stdin.readline()
rest = [str(number) for number in (first, total - first, first, total - first)]
if how in ("static", "set-user-ID"):
    os.set_inheritable(one.fileno(), True)
    os.execv(stranger, [stranger, str(one.fileno()), *rest])
elif how == "passed":
    way = socket.socket(fileno=int(stranger))
    socket.send_fds(way, [b"x"], [one.fileno()])
    one.close()
else:
    if how == "KERNEL_TLS":
        one.setsockopt(socket.IPPROTO_TCP, 31, b"tls")  # TCP_ULP
    else:
        one.send(b"!", socket.MSG_OOB)
    print("right" if take(one, total - first) == theirs[first:] else "wrong", flush=True)
    one.sendall(mine[first:])
    sys.stdin.readline()
"""
)

_SENDER = (
    _COMMON
    + """
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
one, _ = listener.accept()
while (record := take(one, 64))[:1] == b"p":
    one.sendall(record)
one.sendall(bytes(int(sys.argv[1])))
print("sent", flush=True)
sys.stdin.readline()
one.shutdown(socket.SHUT_WR)
print("ended", flush=True)
one.recv(1)
"""
)

_LATE = (
    _COMMON
    + """
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while not select.select([sys.stdin], [], [], 0)[0]:
    one.sendall(b"p" * 64)
    take(one, 64)
sys.stdin.readline()
one.sendall(b"g" * 64)
sys.stdin.readline()
os.dup2(0, 9)
os.dup2(one.fileno(), 0)
os.execve("/bin/sh", ["sh", "-c", "echo begins; read go <&9; wc -c"], {"SIDESTEP_DISABLE": "1"})
"""
)


def _line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def _tell(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    program.stdin.write("go\n")
    program.stdin.flush()


class Handover:
    """The two ends, promoted, with the ring full of bytes for the giver."""

    def __init__(self, sidestep: Sidestep, how: str, stranger: object, pass_fds: tuple[int, ...] = ()) -> None:
        def start(source: str, *words: object) -> subprocess.Popen[str]:
            argv = [sys.executable, "-c", source, *map(str, words)]
            return sidestep.popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds
            )  # fmt: skip

        self._sidestep = sidestep
        self.peer = start(_PEER, TOTAL)
        self.giver = start(_GIVER, how, _line(self.peer), TOTAL, FIRST, stranger)
        self._local = f"127.0.0.1:{_line(self.giver)}"
        sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
        _tell(self.giver)
        assert _line(self.giver) == "full"
        ours = self.end()
        assert ours is not None
        assert ours.promoted
        assert ours.rx.ring_bytes >= FIRST
        assert self.end(of_peer=True).tx.ring_bytes - ours.rx.ring_bytes >= TOTAL - FIRST  # type: ignore[union-attr]
        _tell(self.giver)

    def end(self, *, of_peer: bool = False) -> Connection | None:
        """The giver's end, or the peer's, as it is now."""
        found = self._sidestep.connections()
        return next((c for c in found if (c.remote if of_peer else c.local) == self._local), None)

    def finish(self) -> None:
        """The peer must have received all, and the giver have ended well."""
        assert _line(self.peer) == "right"
        assert self.giver.wait(PATIENCE_S) == 0
        assert self.peer.wait(PATIENCE_S) == 0


def _stranger(name: str, *flags: str) -> Path:
    return toolchain.build(name, [HERE / "strangers" / "stranger.c"], ["-D_GNU_SOURCE", *flags])


def test_exec_of_a_static_program(sidestep: Sidestep) -> None:
    over = Handover(sidestep, "static", _stranger("stranger-static", "-static"))
    assert _line(over.giver) == "0"
    over.finish()


def test_an_end_waits_for_recalled_bytes_that_are_read_late(sidestep: Sidestep) -> None:
    """TCP has no room for what the ring held, and shutdown() ends its waiting for that."""

    def start(source: str, *words: object) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", source, *map(str, words)]
        return sidestep.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    sender = start(_SENDER, MUCH)
    late = start(_LATE, _line(sender))
    sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
    _tell(late)
    assert _line(sender) == "sent"
    _tell(late)
    assert _line(late) == "begins"
    _tell(sender)
    assert _line(sender) == "ended"
    _tell(late)
    assert _line(late) == str(MUCH)
    assert late.wait(PATIENCE_S) == 0
    assert sender.wait(PATIENCE_S) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a program of another user's")
def test_exec_of_a_set_user_id_program(sidestep: Sidestep, tmp_path: Path) -> None:
    program = tmp_path / "stranger"
    shutil.copy(_stranger("stranger"), program)
    os.chown(program, NOBODY, NOBODY)
    program.chmod(0o4755)
    over = Handover(sidestep, "set-user-ID", program)
    assert _line(over.giver) == "1", "the mount does not honour the bit"
    over.finish()


def test_passed_to_a_program_without_the_shim(sidestep: Sidestep) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        over = Handover(sidestep, "passed", theirs.fileno(), (theirs.fileno(),))
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    with socket.socket(fileno=fds[0]) as one:
        argv: list[str | Path] = [
            _stranger("stranger"),
            str(one.fileno()),
            str(FIRST),
            str(TOTAL - FIRST),
            str(FIRST),
            str(TOTAL - FIRST),
        ]
        assert subprocess.run(argv, pass_fds=fds, timeout=PATIENCE_S).returncode == 0
    over.finish()


def _kernel_tls() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        try:
            one.setsockopt(socket.IPPROTO_TCP, 31, b"tls")
        except FileNotFoundError:
            return False
    return True


def test_passed_at_both_ends_at_once() -> None:
    """Neither end is left to send again what the other has not read: each gives it a moment for that."""
    rounds = 8
    with Sidestep(promote_after="0") as sidestep:
        argv = [sys.executable, str(HERE / "programs/both_passed.py"), str(rounds)]
        ended = sidestep.run(argv, stdout=subprocess.PIPE, text=True)
        promoted = sidestep.status()["counters"]["claim_matched"]
    assert ended.stdout.split() == ["whole"] * rounds
    assert promoted > rounds / 2


# Who reads on gets the socket by these calls, and by nothing else of the program's.
GIVEN = [
    "passed", "passed-by-sendmmsg", "passed-and-closed", "passed-late",
    "executed", "executed-and-closed", "executed-as-stdin", "fexecve", "spawned",
]  # fmt: skip


# Of these the reader goes on by ring, if the shim is certain to be in it.
TRAVELS = [
    "passed", "passed-by-sendmmsg", "passed-and-closed", "executed", "executed-and-closed", "fexecve", "vforked",
]  # fmt: skip


def _half_close(name: str = "half-close", *flags: str) -> Path:
    return toolchain.build(name, [HERE / "programs/half_close.c"], ["-D_GNU_SOURCE", *flags])


def _half_closed(sidestep: Sidestep, how: str, program: Path | None = None, **changes: str) -> str:
    """What a reader got of a request whose sender has ended its direction, and has it in the ring."""
    with sidestep.popen(
        [program or _half_close(), how],
        env=sidestep.env(**changes),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
        told, _ = server.communicate("go", timeout=20)
    assert server.returncode == 0
    return str(told).strip()


@pytest.mark.parametrize("how", GIVEN)
def test_a_request_that_nobody_can_send_again_does_not_look_ended(sidestep: Sidestep, how: str) -> None:
    """The next reader does not see the ring that holds its bytes: it meets a reset, and no end of the stream."""
    assert _half_closed(sidestep, how, BARE="1") == "0 bytes, then ECONNRESET"


@pytest.mark.parametrize("how", TRAVELS)
def test_a_request_goes_on_into_the_next_program(sidestep: Sidestep, how: str) -> None:
    """Its ring is the next program's to read, whatever has become of the sender."""
    assert _half_closed(sidestep, how) == "50000 bytes, then the end"


@pytest.mark.parametrize("how", [*TRAVELS, "executed-as-stdin"])
def test_a_request_goes_on_into_the_next_static_program(sidestep: Sidestep, how: str) -> None:
    """By the loader, from a static program to itself."""
    assert _half_closed(sidestep, how, _half_close("half-close-static", "-static")) == "50000 bytes, then the end"


@pytest.mark.parametrize("how", ["executed", "executed-and-closed"])
def test_a_request_goes_on_into_a_static_program(sidestep: Sidestep, how: str) -> None:
    """From a dynamic one, and back."""
    dynamic, static = _half_close(), _half_close("half-close-static", "-static")
    assert _half_closed(sidestep, how, dynamic, NEXT=str(static)) == "50000 bytes, then the end"
    assert _half_closed(sidestep, how, static, NEXT=str(dynamic)) == "50000 bytes, then the end"


@pytest.mark.parametrize("how", ["executed", "executed-and-closed", "executed-as-stdin"])
def test_a_request_meets_a_reset_where_the_loader_refuses_the_next_program(sidestep: Sidestep, how: str) -> None:
    """The loader has taken its connections up by then."""
    refused = _half_close("half-close-refused", "-static", "-DREFUSED")
    assert _half_closed(sidestep, how, NEXT=str(refused)) == "0 bytes, then ECONNRESET"


def test_a_request_meets_a_reset_where_a_child_without_the_shim_has_the_socket_too(sidestep: Sidestep) -> None:
    """Its connection stays on TCP for the child, and so the next program, which has the shim, does not see the ring."""
    assert _half_closed(sidestep, "executed-beside") == "0 bytes, then ECONNRESET"


def test_who_starts_a_program_may_read_on(sidestep: Sidestep) -> None:
    """Many programs inherit a socket that they do not use."""
    assert _half_closed(sidestep, "read-on") == "50000 bytes, then the end"


@pytest.mark.parametrize("reason", ["KERNEL_TLS", "URGENT_DATA"])
def test_what_only_the_kernel_carries(sidestep: Sidestep, reason: str) -> None:
    if reason == "KERNEL_TLS" and not _kernel_tls():
        pytest.skip("this kernel has no TLS (modprobe tls)")
    over = Handover(sidestep, reason, "-")
    assert _line(over.giver) == "right"
    ours = over.end()
    assert ours is not None
    assert (ours.state, ours.reason, ours.tx.path) == ("pinned", reason, "tcp")
    (outcome,) = sidestep.promote(lambda c: c.local == ours.local)
    assert (outcome.done, outcome.result) == (False, "stays")
    _tell(over.giver)
    over.finish()
