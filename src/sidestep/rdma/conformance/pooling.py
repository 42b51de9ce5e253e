"""Checks of the pools on top of a device: lending, waiting in order, remembering registrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.errors import LimitReached, Misuse, SidestepError, Unavailable
from sidestep.rdma.conformance.harness import ALL, LOCAL, READ, WRITE, check
from sidestep.rdma.pools import DatagramPool, Element, MessagePool, RdmaElement, RdmaPool
from sidestep.rdma.work import GRH_LEN, RdmaRead, RdmaWrite, Receive, Send

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench


@check("the 2002 design: message pools")
def message_pool_lends_registered_buffers(bench: Bench) -> None:
    """Buffers of a message pool are good for receives and sends, and lie apart from each other."""
    active, passive = bench.pair()
    sends = MessagePool(active.domain, size=32, count=4)
    receives = MessagePool(passive.domain, size=32, count=4)
    bench.equal((sends.available, receives.available), (4, 4), "all are there")
    taken = [receives.take() for _ in range(4)]
    for index, element in enumerate(taken):
        assert element is not None
        passive.qp.post_recv(Receive(index, (element.view,)))
    bench.equal(receives.take(), None, "an empty pool lends nothing")
    for index in range(4):
        element = sends.take()
        assert element is not None
        element.view[:] = b"%032d" % index
        active.qp.post_send(Send(index, (element.view,)))
    bench.eventually(lambda: len(passive.received) == 4, "all messages arrive")
    for index, element in enumerate(taken):
        assert element is not None
        bench.equal(bytes(element.view), b"%032d" % index, "each buffer has its own message")
        receives.put(element)
    bench.equal(receives.available, 4, "what is given back is there again")
    first = taken[0]
    assert first is not None
    bench.refused(Misuse, lambda: receives.put(first), "a buffer is given back once")
    bench.refused(Misuse, lambda: MessagePool(active.domain, size=0, count=1), "a buffer has a byte")


@check("the 2002 design: asynchronous get")
def message_pool_serves_in_order(bench: Bench) -> None:
    """Who finds a pool empty waits, is served in the order of asking, and may leave the row."""
    domain = bench.active.alloc_pd()
    pool = MessagePool(domain, size=8, count=1, waiters_max=3)
    got: list[tuple[str, Element | SidestepError]] = []
    pool.get(lambda element: got.append(("a", element)))
    bench.equal([name for name, _ in got], ["a"], "a buffer that is there is given at once")
    pool.get(lambda element: got.append(("b", element)))
    leaving = pool.get(lambda element: got.append(("c", element)))
    pool.get(lambda element: got.append(("d", element)))
    bench.refused(LimitReached, lambda: pool.get(lambda element: None), "so many may wait")
    leaving.cancel()
    bench.equal((len(got), pool.waiting), (1, 2), "who waits is not served before there is a buffer")
    for _ in range(2):
        element = got[-1][1]
        assert isinstance(element, Element)
        pool.put(element)
    bench.equal([name for name, _ in got], ["a", "b", "d"], "in the order of asking, without who left")
    pool.get(lambda element: got.append(("e", element)))
    pool.close()
    bench.expect(isinstance(got[-1][1], Unavailable), "who waits when the pool is closed is told", got[-1])
    bench.refused(Misuse, lambda: pool.get(lambda element: None), "a closed pool is not asked")
    domain.deallocate()


@check("IBTA 11.4.1.2")
def datagram_pool_leaves_room(bench: Bench) -> None:
    """A buffer for datagrams has room for the routing header in front of the payload."""
    pool = DatagramPool(bench.active.alloc_pd(), size=64, count=2)
    element = pool.take()
    assert element is not None
    bench.equal((len(element.view), len(element.payload)), (GRH_LEN + 64, 64), "room in front")
    element.payload[:] = b"p" * 64
    bench.equal(bytes(element.view), bytes(GRH_LEN) + b"p" * 64, "the payload is behind it")


@check("the 2002 design: RDMA pools")
def rdma_pool_remembers_buffers(bench: Bench) -> None:
    """A buffer that a pool has seen is not registered again; but what was given back is closed to the other end."""
    active, passive = bench.pair()
    pool = RdmaPool(passive.domain)
    memory = bytearray(b"." * 16)
    keys = set()
    regions = set()
    for turn in range(3):
        got: list[RdmaElement | SidestepError] = []
        pool.get(memory, ALL, got.append)
        bench.eventually(lambda found=got: bool(found), "the buffer is registered")  # type: ignore[misc]
        element = got[0]
        assert isinstance(element, RdmaElement)
        keys.add(element.rkey)
        regions.add(id(element.region))
        bench.write(active, b"turn%d" % turn, element.va, element.rkey)
        bench.equal(bytes(memory[:5]), b"turn%d" % turn, "the buffer can be written")
        last = element.va, element.rkey
        pool.put(element)
    bench.equal((pool.misses, pool.hits, len(regions)), (1, 2, 1), "it was registered once")
    bench.equal(len(keys), 3, "each time with another key")
    word = active.memory(b"EVIL")
    active.qp.post_send(RdmaWrite(9, (word.view,), *last))
    bench.eventually(lambda: len(active.sent) == 4 or bool(passive.events), "the Write ends")
    bench.equal(bytes(memory[:5]), b"turn2", "the old key is void")


@check("the 2002 design: RDMA pools")
def rdma_pool_is_shared_and_joined(bench: Bench) -> None:
    """Who asks for a buffer that is being registered, or in use, gets the same region; for other parts others."""
    active, passive = bench.pair()
    pool = RdmaPool(passive.domain)
    memory = memoryview(bytearray(b"0123456789"))
    got: list[RdmaElement | SidestepError] = []
    pool.get(memory, READ, got.append)
    gone = pool.get(memory, READ, lambda element: got.append(Misuse("cancelled")))
    gone.cancel()
    pool.get(memory, READ, got.append)
    bench.equal(got, [], "nobody is called before it is registered")
    bench.eventually(lambda: len(got) >= 2, "both get it")
    pool.get(memory, READ, got.append)
    bench.equal((len(got), len({id(each) for each in got}), pool.regions), (3, 1, 1), "all share one region")
    for _ in range(2):
        assert isinstance(got[0], RdmaElement)
        pool.put(got[0])
    sink = active.memory(10)
    assert isinstance(got[0], RdmaElement)
    active.qp.post_send(RdmaRead(1, (sink.view,), got[0].va, got[0].rkey))
    bench.eventually(lambda: bool(active.sent), "the Read completes")
    bench.equal(bytes(sink.view), b"0123456789", "the region is good until the last one gives it back")
    pool.put(got[0])
    bench.refused(Misuse, lambda: pool.put(got[0]), "a region is given back once for each use")  # type: ignore[arg-type]
    for view, access in ((memory[1:], READ), (memory[:9], READ), (memory, WRITE)):
        pool.get(view, access, got.append)
    bench.eventually(lambda: len(got) == 6, "other parts and rights are registered")
    bench.equal((pool.regions, pool.misses), (4, 4), "other parts and rights are other regions")


@check("the 2002 design: RDMA pools")
def rdma_pool_forgets_the_least_recently_used(bench: Bench) -> None:
    """A full pool forgets what was not used for the longest time, and never what is in use."""
    pool = RdmaPool(bench.active.alloc_pd(), regions_max=3, bytes_max=300)
    buffers = [bytearray(100) for _ in range(5)]
    held: dict[int, RdmaElement] = {}

    def use(index: int) -> None:
        def take(element: RdmaElement | SidestepError) -> None:
            assert isinstance(element, RdmaElement)
            held[index] = element

        pool.get(buffers[index], LOCAL, take)
        bench.eventually(lambda: index in held, "it is registered")

    def give_back(index: int) -> None:
        pool.put(held.pop(index))

    for index in (0, 1, 2):
        use(index)
    for index in (1, 0, 2):
        give_back(index)
    use(1)  # is now the most recently used, and in use
    use(3)  # makes the pool forget 0
    bench.equal((pool.regions, pool.bytes, pool.evictions), (3, 300, 1), "one is forgotten")
    misses = pool.misses
    use(2)
    bench.equal(pool.misses, misses, "it was not the one used later")
    for index in (1, 2, 3):
        give_back(index)
    use(0)
    bench.equal(pool.misses, misses + 1, "it was the one used before the others")
    pool.put(held.pop(0), keep=False)
    bench.equal((pool.regions, pool.bytes), (2, 200), "what is not to be kept is forgotten at once")
    pool.close()
    bench.equal((pool.regions, pool.bytes), (0, 0), "a closed pool keeps nothing")


@check("the 2002 design: asynchronous get")
def rdma_pool_serves_in_order(bench: Bench) -> None:
    """Who finds an RDMA pool full of regions in use waits, is served in the order of asking, and may leave the row."""
    pool = RdmaPool(bench.active.alloc_pd(), regions_max=8, bytes_max=100, waiters_max=3)
    got: list[tuple[str, RdmaElement | SidestepError]] = []

    def ask(name: str, size: int) -> object:
        return pool.get(bytearray(size), LOCAL, lambda element: got.append((name, element)))

    ask("a", 100)
    bench.eventually(lambda: len(got) == 1, "the first one is served")
    ask("large", 60)
    leaving = pool.get(bytearray(10), LOCAL, lambda element: got.append(("left", element)))
    ask("half", 50)
    bench.refused(LimitReached, lambda: ask("too many", 1), "so many may wait")
    bench.refused(LimitReached, lambda: ask("too large", 101), "a buffer larger than the pool never fits")
    leaving.cancel()
    bench.dut.run()
    bench.equal((len(got), pool.waiting), (1, 2), "who waits is not served before there is room")
    for served in (2, 4):
        if served == 4:
            ask("small", 30)  # would fit, but "half" came before
            bench.dut.run()
            bench.equal(len(got), 2, "who would fit does not pass who came before")
        element = got[-1][1]
        assert isinstance(element, RdmaElement)
        pool.put(element)
        bench.eventually(lambda wanted=served: len(got) >= wanted, "then they are")  # type: ignore[misc]
        bench.dut.run()
        bench.equal(len(got), served, "as many as there is room for")
    bench.equal(got[1][0], "large", "in the order of asking")
    bench.equal({name for name, _ in got[2:]}, {"half", "small"}, "without who left")
    ask("late", 50)
    pool.close()
    bench.expect(isinstance(got[-1][1], Unavailable), "who waits when the pool is closed is told", got[-1])
    for _, element in got[2:4]:
        assert isinstance(element, RdmaElement)
        pool.put(element)
    bench.equal((pool.regions, pool.bytes), (0, 0), "what is given back to a closed pool is forgotten")
