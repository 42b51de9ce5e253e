import os, socket, struct, sys, time
from pathlib import Path
sys.path.insert(0, "$ROOT/tests/support")
from shim_client import ShimClient
from sidestep.native import layout
from sidestep.native.layout import Rpc
from sidestep.provider import rpc
from sidestep.provider.rpc import Message
pid = int(sys.argv[1])
for fd in os.listdir(f"/proc/{pid}/fd"):
    if "sidestep-arena" in os.readlink(f"/proc/{pid}/fd/{fd}"):
        head = open(f"/proc/{pid}/fd/{fd}", "rb").read(256); break
import re
off = int(sys.argv[2])
arena_id = head[off:off + 16]
with ShimClient(Path(os.environ["SIDESTEP_SOCKET"])) as c:
    c.hello()
    l = socket.create_server(("127.0.0.1", 0), backlog=1)
    fds = []
    for _ in range(2):
        s = socket.create_connection(l.getsockname())
        s.setblocking(False)
        try:
            while True: s.send(b"x" * 65536)
        except BlockingIOError: pass
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 5))
        fds.append(s.detach())
    rpc.send(c.sock, Message(type=Rpc.BELL, arena_id=arena_id, doorbell_page_id=bytes(16), cookie=1, token=1), fds)
    for f in fds: os.close(f)
    print("sent", flush=True)
    time.sleep(13)
