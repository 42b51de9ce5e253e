"""IMAP by dovecot: megabytes of mail are brought, fetched and compared.

By imaps the process that has accepted the connection keeps it for TLS. By imap it hands it to one that is started for
it, which as dovecot comes is another user's. Nor is it known who will get it: the socket by which it goes is accepted
later. Dovecot reads no mail as root, so with one user for all its processes this is run as that user.

usage: dovecot_case.py MODE WORKDIR PROGRAM imap|imaps one|several      how many users its processes have
WORKDIR has a certificate and its key.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stage import Mode, Stage, staged

COUNT, SIZE = 10, 1_000_000  # of mails
SERVER = """
base_dir={root}/run
log_path={root}/dovecot.log
protocols=imap
listen=127.0.0.1
disable_plaintext_auth=no
mail_location=maildir:{root}/mail/%u
first_valid_uid=1
service imap-login {{
 inet_listener imap {{
  port={imap}
 }}
 inet_listener imaps {{
  port={imaps}
 }}
}}
passdb {{
 driver=static
 args=password=x
}}
userdb {{
 driver=static
 args=uid={user} gid={group} home={root}/mail/%u
}}
"""
TLS = """
ssl=yes
ssl_cert=<{root}/certificate
ssl_key=<{root}/key
"""
ONE_USER = """
default_internal_user={user}
default_internal_group={group}
default_login_user={user}
service anvil {{
 chroot=
}}
service imap-login {{
 chroot=
}}
"""


def serve(stage: Stage, program: str, protocol: str, users: str) -> int:
    """Starts dovecot; its port."""
    root = stage.workdir
    text = SERVER + (TLS if protocol == "imaps" else "ssl=no\n") + (ONE_USER if users == "one" else "")
    who = pwd.getpwuid(os.geteuid()) if users == "one" else pwd.getpwnam("nobody")
    (root / "mail").mkdir()
    os.chown(root / "mail", who.pw_uid, who.pw_gid)

    def dovecot(port: int) -> list[str]:
        ports = {"imap": 0, "imaps": 0} | {protocol: port}
        group = grp.getgrgid(who.pw_gid).gr_name
        (root / "conf").write_text(text.format(root=root, user=who.pw_name, group=group, **ports))
        return [program, "-F", "-c", str(root / "conf")]

    return stage.serve(dovecot)[1]


def ends(stage: Stage, port: int) -> list[tuple[str, str]]:
    """What is said of each end: the verdict, and the cause in words."""
    command = [str(Path(sys.executable).parent / "sidestep"), "explain", f":{port}", "--json"]
    shown = subprocess.run(command, env=stage.env("client"), check=True, capture_output=True, timeout=60).stdout
    found = [(one["verdict"], one["cause"]) for one in json.loads(shown)["explanations"]]
    return [end for end in found if end[0] != "listens"]


def main() -> None:
    """Run it."""
    mode, workdir, (program, protocol, users) = Mode(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    os.environ["HOME"] = str(workdir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # leave through the context managers: no orphans
    carried = protocol == "imaps"
    with staged(mode, workdir) as stage:
        port = serve(stage, program, protocol, users)
        client = stage.python("client", "imap_client.py", port, protocol, COUNT, SIZE)
        assert client.line() == "in"
        if carried:
            stage.check_path(port, nudge=client.nudge)
        client.tell("go on")
        assert client.line() == "same"
        if mode is Mode.BOTH:
            found = ends(stage, port)
            assert [verdict for verdict, _ in found] == ["carried" if carried else "tcp"] * 2, found
            assert [cause.endswith("another process made it") for _, cause in found] == [not carried] * 2, found
        client.rest()
        if mode is Mode.BOTH:
            share = stage.ring_share(port)
            print(f"{share:.4f} of the bytes went by ring")
            assert share > 0.95 if carried else share < 0.05
    print("all is well")


if __name__ == "__main__":
    main()
