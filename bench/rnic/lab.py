"""The lab's guest as a place to measure in: it gets this program and our package, and serves in every way."""

from __future__ import annotations

import json
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from lab_guest import Lab, Unusable  # noqa: E402 - found by the line above

from rnic.method import DEVICE_PORT, SIW_PORT  # noqa: E402
from rnic.tcp import TCP_PORT  # noqa: E402

__all__ = ["Guest", "Unusable"]

_PLACE: Final = "/run/sidestep-bench"  # in the guest
_PROGRAM: Final = "bench/iwarp.py"
_FILES: Final = (_PROGRAM, "bench/rnic", "src/sidestep")
_SUFFIXES: Final = {".py", ".so"}
_MEASURING_S: Final = 1800.0  # of one round at most
_SERVERS: Final = {"device": DEVICE_PORT, "tcp": TCP_PORT, "siw": SIW_PORT}


class Guest:
    """The guest while its servers run. `Unusable` says why there is none."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.address = lab.siw_address
        self.host_address = lab.host_address

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[Self]:
        """Boots it; it ends with this."""
        lab = Lab.started()
        try:
            guest = cls(lab)
            guest._install()
            for kind, port in _SERVERS.items():
                guest._serve(kind, port)
            yield guest
        finally:
            lab.stop()

    def _install(self) -> None:
        with tempfile.NamedTemporaryFile(suffix=".tar") as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                for name in _FILES:
                    archive.add(ROOT / name, name, filter=_wanted)
            file.flush()
            self._lab.push(Path(file.name), f"{_PLACE}.tar")
        self._lab.run(f"mkdir {_PLACE} && tar -xf {_PLACE}.tar -C {_PLACE}")

    def _serve(self, kind: str, port: int) -> None:
        server = self._lab.background(f"serve-{kind}", f"exec {_command('--serve', kind, self.address)}")
        listens = f"ss -Htln 'src {self.address}:{port}' | grep -q ."
        if not self._lab.wait(listens):
            raise SystemExit(f"the server {kind} does not listen on port {port} of the guest:\n{server.log()}")

    def inside(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What the program measures within the guest."""
        done = self._lab.run(_command(*arguments), timeout_s=_MEASURING_S)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def on_host(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What it measures on this machine, in the lab's network."""
        done = self._lab.python(str(ROOT / _PROGRAM), *arguments, timeout_s=_MEASURING_S)
        if done.returncode:
            raise SystemExit(f"{_PROGRAM} in the lab's network:\n{done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def parameters(self) -> str:
        """Of its siw."""
        told = self._lab.run("cd /sys/module/siw/parameters && grep . *").stdout
        return ", ".join(line.replace(":", " ") for line in told.split())


def _command(*arguments: str) -> str:
    return shlex.join(["env", f"PYTHONPATH={_PLACE}/src", "python3", f"{_PLACE}/{_PROGRAM}", *arguments])


def _wanted(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return file if file.isdir() or Path(file.name).suffix in _SUFFIXES else None
