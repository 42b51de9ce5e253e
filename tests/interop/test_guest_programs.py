"""The programs that later tests need are in the guest, and this is how they are called with siw.

Each talks to itself here, within the guest. udaddy is not among them: it wants datagrams, which iWARP has not; nor is
ibv_rc_pingpong: on iWARP a queue pair is connected by the connection manager only.
"""

from __future__ import annotations

import pytest
from lab_guest import Lab

_PORT = 7180
_PERFTEST = f"-F -R -d siw0 -p {_PORT} -n 100"

# Program -> the options of the server and of the client. perftest needs -F; without -e it polls.
PROGRAMS = {
    "rping": ("-s -a {address} -p {port} -v", "-c -a {address} -p {port} -C 5 -vV"),
    "ucmatose": ("-b {address} -p {port} -C 4 -S 1000", "-s {address} -p {port} -C 4 -S 1000"),
    "rstream": ("-b {address} -p {port} -S 65536 -C 50", "-s {address} -p {port} -S 65536 -C 50"),
    "ib_send_bw": (f"{_PERFTEST} -e -s 65536", f"{_PERFTEST} -e -s 65536 {{address}}"),
    "ib_write_bw": (f"{_PERFTEST} -s 65536", f"{_PERFTEST} -s 65536 {{address}}"),
    "ib_read_bw": (f"{_PERFTEST} -s 65536", f"{_PERFTEST} -s 65536 {{address}}"),
    "ib_send_lat": (f"{_PERFTEST} -e", f"{_PERFTEST} -e {{address}}"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_talks_over_siw(lab: Lab, program: str) -> None:
    server, client = (options.format(address=lab.siw_address, port=_PORT) for options in PROGRAMS[program])
    running = lab.serve(program, f"exec {program} {server}", _PORT)
    try:
        lab.run(f"{program} {client}")
    finally:
        running.kill()  # one whose client failed would stay, and some of them poll


def test_verbs_from_python(lab: Lab) -> None:
    listed = "import pyverbs.device as d; print(*(one.name.decode() for one in d.get_device_list()))"
    assert "siw0" in lab.run(["python3", "-c", listed]).stdout.split()
