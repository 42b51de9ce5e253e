"""rping's protocol (librdmacm's example of that name), at the end that serves.

    client                                        server
    Send: where its data lies            -->
                                         <--      RDMA Read of it
                                         <--      Send: go on
    Send: where there is room            -->
                                         <--      RDMA Write of what was read
                                         <--      Send: go on
    ... from the beginning, until the client disconnects

Messages have 16 bytes: address, key and length, big-endian; what the server sends says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.rdma.tools.talk import Talk
from sidestep.rdma.tools.terms import Op, Terms
from sidestep.rdma.work import Access, Completion, Opcode, RdmaRead, RdmaWrite, RKey, Send

if TYPE_CHECKING:
    from sidestep.rdma.verbs import Device

INFO: Final = Struct("!QII")  # struct rping_rdma_info: buf, rkey, size
_GO_ON: Final = bytes(INFO.size)
PLAIN: Final = Terms(Op.PING, 0)


class Rping(Talk):
    """One client's."""

    def __init__(self, device: Device, failed: Callable[[str], object]) -> None:
        super().__init__(device, PLAIN, 2, INFO.size, failed)
        self._data = bytearray()
        self._writes_next = False
        self._busy = False
        self.messages = 0

    def received(self, index: int, length: int) -> None:
        if length != INFO.size or self._busy:
            raise PeerViolation(f"{length} bytes that are none of rping's messages", rule="unexpected")
        va, rkey, size = INFO.unpack_from(self.slots[index])
        self.post_receive(index)
        if not 0 < size <= limits.RDMA_TOOL_MESSAGE_MAX:
            raise PeerViolation(f"{size} bytes; 1 to {limits.RDMA_TOOL_MESSAGE_MAX} are possible", rule="limits")
        self._busy = True
        if self._writes_next:
            data = memoryview(self._data)[:size]
            self.qp.post_send(RdmaWrite(0, (data,), va, RKey(rkey), signaled=False))
            self._go_on()
        else:
            self._make_room(size)
            self.qp.post_send(RdmaRead(0, (memoryview(self._data),), va, RKey(rkey)))

    def sent(self, completion: Completion) -> None:
        if completion.opcode is Opcode.RDMA_READ:
            self._go_on()

    def _go_on(self) -> None:
        self._busy = False
        self.messages += self._writes_next
        self._writes_next = not self._writes_next
        self.qp.post_send(Send(0, (_GO_ON,)))

    def _make_room(self, size: int) -> None:
        if len(self._data) != size:
            if self._data:
                self.regions.pop().deregister()
            self._data = self.memory(bytearray(size), Access.LOCAL_WRITE)
