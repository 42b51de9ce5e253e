"""Runs in the guest: a host with a provider, an echo server and clients under the shim, as a test asks by TCP.

A request is a line of JSON that names in `do` what to do, and is answered by one line: what came of it, or `error`. It
ends with its connection. See `Host` for what there is.

usage: verbs_host.py CONTROL PORT ADDRESS NETWORK TRANSPORTS PROMOTE
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sidestep.errors import SidestepError
from sidestep.observe.rdma import processes
from sidestep.provider.control import ControlConnection
from sidestep.settings import RemoteSettings
from sidestep.testing import Sidestep

PLACES = [Path(__file__).with_name("talkers.py"), Path(__file__).parents[2] / "remote" / "talkers.py"]
TALKERS = [sys.executable, str(next(place for place in PLACES if place.exists()))]
PROGRAM_CLIENT = [sys.executable, str(Path(__file__).with_name("program_client.py"))]
PORT = 7000
OFFER_EXPIRY_S = 60.0  # it opens its device when the first one asks, which takes longer than an offer waits elsewhere
PAUSE_S = 0.05  # between two messages: an emulated processor that has no rest answers nobody in time


class Host:
    """Each method but `run` is a request, with the fields that it takes."""

    def __init__(self, sidestep: Sidestep, address: str, log: Path) -> None:
        self._sidestep = sidestep
        self._log = log
        self._address = address
        self._client: Any = None
        self._program: Any = None

    def run(self, control: socket.socket) -> None:
        """Until the test hangs up."""
        with control.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                asked = json.loads(line)
                try:
                    answer = getattr(self, asked.pop("do"))(**asked)
                except (SidestepError, OSError, RuntimeError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()

    def serve(self) -> dict[str, Any]:
        """The echo server listens."""
        server = self._sidestep.popen([*TALKERS, "serve", self._address, str(PORT)], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        return {"says": server.stdout.readline().strip()}

    def talk(self, address: str, size: int, pause_s: float = PAUSE_S) -> dict[str, Any]:
        """A client talks until `finish`; its first message has come back."""
        argv = [*TALKERS, "talk", address, str(PORT), "0", str(size), str(pause_s)]
        self._client = self._sidestep.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return {"says": self._client.stdout.readline().strip()}

    def start(self, argv: list[str], environment: dict[str, str]) -> dict[str, Any]:
        """A program runs until `stop`."""
        self._program = self._sidestep.popen(argv, env=self._sidestep.env() | environment)
        return {}

    def stop(self) -> dict[str, Any]:
        """How it ended."""
        self._program.terminate()
        return {"code": self._program.wait(60)}

    def ask(self, what: str, address: str, port: int) -> dict[str, Any]:
        """A client of a program works until `finish`: what it says first."""
        argv = [*PROGRAM_CLIENT, what, address, str(port)]
        self._client = self._sidestep.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return {"says": self._client.stdout.readline().strip()}

    def finish(self) -> dict[str, Any]:
        """What it says at its end, and how it ended."""
        said, _ = self._client.communicate(timeout=60)
        return {"says": said.splitlines(), "code": self._client.returncode}

    def look(self) -> dict[str, Any]:
        """Counters, the devices of the links, the ends, and bytes that are pinned, as we and the kernel count them."""
        with ControlConnection(self._sidestep.socket) as connection:
            status, links = connection.status(), list(connection.links())
        devices = [device for process in processes({status["pid"]}) for device in process.devices]
        return {
            "pinned": sum(device.counters.get("pinned_bytes", 0) for device in devices),
            "pinned_by_kernel": _pinned(status["pid"]),
            "counters": status["counters"],
            "log": self._log.read_text(encoding="utf-8")[-2000:],
            "devices": [link["device"] for link in links],
            "ends": [
                {
                    "state": each.state, "promoted": each.promoted, "reason": each.reason, "why": each.why,
                    "sent": each.tx.ring_bytes,
                }
                for each in self._sidestep.connections()
            ],
        }  # fmt: skip


def _pinned(pid: int) -> int:
    """What a process has pinned, in bytes (proc_pid_status(5))."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmPin:"))


def main() -> None:
    control, port, address, network, transports, promote = sys.argv[1:]
    with socket.create_server((control, int(port))) as server, tempfile.TemporaryDirectory() as place:
        log = Path(place) / "provider.log"
        settings = RemoteSettings.parse(network, promote=promote, transports=transports)
        with Sidestep(remote=settings, log=log, offer_expiry_s=OFFER_EXPIRY_S) as own:
            print("ready", flush=True)
            Host(own, address, log).run(server.accept()[0])


main()
