"""`sidestep explain` of a connection to another host: two network namespaces, each with a provider, and a cable."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from common import PATIENCE_S, standing_still
from netns import ip, veth

from sidestep.native.layout import REASON_TEXT, Reason
from sidestep.native.reasons import REMEDY
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow
SERVER = """
import socket, sys
print("here", flush=True)
sys.stdin.readline()
with socket.create_server(("10.78.0.2", 7000)) as listener:
    print("listening", flush=True)
    connection = listener.accept()[0]
    while data := connection.recv(100):
        connection.sendall(data)
"""
CLIENT = """
import socket, sys
with socket.create_connection(("10.78.0.2", 7000)) as connection:
    for _ in range(20):
        connection.sendall(b"x")
        connection.recv(1)
    print("talked", flush=True)
    sys.stdin.readline()
"""


def explain(sidestep: Sidestep, what: object) -> list[dict[str, Any]]:
    """Its explanations."""
    argv = [sys.executable, "-m", "sidestep", "explain", f"--socket={sidestep.socket}", "--json", str(what)]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    explanations: list[dict[str, Any]] = json.loads(found.stdout)["explanations"]
    return explanations


@pytest.mark.usefixtures("netns")
@pytest.mark.parametrize("answers", [True, False], ids=["told by the shim", "the provider answers too late"])
def test_the_other_host_is_told_from_both_ends(answers: bool) -> None:
    """A shim that has not heard the provider yet cannot pin its connection; the addresses tell all the same."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        here, there = (stack.enter_context(Sidestep()) for _ in range(2))
        server: Any = there.popen(["unshare", "--net", sys.executable, "-c", SERVER], **pipes)
        assert server.stdout.readline() == "here\n"
        veth("here", "there")
        ip("address add 10.78.0.1/24 dev here")
        ip(f"link set there netns {server.pid}")
        enter = ["nsenter", f"--target={server.pid}", "--net", "ip"]
        for command in ("address add 10.78.0.2/24 dev there", "link set there up", "link set lo up"):
            subprocess.run([*enter, *command.split()], check=True, timeout=PATIENCE_S)
        server.stdin.write("\n")
        server.stdin.flush()
        assert server.stdout.readline() == "listening\n"
        with ExitStack() as still:
            for one in () if answers else (here, there):
                still.enter_context(standing_still(one.provider_pid))
            client: Any = here.popen([sys.executable, "-c", CLIENT], **pipes)
            assert client.stdout.readline() == "talked\n"
        (mine,) = explain(here, client.pid)
        others = [one for one in explain(there, server.pid) if one["verdict"] == "tcp"]
    for found in (mine, *others):
        assert (found["reason"], found["cause"], found["hint"]) == (
            "REMOTE", REASON_TEXT[Reason.REMOTE], REMEDY[Reason.REMOTE]
        )  # fmt: skip
    assert len(others) == 1
