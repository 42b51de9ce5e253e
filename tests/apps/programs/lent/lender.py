"""As Lender.java: echoes on sockets that programs inherit, and starts one for each line of its input, by system().

These programs do not have the shim, or the connections would go on in them.
"""

from __future__ import annotations

import os
import socket
import sys
import threading


def echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


def accept(listener: socket.socket) -> None:
    while True:
        connection = listener.accept()[0]
        connection.set_inheritable(True)
        threading.Thread(target=echo, args=(connection,), daemon=True).start()


server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=accept, args=(server,), daemon=True).start()
print(server.getsockname()[1], flush=True)
os.environ["SIDESTEP_DISABLE"] = "1"
for line in sys.stdin:
    print("ended", os.system(f"sleep {line}"), flush=True)
