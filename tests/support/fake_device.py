"""Devices of the kernel without the kernel: `native/fake_verbs.c` in the place of libibverbs.

What Python and the engine do with it is what they do with a real one; what they are told, and when, is up to the test.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import toolchain

from sidestep.rdma.kernel import device
from sidestep.rdma.kernel.device import KernelDevice
from sidestep.rdma.kernel.libraries import _VERBS_CALLS, Libraries, _bound

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.rdma.kernel.pinned import PinnedMemory

ADDRESSES: Final = ("127.77.0.1", "127.77.0.2")
RECEIVED: Final = 128  # enum ibv_wc_opcode
RECEIVED_RDMA_WITH_IMM: Final = 129
WITH_IMM: Final = 2  # enum ibv_wc_flags


class FakeVerbs(Libraries):
    """The library, and its knobs: see fake_verbs.h."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[str, Any] = _bound(library, _VERBS_CALLS, "fake_verbs")
        self._library = library
        library.fake_count.restype = ctypes.c_uint64

    def hold(self, *, deliveries: bool = False, acknowledgements: bool = False) -> None:
        self._library.fake_hold(deliveries, acknowledgements)

    def fail(self, call: str, error: int, count: int = 1) -> None:
        self._library.fake_fail(call.encode(), error, count)

    def receive(
        self, qp_num: int, *, status: int = 0, opcode: int = RECEIVED, flags: int = 0, byte_len: int = 0
    ) -> None:
        assert not self._library.fake_receive(qp_num, status, opcode, flags, byte_len)

    def break_off(self, qp_num: int) -> None:
        assert not self._library.fake_break(qp_num)

    def event(self, kind: int, qp_num: int = 0) -> None:
        self._library.fake_event(kind, qp_num)

    def count(self, what: str) -> int:
        return int(self._library.fake_count(what.encode()))


@cache
def fake_verbs() -> FakeVerbs:
    source = toolchain.NATIVE_TESTS / "fake_verbs.c"
    library = toolchain.build("fake_verbs.so", [source], ["-O1", "-fPIC", "-shared"])
    return FakeVerbs(ctypes.CDLL(str(library), use_errno=True))


def open_fake(address: str, loop: Loop, pinned: PinnedMemory | None = None) -> KernelDevice:
    """One that has this address."""
    with mock.patch.object(device, "libraries", fake_verbs):
        return KernelDevice(address, loop, name=f"verbs@{address}", by_number=True, pinned=pinned)
