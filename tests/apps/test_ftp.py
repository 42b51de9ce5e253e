"""vsftpd in a changed root: its client waits on one connection for what comes by the other, active and passive."""

from __future__ import annotations

import os
import sys

import needed
import pytest
from stage import PROGRAMS, Mode, Stage, payload

from sidestep.testing import free_port

pytestmark = [
    pytest.mark.usefixtures("load"),
    pytest.mark.skipif(os.geteuid() != 0, reason="vsftpd wants root, to change its root and its user"),
]

SIZE = 60_000_000
RING_SHARE_MIN = 0.5
SERVER = """
listen=YES
listen_address=127.0.0.1
listen_port={port}
background=NO
one_process_model=YES
seccomp_sandbox=NO
xferlog_enable=NO
anonymous_enable=YES
local_enable=NO
no_anon_password=YES
write_enable=YES
anon_upload_enable=YES
anon_umask=022
anon_root={root}/files
secure_chroot_dir={root}
connect_from_port_20=YES
ftp_data_port={data}
pasv_min_port={data}
pasv_max_port={data}
"""


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_files_there_and_back(stage: Stage, mode: str) -> None:
    files, data = stage.workdir / "files", free_port()
    (files / "up").mkdir(parents=True)
    (files / "up").chmod(0o777)
    (files / "down").write_bytes(payload(SIZE))
    for path in (stage.workdir, *stage.workdir.parents):
        if path.owner() == "root" and path.stat().st_mode & 0o5 != 0o5:
            path.chmod(path.stat().st_mode | 0o5)

    def vsftpd(port: int) -> list[str]:
        (stage.workdir / "conf").write_text(SERVER.format(port=port, root=stage.workdir, data=data))
        return [needed.program("vsftpd"), str(stage.workdir / "conf")]

    _, port = stage.serve(vsftpd)
    client = stage.converse("client", [sys.executable, str(PROGRAMS / "ftp_client.py"), str(port), "down", mode])
    stage.check_path(data)
    client.tell("go on")
    assert client.rest() == payload(SIZE)
    if stage.mode is Mode.BOTH:
        assert stage.ring_share(data) > RING_SHARE_MIN
