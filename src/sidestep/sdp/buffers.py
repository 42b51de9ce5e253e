"""Private buffers of all connections on a device: who needs some waits in line, who is done gives them back.

They come in slabs of one size, registered as a whole (`rdma.pools.MessagePool`). A slab is made when the present ones
do not suffice and the bound allows, and given up as soon as all of its buffers are back. Where the bound does not
allow, the buffers that come back go to who has waited the longest, until that one has all it asked for: two that wait
for each other's half would both wait for ever. Where nobody is to wait, who asks for more than there is gets none.

A slab has buffers for connections of one user: what is pinned for him is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from sidestep import limits
from sidestep.errors import LimitReached, SidestepError, Unavailable
from sidestep.rdma.pools import MessagePool

if TYPE_CHECKING:
    from sidestep.rdma.pools import Element
    from sidestep.rdma.verbs import ProtectionDomain

PoolBuffer: TypeAlias = "tuple[MessagePool, Element]"
_Key: TypeAlias = tuple[int | None, int]  # whose they are, and bytes
BuffersHandler: TypeAlias = "Callable[[list[PoolBuffer] | SidestepError], None]"


class Want:
    """Who waits for buffers, and for how many."""

    __slots__ = ("count", "give")

    def __init__(self, count: int, give: BuffersHandler) -> None:
        self.count = count
        self.give = give

    def cancel(self) -> None:
        self.count = 0


class _Kind:
    """The buffers of one size, for one user."""

    __slots__ = ("open", "serving", "slabs", "wants")

    def __init__(self) -> None:
        self.slabs: dict[MessagePool, None] = {}  # sets that keep their order
        self.open: dict[MessagePool, None] = {}  # those that have a buffer to give
        self.wants: deque[Want] = deque()
        self.serving = False


class PrivateBuffers:
    """The private buffers of one domain.

    Args:
        domain: Whose queue pairs use them.
        bytes_max: Of all of them.
        kept: Bytes of unused slabs that are kept for whoever comes next; making one takes a registration.
        waits: Whether who asks for more than there is waits for it.
    """

    def __init__(
        self,
        domain: ProtectionDomain,
        *,
        bytes_max: int = limits.SDP_PRIVATE_BYTES_MAX,
        kept: int = 0,
        waits: bool = True,
    ) -> None:
        self.waits: Final = waits
        self._domain = domain
        self._bytes_max = bytes_max
        self._kept_max = kept
        self._idle: deque[MessagePool] = deque()  # slabs that nobody uses, the longest unused first
        self._kinds: dict[_Key, _Kind] = {}
        self.bytes = 0  # of all slabs

    @property
    def lent(self) -> int:
        """Buffers that are in use."""
        return sum(slab.count - slab.available for kind in self._kinds.values() for slab in kind.slabs)

    @property
    def waiting(self) -> int:
        return sum(want.count > 0 for kind in self._kinds.values() for want in kind.wants)

    def ask(self, count: int, size: int, give: BuffersHandler, uid: int | None = None) -> Want:
        """Gives `count` buffers of `size` bytes: now, later, or in parts; or the error that there can be none."""
        want = Want(count, give)
        self._kinds.setdefault((uid, size), _Kind()).wants.append(want)
        self._serve((uid, size))
        return want

    def put(self, loan: PoolBuffer) -> None:
        slab, element = loan
        slab.put(element)
        if (key := _key(slab)) in self._kinds:  # not after `close`
            self._kinds[key].open[slab] = None
            self._serve(key)
            if slab.available == slab.count:
                self._retire(slab)

    def close(self) -> None:
        """Ends everything; buffers that are still lent become useless."""
        kinds, self._kinds = self._kinds, {}
        self._idle.clear()
        for kind in kinds.values():
            for slab in kind.slabs:
                slab.close()
            for want in kind.wants:
                if want.count:
                    want.cancel()
                    want.give(Unavailable("the device is not used any more"))
        self.bytes = 0

    def _serve(self, key: _Key) -> None:
        kind = self._kinds[key]
        if kind.serving:  # who was given some gave others back: the loop below sees them
            return
        kind.serving = True
        try:
            while kind.wants:
                want = kind.wants[0]
                if want.count and not self._serve_one(want, kind, key):
                    return
                if not want.count:
                    kind.wants.popleft()
        finally:
            kind.serving = False
        self._tidy(key)

    def _serve_one(self, want: Want, kind: _Kind, key: _Key) -> bool:
        """Gives what there is; False if there is nothing to give."""
        loans = self._take(kind, want.count)
        if not loans:
            fault = self._grow(kind, key, want.count)
            if fault is not None:
                if self.waits and self._may_come(kind, key[1], fault):
                    return False
                want.cancel()
                want.give(fault)
                return True
            loans = self._take(kind, want.count)
        want.count -= len(loans)
        want.give(loans)
        return True

    @staticmethod
    def _take(kind: _Kind, most: int) -> list[PoolBuffer]:
        loans: list[PoolBuffer] = []
        while len(loans) < most and kind.open:
            slab = next(iter(kind.open))
            while len(loans) < most and (element := slab.take()) is not None:
                loans.append((slab, element))
            if not slab.available:
                del kind.open[slab]
        return loans

    def _grow(self, kind: _Kind, key: _Key, count: int) -> SidestepError | None:
        """Another slab, as large as is wanted if there is room for it; what is in the way, if it is none at all."""
        uid, size = key
        while self._idle and self.bytes + size * count > self._bytes_max:
            self._drop(self._idle.popleft())
        count = min(count, (self._bytes_max - self.bytes) // size)
        if count < 1:
            return LimitReached(f"private buffers have {self.bytes} bytes of {self._bytes_max} already")
        try:
            slab = MessagePool(self._domain, size=size, count=count, uid=uid)
        except SidestepError as why:
            return why
        self.bytes += size * count
        kind.slabs[slab] = kind.open[slab] = None
        return None

    def _may_come(self, kind: _Kind, size: int, fault: SidestepError) -> bool:
        """Whether buffers come back that who asks has a use for, or their room."""
        if any(slab.available < slab.count for slab in kind.slabs):
            return True
        return isinstance(fault, LimitReached) and size <= self._bytes_max and self.bytes > 0

    def _retire(self, slab: MessagePool) -> None:
        self._idle = deque(each for each in self._idle if each is not slab and each.available == each.count)
        self._idle.append(slab)
        while self._idle and sum(each.count * each.size for each in self._idle) > self._kept_max:
            self._drop(self._idle.popleft())

    def _drop(self, slab: MessagePool) -> None:
        if slab.available < slab.count:
            return  # it found a use again
        key = _key(slab)
        del self._kinds[key].slabs[slab]
        self._kinds[key].open.pop(slab, None)
        self.bytes -= slab.count * slab.size
        slab.close()
        self._tidy(key)
        for key in list(self._kinds):  # its room may be what others wait for
            if key in self._kinds and self._kinds[key].wants:
                self._serve(key)

    def _tidy(self, key: _Key) -> None:
        kind = self._kinds.get(key)
        if kind is not None and not kind.slabs and not kind.wants and not kind.serving:
            del self._kinds[key]


def _key(slab: MessagePool) -> _Key:
    return slab.uid, slab.size


__all__: Final = ["BuffersHandler", "PoolBuffer", "PrivateBuffers", "Want"]
