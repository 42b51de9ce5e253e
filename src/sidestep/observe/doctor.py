"""Checks of this machine for what sidestep needs: each tries the thing itself, none looks at version numbers."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, NoReturn

from sidestep import config
from sidestep.config import ENV_LOG, ShimSettings, log_file, make_private_dir
from sidestep.errors import SidestepError, Unavailable, counted
from sidestep.installation import native_library
from sidestep.native import _channel
from sidestep.native.layout import LAYOUT_VERSION
from sidestep.observe import other_users
from sidestep.provider import control, memory
from sidestep.provider.policy_files import read_places
from sidestep.provider.proof import lookup as proof
from sidestep.settings import policy_places

_NOFILE_COMFORTABLE: Final = 4096  # descriptors; the shim takes one or two a thread and one a promoted peer thread
_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}  # system call numbers
_IO_URING_SETUP: Final = 425
_MEMBARRIER_PRIVATE_EXPEDITED: Final = 1 << 3


Checks = tuple[tuple[str, Callable[[], "Finding"]], ...]


class Level(StrEnum):
    """Severity of a finding."""

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
        return asdict(self)


def check_machine(socket_path: Path) -> Iterator[Finding]:
    """All findings about this machine and the provider at `socket_path`."""
    yield Finding("kernel", Level.OK, f"{platform.system()} {platform.release()} on {platform.machine()}")
    yield from run_checks((
        *kernel_checks(),
        ("netns cookie", _netns_cookie),
        ("rseq", _rseq),
        ("membarrier", _membarrier),
        ("io_uring", _io_uring),
        ("descriptors", descriptors),
        ("cpus", _cpus),
        ("shim", shim),
        ("provider", lambda: provider(socket_path)),
        ("users", lambda: _users(socket_path)),
        ("policy", lambda: _policy(socket_path)),
        *log_checks(),
    ))  # fmt: skip


def kernel_checks() -> Checks:
    return (
        ("memfd", in_child(_memfd)),
        ("eventfd", in_child(_eventfd)),
        ("passing", in_child(_passing)),
        ("sock_diag", in_child(_sock_diag)),
    )


def run_checks(checks: Checks) -> Iterator[Finding]:
    for subject, check in checks:
        try:
            yield check()
        except SidestepError as error:
            yield Finding(subject, Level.FAIL, error.message, error.remedy)
        except OSError as error:
            yield Finding(subject, Level.FAIL, f"the kernel refuses: {error.strerror}", _refusal_remedy())


def _refusal_remedy() -> str:
    filtered = "\nSeccomp:\t2" in Path("/proc/self/status").read_text(encoding="utf-8")
    return "allow it in the container's seccomp profile" if filtered else "use a newer kernel, or allow it"


def in_child(check: Callable[[], Finding]) -> Callable[[], Finding]:
    """A check that a child process makes: a filter may kill the process that tries."""

    def tried() -> Finding:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        child = os.fork()
        if not child:
            os.close(reader)
            _answer(check, writer)
        os.close(writer)
        with open(reader, "rb") as answers:
            answer = answers.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            raise Unavailable(
                f"a process that tries is killed by {signal.Signals(os.WTERMSIG(status)).name}",
                remedy=_refusal_remedy(),
            )
        number, _, text = answer.decode(errors="replace").partition(" ")
        if number != "0":
            raise OSError(int(number or errno.EIO), text)
        found: dict[str, str] = json.loads(text)
        return Finding(found["subject"], Level(found["level"]), found["text"], found["remedy"])

    return tried


def _answer(check: Callable[[], Finding], writer: int) -> NoReturn:
    """Writes what a check finds, or the error that it meets, and ends this process, which is a child."""
    text = f"{errno.EIO} the check failed"
    try:
        text = f"0 {json.dumps(check().as_json())}"
    except OSError as error:
        text = f"{error.errno} {error.strerror}"
    finally:
        os.write(writer, text.encode())
        os._exit(0)


def _memfd() -> Finding:
    os.close(memory.sealed_memfd("sidestep-doctor", 4096))
    return Finding("memfd", Level.OK, "sealed shared memory works")


def _eventfd() -> Finding:
    os.close(_channel.doorbell_make())
    return Finding("eventfd", Level.OK, "doorbells work")


def _passing() -> Finding:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        socket.send_fds(one, [b"x"], [one.fileno()])
        _, fds, _, _ = socket.recv_fds(other, 1, 1)
        for fd in fds:
            os.close(fd)
    return Finding("passing", Level.OK, "descriptors can be passed by UNIX sockets")


def _sock_diag() -> Finding:
    prover = proof.SocketProver()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
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
    if ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
        return Finding("io_uring", Level.OK, "switched off here; programs use epoll")
    return Finding(
        "io_uring", Level.NOTE, "the kernel has it; a program that moves socket bytes only by it stays on TCP",
        "switch io_uring off in a program that mixes it with socket calls (the shim does so for libuv)",
    )  # fmt: skip


def descriptors() -> Finding:
    """Finding about the room for the shim's descriptors beside the program's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"a program may open {soft} (up to {hard})"
    if soft >= _NOFILE_COMFORTABLE:
        return Finding("descriptors", Level.OK, text)
    wanted = min(hard, 65536)
    remedy = f"ulimit -n {wanted}" if wanted > soft else "have root raise the hard limit (LimitNOFILE= of its service)"
    return Finding("descriptors", Level.NOTE, text, f"for many connections: {remedy}")


def _cpus() -> Finding:
    usable = len(os.sched_getaffinity(0))
    if usable > 1:
        return Finding("cpus", Level.OK, f"{usable} usable: waits may spin")
    return Finding("cpus", Level.NOTE, "one usable: waits never spin, so gains are less", "allow more CPUs (taskset)")


def shim() -> Finding:
    library = native_library()
    env = ShimSettings(Path(os.devnull)).environment({})
    tried = subprocess.run(["/bin/true"], env=env, capture_output=True, text=True, timeout=10, check=False)
    if tried.returncode == 0 and not tried.stderr:
        return Finding("shim", Level.OK, f"{library} loads")
    raise Unavailable(
        f"{library} does not load: {tried.stderr.strip() or f'exit status {tried.returncode}'}",
        remedy="install sidestep for this Python and system",
    )


def log_checks() -> Checks:
    """Checks of the shim's log, if there is to be one: the shim in a program stays silent if it cannot write it."""
    return (("log", _log),) if os.environ.get(ENV_LOG) else ()


def _log() -> Finding:
    try:
        return Finding("log", Level.OK, f"{log_file(os.environ)} can be written")
    except Unavailable as error:  # a worse one would say that connections stay on TCP
        return Finding("log", Level.NOTE, error.message, error.remedy)


def _users(socket_path: Path) -> Finding:
    """Finding about programs of other users that listen on this host and are left out."""
    uids = {found.uid for found in other_users.sockets() if found.listens}
    others = sorted(other_users.name(uid) for uid in uids if other_users.left_out(uid, socket_path))
    if not others:
        return Finding("users", Level.OK, "the provider serves the users of all programs that listen here")
    who = other_users.name(other_users.owner(socket_path))
    return Finding(
        "users", Level.NOTE, f"the provider is {who}'s own and leaves out servers of {', '.join(others)}",
        other_users.remedy(),
    )  # fmt: skip


def _policy(socket_path: Path) -> Finding:
    """Finding about the rules: whether they are in force; without a provider, whether one would take them."""
    if config.answers(socket_path):
        with control.ControlConnection(socket_path) as connection:
            found = connection.status()["policy"]
        rules, bad, first, blind = found["rules"], found["errors"], found["first_error"], found["blind"]
    else:
        loaded = read_places(policy_places(os.environ))
        problems = [problem for one in loaded for problem in one.problems]
        rules, bad, blind = sum(len(one.statements) for one in loaded), len(problems), None
        first = str(problems[0]) if problems else None
    if bad:
        raise Unavailable(f"{bad} bad lines, so not all of it is in force: {first}", remedy="sidestep policy check")
    if blind:
        return Finding(
            "policy", Level.NOTE, f"changes may go unnoticed: {blind}", "restart the provider after a change"
        )
    return Finding("policy", Level.OK, f"{rules} rules" if rules else "no rules: everything may be offloaded")


def provider(socket_path: Path) -> Finding:
    if config.answers(socket_path):
        with control.ControlConnection(socket_path) as connection:
            found = connection.status()
        if LAYOUT_VERSION not in control.layouts(found):
            text = (
                f"{found['pid']} at {socket_path}, of sidestep {found['version']}, does not serve programs of this one"
            )
            raise Unavailable(text, remedy=control.RESTART)
        return Finding("provider", Level.OK, f"{found['pid']} at {socket_path}, {counted(found['shims'], 'program')}")
    directory = socket_path.parent
    if directory.is_dir():
        make_private_dir(directory)  # the directory exists: nothing is made, only checked
    elif not os.access(directory.parent, os.W_OK):
        raise Unavailable(f"{directory} cannot be made", remedy="give another place with --socket")
    return Finding("provider", Level.OK, f"none runs at {socket_path}; 'sidestep run' starts one")
