"""Runs in the guest: a consumer of verbs on the kernel's device, told by the peer what to do. Prints JSON, one a line.

On each connection the first Send of the peer is a wish, in JSON: `receives` to post, each of `size` bytes, and `reads`
to post, as lists of address, key and length. The answer is a Send that tells the keys and addresses of its memory, by
what a peer may do with it. When everything has completed, well or not, a line tells how, and what the memory holds.

usage: verbs_consumer.py ADDRESS PORT
"""

from __future__ import annotations

import json
import sys
from itertools import count
from typing import Any

from pyverbs import cm_enums, enums
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QPCap, QPInitAttr

DEPTH = 4  # reads in both directions
WORK_MAX = 64
MEMORY_LEN = 4096
WISH_LEN = 1024
SHOWN = 16  # bytes of each memory in the report
READ_AND_WRITE = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
RIGHTS = {
    "both": READ_AND_WRITE,
    "readable": enums.IBV_ACCESS_REMOTE_READ,
    "writable": enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE,
    "local": enums.IBV_ACCESS_LOCAL_WRITE,
}


def say(**fields: Any) -> None:
    """A line for whoever reads the log."""
    print(json.dumps(fields), flush=True)


def status(completion: Any) -> list[Any]:
    """A completion: how it went, and how many bytes."""
    names = {getattr(enums, name): name for name in dir(enums) if name.startswith("IBV_WC_") and name.endswith("_ERR")}
    names[enums.IBV_WC_SUCCESS] = "IBV_WC_SUCCESS"
    return [names[completion.status].removeprefix("IBV_WC_"), completion.byte_len]


class Consumer:
    """A listener for one connection. Another one gets a listener of its own: pyverbs closes the context with it."""

    def __init__(self, address: str, port: str, number: int) -> None:
        self.number = number
        self.channel = CMEventChannel()
        self.listener = CMID(creator=self.channel)
        self.listener.bind_addr(
            AddrInfo(src=address, src_service=port, port_space=cm_enums.RDMA_PS_TCP, flags=cm_enums.RAI_PASSIVE)
        )
        self.listener.listen(backlog=16)
        self.domain = self.listener.pd
        say(listening=number)

    def event(self, wanted: str) -> Any:
        """The next event of that kind."""
        while True:
            event = CMEvent(self.channel)
            if event.event_type == getattr(cm_enums, f"RDMA_CM_EVENT_{wanted}"):
                return event
            event.ack_cm_event()

    def memory(self, length: int, rights: int, domain: Any = None) -> MR:
        """A region, all zeros."""
        return MR(domain or self.domain, length, rights)

    def serve(self) -> None:
        """The connection, from its request to its end."""
        asked = self.event("CONNECT_REQUEST")
        connection = CMID(creator=asked, listen_id=self.listener)
        room = QPCap(max_send_wr=WORK_MAX, max_recv_wr=WORK_MAX, max_send_sge=1, max_recv_sge=1)
        connection.create_qp(QPInitAttr(qp_type=enums.IBV_QPT_RC, cap=room))
        stranger = PD(self.listener.context)
        wish_memory = self.memory(WISH_LEN, enums.IBV_ACCESS_LOCAL_WRITE)
        memory = {name: self.memory(MEMORY_LEN, rights) for name, rights in RIGHTS.items()}
        memory["foreign"] = self.memory(MEMORY_LEN, READ_AND_WRITE, stranger)
        connection.post_recv(wish_memory, WISH_LEN)
        connection.accept(ConnParam(resources=DEPTH, depth=DEPTH))
        asked.ack_cm_event()
        first = connection.get_recv_comp()
        report: dict[str, Any] = {"connection": self.number, "wish": status(first), "receives": [], "sends": []}
        if first.status == 0:
            self.obey(connection, json.loads(wish_memory.read(first.byte_len, 0)), memory, report)
        report["memory"] = {name: one.read(SHOWN, 0).hex() for name, one in memory.items()}
        for one in (wish_memory, *memory.values(), stranger, connection, self.listener, self.channel):
            one.close()
        say(**report)

    def obey(self, connection: CMID, wish: dict[str, Any], memory: dict[str, MR], report: dict[str, Any]) -> None:
        """Posts what is wished for, and when the connection has ended collects the completions."""
        size, receives = wish.get("size", MEMORY_LEN), wish.get("receives", 0)
        room = self.memory(max(1, size), enums.IBV_ACCESS_LOCAL_WRITE)
        for _ in range(receives):
            connection.post_recv(room, size)
        answer = json.dumps({name: [one.buf, one.rkey] for name, one in memory.items()}).encode()
        told = self.memory(len(answer), enums.IBV_ACCESS_LOCAL_WRITE)
        told.write(answer, len(answer))
        connection.post_send(told, enums.IBV_SEND_SIGNALED, len(answer))
        for address, key, length in wish.get("reads", []):
            connection.post_read(memory["both"], length, address, key, enums.IBV_SEND_SIGNALED)
        self.event("DISCONNECTED").ack_cm_event()
        connection.disconnect()  # what is still posted completes, as flushed
        report["sends"] = [status(connection.get_send_comp()) for _ in (answer, *wish.get("reads", []))]
        report["receives"] = [status(connection.get_recv_comp()) for _ in range(receives)]
        report["received"] = room.read(min(size, SHOWN), 0).hex() if size else ""
        for one in (room, told):
            one.close()


for connection_number in count(1):
    Consumer(sys.argv[1], sys.argv[2], connection_number).serve()
