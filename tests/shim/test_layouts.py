"""A shim that cannot go with its provider, or with a segment: connections stay on TCP, and it is said why."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from chatting import Chat, talk_on
from common import PATIENCE_S, eventually
from shim_client import Channel, ShimClient

from sidestep.native.layout import LAYOUT_VERSION, Reason, Rpc
from sidestep.observe.explain import Explainer, Query, Verdict
from sidestep.observe.sockets import Outside
from sidestep.provider import arena, rpc
from sidestep.provider.rpc import Descriptors, Message
from sidestep.testing import Sidestep


def test_a_provider_that_does_not_serve_the_layout_is_the_reason(
    sidestep: Sidestep, closing: ExitStack, tmp_path: Path
) -> None:
    tmp_path.chmod(stat.S_IRWXU)
    path = tmp_path / "provider"
    listener = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    listener.bind(os.fspath(path))
    listener.listen(8)
    listener.settimeout(PATIENCE_S)
    environment = sidestep.env() | {"SIDESTEP_SOCKET": str(path)}
    chat = Chat(closing, sidestep.popen, env=environment)
    client = chat.client(sidestep.popen, env=environment)
    arenas: list[Descriptors] = []

    def explained() -> bool:
        """Each process comes, is told, and is sent away; whatever the version of the record that tells it."""
        talk_on(client)
        listener.setblocking(False)
        try:
            shim, _ = listener.accept()
        except BlockingIOError:
            pass
        else:
            with shim:
                shim.settimeout(PATIENCE_S)
                hello = rpc.receive(shim)
                assert hello is not None
                assert hello.message.type is Rpc.HELLO
                arenas.append(closing.enter_context(hello.descriptors))
                rpc.send(shim, Message(type=Rpc.LAYOUT, version=LAYOUT_VERSION + 40))
        reasons = {slot["reason"] for one in arenas for _, slot in arena.numbered_slots(one[0])}
        return Reason.PROVIDER_LAYOUT in reasons

    eventually(explained)
    talk_on(client)


def test_explain_names_both_versions_and_whom_to_restart(sidestep: Sidestep, closing: ExitStack) -> None:
    chat = Chat(closing, sidestep.popen)
    client = chat.client(sidestep.popen)
    assert arena.layout_of(client.pid) == LAYOUT_VERSION
    process = Explainer(sidestep.socket)
    (known,) = process.explain(Query(pid=client.pid))
    assert known.verdict is not Verdict.UNKNOWN
    # its shim is of another version from now on, as the header of its arena has it
    (held,) = (
        entry
        for entry in Path(f"/proc/{client.pid}/fd").iterdir()
        if str(entry.readlink()).startswith(arena.ARENA_NAME)
    )
    for version, remedy in ((LAYOUT_VERSION + 1, "sidestep provider stop"), (1, "restart ")):
        with held.open("r+b") as file:
            file.seek(4)
            file.write(version.to_bytes(4, "little"))
        (found,) = Explainer(sidestep.socket).explain(Query(pid=client.pid))
        assert found.reason == Outside.OTHER_LAYOUT.name
        assert f"of layout {version}; the provider, of sidestep" in found.cause
        assert remedy in found.hint


ECHO = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
one, _ = listener.accept()
while message := one.recv(64):
    one.sendall(message)
"""


def test_a_segment_that_no_shim_makes_is_the_reason(sidestep: Sidestep, closing: ExitStack) -> None:
    server = sidestep.popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    tcp = closing.enter_context(socket.create_connection(("127.0.0.1", int(server.stdout.readline()))))
    client = closing.enter_context(ShimClient(sidestep.socket))
    client.hello()
    channel = Channel.make()  # its header has neither magic nor version
    closing.callback(channel.close)
    client.offer(tcp, channel, token=1)
    client.wait_offer(tcp)

    def explained() -> bool:
        tcp.sendall(b"x")
        assert tcp.recv(1) == b"x"
        return [c.reason for c in sidestep.connections()] == ["PEER_VIOLATION"]

    eventually(explained)
