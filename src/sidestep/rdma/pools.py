"""Pools of memory that a device may use: for messages, for RDMA, and for datagrams.

Registering memory is slow, so it is done once and the memory lent out. Every pool is bounded; who finds it empty waits
in order, or takes the other way (SDP without a registered buffer sends by Bcopy).

- `MessagePool`: buffers of one size in one region, for receives and sends (SDP: private buffers).
- `RdmaPool`: the user's own buffers, registered when they are first seen and remembered, the least recently used
  forgotten first.
- `DatagramPool`: buffers of one size with the room in front that a datagram's routing header takes (IBTA 11.4.1.2). The
  verbs here have no datagrams yet; the pool is what they will post.

What is given back is closed to the other end: a remembered region of an `RdmaPool` gets new keys before anybody else
uses its memory, and a peer that kept the old one is refused.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, SidestepError, Unavailable
from sidestep.rdma.address import buffer_address
from sidestep.rdma.verbs import MemoryRegion
from sidestep.rdma.work import GRH_LEN, Access

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from sidestep.rdma.verbs import ProtectionDomain
    from sidestep.rdma.work import RKey

_REMOTE: Final = int(Access.REMOTE_READ | Access.REMOTE_WRITE)
_T = TypeVar("_T")


class Waiter(Generic[_T]):
    """Somebody who asked a pool."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[_T | SidestepError], object]) -> None:
        self.callback: Callable[[_T | SidestepError], object] | None = callback

    def cancel(self) -> None:
        """The callback is not called any more; too late if it was."""
        self.callback = None

    def answer(self, result: _T | SidestepError) -> None:
        callback, self.callback = self.callback, None
        if callback is not None:
            callback(result)


class Element:
    """A buffer of a pool, lent out until it is given back."""

    __slots__ = ("lent", "payload", "view")

    def __init__(self, view: memoryview, headroom: int) -> None:
        self.view = view  # what is posted
        self.payload = view[headroom:] if headroom else view  # what the user's bytes are in
        self.lent = False


class MessagePool:
    """Buffers of one size, registered together.

    Args:
        domain: Whose queue pairs may use them.
        size: Bytes of a buffer.
        count: How many there are.
        waiters_max: Who may wait at a time.
        uid: As `ProtectionDomain.register` takes it.

    Raises:
        Misuse, LimitReached, Unavailable: As `ProtectionDomain.register` does.
    """

    HEADROOM = 0  # bytes of each buffer that are not payload

    def __init__(
        self,
        domain: ProtectionDomain,
        *,
        size: int,
        count: int,
        waiters_max: int = limits.POOL_WAITERS_MAX,
        uid: int | None = None,
    ) -> None:
        if size < 1 or count < 1:
            raise Misuse(f"a pool of {count} buffers of {size} bytes")
        stride = self.HEADROOM + size
        memory = domain.memory(stride * count)
        self.size = size
        self.count = count
        self.uid = uid
        self.region = domain.register(memory, Access.LOCAL_WRITE, uid=uid)  # as receives need it
        self._free = [Element(memory[at : at + stride], self.HEADROOM) for at in range(0, len(memory), stride)]
        self._waiters: deque[Waiter[Element]] = deque()
        self._waiters_max = waiters_max
        self._closed = False

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def waiting(self) -> int:
        return sum(waiter.callback is not None for waiter in self._waiters)

    def take(self) -> Element | None:
        """A buffer, or None if there is none; its content is of no meaning."""
        if not self._free:
            return None
        element = self._free.pop()
        element.lent = True
        return element

    def get(self, callback: Callable[[Element | SidestepError], object]) -> Waiter[Element]:
        """Calls with a buffer: at once if there is one, else when one is given back, in the order of asking.

        The callback gets Unavailable if the pool is closed meanwhile.

        Raises:
            LimitReached: Too many wait.
            Misuse: The pool is closed.
        """
        if self._closed:
            raise Misuse("the pool is closed")
        waiter: Waiter[Element] = Waiter(callback)
        if (element := self.take()) is not None:
            waiter.answer(element)
        elif len(self._waiters) >= self._waiters_max and self.waiting >= self._waiters_max:
            raise LimitReached(f"{self._waiters_max} wait for a buffer already")
        else:
            self._waiters.append(waiter)
        return waiter

    def put(self, element: Element) -> None:
        """Gives a buffer back, perhaps to who waits the longest.

        Raises:
            Misuse: It was not lent.
        """
        if not element.lent:
            raise Misuse("a buffer was given back twice")
        element.lent = False
        self._free.append(element)
        while self._waiters and self._free and not self._closed:
            waiter = self._waiters.popleft()
            if waiter.callback is not None:
                element = self._free.pop()
                element.lent = True
                waiter.answer(element)

    def close(self) -> None:
        """Ends the registration; who waits gets Unavailable, buffers lent out become useless."""
        if self._closed:
            return
        self._closed = True
        self._free.clear()
        self.region.deregister()
        while self._waiters:
            self._waiters.popleft().answer(Unavailable("the pool was closed"))


class DatagramPool(MessagePool):
    """Buffers for datagrams: `payload` is behind the room for the routing header."""

    HEADROOM = GRH_LEN


class RdmaElement:
    """A user's buffer that is registered for now."""

    __slots__ = ("kept", "key", "region", "users")

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.kept = True  # when it is given back
        self.region: MemoryRegion | None = None  # None while it is being registered
        self.users = 0

    @property
    def va(self) -> int:
        assert self.region is not None
        return self.region.va

    @property
    def rkey(self) -> RKey:
        assert self.region is not None
        return self.region.rkey

    @property
    def length(self) -> int:
        return self.key[1]


_Key: TypeAlias = tuple[int, int, int]  # address, bytes, access: as long as the region lives, so does the memory
_Wish: TypeAlias = "tuple[Waiter[RdmaElement], memoryview, Access, _Key, bool]"


class RdmaPool:
    """Registered buffers of users, the idle ones remembered.

    A remembered region keeps its buffer alive and unresizable. A buffer is the same if its first byte, its length and
    the wanted access are. Who asks for it while it is in use gets the same region, unless it is not to be shared: the
    other end that was shown a key may void it (RFC 5040 5.3), and would void it for all.

    Args:
        domain: Whose queue pairs may use them.
        regions_max: Regions, in use and remembered.
        bytes_max: Bytes of all of them.
        waiters_max: Who may wait at a time.
    """

    def __init__(
        self,
        domain: ProtectionDomain,
        *,
        regions_max: int = limits.RDMA_POOL_REGIONS_MAX,
        bytes_max: int = limits.RDMA_POOL_BYTES_MAX,
        waiters_max: int = limits.POOL_WAITERS_MAX,
    ) -> None:
        self._domain = domain
        self._regions_max = regions_max
        self._bytes_max = bytes_max
        self._waiters_max = waiters_max
        self._elements: dict[_Key, RdmaElement] = {}  # those that can be found: one of a key
        self._idle: OrderedDict[_Key, RdmaElement] = OrderedDict()  # the least recently used first
        self._joined: dict[_Key, list[Waiter[RdmaElement]]] = {}  # who waits for a registration under way
        self._waiters: deque[_Wish] = deque()
        self._closed = False
        self._then: Callable[[], object] | None = None
        self.regions = 0  # in use, remembered, or being registered
        self.bytes = 0  # of them
        self.hits = 0  # registrations saved
        self.misses = 0
        self.evictions = 0

    @property
    def waiting(self) -> int:
        return sum(waiter.callback is not None for waiter, *_ in self._waiters)

    def get(
        self,
        buffer: Buffer,
        access: Access,
        callback: Callable[[RdmaElement | SidestepError], object],
        *,
        wait: bool = True,
        shared: bool = True,
    ) -> Waiter[RdmaElement]:
        """Calls with the buffer registered: at once if it is known, else when that is done.

        Where there is no room, what nobody uses is forgotten; if that is not enough, who asks waits in order, unless
        `wait` is False. The callback gets what `register` would raise, or Unavailable if the pool is closed. Unless
        `shared`, nobody else uses the region at that time.

        Raises:
            LimitReached: The buffer is larger than the pool, too many wait, or there is no room and `wait` is False.
            Misuse: The pool is closed, or the memory cannot be registered so.
        """
        if self._closed:
            raise Misuse("the pool is closed")
        view = memoryview(buffer).cast("B")
        if len(view) > self._bytes_max:
            raise LimitReached(f"a buffer of {len(view)} bytes for a pool of {self._bytes_max}")
        waiter: Waiter[RdmaElement] = Waiter(callback)
        key = (buffer_address(view), len(view), int(access))
        if self._find(key, waiter, shared=shared):
            return waiter
        if self._waiters or not self._make_room(len(view)):
            if not wait:
                raise LimitReached(f"a pool of {self._bytes_max} bytes in {self._regions_max} regions is in use")
            if len(self._waiters) >= self._waiters_max and self.waiting >= self._waiters_max:
                raise LimitReached(f"{self._waiters_max} wait for a region already")
            self._waiters.append((waiter, view, access, key, shared))
        else:
            self._register(waiter, view, access, key)
        return waiter

    def put(self, element: RdmaElement, *, keep: bool = True) -> None:
        """Gives a buffer back. With the last user its keys are void, at once; if one had `keep=False` it is forgotten.

        Raises:
            Misuse: Nobody uses it.
        """
        if element.users < 1:
            raise Misuse("a buffer was given back twice")
        element.users -= 1
        element.kept = element.kept and keep
        if element.users:
            return
        assert element.region is not None
        detached = self._elements.get(element.key) is not element
        if self._closed or not element.kept or detached:
            self._forget(element)
        else:
            if element.key[2] & _REMOTE:
                element.region.rekey()
            self._idle[element.key] = element
        self._serve()

    def close(self, then: Callable[[], object] | None = None) -> None:
        """Forgets everything; who waits gets Unavailable. What is in use is deregistered when it is given back.

        `then` is called when nothing is registered any more, nor being registered: now, if it is so.
        """
        self._closed = True
        self._then = then
        while self._idle:
            self._forget(next(iter(self._idle.values())))
        while self._waiters:
            self._waiters.popleft()[0].answer(Unavailable("the pool was closed"))
        self._see_whether_empty()

    def _see_whether_empty(self) -> None:
        if self._closed and not self.bytes and self._then is not None:
            then, self._then = self._then, None
            then()

    def _is_known(self, key: _Key, *, shared: bool) -> bool:
        element = self._elements.get(key)
        if element is None or (element.region is not None and not element.region.valid):
            return False
        return shared or (element.region is not None and not element.users)

    def _find(self, key: _Key, waiter: Waiter[RdmaElement], *, shared: bool) -> bool:
        element = self._elements.get(key)
        if element is None or (not shared and (element.region is None or element.users)):
            return False
        if element.region is None:
            self.hits += 1
            self._joined[key].append(waiter)
            return True
        if not element.region.valid:  # the other end voided it, or the user did
            if element.users:
                del self._elements[key]  # its users keep it to the end
            else:
                self._forget(element)
            return False
        self.hits += 1
        self._lend(element, waiter)
        return True

    def _make_room(self, size: int) -> bool:
        while self.regions >= self._regions_max or self.bytes + size > self._bytes_max:
            if not self._idle:
                return False
            self.evictions += 1
            self._forget(next(iter(self._idle.values())))
        return True

    def _register(self, waiter: Waiter[RdmaElement], view: memoryview, access: Access, key: _Key) -> None:
        element = RdmaElement(key)
        waiters = [waiter]

        def done(result: MemoryRegion | SidestepError) -> None:
            found = self._elements.get(key) is element
            if found:
                del self._joined[key]
            if isinstance(result, SidestepError):
                if found:
                    del self._elements[key]
                self.regions -= 1
                self.bytes -= len(view)
                for each in waiters:
                    each.answer(result)
                self._serve()
                self._see_whether_empty()
                return
            element.region = result
            element.users = 1  # while its waiters are told: one may give it back at once
            for each in waiters:
                if self._closed:
                    each.answer(Unavailable("the pool was closed"))
                else:
                    self._lend(element, each)
            self.put(element)

        self._domain.register_later(view, access, done)
        self.misses += 1
        if key not in self._elements:
            self._elements[key] = element
            self._joined[key] = waiters
        self.regions += 1
        self.bytes += len(view)

    def _lend(self, element: RdmaElement, waiter: Waiter[RdmaElement]) -> None:
        if waiter.callback is not None:
            if not element.users:
                del self._idle[element.key]
            element.users += 1
            waiter.answer(element)

    def _forget(self, element: RdmaElement) -> None:
        if self._elements.get(element.key) is element:
            del self._elements[element.key]
            self._idle.pop(element.key, None)
        self.regions -= 1
        self.bytes -= element.length
        assert element.region is not None
        element.region.deregister()
        self._see_whether_empty()

    def _serve(self) -> None:
        while self._waiters and not self._closed:
            waiter, view, access, key, shared = self._waiters[0]
            known = self._is_known(key, shared=shared)
            if waiter.callback is not None and not known and not self._make_room(len(view)):
                return
            self._waiters.popleft()
            if waiter.callback is not None and not self._find(key, waiter, shared=shared):
                try:
                    self._register(waiter, view, access, key)
                except Misuse as why:
                    waiter.answer(why)
