"""What commands print by --json is what docs/reference/schemas says, field by field: each is run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import pytest
from captures import WHOLE, V, written
from chatting import ended, promoted_chat
from hosts import need_namespaces
from jsonschema import Draft202012Validator

from sidestep import config, installation
from sidestep.cli.group import cli
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow  # real programs, and commands as processes

SCHEMAS = Path(__file__).parents[2] / "docs/reference/schemas"
Json = dict[str, Any]


def closed(schema: Any) -> Any:
    """Nothing beside what it names: a field that is new must be in the documents."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(each) for name, each in schema.items()}
    return made | {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else made


def check(command: str, text: str) -> list[Json]:
    """The documents of a command, one a line or one in all, which are as its schema says."""
    lines = text.splitlines()
    try:
        documents = [json.loads(line) for line in lines]
    except ValueError:
        documents = [json.loads(text)]
    assert documents
    name = command.replace(" ", ".")
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    for document in documents:
        Draft202012Validator(closed(schema)).validate(document)
        assert next(iter(document.items())) == ("schema", f"sidestep.{name}/1")
    return documents


def with_json(command: click.Command, path: str = "") -> Iterator[str]:
    """The commands below that have --json, with dots."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from with_json(child, f"{path}.{name}".lstrip("."))
    elif any("--json" in one.opts for one in command.params):
        yield path


def test_every_command_has_a_schema_and_each_is_one() -> None:
    files = {path.name.removesuffix(".json"): json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    assert set(files) == set(with_json(cli))
    for schema in files.values():
        Draft202012Validator.check_schema(schema)


@pytest.fixture
def run(sidestep: Sidestep) -> Callable[..., str]:
    """Runs `sidestep ARGS --json` at a private provider; what it prints."""

    def made(*args: str | Path, stdin: str = "") -> str:
        argv = [sys.executable, "-m", "sidestep", *args]
        env = os.environ | {config.ENV_SOCKET: str(sidestep.socket)}
        found = subprocess.run(argv, env=env, input=stdin, capture_output=True, text=True, timeout=60, check=False)
        assert "Traceback" not in found.stderr
        assert found.stdout or not found.returncode, found.stderr
        return found.stdout

    return made


def test_what_tells_of_connections(sidestep: Sidestep, closing: ExitStack, run: Callable[..., str]) -> None:
    chat, _ = promoted_chat(sidestep, closing)
    kernel_only = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    assert len(check("ss", run("ss", "--json"))[0]["connections"]) == 2
    assert len(check("explain", run("explain", "--json"))[0]["explanations"]) == 2
    check("explain", run("explain", f":{chat.port}", "--json"))
    check("explain", run("explain", f":{kernel_only.getsockname()[1]}", "--json"))
    assert len(check("top", run("top", "--interval=0.1", "--json"))[0]["connections"]) == 2
    check("policy trace", run("policy", "trace", "--no-follow", "--json"))
    for command in ("demote", "promote"):
        check(command, run(command, "--all", "--timeout=0.2", "--json"))


def test_what_tells_of_the_provider(run: Callable[..., str]) -> None:
    check("provider start", run("provider", "start", "--json"))
    check("provider status", run("provider", "status", "--json"))
    check("provider modules", run("provider", "modules", "--json"))
    check("provider remove", run("provider", "remove", "sdp", "--json"))
    check("provider add", run("provider", "add", "sdp", "--json"))
    check("provider modules", run("provider", "modules", "--json"))
    check("provider stop", run("provider", "stop", "--json"))


def test_what_tells_of_this_place(run: Callable[..., str], tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("use tcp conect * *:*\nuse tcp connect * *:*\nuse tcp connect * *:80\n")
    assert len(check("policy check", run("policy", "check", rules, "--json"))[0]["problems"]) == 2
    check("policy test", run("policy", "test", "connect", "redis-cli", "127.0.0.1:6379", "--json"))
    rules.write_text("use tcp connect * *:*\n")
    for words in (("connect", "ssh", "127.0.0.1:1"), ("server", "sshd", "[::]:22")):
        check("policy test", run("policy", "test", "--file", rules, *words, "--json"))
    check("doctor", run("doctor", "sh", "--json"))
    check("check", run("check", "--json", "sh"))
    if installation.loader():
        check("bundle", run("bundle", "--json", tmp_path / "bundle"))


def test_what_tells_of_sdp(run: Callable[..., str], tmp_path: Path) -> None:
    told = check(
        "sdp decode", run("sdp", "decode", "--json", stdin="\n\n".join(one.message.hex() for one in V.values()))
    )
    assert len(told) == len(V)
    check("sdp decode", run("sdp", "decode", "--json", V["V29"].message.hex()[:-4]))
    file = tmp_path / "talk.pcap"
    file.write_bytes(written(WHOLE))
    assert len(check("sdp decode", run("sdp", "decode", "--json", file))) > 10
    assert len(check("sdp simulate", run("sdp", "simulate", "--count=3", "--json"))) == 3


def test_what_tells_of_rdma(closing: ExitStack, run: Callable[..., str], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sidestep", "rdma", "server", "--address=127.0.0.1", "--port=0", "--json"]
    server = closing.enter_context(ended(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)))
    assert server.stdout is not None
    (told,) = check("rdma server", server.stdout.readline())
    place = f"127.0.0.1:{told['listening'][0]['port']}"
    check("rdma ping", run("rdma", "ping", place, "-n2", "--interval=0", "--json"))
    check("rdma bw", run("rdma", "bw", place, "--duration=0.1", "--json"))
    assert check("rdma list", run("rdma", "list", "--json"))[0]["processes"]
    check("capture", run("capture", "-w", tmp_path / "file", "--duration=0.1", "--json"))


def test_what_tells_of_a_profile(run: Callable[..., str]) -> None:
    need_namespaces()
    check("rdma profile", run("rdma", "profile", "--rounds=1", "--seconds=0.5", "--json"))


def test_what_tells_of_two_hosts(closing: ExitStack, run: Callable[..., str]) -> None:
    argv = [sys.executable, "-m", "sidestep", "rdma", "bench", "--serve", "--address=127.0.0.1"]
    server = closing.enter_context(ended(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)))
    assert server.stdout is not None
    assert server.stdout.readline() == "listening at 127.0.0.1:7473\n"
    check("rdma bench", run("rdma", "bench", "127.0.0.1", "--rounds=1", "--seconds=0.1", "--json"))


def test_what_tells_of_the_gateway() -> None:
    rule = "tcp 127.0.0.1:0 to sdp 192.0.2.7:80"
    argv = [sys.executable, "-m", "sidestep", "gateway", "--json", rule]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert len(check("gateway", first + process.stdout.read())) == 2


def test_what_tells_of_the_demo(run: Callable[..., str], tmp_path: Path) -> None:
    picture = f"--picture={tmp_path / 'demo.svg'}"
    assert check("demo", run("demo", "--rounds=1", "--seconds=0.1", "--json", picture))[0]["works"]


def test_what_tells_of_services(run: Callable[..., str], tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/it.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    run("service", "enable", "it", f"--root={tmp_path}")
    assert check("service list", run("service", "list", "--json", f"--root={tmp_path}"))[0]["services"]
