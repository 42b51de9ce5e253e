"""OpenSSH: the server executes itself for each connection, and a process under a seccomp filter has it for a while."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import needed
import pytest
from stage import Mode, Stage, payload

pytestmark = [
    pytest.mark.usefixtures("load"),
    pytest.mark.skipif(os.geteuid() != 0, reason="sshd wants root for its privilege separation"),
]

SIZE = 16_000_000
RING_SHARE_MIN = 0.5  # the rest is what went before an offer was taken up
SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {root}/host
AuthorizedKeysFile {root}/user.pub
StrictModes no
PidFile none
UsePAM no
PermitRootLogin yes
Subsystem sftp internal-sftp
"""


def test_files_there_and_back(stage: Stage) -> None:
    root = stage.workdir
    for name in ("host", "user"):
        keygen = [needed.program("ssh-keygen", "ssh"), "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)]
        subprocess.run(keygen, check=True, timeout=60)
    Path("/run/sshd").mkdir(exist_ok=True)

    def sshd(port: int) -> list[str]:
        (root / "sshd.conf").write_text(SERVER.format(port=port, root=root))
        return [needed.program("sshd"), "-D", "-e", "-f", str(root / "sshd.conf")]

    _, port = stage.serve(sshd)
    options = [f"Port={port}", f"IdentityFile={root}/user", "StrictHostKeyChecking=no", "LogLevel=ERROR",
               f"UserKnownHostsFile={root}/known"]  # fmt: skip
    words = ["-F", "none", *(word for option in options for word in ("-o", option))]
    (root / "there").write_bytes(payload(SIZE))
    (root / "batch").write_text(f"put {root}/there {root}/copy\nget {root}/copy {root}/back\n")
    # what reads before the user is known is under a filter that no ring bears: until it has ended TCP goes on
    with stage.watching(port):
        stage.run("client", [needed.program("sftp", "ssh"), *words, "-b", str(root / "batch"), "root@127.0.0.1"])
    assert (root / "back").read_bytes() == payload(SIZE)
    with stage.watching(port), (root / "there").open("rb") as data:
        command = [needed.program("ssh"), *words, "root@127.0.0.1", "cat"]
        assert stage.run("client", command, stdin=data) == payload(SIZE)
    if stage.mode is Mode.BOTH:
        assert stage.ring_share(port) > RING_SHARE_MIN
