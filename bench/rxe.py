"""Two guests with the kernel's rxe: rstream over rsockets, under sidestep, by SMC-R and by TCP: `python bench/rxe.py`.

As root, with the lab (SIDESTEP_LAB, see tests/interop/README.md). The guests are emulated, so figures mean something
only beside each other. Each way is taken in turns, round after round; what rxe has received meanwhile is printed, too,
as rstream's connection begins with TCP under sidestep, and a short run would be mostly that. SMC-R hangs in Linux 6.1:
take another kernel by LAB_KERNEL=linux-image-6.12-amd64, or leave it out.

    --rounds N    (4)
    --ways NAMES  of rsockets, sidestep, smc, tcp (rsockets,sidestep,tcp)
    --works NAMES   of latency, messages, bandwidth (all)
    --save FILE   the figures as JSON
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests/support"))

from lab_guest import Background, Lab, lab_folder  # noqa: E402 - the path has to be there first

from sidestep.demo.machine import Machine  # noqa: E402

WAYS: Final = ("rsockets", "sidestep", "smc", "tcp")
WORKS: Final = {  # bytes of a message, messages one way before those the other way, turns
    "latency": (64, 1, 3000),
    "messages": (64, 1000, 60),
    "bandwidth": (65536, 50, 16),
}
SOCKET: Final = "/run/bench/provider"
SMC: Final = "/run/smc.so"
PROVIDER: Final = (
    f"mkdir -p -m 700 /run/bench; ulimit -l unlimited; exec {{}} --foreground --socket={SOCKET} "
    "--remote=198.18.2.0/24 --remote-transports=verbs --remote-promote=always --offer-expiry=60"
)
BOOT_S: Final = 100.0
RUN_S: Final = 300.0


@dataclass
class Row:
    """What each round of one work and way came to."""

    work: str
    way: str
    us: list[float] = field(default_factory=list)  # a message
    packets: list[int] = field(default_factory=list)  # that rxe of the asking guest received meanwhile


class Guests:
    """Both, with a provider each."""

    def __init__(self, one: Lab, other: Lab) -> None:
        self.one, self.other = one, other
        self._port = 7000
        self._providers = [self._provider(guest) for guest in (one, other)]

    def _sidestep(self, guest: Lab, *words: str) -> str:
        *run, _ = guest.python_in_guest("")
        return shlex.join([*run, "-m", "sidestep", *words])

    def _provider(self, guest: Lab) -> Background:
        provider = guest.background("provider", PROVIDER.format(self._sidestep(guest, "provider", "start")))
        asked = self._sidestep(guest, "provider", "status", f"--socket={SOCKET}")
        assert guest.wait(f"{asked} >/dev/null 2>&1", BOOT_S), provider.log()
        return provider

    def have_smc(self) -> None:
        """Sockets of the family AF_SMC go over rxe."""
        with tempfile.TemporaryDirectory() as place:
            library = Path(place) / "smc.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", library, HERE / "c/smc.c"], check=True)
            for guest in (self.one, self.other):
                guest.push(library, SMC)
                guest.push(lab_folder() / "checks/smc_probe.py", "/run/smc_probe.py")
                guest.run("modprobe smc && python3 /run/smc_probe.py setup SIDESTEP eth1 rxe0")

    def received(self) -> int:
        """Packets, by the device's own count."""
        words = self.one.run("rdma statistic show link rxe0/1").stdout.split()
        return int(words[words.index("rcvd_pkts") + 1])

    def measure(self, way: str, work: str) -> float:
        """Microseconds of a message."""
        size, together, turns = WORKS[work]
        self._port += 1
        run = self._sidestep(self.one, "run", f"--socket={SOCKET}", "--")
        prefix = {"sidestep": run, "smc": f"env LD_PRELOAD={SMC}"}.get(way, "")
        options = f"-f ip -p {self._port} -T b{'' if way == 'rsockets' else ' -T s'} -S {size} -C {together} -I {turns}"
        program = f"{prefix} rstream {options}"
        server = self.other.background("server", f"exec {program} -b {self.other.rxe_address}")
        listens = f"ss -tln | grep -q ':{self._port} '"
        if way == "rsockets":
            listens = f"rdma resource show cm_id | grep -q 'LISTEN.*:{self._port} '"
        assert self.other.wait(listens), server.log()
        said = self.one.run(f"{program} -s {self.other.rxe_address}", timeout_s=RUN_S).stdout
        seconds = next(line.split()[5] for line in said.splitlines() if line.startswith("custom"))
        return float(seconds.rstrip("s")) * 1e6 / (2 * together * turns)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ways", default="rsockets,sidestep,tcp")
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    ways, works = given.ways.split(","), given.works.split(",")
    if unknown := {*ways} - {*WAYS} | {*works} - {*WORKS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    machine = Machine.now()
    print(machine, flush=True)
    rows = [Row(work, way) for work in works for way in ways]
    lab = Lab.started()
    try:
        guests = Guests(lab, lab.beside())
        if "smc" in ways:
            guests.have_smc()
        for _ in range(given.rounds):
            for row in rows:
                before = guests.received()
                row.us.append(guests.measure(row.way, row.work))
                row.packets.append(guests.received() - before)
                print(f"{row.work:<10} {row.way:<9} {row.us[-1]:9,.1f} us  {row.packets[-1]:7,} packets", flush=True)
    finally:
        lab.stop()
    for row in rows:
        other = next(each for each in rows if (each.work, each.way) == (row.work, ways[0]))
        ratio = statistics.median(theirs / ours for theirs, ours in zip(other.us, row.us, strict=True))
        spread = f"{statistics.median(row.us):9,.1f} us ({min(row.us):,.1f} .. {max(row.us):,.1f})"
        print(f"{row.work:<10} {row.way:<9} {spread:<36} {ratio:5.2f}x of {ways[0]}")
    if given.save:
        saved = {"machine": machine.as_json(), "rows": [asdict(row) for row in rows]}
        given.save.write_text(json.dumps(saved, indent=1))


if __name__ == "__main__":
    main()
