"""Every kind of explanation, of real programs that talk under sidestep or beside it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from chatting import PROGRAM, Chat, ended, expect, promoted_chat, promoted_client, talk_on
from common import eventually, slot
from foreign_programs import put_out_of_reach
from relay_example import installed as relay_installed
from shim_client import ShimClient

from sidestep.errors import Misuse
from sidestep.native.layout import REASON_TEXT, Reason, State
from sidestep.native.reasons import REMEDY, remedy
from sidestep.observe import other_users
from sidestep.observe.explain import Explainer, Query, Verdict
from sidestep.observe.sockets import HostSocket
from sidestep.settings import Proof
from sidestep.switch.protocol import Endpoint
from sidestep.testing import Sidestep, free_port

pytestmark = pytest.mark.slow  # real programs, and commands as processes

SHOWN = 120  # characters of a command line in a hint
Explain = Callable[..., list[dict[str, Any]]]


def command_of(*words: object) -> str:
    """The command of a hint; a command line that is too long, as in a tree with a long path, is cut to its program."""
    full = " ".join([sys.executable, *map(str, words)])
    return f"sidestep run -- {full if len(full) <= SHOWN else f'{sys.executable} ...'}"


@pytest.fixture
def command(sidestep: Sidestep) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`sidestep explain ARGS` with the private provider."""

    def run(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "sidestep", "explain", f"--socket={sidestep.socket}", *map(str, args)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=env)

    return run


@pytest.fixture
def explain(command: Callable[..., subprocess.CompletedProcess[str]]) -> Explain:
    """Its explanations."""

    def run(*args: object) -> list[dict[str, Any]]:
        found = command("--json", *args)
        assert found.returncode == 0, found.stderr
        explanations: list[dict[str, Any]] = json.loads(found.stdout)["explanations"]
        return explanations

    return run


@pytest.fixture
def chat(sidestep: Sidestep, closing: ExitStack) -> Chat:
    """A server under sidestep."""
    return Chat(closing, sidestep.popen)


def test_a_promoted_connection_is_told_with_its_offsets_and_its_saving(
    sidestep: Sidestep, explain: Explain, command: Callable[..., Any], closing: ExitStack
) -> None:
    chat, client = promoted_chat(sidestep, closing)
    (found,) = explain(client.pid)
    slots = {one.pid: one for one in sidestep.connections()}
    mine, other = slots[client.pid], slots[chat.server.pid]
    assert (found["verdict"], found["carrier"], found["reason"], found["cause"]) == ("carried", "local", None, "")
    # Nothing of the stream was lost or doubled where it moved: what went by TCP ends where the ring begins.
    assert mine.tx.ring_from == mine.tx.tcp_bytes == other.rx.ring_from
    assert mine.rx.ring_from == mine.rx.tcp_bytes == other.tx.ring_from
    assert found["facts"]["since"].startswith(f"byte {mine.tx.ring_from:,} sent, byte {mine.rx.ring_from:,} received (")
    assert found["facts"]["peer"].startswith(f"{other.program}[{chat.server.pid}] fd {other.fd}, promoted")
    messages = mine.tx.ring_msgs + mine.rx.ring_msgs
    made = mine.doorbells + mine.sleeps + mine.calls  # of a chat on a busy machine as many as there are messages
    assert found["calls_saved"] == max(0, messages - made)
    assert found["facts"]["saved"].startswith(f"{found['calls_saved']:,} system calls: {messages:,} messages")
    text = command(f"{client.pid}/{mine.fd}").stdout.splitlines()
    assert text[0].endswith(f"{mine.local} -> {mine.remote}, is carried by local (shared memory)")
    assert [line.split(":")[0] for line in text[1:]] == ["since", "sent", "received", "saved", "peer"]


def test_the_program_at_the_other_end_is_named_with_the_command_that_would_help(
    sidestep: Sidestep, explain: Explain, chat: Chat
) -> None:
    client = chat.client(subprocess.Popen)
    start = command_of(PROGRAM, "client", chat.port)
    (server_end,) = explain(f"{chat.server.pid}/{sidestep.connections()[0].fd}")
    assert (server_end["verdict"], server_end["reason"], server_end["hint"]) == ("tcp", "NOT_STARTED", start)
    assert f"the other end, {Path(sys.executable).resolve().name}[{client.pid}]," in server_end["cause"] or (
        f"[{client.pid}], was started without 'sidestep run'" in server_end["cause"]
    )
    (client_end,) = explain(client.pid)
    assert (client_end["reason"], client_end["hint"], client_end["connection"]) == ("NOT_STARTED", start, None)


def test_a_listening_socket_is_told_by_its_port(explain: Explain, chat: Chat, closing: ExitStack) -> None:
    (found,) = explain(f":{chat.port}")
    assert (found["verdict"], found["reason"]) == ("listens", None)
    outside = Chat(closing, subprocess.Popen)
    (found,) = explain(f"127.0.0.1:{outside.port}")
    assert (found["verdict"], found["reason"]) == ("tcp", "NOT_STARTED")
    assert found["hint"] == command_of(PROGRAM, "server", outside.port)


def test_a_reason_of_this_end_comes_with_its_remedy_and_shows_at_the_other(
    sidestep: Sidestep, explain: Explain, chat: Chat
) -> None:
    client = chat.client(sidestep.popen, "urgent")
    (mine,) = explain(client.pid)
    assert (mine["reason"], mine["cause"], mine["hint"]) == (
        "URGENT_DATA", REASON_TEXT[Reason.URGENT_DATA], REMEDY[Reason.URGENT_DATA]
    )  # fmt: skip
    others = [one for one in explain(f":{chat.port}") if one["connection"] and one["connection"]["role"] == "passive"]
    assert [one["reason"] for one in others] == ["URGENT_DATA"]
    assert others[0]["cause"] == f"at the other end, {REASON_TEXT[Reason.URGENT_DATA]}"


@pytest.fixture(scope="session")
def static_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A static program that connects, sends a byte, and waits for its input."""
    source = tmp_path_factory.mktemp("static") / "client.c"
    source.write_text("""
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv)
{
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2])), .sin_addr.s_addr = htonl(0x7f000001)};
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	char byte = 'x';
	if (argc < 3 || connect(fd, (struct sockaddr *)&to, sizeof(to)) || write(fd, &byte, 1) != 1 || read(fd, &byte, 1) != 1)
		return 1;
	puts("talked");
	fflush(stdout);
	return read(0, &byte, 1) < 0;
}
""")  # noqa: E501
    subprocess.run(["cc", "-static", source, "-o", source.with_suffix("")], check=True)
    return put_out_of_reach(source.with_suffix(""))


def test_a_program_out_of_reach_is_told_as_such(
    sidestep: Sidestep, explain: Explain, chat: Chat, static_client: Path
) -> None:
    client = chat.client(sidestep.popen, argv=[str(static_client)])
    (found,) = explain(client.pid)
    assert found["reason"] == "UNREACHABLE"
    assert "its system calls cannot be replaced" in found["cause"]
    (server_end,) = [one for one in explain(chat.server.pid) if one["connection"]]
    assert (server_end["reason"], server_end["hint"]) == ("UNREACHABLE", found["hint"])


def test_a_program_in_which_the_shim_does_nothing_is_told(sidestep: Sidestep, explain: Explain, chat: Chat) -> None:
    client = chat.client(sidestep.popen, env=sidestep.env(SIDESTEP_DISABLE="1"))
    (found,) = explain(client.pid)
    assert found["reason"] == "DISABLED"
    client = chat.client(sidestep.popen, env=sidestep.env(LD_PRELOAD="/no/such/libsidestep.so"))
    (found,) = explain(client.pid)
    assert found["reason"] == "NOT_LOADED"


def test_a_program_of_another_provider_is_told_with_its_place(sidestep: Sidestep, explain: Explain, chat: Chat) -> None:
    with Sidestep() as other:
        client = chat.client(other.popen)
        found = explain(client.pid)
    # two were seen once beside a load, for a reason that is not known: a failure shows them
    assert {one["reason"] for one in found} == {"OTHER_PROVIDER"}, found
    assert all(str(other.socket) in one["cause"] for one in found)


# As PostgreSQL does: its title lies where its arguments and environment were.
TITLED = """
import ctypes, os, socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    if child := os.fork():
        connection.close()
        sys.exit(os.waitpid(child, 0)[1])
    with open("/proc/self/stat") as stat:
        begin, end = map(int, stat.read().rpartition(")")[2].split()[47:49])
    ctypes.memset(begin, 0, end - begin)
    print(os.getpid(), flush=True)
    while data := connection.recv(100):
        connection.sendall(data)
"""


def test_a_connection_of_another_provider_is_told_as_its_listener_is(
    sidestep: Sidestep, explain: Explain, closing: ExitStack
) -> None:
    other, port = closing.enter_context(Sidestep()), free_port()
    server = other.popen([sys.executable, "-c", TITLED, str(port)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    argv = [sys.executable, str(PROGRAM), "client", str(port)]
    client = closing.enter_context(
        ended(sidestep.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    )
    child = int(server.stdout.readline())
    expect(client, "talked")
    assert b"SIDESTEP_SOCKET" not in Path(f"/proc/{child}/environ").read_bytes()
    found = explain(child) + explain(server.pid) + explain(client.pid)
    assert {one["reason"] for one in found} == {"OTHER_PROVIDER"}
    assert all(str(other.socket) in one["cause"] for one in found)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a program of another user")
def test_the_hint_to_start_a_program_names_its_user(explain: Explain, chat: Chat) -> None:
    code = "import os, sys; sys.path[0] = sys.argv.pop(1); import chat, encodings.idna; os.setuid(12345); "
    code += "chat.talk(int(sys.argv[2]), urgent=False)"
    client = chat.client(subprocess.Popen, argv=[sys.executable, "-c", code, str(PROGRAM.parent)])
    (found,) = explain(client.pid)
    assert found["reason"] == "NOT_STARTED"
    assert re.fullmatch(r"as uid 12345: sidestep run -- .*|sidestep service enable \S+ --restart", found["hint"])


@pytest.mark.parametrize(
    ("words", "changes", "cause"),
    [
        (["env", "-u", "LD_PRELOAD"], {}, "has taken LD_PRELOAD out"),
        (["env", "LD_PRELOAD=libm.so.6"], {}, "has set LD_PRELOAD to something else"),
        (["env", "-i"], {"SIDESTEP_CARRY": "0"}, "under --no-carry"),
    ],
)
def test_a_program_that_was_given_an_environment_without_the_shim_is_told(
    sidestep: Sidestep, explain: Explain, chat: Chat, words: list[str], changes: dict[str, str], cause: str
) -> None:
    """Who gave it that is named."""
    starts = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    argv = [sys.executable, "-c", starts, *words, sys.executable, str(PROGRAM)]
    starter = chat.client(sidestep.popen, env=sidestep.env(**changes), argv=argv)
    children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
    (found,) = explain(*children)
    assert (found["verdict"], found["reason"]) == ("tcp", "LEFT_OUT")
    assert f"[{starter.pid}]" in found["cause"]
    assert cause in found["cause"]


@pytest.fixture
def holder(sidestep: Sidestep) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program that has a connection which somebody without the shim has made, and its number; it ends when told."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as made:
        program = sidestep.popen(
            [sys.executable, "-c", "print('ready', flush=True); input()"], pass_fds=[made.fileno()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        yield program, made.fileno()


def test_a_socket_that_another_process_made_is_told(
    holder: tuple[subprocess.Popen[str], int], explain: Explain
) -> None:
    program, fd = holder
    (found,) = explain(f"{program.pid}/{fd}")
    assert (found["verdict"], found["reason"]) == ("tcp", "UNKNOWN_SOCKET")


def test_of_a_socket_that_soon_goes_nothing_is_said(
    sidestep: Sidestep, holder: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one that gets its slot a little later: its program may have had no processor in between."""
    program, fd = holder

    def let_go(_seconds: float) -> None:
        program.communicate("\n")

    monkeypatch.setattr(time, "sleep", let_go)
    assert list(Explainer(sidestep.socket).explain(Query(pid=program.pid, fd=fd))) == []


FORKING = """
import os, socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    if child := os.fork():
        connection.close()
        sys.exit(os.waitpid(child, 0)[1])
    print(os.getpid(), flush=True)
    while data := connection.recv(100):
        connection.sendall(data)
"""


def test_a_child_that_serves_a_connection_is_explained_as_its_parent_that_accepted_it(
    sidestep: Sidestep, explain: Explain, closing: ExitStack
) -> None:
    """As each backend of PostgreSQL does: the slot names the process that accepted."""
    port = free_port()
    server = sidestep.popen([sys.executable, "-c", FORKING, str(port)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    argv = [sys.executable, str(PROGRAM), "client", str(port)]
    client = closing.enter_context(
        ended(sidestep.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    )
    child = int(server.stdout.readline())
    expect(client, "talked")

    def promoted() -> bool:
        talk_on(client)
        return sum(one.promoted for one in sidestep.connections()) == 2

    eventually(promoted)
    (found,) = (one for one in explain(child) if one["verdict"] != "listens")
    assert (found["verdict"], found["carrier"]) == ("carried", "local")
    assert f"[{child}] fd " in found["subject"]
    assert f"[{client.pid}]" in found["facts"]["peer"]


def test_an_unseen_peer_is_explained_by_the_end_that_is_seen(sidestep: Sidestep) -> None:
    """Another user's server: the kernel lists its sockets, and hides the process."""
    with ShimClient(sidestep.socket) as client:
        client.hello()
        client.write_arena([slot(1000, state=State.PROMOTED)])
        explainer = Explainer(sidestep.socket)
        ((local, remote),) = explainer._by_ends
        explainer.__dict__["_host_sockets"] = [
            HostSocket(None, -1, remote, local), HostSocket(None, -1, Endpoint(remote.address, 2000), None),
        ]  # fmt: skip
        assert [one.verdict for one in explainer.explain(Query(port=1000))] == [Verdict.CARRIED]
        (found,) = explainer.explain(Query(port=2000))
        assert (found.verdict, found.reason, found.carrier) == (Verdict.UNSEEN, "UNSEEN", "")


def test_root_is_not_sent_to_root(sidestep: Sidestep, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShimClient(sidestep.socket) as client:
        client.hello()
        client.write_arena([slot(1000, state=State.NATIVE, reason=Reason.YOUNG)])
        hints = []
        for uid in (0, 1):
            monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
            (found,) = Explainer(sidestep.socket).explain(Query(port=1000))
            hints.append(found.hint)
            assert found.reason == "UNSEEN"
    assert ["as root" in hint for hint in hints] == [False, True]


@pytest.mark.skipif(os.getuid() != 0, reason="the provider shows all to root of its network namespace")
def test_root_of_another_network_namespace_claims_nothing_of_what_it_is_not_shown(
    sidestep: Sidestep, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = promoted_chat(sidestep, closing)
    monkeypatch.setattr("sidestep.observe.explain.netns_cookie", lambda: 1)
    explainer = Explainer(sidestep.socket)
    explainer._tracked = []
    (found,) = explainer.explain(Query(pid=client.pid))
    assert (found.verdict, found.reason, found.carrier) == (Verdict.UNKNOWN, "NOT_SHOWN", "")


def test_a_remote_peer_is_told(sidestep: Sidestep, explain: Explain) -> None:
    with ShimClient(sidestep.socket) as client:
        client.hello()
        elsewhere = bytes(10) + b"\xff\xff" + socket.inet_aton("198.51.100.7")
        client.write_arena([slot(1000, state=State.NATIVE, reason=Reason.YOUNG, remote_addr=elsewhere)])
        (found,) = explain("198.51.100.7:80")
    assert (found["reason"], found["hint"]) == ("REMOTE", REMEDY[Reason.REMOTE])


@pytest.mark.parametrize(
    ("prove_by", "has", "reason"),
    [
        (Proof.LOOKUP, {"state": State.NATIVE, "reason": Reason.YOUNG}, "OTHER_NETNS"),
        (Proof.LOOKUP, {"state": State.PINNED, "reason": Reason.REMOTE}, "OTHER_NETNS"),
        (Proof.PATH, {"state": State.NATIVE, "reason": Reason.YOUNG}, "YOUNG"),
    ],
)
def test_a_peer_in_another_network_namespace_is_told_though_it_is_known(
    prove_by: Proof, has: dict[str, Any], reason: str
) -> None:
    """Both ends may have the same provider; only one that proves paths pairs them."""
    one, other = (bytes(10) + b"\xff\xff" + socket.inet_aton(f"198.51.100.{last}") for last in (6, 7))
    with Sidestep(prove_by=prove_by) as sidestep, ShimClient(sidestep.socket) as client:
        client.hello()
        here = slot(1000, local_addr=one, remote_addr=other, **has)
        there = slot(80, local_addr=other, remote_addr=one, remote_port=1000, role=2, **has)
        client.write_arena([here, there])
        found = list(Explainer(sidestep.socket).explain(Query(port=1000)))
    assert [one.reason for one in found] == [reason] * 2
    if reason == "OTHER_NETNS":
        assert all(one.hint == f"{other_users.remedy()}; then start both programs again" for one in found)


def test_a_channel_that_ends_in_the_provider_is_not_called_local(sidestep: Sidestep, explain: Explain) -> None:
    """Each end has a channel of its own then, with another name."""
    one, other = (bytes(10) + b"\xff\xff\x7f\0\0" + last for last in (b"\1", b"\2"))
    with ShimClient(sidestep.socket) as client:
        client.hello()
        here = slot(1000, local_addr=one, remote_addr=other, segment_id=b"a" * 16)
        there = slot(80, local_addr=other, remote_addr=one, remote_port=1000, role=2, segment_id=b"b" * 16)
        client.write_arena([here, there])
        assert [found["carrier"] for found in explain(":1000")] == ["offload protocol"] * 2
        client.write_arena([here, there | {"segment_id": b"a" * 16}])
        assert [found["carrier"] for found in explain(":1000")] == ["local"] * 2


def test_a_connection_through_a_protocol_is_told_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closing: ExitStack
) -> None:
    """Both protocols are there, and only the rule for the end that connects names one."""
    rules = tmp_path / "policy.conf"
    rules.write_text("use relay connect * *:*\n")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(relay_installed()))
        private = closing.enter_context(Sidestep(promote_after="0", policy=rules))
    chat, client = promoted_chat(private, closing)
    assert private.status()["counters"]["relay_opened"] == 1
    for pid in (client.pid, chat.server.pid):
        argv = [sys.executable, "-m", "sidestep", "explain", f"--socket={private.socket}", "--json", str(pid)]
        found = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        carriers = [one["carrier"] for one in json.loads(found.stdout)["explanations"] if one["verdict"] == "carried"]
        assert carriers == ["relay"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_what_is_anothers_is_told_as_such(sidestep: Sidestep, chat: Chat) -> None:
    chat.client(subprocess.Popen)
    # The interpreter may be where that user cannot enter: it changes its user once all is loaded.
    code = "import os, sidestep.cli.explain as e; os.setgroups([]); os.setgid(12345); os.setuid(12345); e.explain()"
    argv = [sys.executable, "-c", code, "--socket=/proc/nowhere/provider", "--json", f":{chat.port}"]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    explanations = json.loads(found.stdout)["explanations"]
    assert {one["reason"] for one in explanations} == {"OTHER_USER"}  # the kernel tells everybody whose a socket is
    assert "its process runs as root, and a user's own provider leaves out" in explanations[0]["cause"]
    assert explanations[0]["hint"].startswith("one provider for all users, as root: s")
    assert len(explanations) == 3  # the listener and both ends
    assert "only the kernel was asked" in found.stderr


EXECUTED = ["setpriv", "--reuid=12345", "--clear-groups", "bash", "-c"]
EXECUTED += ["exec 3<>/dev/tcp/127.0.0.1/$2; echo x >&3; read -n 1 <&3; echo talked; read", "bash"]
# The provider knows the parent, and by it the arena. The interpreter may be where that user cannot enter.
FORKED = [sys.executable, "-c", "import os, sys; sys.path[0] = sys.argv.pop(1); import chat, encodings.idna; "]
FORKED[-1] += "os.setuid(12345); child = os.fork(); os.wait() if child else chat.talk(int(sys.argv[2]), urgent=False)"
FORKED += [str(PROGRAM.parent)]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a program of another user")
@pytest.mark.parametrize("argv", [EXECUTED, FORKED], ids=["executed", "forked"])
def test_a_program_that_changed_its_user_is_told_with_the_command_that_would_help(
    sidestep: Sidestep, explain: Explain, chat: Chat, argv: list[str]
) -> None:
    """As a server of root's does whose start script becomes the server's user."""
    chat.client(sidestep.popen, argv=argv)
    ends = [one for one in explain(f":{chat.port}") if one["verdict"] != "listens"]
    assert {one["reason"] for one in ends} == {"OTHER_USER"}
    assert len(ends) == 2
    for one in ends:
        assert "runs as uid 12345, and a user's own provider leaves out the programs of others" in one["cause"]
        assert one["hint"].startswith("one provider for all users, as root: s")


LEAVES = """
import os, socket
listener = socket.create_server(("127.0.0.1", 0))
os.setgid(12345)
os.setuid(12345)
print(listener.getsockname()[1], flush=True)
one = listener.accept()[0]
while word := one.recv(100):
    one.sendall(word)
"""
TALKS = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while one.sendall(b"x") is None and one.recv(1):
    pass
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_server_that_has_met_the_provider_before_it_changed_its_user_is_served(
    sidestep: Sidestep, explain: Explain
) -> None:
    server = sidestep.popen([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    assert [one["cause"] for one in explain(f":{port}")] == ["connections that it accepts can be promoted"]
    sidestep.popen([sys.executable, "-c", TALKS, port])
    sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
    assert sorted(one["verdict"] for one in explain(f":{port}")) == ["carried", "carried", "listens"]


def test_without_a_provider_nothing_is_claimed_that_is_not_known(
    sidestep: Sidestep, explain: Explain, command: Callable[..., Any], closing: ExitStack
) -> None:
    _, client = promoted_chat(sidestep, closing)
    sidestep.kill_provider()
    (found,) = explain(client.pid)
    assert (found["verdict"], found["reason"], found["carrier"]) == ("unknown", "NO_PROVIDER", "")
    everything = command()
    assert (everything.returncode, everything.stdout) == (1, "")
    assert "hint: start one with 'sidestep provider start'" in everything.stderr


def test_programs_are_found_by_name_and_nothing_is_said_of_others(
    sidestep: Sidestep, explain: Explain, closing: ExitStack
) -> None:
    chat, client = promoted_chat(sidestep, closing)
    (program,) = {one.program for one in sidestep.connections()}
    pids = {one["connection"]["pid"] for one in explain(program) if one["connection"]}
    assert pids == {chat.server.pid, client.pid}
    assert len(explain()) == 2


@pytest.mark.parametrize("role", ["connect", "listen"])
def test_the_line_of_the_policy_is_named_and_the_line_that_is_proposed_helps(
    closing: ExitStack, tmp_path: Path, role: str
) -> None:
    file, rule = tmp_path / "policy.conf", f"use tcp {role} * *:*"
    file.write_text(f"# nothing is offloaded\n{rule}\n")
    sidestep = closing.enter_context(Sidestep(policy=file))
    chat = Chat(closing, sidestep.popen)
    client = chat.client(sidestep.popen)

    def explained() -> list[dict[str, Any]]:
        talk_on(client)
        argv = [sys.executable, "-m", "sidestep", "explain", f"--socket={sidestep.socket}", "--json", str(client.pid)]
        found = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        return [one for one in json.loads(found.stdout)["explanations"] if one["reason"] == "POLICY"]

    eventually(explained)
    (found,) = explained()
    assert (found["verdict"], found["cause"]) == ("tcp", f"{file}, line 2 says so: {rule}")
    place, line = found["hint"].split(": ", 1)
    assert place == f"put this line before line 2 of {file}"
    client.kill()
    client.wait()
    file.write_text(f"# nothing is offloaded\n{line}\n{rule}\n")
    promoted_client(sidestep, chat)


def test_a_connection_that_was_sent_back_is_told_and_counts_its_promotions(
    sidestep: Sidestep, explain: Explain, closing: ExitStack
) -> None:
    _, client = promoted_chat(sidestep, closing)
    order = [sys.executable, "-m", "sidestep", "demote", "--all", f"--socket={sidestep.socket}"]
    subprocess.run(order, timeout=60, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def reason() -> str | None:
        talk_on(client)
        return str(explain(client.pid)[0]["reason"])

    eventually(lambda: reason() == "DEMOTED")
    (found,) = explain(client.pid)
    assert (found["verdict"], found["hint"]) == ("tcp", f"sidestep promote {found['connection']['local']}")
    order[3] = "promote"
    subprocess.run(order, timeout=60, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def verdict() -> str:
        talk_on(client)
        return str(explain(client.pid)[0]["verdict"])

    eventually(lambda: verdict() == "carried")
    (found,) = explain(client.pid)
    assert "promoted 2 times" in found["facts"]["since"]


def test_what_is_not_there_is_exit_code_1(command: Callable[..., Any]) -> None:
    for what in ("no-such-program", f":{free_port()}", f"127.0.0.1:{free_port()}", "4194305", f"{os.getpid()}/99999"):
        found = command(what)
        assert (found.returncode, found.stdout) == (1, ""), what
        assert found.stderr.startswith("sidestep: "), what
    assert "for a port write :4194305" in command("4194305").stderr


def test_no_connections_is_no_error(command: Callable[..., Any]) -> None:
    found = command()
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "no connections\n")


CHURN = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
while True:
    with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
        one.sendall(b"x")
        other.recv(1)
"""


def reasons_of_churn(sidestep: Sidestep, look: Callable[[subprocess.Popen[str]], None]) -> Iterator[str | None]:
    port = free_port()
    program = sidestep.popen([sys.executable, "-c", CHURN, str(port)], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    while True:
        look(program)
        yield from (one.reason for one in Explainer(sidestep.socket).explain(Query(pid=program.pid, port=port)))
        program.send_signal(signal.SIGCONT)


@pytest.mark.least("ci")
def test_of_a_connection_that_comes_or_goes_nothing_false_is_said(sidestep: Sidestep) -> None:
    assert "UNKNOWN_SOCKET" not in set(islice(reasons_of_churn(sidestep, lambda _: None), 12))


def test_of_a_program_that_does_not_get_on_nothing_false_is_said(sidestep: Sidestep) -> None:
    """Where it stops is left to chance: now and then between a socket and its slot."""

    def stop(program: subprocess.Popen[str]) -> None:
        time.sleep(random.uniform(0, 0.01))  # not for anything to happen: it chooses where the program stops
        program.send_signal(signal.SIGSTOP)

    seen = set[str | None]()
    for reason in reasons_of_churn(sidestep, stop):
        seen.add(reason)
        if "HELD_UP" in seen:
            break
    assert "UNKNOWN_SOCKET" not in seen


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, Query()),
        ("12", Query(pid=12)),
        ("12/3", Query(pid=12, fd=3)),
        (":80", Query(port=80)),
        ("10.0.0.1:80", Query(addresses=frozenset({ip_address("10.0.0.1")}), port=80)),
        ("[::1]:80", Query(addresses=frozenset({ip_address("::1")}), port=80)),
        ("[::ffff:10.0.0.1]:80", Query(addresses=frozenset({ip_address("10.0.0.1")}), port=80)),
        ("redis-server", Query(program="redis-server")),
        ("12/x", Query(program="12/x")),
    ],
)
def test_what_is_asked_for_is_understood(text: str | None, wanted: Query) -> None:
    assert Query.parse(text) == wanted


def test_a_host_has_a_name() -> None:
    wanted = Query.parse("localhost:80")
    assert wanted.port == 80
    assert ip_address("127.0.0.1") in wanted.addresses


@pytest.mark.parametrize("text", ["a..b:80", "1.2.3.4:", ":", ":65536", "1.2.3.4:-1", "1.2.3.256:80", ":\uff18\uff10"])
def test_what_makes_no_sense_is_told(text: str) -> None:
    with pytest.raises(Misuse):
        Query.parse(text)


def test_young_ends_wait_for_one_another(closing: ExitStack) -> None:
    with Sidestep(promote_after="100000:1000000000") as sidestep:
        chat = Chat(closing, sidestep.popen)
        client = chat.client(sidestep.popen)
        argv = [sys.executable, "-m", "sidestep", "explain", f"--socket={sidestep.socket}", "--json"]
        eventually(lambda: len(sidestep.connections()) == 2)
        found = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)["explanations"]
    by_pid = {one["connection"]["pid"]: one for one in found}
    assert {by_pid[pid]["reason"] for pid in (client.pid, chat.server.pid)} == {"YOUNG"}
    assert "--promote-after 0" in by_pid[client.pid]["hint"]


IDLE = """
import socket
server = socket.create_server(("127.0.0.1", 0))
idle = socket.create_connection(server.getsockname())
busy, _ = server.accept()
print(busy.fileno(), flush=True)
while True:
    busy.send(b"x")
    input()
"""


def test_an_idle_end_under_sidestep_is_not_to_be_started_under_it(sidestep: Sidestep, explain: Explain) -> None:
    program = sidestep.popen([sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lines, stdout = program.stdin, program.stdout
    assert lines is not None
    assert stdout is not None
    number = stdout.readline().strip()

    def reason() -> str:
        lines.write("\n" * 10)
        lines.flush()
        (found,) = explain(f"{program.pid}/{number}")
        return str(found["reason"])

    eventually(lambda: reason() == "PEER_ABSENT")
    (found,) = explain(f"{program.pid}/{number}")
    assert found["hint"].startswith("nothing to do: it is promoted when")
    assert "is not under sidestep" not in found["cause"]


def test_the_remedy_of_a_ring_names_the_setting_of_the_program() -> None:
    assert "--innodb-use-native-aio=0" in remedy(Reason.IO_URING, "mariadbd")
    assert "'rings files fio'" in remedy(Reason.IO_URING, "fio")
    assert remedy(Reason.IO_URING, "") == REMEDY[Reason.IO_URING]
