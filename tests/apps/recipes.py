"""The recipes of docs/guides/recipes.md: their files and commands, run as they stand there, on free ports."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from matrix import switched
from stage import LOG, SEARCH_PATH, Program, Stage

from sidestep.config import ENV_SOCKET
from sidestep.testing import Sidestep, free_port

PAGE: Final = Path(__file__).parents[2] / "docs/guides/recipes.md"
CLIENT_S: Final = 90.0  # for one run of a client; Ray's takes ten seconds on an idle machine
_PORT: Final = re.compile(r"\b[678]\d{3}\b")


@dataclass(frozen=True)
class Recipe:
    """A section of the page, and the files of all sections."""

    files: dict[str, str]
    servers: list[str]  # command lines
    client: str
    output: str  # what the client says
    ports: list[str]


def read_recipe(title: str) -> Recipe:
    """The section of that title, with other ports than on the page."""
    ports: dict[str, str] = {}
    page = _PORT.sub(lambda port: ports.setdefault(port[0], str(free_port())), PAGE.read_text())
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    *servers, client = blocks(section, "sh")[0].splitlines()
    files = {re.split("[ :\n]", text)[1]: text for text in blocks(page, "python")}
    return Recipe(
        files,
        [line.removesuffix(" &") for line in servers],
        client,
        blocks(section, "text")[0].strip(),
        [*ports.values()],
    )


def titles() -> list[str]:
    """Of all sections."""
    return re.findall(r"(?m)^## (.*)$", PAGE.read_text())


def blocks(text: str, kind: str) -> list[str]:
    """What is fenced as `kind`."""
    return re.findall(rf"(?s)```{kind}\n(.*?)```", text)


def follow(recipe: Recipe, stage: Stage, sidestep: Sidestep, programs: Path) -> None:
    """Start the servers, then run the client until every program has sent by ring; `programs` has what they name.

    A client may be through before the provider has had its turn: then it runs once more.
    """
    for name, text in recipe.files.items():
        (stage.workdir / name).write_text(text)
    env = {ENV_SOCKET: str(sidestep.socket), "HOME": str(stage.workdir)}
    env["PATH"] = os.pathsep.join([str(programs), SEARCH_PATH])
    logs = {line: stage.workdir / f"{number}.shim" for number, line in enumerate([*recipe.servers, recipe.client])}

    def start(line: str, stdout: int) -> Program:
        env["SIDESTEP_LOG"] = str(logs[line])
        return stage.start("client", shlex.split(line), stdin=subprocess.DEVNULL, stdout=stdout, **env)

    for line in recipe.servers:
        server = start(line, LOG)
        for port in recipe.ports:
            if port in line:
                assert server.listens(int(port)), server.complaint("cannot be started")
    end = time.monotonic() + CLIENT_S
    while True:
        client = start(recipe.client, subprocess.PIPE)
        said = client.rest(CLIENT_S).decode()
        assert recipe.output in said, client.complaint(said)
        if not (silent := [line for line, log in logs.items() if not switched(log)]):
            return
        assert time.monotonic() < end, f"never sent by ring: {silent}"
