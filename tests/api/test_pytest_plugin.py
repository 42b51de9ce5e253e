"""The plug-in for pytest, in runs of pytest of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ECHO = """
import socket
import sys

from sidestep.testing import free_port

SERVER = '''
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
    print("listens", flush=True)
    with listener.accept()[0] as sock:
        while data := sock.recv(1 << 16):
            sock.sendall(data)
'''
CLIENT = '''
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
    while True:
        sock.sendall(b"word")
        sock.recv(1 << 16)
'''

def test_echo(sidestep):
    port = str(free_port())
    server = sidestep.popen([sys.executable, "-c", SERVER, port], stdout=-1)
    assert server.stdout.readline() == b"listens\\n"
    client = sidestep.popen([sys.executable, "-c", CLIENT, port])
    sidestep.wait_for(lambda found: [end.promoted for end in found] == [True, True])
    print(f"programs {server.pid} {client.pid} {sidestep.provider_pid}")
"""


@pytest.mark.slow
def test_a_test_that_asks_for_sidestep_has_a_provider_and_programs_which_end_with_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ECHO)
    run = pytester.runpytest_subprocess("-s")
    run.assert_outcomes(passed=1)
    (said,) = (line for line in run.outlines if "programs " in line)
    assert [pid for pid in re.findall(r"\d+", said.partition("programs ")[2]) if Path("/proc", pid).exists()] == []


@pytest.mark.slow
def test_a_run_that_does_not_use_it_imports_nothing_of_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys

        def test_modules():
            there = {name for name in sys.modules if name.partition(".")[0] == "sidestep"}
            assert there == {"sidestep", "sidestep.pytest_plugin"}
    """)
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.slow
def test_pytest_lists_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.runpytest_subprocess("--fixtures").stdout.fnmatch_lines(["sidestep -- *pytest_plugin.py*"])
