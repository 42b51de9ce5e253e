"""Serves what it is sent back, or talks to such a server.

usage: exchange.py serve HOST | exchange.py talk HOST PORT; the server prints its port. The talker prints whether all
came back equal once its shim has had 300 exchanges to move the connection, and keeps it until it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time


def serve(host: str) -> None:
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            with listener.accept()[0] as one:
                while data := one.recv(65536):
                    one.sendall(data)


def talk(host: str, port: int) -> None:
    equal = True
    with socket.create_connection((host, port)) as one:
        for _ in range(300):
            sent = os.urandom(1000)
            one.sendall(sent)
            equal &= one.recv(len(sent), socket.MSG_WAITALL) == sent
            time.sleep(0.001)  # whoever pairs the two needs a moment
        print(json.dumps({"equal": equal}), flush=True)
        signal.pause()


if sys.argv[1] == "serve":
    serve(sys.argv[2])
else:
    talk(sys.argv[2], int(sys.argv[3]))
