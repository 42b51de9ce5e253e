"""Runs in the guest: does on the kernel's device what a test asks for, one line of JSON after the other, over TCP.

Each TCP connection gets a process of its own, so that it can be killed and leaves nothing behind. A request names in
`do` what to do and is answered by one line: what came of it, or `error`. See `Agent` for what there is.

usage: verbs_agent.py ADDRESS PORT
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from hashlib import shake_128
from ipaddress import IPv6Address, ip_address
from typing import Any

from pyverbs import cm_enums, enums
from pyverbs.addr import AH, GID, AHAttr, GlobalRoute
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

WORK_MAX = 256
GRH_LEN = 40  # bytes in front of a received datagram
EVENTS = {
    getattr(cm_enums, name): name.removeprefix("RDMA_CM_EVENT_")
    for name in dir(cm_enums)
    if name.startswith("RDMA_CM_EVENT_")
}
STATUSES = {
    getattr(enums, name): name.removeprefix("IBV_WC_") for name in dir(enums) if name.startswith("IBV_WC_") and
    (name.endswith("_ERR") or name == "IBV_WC_SUCCESS")
}  # fmt: skip
RIGHTS = {
    "local": enums.IBV_ACCESS_LOCAL_WRITE,
    "read": enums.IBV_ACCESS_REMOTE_READ,
    "write": enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE,
    "all": enums.IBV_ACCESS_LOCAL_WRITE
    | enums.IBV_ACCESS_REMOTE_READ
    | enums.IBV_ACCESS_REMOTE_WRITE
    | enums.IBV_ACCESS_REMOTE_ATOMIC,
    "both": enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE,
}
ROOM = QPCap(max_send_wr=WORK_MAX, max_recv_wr=WORK_MAX, max_send_sge=1, max_recv_sge=1)


def pattern(seed: int, length: int) -> bytes:
    """What a test writes and looks for; the test's side has the same."""
    return shake_128(str(seed).encode()).digest(length)


class Agent:
    """One consumer of verbs. Each method but `run` is a request, with the fields that it takes."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = CMEventChannel()
        self._listener: Any = None
        self._id: Any = None
        self._event: Any = None
        self._regions: list[Any] = []
        self._datagrams: Datagrams | None = None

    def run(self, control: socket.socket) -> None:
        """Until the test hangs up."""
        with control, control.makefile("r") as requests:
            for line in requests:
                fields = json.loads(line)
                try:
                    answer = getattr(self, fields.pop("do"))(**fields)
                except Exception as why:
                    answer = {"error": f"{type(why).__name__}: {why}"}
                control.sendall(json.dumps(answer if answer is not None else {}).encode() + b"\n")

    # ---- connections ----

    def listen(self, port: int) -> None:
        self._listener = CMID(creator=self._channel)
        self._listener.bind_addr(self._info(src=self._address, src_service=str(port), flags=cm_enums.RAI_PASSIVE))
        self._listener.listen(backlog=16)

    def event(self) -> dict[str, Any]:
        """Waits for the next one of the connection manager."""
        event = CMEvent(self._channel)
        kind = EVENTS[event.event_type]
        told = {"event": kind, "private_data": bytes(event.private_data or b"").hex()}
        if kind == "CONNECT_REQUEST":
            self._event = event  # holds what the answer needs
            self._id = CMID(creator=event, listen_id=self._listener)
        else:
            event.ack_cm_event()
        return told

    def accept(self, private_data: str = "", resources: int = 4, depth: int = 4) -> None:
        self._id.accept(self._param(private_data, resources, depth))
        self._event.ack_cm_event()

    def reject(self, private_data: str = "") -> None:
        self._id.reject(bytes.fromhex(private_data))
        self._event.ack_cm_event()

    def resolve(self, address: str, port: int) -> None:
        self._id = CMID(creator=self._channel)
        info = self._info(src=self._address, dst=address, dst_service=str(port))
        self._id.resolve_addr(info)
        self._expect("ADDR_RESOLVED")
        self._id.resolve_route()
        self._expect("ROUTE_RESOLVED")

    def create_qp(self) -> None:
        self._id.create_qp(QPInitAttr(qp_type=enums.IBV_QPT_RC, cap=ROOM))

    def connect(self, private_data: str = "", resources: int = 4, depth: int = 4) -> None:
        self._id.connect(self._param(private_data, resources, depth))

    def disconnect(self) -> None:
        self._id.disconnect()

    def kill(self) -> None:
        """The program dies without a word."""
        os.kill(os.getpid(), signal.SIGKILL)

    # ---- memory ----

    def region(self, length: int, rights: str = "both", seed: int | None = None) -> dict[str, int]:
        """Registers memory, of the pattern of that seed or zeros."""
        region = MR(self._id.pd, length, RIGHTS[rights])
        region.write(bytes(length) if seed is None else pattern(seed, length), length)
        self._regions.append(region)
        return {"region": len(self._regions) - 1, "address": region.buf, "key": region.rkey}

    def holds(self, region: int, seed: int, length: int, offset: int = 0) -> dict[str, bool]:
        """Whether the pattern is there."""
        return {"holds": self._regions[region].read(length, offset) == pattern(seed, length)}

    def number(self, region: int, offset: int = 0) -> dict[str, int]:
        """Eight bytes, as this machine reads a number."""
        return {"number": int.from_bytes(self._regions[region].read(8, offset), sys.byteorder)}

    def revoke(self, region: int) -> None:
        self._regions[region].close()

    # ---- work ----

    def receive(self, region: int, length: int, count: int = 1) -> None:
        for _ in range(count):
            self._id.post_recv(self._regions[region], length)

    def send(self, region: int, length: int, count: int = 1) -> None:
        for _ in range(count):
            self._id.post_send(self._regions[region], enums.IBV_SEND_SIGNALED, length)

    def write(self, region: int, length: int, address: int, key: int, count: int = 1) -> None:
        for _ in range(count):
            self._id.post_write(self._regions[region], length, address, key, enums.IBV_SEND_SIGNALED)

    def read(self, region: int, length: int, address: int, key: int, count: int = 1) -> None:
        for _ in range(count):
            self._id.post_read(self._regions[region], length, address, key, enums.IBV_SEND_SIGNALED)

    def sent(self, count: int = 1) -> dict[str, Any]:
        """Waits for so many completions of the send queue."""
        return {"completions": [self._status(self._id.get_send_comp()) for _ in range(count)]}

    def received(self, count: int = 1) -> dict[str, Any]:
        """Waits for so many completions of the receive queue."""
        return {"completions": [self._status(self._id.get_recv_comp()) for _ in range(count)]}

    def immediate(self, count: int = 1) -> dict[str, Any]:
        """Waits for so many completions of the receive queue, and tells what they carry beside the message."""
        found = [self._id.get_recv_comp() for _ in range(count)]
        return {"completions": [[*self._status(each), _immediate(each)] for each in found]}

    # ---- datagrams ----

    def datagrams(self, qkey: int) -> dict[str, int]:
        """Makes a queue pair for them."""
        self._datagrams = Datagrams(self._address, qkey)
        return {"number": self._datagrams.qp.qp_num}

    def datagram_rooms(self, length: int, count: int = 1) -> None:
        """Posts receives for so many bytes behind the routing header."""
        assert self._datagrams is not None
        for _ in range(count):
            self._datagrams.post(length)

    def datagram(
        self, address: str, number: int, qkey: int, seed: int, length: int, immediate: str | None = None
    ) -> dict[str, str]:
        """Sends one, and waits until it has left."""
        assert self._datagrams is not None
        content = pattern(seed, length)
        data = None if immediate is None else bytes.fromhex(immediate)
        completion = self._datagrams.send(address, number, qkey, content, data)
        return {"status": STATUSES[completion.status]}

    def datagrams_received(self, count: int = 1, wait_s: float = 20.0) -> dict[str, Any]:
        """What has come, once so many have, or after that time."""
        assert self._datagrams is not None
        return {"datagrams": self._datagrams.received(count, wait_s)}

    # ---- what they need ----

    def _status(self, completion: Any) -> list[Any]:
        return [STATUSES[completion.status], completion.byte_len]

    def _expect(self, kind: str) -> None:
        found = self.event()["event"]
        if found != kind:
            raise RuntimeError(f"{found} instead of {kind}")

    def _info(self, **fields: Any) -> Any:
        return AddrInfo(port_space=cm_enums.RDMA_PS_TCP, **fields)

    def _param(self, private_data: str, resources: int, depth: int) -> Any:
        data = bytes.fromhex(private_data)
        param = ConnParam(resources=resources, depth=depth, data_len=len(data))
        if data:
            param.set_private_data(data)
        return param


class Datagrams:
    """A queue pair for datagrams."""

    def __init__(self, address: str, qkey: int) -> None:
        self._context, self._index = _device_with(address)
        self._pd = PD(self._context)
        self._send_cq, self._recv_cq = CQ(self._context, WORK_MAX), CQ(self._context, WORK_MAX)
        attributes = QPAttr(port_num=1)
        attributes.qkey = qkey
        made = QPInitAttr(qp_type=enums.IBV_QPT_UD, scq=self._send_cq, rcq=self._recv_cq, cap=ROOM)
        self.qp = QP(self._pd, made, attributes)
        self._rooms: list[Any] = []
        self._ways: dict[str, Any] = {}

    def post(self, length: int) -> None:
        size = GRH_LEN + length
        room = MR(self._pd, size, enums.IBV_ACCESS_LOCAL_WRITE)
        self._rooms.append(room)
        entry = SGE(room.buf, size, room.lkey)
        self.qp.post_recv(RecvWR(wr_id=len(self._rooms) - 1, num_sge=1, sg=[entry]))

    def send(self, address: str, number: int, qkey: int, content: bytes, immediate: bytes | None) -> Any:
        memory = MR(self._pd, max(1, len(content)), enums.IBV_ACCESS_LOCAL_WRITE)
        memory.write(content, len(content))
        opcode, data = enums.IBV_WR_SEND, 0
        if immediate is not None:
            opcode, data = enums.IBV_WR_SEND_WITH_IMM, int.from_bytes(immediate, sys.byteorder)
        request = SendWR(
            num_sge=1, sg=[SGE(memory.buf, len(content), memory.lkey)], opcode=opcode, imm_data=data,
            send_flags=enums.IBV_SEND_SIGNALED,
        )  # fmt: skip
        request.set_wr_ud(self._way(address), number, qkey)
        self.qp.post_send(request)
        return self._poll(self._send_cq, time.monotonic() + 20.0)

    def received(self, count: int, wait_s: float) -> list[dict[str, Any]]:
        end = time.monotonic() + wait_s
        found = [self._poll(self._recv_cq, end) for _ in range(count)]
        return [self._told(each) for each in found if each is not None]

    def _told(self, completion: Any) -> dict[str, Any]:
        told = {"status": STATUSES[completion.status], "length": completion.byte_len, "source": completion.src_qp}
        if completion.status == enums.IBV_WC_SUCCESS:
            told["bytes"] = self._rooms[completion.wr_id].read(completion.byte_len, 0).hex()
        return told | {"immediate": _immediate(completion)}

    def _poll(self, queue: Any, end: float) -> Any:
        while time.monotonic() < end:
            count, found = queue.poll(1)
            if count:
                return found[0]
            time.sleep(0.001)
        return None

    def _way(self, address: str) -> Any:
        if address not in self._ways:
            route = GlobalRoute(dgid=GID(_gid_of(address).exploded), sgid_index=self._index)
            self._ways[address] = AH(self._pd, attr=AHAttr(gr=route, is_global=1, port_num=1))
        return self._ways[address]


def _gid_of(address: str) -> IPv6Address:
    found = ip_address(address)
    return found if isinstance(found, IPv6Address) else IPv6Address(0xFFFF << 32 | int(found))


def _device_with(address: str) -> tuple[Any, int]:
    """The device that has this address, opened, and its place in the table of GIDs."""
    for each in get_device_list():
        context = Context(name=each.name.decode())
        for index in range(16):
            try:
                gid = context.query_gid(1, index)
            except Exception:
                break
            if IPv6Address(str(gid)) == _gid_of(address):
                return context, index
    raise RuntimeError(f"no RDMA device has {address}")


def _immediate(completion: Any) -> str | None:
    """Four bytes in hex; pyverbs takes them, as they came, for a number of this machine."""
    if not completion.wc_flags & enums.IBV_WC_WITH_IMM:
        return None
    return int(completion.imm_data).to_bytes(4, sys.byteorder).hex()


def main() -> None:
    address, port = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.create_server((address, int(port))) as server:
        print("ready", flush=True)
        while True:
            control, _ = server.accept()
            if os.fork() == 0:
                server.close()
                Agent(address).run(control)
                os._exit(0)
            control.close()


main()
