"""A guest with the kernel's own RDMA drivers, and the network that this machine shares with it.

`Lab` drives the scripts of a folder called `lab` (see README.md): it builds a disk from Debian's packages, boots it
under qemu in a network namespace of its own, and runs commands in it. Everything has a time limit. Whatever keeps the
guest from running is an `Unusable` that says what it was.
"""

from __future__ import annotations

import compileall
import fcntl
import os
import py_compile
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Final, Self

import click

from sidestep.observe.namespaces import thread_in_netns

ROOT: Final = Path(__file__).parents[2]
BUILD_TIMEOUT_S: Final = 900.0  # downloads some 300 MB; on a quiet machine it takes one minute
START_TIMEOUT_S: Final = 180.0
COMMAND_TIMEOUT_S: Final = 60.0
SIW_BRIDGE: Final = "lab-iw"
RXE_BRIDGE: Final = "lab-ro"
_TOLD_MAX: Final = 600  # characters at the end of an output that are of interest
_GRACE_S: Final = 30.0  # of a command's limit, for the way into the guest and back
_DISCARD: Final = 9  # RFC 863
_MARK: Final = b"the capture ends here"
_INSTALLED: Final = "/opt/sidestep"  # in the guest
_GUEST_PYTHON: Final = (3, 11)
_TESTS: Final = ROOT / "tests"
_PROGRAMS: Final = ("interop/guest/*.py", "remote/talkers.py", "support/control_pair.py")
_NICE: Final = ("nice", "-n", "19")


class Unusable(Exception):
    """Why there is no guest."""


def lab_folder() -> Path:
    """Where the scripts are: SIDESTEP_LAB, else `shared/lab` beside the folder of the repository."""
    named = os.environ.get("SIDESTEP_LAB")
    folder = Path(named) if named else ROOT.parent / "shared" / "lab"
    if not os.access(folder / "lab", os.X_OK):
        where = "SIDESTEP_LAB names" if named else "SIDESTEP_LAB is not set and by default it is"
        raise Unusable(f"no program `lab` in the folder of the lab: {where} {folder}")
    return folder


class Background:
    """A command that runs in the guest; its output is in a file there."""

    def __init__(self, lab: Lab, pid: int, file: str) -> None:
        self._lab = lab
        self.pid = pid
        self._file = file

    def log(self) -> str:
        """What it has written so far."""
        return self._lab.run(["cat", self._file]).stdout

    def wait_for(self, pattern: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Its output once a line matches the pattern, an extended regular expression."""
        command = f"until grep -qE -- {shlex.quote(pattern)} {self._file}; do sleep 0.05; done; cat {self._file}"
        done = self._lab.run(command, timeout_s=timeout_s, check=False)
        assert done.returncode == 0, f"no line matches {pattern!r} after {timeout_s} s:\n{self.log()}"
        return done.stdout

    def kill(self) -> None:
        """The shell that runs the command, or the program that it has become with `exec`, is gone."""
        self._lab.run(["kill", "-KILL", str(self.pid)], check=False)


class Lab:
    """One guest, from boot to stop, in a network namespace that nobody else uses."""

    def __init__(self, folder: Path, beside: Lab | None = None) -> None:
        self.name, number = ("a", 1) if beside is None else ("b", 2)
        self._script = folder / "lab"
        place = tempfile.mkdtemp(prefix="sidestep-lab-") if beside is None else beside._place
        self._place: Path = Path(place)
        self._netns = f"{self._place.name}"
        self._environment = {**os.environ, "LAB_RUN": str(self._place / "run"), "LAB_NETNS": self._netns}
        self._keeper: subprocess.Popen[bytes] | None = None  # of the first guest: it stops both
        self._installed = False
        self.siw_address = f"198.18.1.{10 + number}"  # of the guest
        self.host_address = "198.18.1.1"  # of this machine, as the guest's siw sees it
        self.rxe_address = f"198.18.2.{10 + number}"  # of the guest's other link, where rxe is
        self.rxe_host_address = "198.18.2.1"
        self.rxe_address6, self.rxe_host_address6 = f"fd18:2::{10 + number}", "fd18:2::1"
        self.siw_nobody, self.rxe_nobody = "198.18.1.99", "198.18.2.99"  # of the same networks, of nobody

    # ---- boot and stop ----

    @classmethod
    def started(cls) -> Self:
        """A guest that has booted; `Unusable` with the reason if there can be none."""
        folder = lab_folder()
        if os.geteuid() != 0:
            raise Unusable("the lab needs root: it makes a network namespace and a tap device")
        if not Path("/dev/net/tun").exists():
            raise Unusable("the lab needs /dev/net/tun")
        lab = cls(folder)
        try:
            lab._build()
            lab._start()
        except BaseException:
            lab.stop()
            raise
        return lab

    def beside(self) -> Lab:
        """A second guest in the same network; it goes with this one. `Unusable` with the reason if there is none."""
        other = Lab(self._script.parent, self)
        other._own("start", other.name, f"--timeout={START_TIMEOUT_S:.0f}", timeout_s=START_TIMEOUT_S + _GRACE_S)
        return other

    def _build(self) -> None:
        with (Path(tempfile.gettempdir()) / "sidestep-lab-build.lock").open("w") as lock:
            # Two builds at a time would write the same files.
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._own("build", timeout_s=BUILD_TIMEOUT_S)
        if shutil.which("qemu-system-x86_64") is None:
            raise Unusable("no qemu-system-x86_64, although the lab has been built")

    def _start(self) -> None:
        # The keeper stops the guest when this process ends, however it does: then its input is at its end.
        stopping = f"cat >/dev/null; {shlex.quote(str(self._script))} stop; rm -rf {self._place}"
        self._keeper = subprocess.Popen(
            ["sh", "-c", stopping], stdin=subprocess.PIPE, env=self._environment, start_new_session=True
        )
        limit = f"--timeout={START_TIMEOUT_S:.0f}"
        self._own("start", self.name, limit, "--links", "siw,rxe", timeout_s=START_TIMEOUT_S + _GRACE_S)

    def _own(self, *arguments: str, timeout_s: float) -> None:
        """A command of the lab's that must work, or there is no guest."""
        try:
            done = subprocess.run(
                [*_NICE, self._script, *arguments], timeout=timeout_s, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Unusable(f"`lab {arguments[0]}` took more than {timeout_s:.0f} s") from error
        if done.returncode:
            raise Unusable(f"`lab {arguments[0]}` failed ({done.returncode}): {done.stdout.strip()[-_TOLD_MAX:]}")

    def stop(self) -> None:
        """The guest and its network are gone after this."""
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait(COMMAND_TIMEOUT_S)
            self._keeper = None
        shutil.rmtree(self._place, ignore_errors=True)

    # ---- in the guest ----

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = COMMAND_TIMEOUT_S,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs it in the guest, a text by bash; 124 is its result when the limit is over, 125 of a guest that is mute.

        With `check` a result other than 0 is an AssertionError with the output.
        """
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        done = subprocess.run(
            [self._script, "exec", "-n", self.name, "-t", str(timeout_s), "--", *argv], timeout=timeout_s + _GRACE_S,
            env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, (
            f"{command} in the guest: result {done.returncode}\n{done.stdout[-_TOLD_MAX:]}\n{done.stderr[-_TOLD_MAX:]}"
        )
        return done

    def install(self) -> None:
        """The package, the programs of `guest/` and what they use are in the guest; `python_in_guest` finds them."""
        if self._installed:
            return
        with tempfile.TemporaryDirectory() as place:
            folder, packed = Path(place) / "site", Path(place) / "site.tar"
            unneeded = shutil.ignore_patterns("__pycache__", "*.c", "*.h")
            shutil.copytree(ROOT / "src" / "sidestep", folder / "sidestep", ignore=unneeded)
            shutil.copytree(Path(click.__file__).parent, folder / "click", ignore=unneeded)
            described = f"sidestep-{metadata.version('sidestep')}.dist-info"  # with the entry points
            shutil.copytree(str(metadata.distribution("sidestep").locate_file(described)), folder / described)
            for program in (found for pattern in _PROGRAMS for found in _TESTS.glob(pattern)):
                shutil.copy(program, folder)
            if sys.version_info[:2] == _GUEST_PYTHON:  # an emulated processor takes a minute for it
                mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
                compileall.compile_dir(folder, quiet=1, invalidation_mode=mode)
            with tarfile.open(packed, "w") as archive:
                archive.add(folder, ".")
            self.push(packed, "/run/site.tar")
        self.run(f"mkdir -p {_INSTALLED} && tar xf /run/site.tar -C {_INSTALLED}")
        self._installed = True

    def python_in_guest(self, program: str, *arguments: str) -> list[str]:
        """Runs a program of `guest/` there, by its Python, which is as old as the oldest we support: the command."""
        self.install()
        return ["env", f"PYTHONPATH={_INSTALLED}", "python3", f"{_INSTALLED}/{program}", *arguments]

    def background(self, tag: str, command: str) -> Background:
        """Starts it in the guest and leaves it running."""
        done = subprocess.run(
            [self._script, "exec", "-n", self.name, "--bg", tag, "--", "bash", "-c", command],
            timeout=COMMAND_TIMEOUT_S, check=True, capture_output=True, text=True,
            env=self._environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        pid, file = done.stdout.split()
        return Background(self, int(pid), file)

    def wait(self, condition: str, timeout_s: float = COMMAND_TIMEOUT_S) -> bool:
        """Whether the condition, a command of the shell's, comes true in the guest within the limit."""
        loop = f"until {condition}; do sleep 0.05; done"
        return self.run(loop, timeout_s=timeout_s, check=False).returncode == 0

    def serve(self, tag: str, command: str, port: int) -> Background:
        """Starts a server in the guest and waits until it listens for RDMA connections on that port."""
        server = self.background(tag, command)
        listens = f"rdma resource show cm_id 2>/dev/null | grep -q 'state LISTEN.*:{port} '"
        assert self.wait(listens), f"{command} does not listen on port {port}:\n{server.log()}"
        return server

    def push(self, source: Path, destination: str) -> None:
        """Copies a file into the guest."""
        subprocess.run(
            [self._script, "push", "-n", self.name, source, destination], timeout=COMMAND_TIMEOUT_S, check=True,
            env=self._environment, stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip

    # ---- on this machine ----

    def network(self) -> AbstractContextManager[None]:
        """This thread, and what it starts, is in the lab's network; sockets made there stay there."""
        return thread_in_netns(Path("/run/netns") / self._netns)

    def listener(self, address: str | None = None) -> socket.socket:
        """A TCP socket that listens to the guest, on a port of the kernel's choice."""
        with self.network():
            return socket.create_server((address or self.host_address, 0))

    def connect(self, port: int, timeout_s: float = COMMAND_TIMEOUT_S, *, address: str | None = None) -> socket.socket:
        """A TCP connection to the guest."""
        with self.network():
            return socket.create_connection((address or self.siw_address, port), timeout_s)

    def python(
        self, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs this repository's Python in the lab's network, on this machine."""
        with self.network():
            return subprocess.run(
                [sys.executable, *arguments], timeout=timeout_s, check=False, capture_output=True, text=True,
                env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @contextmanager
    def capture(self, file: Path, *, only: str = "tcp", interface: str = SIW_BRIDGE) -> Iterator[None]:
        """What goes over the bridge meanwhile is in the file afterwards, as pcap, and behind it a datagram of ours."""
        chosen = f"({only}) or udp dst port {_DISCARD}"
        with self.network():
            tcpdump = subprocess.Popen(
                ["tcpdump", "--immediate-mode", "-Z", "root", "-Uni", interface, "-w", file, chosen],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            assert tcpdump.stderr is not None
            told = next((line for line in tcpdump.stderr if "listening on" in line), None)
            assert told is not None, "tcpdump does not listen"
            yield
            # tcpdump leaves unread what the kernel still has for it when it is told to end.
            mark.sendto(_MARK, (self.rxe_address if interface == RXE_BRIDGE else self.siw_address, _DISCARD))
            self._wait_for_mark(file)
        finally:
            mark.close()
            tcpdump.send_signal(signal.SIGINT)
            _, rest = tcpdump.communicate(timeout=_GRACE_S)
        assert "\n0 packets dropped by kernel" in "\n" + rest, rest

    def _wait_for_mark(self, file: Path) -> None:
        end = time.monotonic() + COMMAND_TIMEOUT_S
        while _MARK not in file.read_bytes():
            assert time.monotonic() < end, "tcpdump has not seen the datagram behind the conversation"
            time.sleep(0.02)
