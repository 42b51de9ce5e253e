"""git clone and push: git daemon or inetd starts a program for each connection, which is its standard input."""

from __future__ import annotations

import filecmp
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import needed
import pytest
from stage import LOG, Mode, Stage, payload

pytestmark = pytest.mark.usefixtures("load")

FILES = 6  # in each commit, of a MB
CLONES_MAX = 12  # until enough of them have gone by ring
WHO = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
QUIET = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_TERMINAL_PROMPT": "0", **WHO}


def git(stage: Stage, directory: Path, *words: str) -> str:
    """What it says; without sidestep."""
    return subprocess.run(
        [needed.program("git"), *words], cwd=directory, env=stage.env("none", **QUIET), check=True, text=True,
        capture_output=True, timeout=60,
    ).stdout  # fmt: skip


def commit(stage: Stage, directory: Path, name: str) -> None:
    """Files that cannot be made shorter."""
    for at in range(FILES):
        (directory / f"{name}{at}").write_bytes(payload(1_000_000, seed=at + len(name) * FILES))
    git(stage, directory, "add", ".")
    git(stage, directory, "commit", "-q", "-m", name)


def same(one: Path, other: Path) -> bool:
    """Whether two working trees have the same files."""
    names = sorted(path.name for path in one.iterdir() if path.is_file())
    return filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("starter", ["daemon", "inetd"])
def test_clone_and_push(stage: Stage, starter: str) -> None:
    root, seed = stage.workdir / "served", stage.workdir / "seed"
    options = [f"--base-path={root}", "--export-all", "--enable=receive-pack"]
    git(stage, stage.workdir, "init", "-q", "--bare", "-b", "main", str(root / "it.git"))
    git(stage, stage.workdir, "clone", "-q", str(root / "it.git"), str(seed))
    commit(stage, seed, "seed")
    git(stage, seed, "push", "-q", "origin", "HEAD:main")

    def daemon(port: int) -> list[str]:
        return [needed.program("git"), "daemon", "--listen=127.0.0.1", f"--port={port}", *options, str(root)]

    def inetd(port: int) -> list[str]:
        program = f"{git(stage, root, '--exec-path').strip()}/git-daemon"
        conf = stage.workdir / "inetd.conf"
        # inetd takes it away; and the program `git` would stay, and hold the socket
        path = f"PATH={stage.env('none')['PATH']}"
        words = ["env", path, program, "--inetd", *options, str(root)]
        conf.write_text(f"127.0.0.1:{port} stream tcp nowait root /usr/bin/env {' '.join(words)}\n")
        return [needed.program("inetd"), "-i", str(conf)]

    _, port = stage.serve(daemon if starter == "daemon" else inetd, **QUIET)
    url, one, other = f"git://127.0.0.1:{port}/it.git", stage.workdir / "one", stage.workdir / "other"

    def watching() -> AbstractContextManager[object]:
        """Processes that git starts at either end may hold the socket as a channel is asked for: then TCP goes on."""
        return nullcontext() if stage.mode is Mode.BOTH else stage.watching(port)

    def by_git(*words: str) -> None:
        stage.start(
            "client", [needed.program("git"), *words], stdin=subprocess.DEVNULL, stdout=LOG, **QUIET
        ).expect_exit()

    with watching():
        by_git("clone", "-q", url, str(one))
    assert same(seed, one)
    commit(stage, one, "pushed")
    by_git("-C", str(one), "push", "-q", "origin", "HEAD:main")
    assert git(stage, root / "it.git", "rev-parse", "main") == git(stage, one, "rev-parse", "HEAD")
    git(stage, root / "it.git", "fsck", "--full")
    with watching():
        by_git("clone", "-q", url, str(other))
    assert same(one, other)
    if stage.mode is Mode.BOTH and starter == "inetd":
        for number in range(CLONES_MAX):
            if stage.ring_share(port) > 0.3:
                break
            by_git("clone", "-q", url, str(again := stage.workdir / f"again{number}"))
            assert same(one, again)
        assert stage.ring_share(port) > 0.3
