"""SDP with a peer that somebody else could have written: it knows docs/wire/sdp.md, and nothing of sidestep.

Each scene is played at a program's listener that the provider serves, and through the gateway in both directions.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import Queue

import pytest
from hosts import hosts, need_namespaces
from sdp_by_hand import (
    BUFFERED,
    COMBINED,
    OOB_PEND,
    OOB_PRES,
    PIPELINED,
    REQ_PIPE,
    HandPeer,
    Mid,
    RefusedError,
    ask_port,
    hello_iwarp,
)
from standard_peer import StandardPeer
from ways import WAIT_S, WAYS, Ends, Way, World

from sidestep.rdma.iwarp.ddp import RdmapOp, Segment

pytestmark = [pytest.mark.slow, pytest.mark.spec("SDP (A4); docs/wire/sdp.md §3 to §18, §23")]

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST
_OURS = 7100  # where a program listens by SDP
SERVICE = 0x1_0000  # of an SDP service ID, with the port below


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One for all scenes: a connection is new in each."""
    need_namespaces()
    folder = tmp_path_factory.mktemp("world")
    rules = folder / "let-in.conf"
    rules.write_text("use both listen * *:*\n")
    log = folder / "log"
    with ExitStack() as closing:
        here, there = closing.enter_context(hosts(2, policy=rules, log=log))
        made = World(closing, here, there, log)
        made.gateway(folder / "gateway.log")
        yield made


@pytest.fixture(params=list(WAYS.values()), ids=list(WAYS))
def way(request: pytest.FixtureRequest) -> Way:
    """How the two ends meet."""
    found: Way = request.param
    return found


def some_bytes(count: int) -> bytes:
    return random.Random(count).randbytes(count)


@contextmanager
def reading(program: socket.socket, count: int) -> Iterator[bytearray]:
    """A program that reads so many bytes meanwhile; they are there at the end."""
    got = bytearray()

    def read() -> None:
        while len(got) < count and (data := program.recv(min(count - len(got), 1 << 16))):
            got.extend(data)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield got
    finally:
        thread.join(WAIT_S)
    assert not thread.is_alive()


@contextmanager
def writing(program: socket.socket, data: bytes) -> Iterator[None]:
    """A program that writes meanwhile."""
    thread = threading.Thread(target=program.sendall, args=(data,))
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_S)
    assert not thread.is_alive()


def arrives(ends: Ends, data: bytes) -> None:
    """What the peer has said is what the program reads."""
    got = bytearray()
    while len(got) < len(data) and (more := ends.program.recv(len(data) - len(got))):
        got += more
    assert got == data


def end_well(ends: Ends) -> None:
    """The peer closes first, then the program; the transport connection ends behind both."""
    ends.peer.say(Mid.DIS_CONN)
    assert ends.program.recv(1) == b""
    ends.program.close()
    ends.peer.until(Mid.DIS_CONN)
    ends.peer.raw.socket.shutdown(socket.SHUT_WR)  # who has closed first takes it down (§16.1)
    mids, _ = ends.peer.left()
    assert Mid.ABORT_CONN not in mids


def test_bcopy_both_ways(world: World, way: Way) -> None:
    there, back = some_bytes(400_000), some_bytes(400_001)
    with way(world) as ends:
        with reading(ends.program, len(there)) as got:
            ends.peer.send(there)
        assert got == there
        with writing(ends.program, back):
            assert ends.peer.until_bytes(len(back)) == back
        end_well(ends)


def test_the_smallest_buffers_there_may_be(world: World, way: Way) -> None:
    """§9.5: three receives of 37 bytes."""
    data = some_bytes(500)
    with way(world, 3, 37) as ends:
        with writing(ends.program, data):
            assert ends.peer.until_bytes(len(data)) == data
        ends.peer.send(data)
        arrives(ends, data)
        end_well(ends)


def test_without_credit_no_payload_comes(world: World, way: Way) -> None:
    """§9.3; what is heard is checked against what was granted by the peer itself."""
    with way(world, 3) as ends:
        ends.peer.refreshes = False
        ends.program.sendall(b"1")
        assert ends.peer.until_bytes(1) == b"1"
        ends.peer.bufs = 2
        ends.peer.say(Mid.DATA)
        ends.program.sendall(b"2")
        ends.peer.say(Mid.DATA, payload=b"x")
        arrives(ends, b"x")
        ends.peer.bufs, ends.peer.refreshes = 64, True
        ends.peer.say(Mid.DATA)
        assert ends.peer.until_bytes(2) == b"12"
        end_well(ends)


@pytest.mark.parametrize("payload", [1, 5_000])
def test_read_zcopy_in_combined_mode(world: World, way: Way, payload: int) -> None:
    data = some_bytes(300_000)
    with way(world) as ends:
        with reading(ends.program, 2 * len(data)) as got:
            ends.peer.offer_source(data, payload)
            ends.peer.offer_source(data, payload)
        assert got == data + data
        assert ends.peer.reads
        end_well(ends)


def test_read_zcopy_in_pipelined_mode(world: World, way: Way) -> None:
    """§11.3: the source is who changes the mode, and several advertisements may be outstanding."""
    pieces = [some_bytes(150_000 + number) for number in range(4)]
    with way(world) as ends:
        peer = ends.peer
        peer.say(Mid.MODE_CHANGE, PIPELINED)
        with reading(ends.program, sum(map(len, pieces))) as got:
            for piece in pieces:
                key, va = peer.offer(bytearray(piece))
                while peer.credit < 3:
                    peer.hear()
                peer.say(Mid.SRC_AVAIL, len(piece), key, va)
            for piece in pieces:
                told = 0
                while told < len(piece):
                    message = peer.until(Mid.RDMA_RD_COMPL, Mid.SEND_SM)
                    if message.mid is Mid.SEND_SM:
                        peer.send(piece[told:])
                        break
                    told += message.fields[0]
                assert told <= len(piece)
            peer.say(Mid.MODE_CHANGE, COMBINED)
        assert got == b"".join(pieces)
        peer.offer_source(pieces[0])
        arrives(ends, pieces[0])
        end_well(ends)


def test_buffered_mode_and_back(world: World, way: Way) -> None:
    """§11.3: the sink may ask for Combined again; until it does, everything goes by Data."""
    with way(world) as ends:
        ends.peer.say(Mid.MODE_CHANGE, BUFFERED)
        data = some_bytes(200_000)
        with reading(ends.program, len(data)) as got:
            ends.peer.send(data)
        assert got == data
        end_well(ends)


def test_a_withdrawal(world: World, way: Way) -> None:
    """§12.3: of what the other end may or may not have begun to read."""
    data = some_bytes(300_000)
    with way(world) as ends:
        peer = ends.peer
        key, va = peer.offer(bytearray(data))
        peer.say(Mid.SRC_AVAIL, len(data), key, va, payload=data[:1])
        peer.say(Mid.SRC_AVAIL_CANCEL)
        cancel, told = peer.tx_mseq, 1
        while told < len(data):
            message = peer.until(Mid.RDMA_RD_COMPL, Mid.SEND_SM)
            if message.mid is Mid.RDMA_RD_COMPL:
                told += message.fields[0]
            elif message.ack >= cancel:
                break
        with reading(ends.program, len(data)) as got:
            peer.send(data[told:])
        assert got == data
        end_well(ends)


class Program(threading.Thread):
    """A program on our own SDP sockets: long sends one after the other, then one long receive."""

    def __init__(self, world: World, pieces: list[bytes], room: int) -> None:
        super().__init__()
        self.ports: Queue[int] = Queue()
        self.room = bytearray(room)
        self.got = -1
        self._world, self._pieces = world, pieces

    def run(self) -> None:
        with self._world.there.namespace.inside(), ExitStack() as closing:
            ours = StandardPeer(closing, self._world.there.address)
            listener = closing.enter_context(ours.listen(_OURS))
            self.ports.put(_OURS)
            connection = closing.enter_context(listener.accept()[0])
            for piece in self._pieces:
                connection.sendall(piece)
            self.got = connection.recv_into(self.room)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""


def test_every_mechanism_with_sockets_of_ours(world: World) -> None:
    """§10.2, §10.3, §11.5, §12: long sends are offered, then written where the peer shows room; and back.

    What a relay reads at a time is too short for that.
    """
    pieces = [some_bytes(400_000 + number) for number in range(6)]
    program = Program(world, pieces, 1 << 20)
    program.start()
    with world.here.namespace.inside(), ExitStack() as closing:
        where = (world.there.address, program.ports.get(timeout=WAIT_S))
        peer = closing.enter_context(HandPeer.connect(world.here.address, where))
        assert take_all(peer, sum(map(len, pieces))) == b"".join(pieces)
        assert peer.writes
        peer.say(Mid.MODE_CHANGE, PIPELINED)
        length, stag, va, count = peer.until(Mid.SINK_AVAIL).fields
        assert (length, count) == (1 << 20, 0)
        peer.write_remote(stag, va, pieces[0])
        peer.say(Mid.RDMA_WR_COMPL, len(pieces[0]), stag=stag)
        peer.until(Mid.DIS_CONN)
        peer.say(Mid.DIS_CONN)
        assert Mid.ABORT_CONN not in peer.left()[0]
    program.join(WAIT_S)
    assert bytes(program.room[: program.got]) == pieces[0]


def take_all(peer: HandPeer, count: int) -> bytes:
    """As a sink that reads what is offered, asks for Pipelined mode, and then shows room of its own."""
    got = bytearray()
    piped = False
    shown: bytearray | None = None
    while len(got) < count:
        message = peer.hear()
        if message.mid is Mid.MODE_CHANGE:
            assert message.fields == (PIPELINED,)
            piped = True
        elif message.mid is Mid.SRC_AVAIL and shown is None:
            length, stag, va = message.fields
            assert bool(message.payload) is not piped
            got += message.payload
            got += peer.read_remote(stag, va + len(message.payload), length - len(message.payload))
            peer.say(Mid.RDMA_RD_COMPL, length - len(message.payload), flags=REQ_PIPE, stag=stag)
        elif message.mid is Mid.RDMA_WR_COMPL:
            assert shown is not None
            got += shown[: message.fields[0]]
            shown = None
        elif message.mid is Mid.DATA and message.payload:
            got += message.payload
            shown = None
        if piped and shown is None and len(got) < count:
            shown = bytearray(300_000)
            peer.say(Mid.SINK_AVAIL, len(shown), *peer.offer(shown), peer.payloads)
    return bytes(got)


def test_urgent_bytes(world: World, way: Way) -> None:
    """§13: OOB_PEND and OOB_PRES, together and apart."""
    with way(world) as ends:
        peer, program = ends.peer, ends.program
        peer.say(Mid.DATA, payload=b"ab!", flags=OOB_PEND | OOB_PRES)
        peer.say(Mid.DATA, payload=b"cd")
        assert select.select([], [], [program], WAIT_S)[2]
        assert program.recv(1, socket.MSG_OOB) == b"!"
        arrives(ends, b"ab")
        arrives(ends, b"cd")
        peer.say(Mid.DATA, payload=b"ef", flags=OOB_PEND)
        peer.say(Mid.DATA, payload=b"?", flags=OOB_PRES)
        peer.say(Mid.DATA, payload=b"g")
        arrives(ends, b"ef")
        assert select.select([], [], [program], WAIT_S)[2]
        assert program.recv(1, socket.MSG_OOB) == b"?"
        arrives(ends, b"g")
        program.sendall(b"hi")
        program.send(b"*", socket.MSG_OOB)
        program.sendall(b"jk")
        assert peer.until_bytes(5) == b"hi*jk"
        assert peer.urgent == [2]
        end_well(ends)


def test_other_buffers_are_asked_for(world: World, way: Way) -> None:
    """§14: smaller at once, larger behind the old ones, and whatever size the other end chooses is kept."""
    data = some_bytes(100_000)
    with way(world) as ends:
        peer = ends.peer
        for wanted in (4096, 16 << 10):
            old = peer.remote_size
            peer.remote_size = min(old, wanted)
            peer.say(Mid.CH_RCV_BUF, wanted)
            with reading(ends.program, len(data)) as got:
                peer.send(data)
                while (message := peer.last_resize) is None:
                    peer.hear()
            assert got == data
            chosen, peer.last_resize = message, None
            assert (wanted <= chosen <= old) if wanted <= old else chosen >= old
            peer.remote_size = chosen
            peer.send(data)
            arrives(ends, data)
        end_well(ends)


def test_the_socket_moves(world: World, way: Way) -> None:
    """§15: SuspComm; the other end comes to the new port, and the stream goes on with numbers that begin anew."""
    with way(world) as ends:
        peer = ends.peer
        peer.send(b"before ")
        arrives(ends, b"before ")
        ends.program.sendall(b"one ")
        assert peer.until_bytes(4) == b"one "
        with socket.create_server((world.here.address, 0)) as listener:
            listener.settimeout(WAIT_S)
            peer.say(Mid.SUSP_COMM, SERVICE | listener.getsockname()[1])
            peer.until(Mid.SUSP_COMM_ACK)
            assert peer.left()[0] == []  # no DisConn
            moved = HandPeer.accept(listener)
        with moved:
            ends.program.sendall(b"two")
            assert moved.until_bytes(3) == b"two"
            moved.send(b"behind")
            arrives(ends, b"behind")
            ends.peer = moved
            end_well(ends)


def test_the_program_closes_first(world: World, way: Way) -> None:
    with way(world) as ends:
        ends.program.sendall(b"bye")
        ends.program.close()
        assert ends.peer.until_bytes(3) == b"bye"
        ends.peer.until(Mid.DIS_CONN)
        ends.peer.say(Mid.DIS_CONN)
        assert Mid.ABORT_CONN not in ends.peer.left()[0]


def test_half_closed_by_the_program(world: World, way: Way) -> None:
    data = some_bytes(300_000)
    with way(world) as ends:
        ends.program.shutdown(socket.SHUT_WR)
        ends.peer.until(Mid.DIS_CONN)
        with reading(ends.program, len(data)) as got:
            ends.peer.offer_source(data)
        assert got == data
        ends.peer.say(Mid.DIS_CONN)
        assert ends.program.recv(1) == b""
        assert Mid.ABORT_CONN not in ends.peer.left()[0]


def test_half_closed_by_the_peer(world: World, way: Way) -> None:
    data = some_bytes(300_000)
    with way(world) as ends:
        ends.peer.send(b"last")
        ends.peer.say(Mid.DIS_CONN)
        arrives(ends, b"last")
        assert ends.program.recv(1) == b""
        with writing(ends.program, data):
            assert ends.peer.until_bytes(len(data)) == data
        ends.program.close()
        ends.peer.until(Mid.DIS_CONN)


@pytest.mark.parametrize("how", ["without a word", "AbortConn"])
def test_reset_by_the_peer(world: World, way: Way, how: str) -> None:
    """§16.2: a transport connection that ends without DisConn, and AbortConn behind it."""
    with way(world) as ends:
        ends.peer.send(b"x")
        arrives(ends, b"x")
        if how == "AbortConn":
            ends.peer.say(Mid.DIS_CONN)
            ends.peer.say(Mid.ABORT_CONN)
        else:
            ends.peer.raw.socket.shutdown(socket.SHUT_RDWR)
        world.program_is_reset(ends.program)


@pytest.mark.parametrize("when", ["open", "half closed"])
def test_reset_by_the_program(world: World, way: Way, when: str) -> None:
    """§16.2: nothing is said if DisConn has not been, and else AbortConn."""
    with way(world) as ends:
        if when == "half closed":
            ends.program.shutdown(socket.SHUT_WR)
            ends.peer.until(Mid.DIS_CONN)
        ends.program.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        ends.program.close()
        mids, _ = ends.peer.left()
        assert mids == ([Mid.ABORT_CONN] if when == "half closed" else [])


def test_whatever_is_to_be_ignored_is(world: World, way: Way) -> None:
    """§12, §18, §19: a keepalive, answers to nothing, withdrawals of nothing, reserved bits."""
    with way(world) as ends:
        peer = ends.peer
        peer.raw.send(Segment(RdmapOp.WRITE, last=True))
        for mid in (Mid.SEND_SM, Mid.SRC_AVAIL_CANCEL, Mid.SINK_AVAIL_CANCEL, Mid.SINK_CANCEL_ACK):
            peer.say(mid)
        peer.say(Mid.DATA, payload=b"a", flags=0xF8 | REQ_PIPE)
        peer.say(Mid.DATA, flags=OOB_PRES)
        peer.say(Mid.SEND_SM, flags=OOB_PRES | REQ_PIPE)
        peer.raw.send(Segment(RdmapOp.WRITE, last=True))
        peer.send(b"b")
        arrives(ends, b"ab")
        ends.program.sendall(b"c")
        assert peer.until_bytes(1) == b"c"
        end_well(ends)


def test_who_only_wants_updates_gets_few(world: World) -> None:
    """§9.4: empty Data is not answered merely because it came."""
    with world.visit() as ends:
        for _ in range(200):
            while ends.peer.credit < 2:
                ends.peer.hear()
            ends.peer.say(Mid.DATA)
        ends.program.sendall(b"x")
        assert ends.peer.until_bytes(1) == b"x"
        assert ends.peer.rx_mseq < 60
        end_well(ends)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"\x02"), (2, b"\0\2"), (4, b"\0\0\0\x21"), (16, b"\x22"), (18, b"\0\0"), (24, b"\0\0\0\x24"), (28, b"\0\0"),
     (30, b"\0\0")],
    ids=["MID", "Bufs", "Len", "MajV", "MaxAdverts", "LocalRcvSz", "LocORD", "LocIRD"],
)  # fmt: skip
def test_a_hello_that_must_be_refused(world: World, offset: int, value: bytes) -> None:
    """§23.3, §5.4."""
    good = hello_iwarp()
    changed = good[:offset] + value + good[offset + len(value) :]
    with pytest.raises(RefusedError), world.visit(hello=changed):
        """It gets no further."""
    with world.visit() as ends:
        end_well(ends)


def test_the_port_mapper_denies_what_nobody_serves(world: World) -> None:
    with world.here.namespace.inside():
        assert ask_port(world.here.address, world.there.address, 9) == 0
