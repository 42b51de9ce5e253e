"""Postfix: what accepts has another user and another root than its master, which root starts."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import needed
import pytest
from stage import Mode, Stage, payload, wait_until

pytestmark = [
    pytest.mark.usefixtures("load"),
    pytest.mark.skipif(os.geteuid() != 0, reason="postfix wants root, to change its root and its user"),
]

COUNT, SIZE = 10, 1_000_000  # of mails
LINE = 72
MAIN = """
compatibility_level = 3.6
queue_directory = {root}/queue
data_directory = {root}/data
maillog_file_prefixes = {root}
maillog_file = {root}/log
myhostname = here
mydestination =
local_recipient_maps =
alias_maps =
inet_interfaces = 127.0.0.1
mynetworks = 127.0.0.0/8
virtual_mailbox_domains = here
virtual_mailbox_base = {root}/mail
virtual_mailbox_maps = inline:{{ somebody@here=somebody/ }}
virtual_uid_maps = static:{uid}
virtual_gid_maps = static:{gid}
virtual_mailbox_limit = 0
message_size_limit = 0
"""
SERVICES = """
127.0.0.1:{port} inet n - y - - smtpd
postlog unix-dgram n - n - 1 postlogd
cleanup unix n - y - 0 cleanup
qmgr unix n - n 300 1 qmgr
rewrite unix - - y - - trivial-rewrite
bounce unix - - y - 0 bounce
defer unix - - y - 0 bounce
error unix - - y - - error
retry unix - - y - - error
proxymap unix - - n - - proxymap
virtual unix - n n - - virtual
anvil unix - - y - 1 anvil
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """Postfix's directories; pytest's own are closed to other users."""
    nobody = pwd.getpwnam("nobody")
    needed.program("postfix")
    with tempfile.TemporaryDirectory(prefix="sidestep-mail-") as made:
        root = Path(made)
        root.chmod(0o755)
        for name in ("etc", "queue", "data", "mail"):
            (root / name).mkdir()
        shutil.chown(root / "data", "postfix")
        os.chown(root / "mail", nobody.pw_uid, nobody.pw_gid)
        for name in ("dynamicmaps.cf", "postfix-files"):  # where its own directory is another, it looks for them there
            shutil.copy(Path("/etc/postfix") / name, root / "etc")
        (root / "etc/main.cf").write_text(MAIN.format(root=root, uid=nobody.pw_uid, gid=nobody.pw_gid))
        yield root
        with suppress(FileNotFoundError, ProcessLookupError):  # its master makes a group of its own
            os.killpg(os.getpgid(int((root / "queue/pid/master.pid").read_text())), signal.SIGKILL)


def lines(number: int) -> str:
    """What is sent in a mail."""
    text = payload(SIZE // 2, seed=number).hex()
    return "".join(f"{text[at : at + LINE]}\n" for at in range(0, len(text), LINE))


def test_mail(stage: Stage, root: Path) -> None:
    """Each mail is delivered as it was sent."""

    def postfix(port: int) -> list[str]:
        (root / "etc/master.cf").write_text(SERVICES.format(port=port))
        return [needed.program("postfix"), "-c", str(root / "etc"), "start-fg"]

    _, port = stage.serve(postfix)
    for number in range(COUNT):
        (stage.workdir / str(number)).write_text(f"Subject: a mail\n\n{lines(number)}")
    client = stage.python("client", "smtp_client.py", port, *(stage.workdir / str(number) for number in range(COUNT)))
    assert client.line() == "in"
    stage.check_path(port, nudge=client.nudge)
    client.tell("go on")
    assert client.line() == "sent"
    stage.check_path(port, ring_bytes_min=COUNT * SIZE, nudge=client.nudge)
    client.rest()
    box = root / "mail/somebody/new"
    wait_until(lambda: box.exists() and len([*box.iterdir()]) == COUNT, "the mails to be delivered")
    arrived = sorted(file.read_text().partition("\n\n")[2] for file in box.iterdir())
    assert arrived == sorted(map(lines, range(COUNT)))
    if stage.mode is Mode.BOTH:
        share = stage.ring_share(port)
        print(f"{share:.4f} of the bytes went by ring")
        assert share > 0.95
