"""As a user that it becomes first, tells whether it believes its provider, and says a secret to itself by TCP.

usage: secret.py UID; all is imported before the privileges go, as in provider.py
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from sidestep import config
from sidestep.config import NotBelieved

SECRET = b"the password is mellon"

os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
try:
    print("believed" if config.answers(Path(os.environ["SIDESTEP_SOCKET"])) else "nobody there")
except NotBelieved as error:
    print(error)
sys.stdout.flush()
if child := os.fork():  # its shim looks for a provider anew: ours has looked as root, when its user changed
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as one:
    one.connect(listener.getsockname())
    other, _ = listener.accept()
    with other:
        for _ in range(300):
            for sender, receiver in ((one, other), (other, one)):
                sender.sendall(SECRET)
                if receiver.recv(len(SECRET), socket.MSG_WAITALL) != SECRET:
                    sys.exit("another secret came")
            time.sleep(0.001)  # whoever pairs the two needs a moment
