"""What this machine has of what sidestep needs: each check tries the thing itself, none looks at version numbers."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from sidestep import native_library
from sidestep.config import ShimSettings, make_private_dir
from sidestep.errors import SidestepError, Unavailable
from sidestep.observe import reach
from sidestep.provider import control, memory, proof

_NOFILE_COMFORTABLE: Final = 4096  # descriptors; the shim takes one or two a thread and one a promoted peer thread
_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}  # system call numbers
_IO_URING_SETUP: Final = 425
_MEMBARRIER_PRIVATE_EXPEDITED: Final = 1 << 3


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"  # works, with a limit worth knowing
    FAIL = "fail"  # connections stay on TCP


@dataclass(frozen=True, slots=True)
class Finding:
    """One result."""

    subject: str
    level: Level
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """The finding as `sidestep doctor --json` shows it."""
        return {"subject": self.subject, "level": self.level.value, "text": self.text, "remedy": self.remedy}


def check_machine(socket_path: Path) -> Iterator[Finding]:
    """All findings about this machine and the provider at `socket_path`."""
    yield Finding("kernel", Level.OK, f"{platform.system()} {platform.release()} on {platform.machine()}")
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("memfd", _memfd),
        ("eventfd", _eventfd),
        ("sock_diag", _sock_diag),
        ("netns cookie", _netns_cookie),
        ("rseq", _rseq),
        ("membarrier", _membarrier),
        ("io_uring", _io_uring),
        ("descriptors", _descriptors),
        ("cpus", _cpus),
        ("shim", _shim),
        ("provider", lambda: _provider(socket_path)),
    )
    for subject, check in checks:
        try:
            yield check()
        except SidestepError as error:
            yield Finding(subject, Level.FAIL, error.message, error.remedy)
        except OSError as error:
            yield Finding(
                subject, Level.FAIL, f"the kernel refuses: {error.strerror}", "use a newer kernel, or allow it"
            )


def check_program(name: str) -> Iterator[Finding]:
    """Whether the shim reaches the program that `name` would run."""
    try:
        program = reach.inspect(reach.find(name))
    except SidestepError as error:
        yield Finding(name, Level.FAIL, error.message, error.remedy)
        return
    for obstacle in program.obstacles:
        yield Finding(name, Level.FAIL, obstacle.verdict, obstacle.remedy)
    if not program.obstacles:
        yield Finding(name, Level.OK, "the shim reaches it: " + " -> ".join(str(path) for path in program.chain))


def _memfd() -> Finding:
    os.close(memory.sealed_memfd("sidestep-doctor", 4096))
    return Finding("memfd", Level.OK, "sealed shared memory works")


def _eventfd() -> Finding:
    os.close(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    return Finding("eventfd", Level.OK, "doorbells work")


def _sock_diag() -> Finding:
    prover = proof.SocketProver()
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as one,
        ):
            held = prover.holds(proof.connection_key(one, proof.netns_cookie()), proof.socket_cookie(one))
    finally:
        prover.close()
    if held:
        return Finding("sock_diag", Level.OK, "the kernel confirms who holds a connection")
    return Finding(
        "sock_diag", Level.FAIL, "the kernel does not find a connection by its addresses",
        "load the module tcp_diag; a sandbox may forbid it",
    )  # fmt: skip


def _netns_cookie() -> Finding:
    if cookie := proof.netns_cookie():
        return Finding("netns cookie", Level.OK, f"this network namespace is {cookie}")
    return Finding(
        "netns cookie", Level.NOTE, "the kernel does not tell network namespaces apart",
        "nothing to do: programs of other namespaces stay on TCP all the same",
    )  # fmt: skip


def _rseq() -> Finding:
    try:
        size = ctypes.c_uint.in_dll(ctypes.CDLL(None), "__rseq_size").value
    except ValueError:
        size = 0
    if size:
        return Finding("rseq", Level.OK, "a thread knows its CPU for free")
    return Finding("rseq", Level.NOTE, "the C library has not registered rseq", "nothing to do: getcpu serves instead")


def _membarrier() -> Finding:
    number = _MEMBARRIER.get(platform.machine())
    commands = ctypes.CDLL(None, use_errno=True).syscall(number, 0, 0, 0) if number else -1
    if commands > 0 and commands & _MEMBARRIER_PRIVATE_EXPEDITED:
        return Finding("membarrier", Level.OK, "expedited memory barriers work")
    return Finding("membarrier", Level.NOTE, "no expedited memory barriers", "nothing to do: fences serve instead")


def _io_uring() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_IO_URING_SETUP, 0, None)  # no parameters: EFAULT or EINVAL where it exists, nothing is made
    if os.strerror(ctypes.get_errno()) in (os.strerror(38), os.strerror(1)):  # ENOSYS, EPERM
        return Finding("io_uring", Level.OK, "switched off here; programs use epoll")
    return Finding(
        "io_uring", Level.NOTE, "the kernel has it; a program that moves socket bytes only by it stays on TCP",
        "switch io_uring off in a program that mixes it with socket calls (libuv is told so by the shim)",
    )  # fmt: skip


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"a program may open {soft} (up to {hard})"
    if soft >= _NOFILE_COMFORTABLE:
        return Finding("descriptors", Level.OK, text)
    return Finding("descriptors", Level.NOTE, text, f"for many connections: ulimit -n {min(hard, 65536)}")


def _cpus() -> Finding:
    usable = len(os.sched_getaffinity(0))
    if usable > 1:
        return Finding("cpus", Level.OK, f"{usable} usable: waits may spin")
    return Finding("cpus", Level.NOTE, "one usable: waits never spin, so gains are less", "allow more CPUs (taskset)")


def _shim() -> Finding:
    library = native_library()
    env = ShimSettings(Path(os.devnull)).environment({})
    tried = subprocess.run(["/bin/true"], env=env, capture_output=True, text=True, timeout=10, check=False)
    if tried.returncode == 0 and not tried.stderr:
        return Finding("shim", Level.OK, f"{library} loads")
    raise Unavailable(
        f"{library} does not load: {tried.stderr.strip() or f'exit status {tried.returncode}'}",
        remedy="install sidestep for this Python and system",
    )


def _provider(socket_path: Path) -> Finding:
    if control.answers(socket_path):
        with control.ControlConnection(socket_path) as connection:
            found = connection.status()
        return Finding("provider", Level.OK, f"{found['pid']} at {socket_path}, {found['shims']} programs")
    directory = socket_path.parent
    if directory.is_dir():
        make_private_dir(directory)  # it is there: nothing is made, only checked
    elif not os.access(directory.parent, os.W_OK):
        raise Unavailable(f"{directory} cannot be made", remedy="give another place with --socket")
    return Finding("provider", Level.OK, f"none runs at {socket_path}; 'sidestep run' starts one")
