"""A peer that breaks a rule of SDP, against a running provider: exactly its connection ends, as the standard has it.

What there is to break is taken from the tables of `sidestep.sdp` themselves: who may send what in which state
(`FORBIDDEN`, `NO_PAYLOAD`), and each rule that a `PeerViolation` names. A row without a scene here fails the test. The
peer is the one made by hand; what it says is right in all but the one thing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hosts import hosts, need_namespaces
from raw_iwarp import Ended
from sdp_by_hand import (
    BSDH,
    BUFFER,
    BUFFERED,
    COMBINED,
    PIPELINED,
    HandPeer,
    Mid,
    RefusedError,
    hello_ib,
    hello_iwarp,
)
from ways import WAYS, Way, World

from sidestep.rdma.iwarp.ddp import RdmapOp
from sidestep.sdp import header, hello, states
from sidestep.sdp.states import FORBIDDEN, NO_PAYLOAD, OPEN, State

pytestmark = [pytest.mark.slow, pytest.mark.spec("SDP (A4) states and error handling; docs/wire/sdp.md §16, §19")]

ABORTED = frozenset({State.FIN_WAIT, State.LAST_ACK})  # who has sent DisConn says AbortConn (§16.2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One provider for all that is done to it."""
    need_namespaces()
    folder = tmp_path_factory.mktemp("violations")
    rules = folder / "let-in.conf"
    rules.write_text("use both listen * *:*\n")
    with ExitStack() as closing:
        here, there = closing.enter_context(hosts(2, policy=rules, log=folder / "log"))
        yield World(closing, here, there, folder / "log")


# ---- the states, over the wire ----


def _established(peer: HandPeer, program: socket.socket) -> None:
    """As it is."""


def _fin_wait(peer: HandPeer, program: socket.socket) -> None:
    program.shutdown(socket.SHUT_WR)
    peer.until(Mid.DIS_CONN)


def _close_wait(peer: HandPeer, program: socket.socket) -> None:
    peer.say(Mid.DIS_CONN)


def _last_ack(peer: HandPeer, program: socket.socket) -> None:
    _close_wait(peer, program)
    assert program.recv(1) == b""
    _fin_wait(peer, program)


Act = Callable[[HandPeer, socket.socket], None]
REACH: dict[State, Act] = {
    State.ESTABLISHED: _established, State.FIN_WAIT: _fin_wait, State.CLOSE_WAIT: _close_wait,
    State.LAST_ACK: _last_ack,
}  # fmt: skip

# A message of each kind that is in order by itself.
GOOD: dict[Mid, tuple[int, ...]] = {
    Mid.SRC_AVAIL: (300, 0xA1, 0x7F0000), Mid.SINK_AVAIL: (40_000, 0xB1, 0x9F0000, 0), Mid.RDMA_WR_COMPL: (200,),
    Mid.RDMA_RD_COMPL: (200,), Mid.MODE_CHANGE: (PIPELINED,), Mid.CH_RCV_BUF: (4096,), Mid.CH_RCV_BUF_ACK: (4096,),
    Mid.SUSP_COMM: (0x1_0000 | 5002,),
}  # fmt: skip


def _good(peer: HandPeer, mid: Mid) -> None:
    if mid is Mid.HELLO:
        peer.say(mid, body=hello_iwarp()[BSDH.size :])
    elif mid is Mid.HELLO_ACK:
        peer.say(mid, body=bytes(12))
    else:
        peer.say(mid, *GOOD.get(mid, ()), payload=b"p" if mid is Mid.SRC_AVAIL else b"")


def _forbidden(state: State, mid: Mid) -> Act:
    def act(peer: HandPeer, program: socket.socket) -> None:
        REACH[state](peer, program)
        _good(peer, mid)

    return act


def _payload_in(state: State) -> Act:
    def act(peer: HandPeer, program: socket.socket) -> None:
        REACH[state](peer, program)
        peer.say(Mid.DATA, payload=b"p")

    return act


# (state, what is said, its rule): from the tables.
ROWS: dict[str, tuple[State, str, Act]] = {
    f"{Mid(mid).name} in {state.value}": (state, rule, _forbidden(state, Mid(mid)))
    for state in REACH
    for mid, rule in FORBIDDEN[state].items()
} | {f"payload in {state.value}": (state, "payload_after_end", _payload_in(state)) for state in NO_PAYLOAD}


def test_every_state_of_the_table_is_reached() -> None:
    assert set(FORBIDDEN) | set(NO_PAYLOAD) <= set(REACH) | {State.REP_SENT}, "a state without a way to reach it"
    assert set(REACH) == OPEN
    # over iWARP the first message is what makes a connection ready, and it is judged as in the state behind that
    assert FORBIDDEN[State.REP_SENT] == FORBIDDEN[State.ESTABLISHED]


# ---- the rules that are not in the table of states ----


def _offer(peer: HandPeer, length: int = 300_000, payload: int = 8) -> None:
    key, va = peer.offer(bytearray(length))
    peer.say(Mid.SRC_AVAIL, length, key, va, payload=bytes(payload))


def _after(*acts: Callable[[HandPeer], object]) -> Act:
    def act(peer: HandPeer, program: socket.socket) -> None:
        for each in acts:
            each(peer)

    return act


def _many_offers(peer: HandPeer) -> None:
    """More than the MaxAdverts of 16, and none is answered while this one does not serve their reads."""
    peer.say(Mid.MODE_CHANGE, PIPELINED)
    for _ in range(17):
        while peer.credit < 3:
            peer.until(Mid.DATA)
        _offer(peer, payload=0)


def _moving(peer: HandPeer) -> None:
    """The answer to SuspComm waits for the reads, and so does the end of this connection."""
    _offer(peer)
    peer.say(Mid.SUSP_COMM, 0x1_0000 | 5002)
    peer.say(Mid.SEND_SM)


def _busy_resize(peer: HandPeer) -> None:
    peer.say(Mid.CH_RCV_BUF, peer.remote_size // 2)
    (size,) = peer.until(Mid.CH_RCV_BUF_ACK).fields
    for _ in range(2):
        peer.say(Mid.CH_RCV_BUF, size + 1000)  # larger: confirmed when the old ones are used up


def _void_their_own(peer: HandPeer) -> None:
    """The key is a good one: of the memory that the provider reads into just now, and never advertised."""
    _offer(peer)
    peer.say(Mid.SEND_SM, stag=peer.next_read().sink_stag)


def _void_nothing(peer: HandPeer) -> None:
    peer.say(Mid.SEND_SM, stag=0x1234_5600)


def _write_unshown(peer: HandPeer) -> None:
    peer.write_remote(0x1234_5600, 0, b"x")


def _answers_resize(size: int) -> Act:
    """The program sends much, and the peer is asked for larger buffers: what it says it has is no size there can be."""

    def act(peer: HandPeer, program: socket.socket) -> None:
        peer.refuses_size = False
        program.sendall(bytes(200_000))
        while peer.asked_size is None:
            peer.hear()
        peer.say(Mid.CH_RCV_BUF_ACK, size)

    return act


def _read_unshown(peer: HandPeer) -> None:
    with pytest.raises(Ended):
        peer.read_remote(0x1234_5600, 0, 8)


RULES: dict[str, Act] = {
    "short_message": _after(lambda peer: peer.raw.send_message(RdmapOp.SEND, b"\xff" * 15)),
    "length": _after(lambda peer: peer.say(Mid.DATA, payload=b"a", length=18)),
    "unknown_mid": _after(lambda peer: peer.say(0x40)),
    "short_header": _after(lambda peer: peer.say(Mid.SINK_AVAIL, body=bytes(4))),
    "stray_payload": _after(lambda peer: peer.say(Mid.SEND_SM, payload=b"a")),
    "hello_length": _after(lambda peer: peer.say(Mid.HELLO, body=bytes(4))),
    "mode_change_code": _after(lambda peer: peer.say(Mid.MODE_CHANGE, 0x30)),
    "src_avail_length": _after(lambda peer: peer.say(Mid.SRC_AVAIL, 8, 1, 1, payload=bytes(8))),
    "sink_avail_length": _after(lambda peer: peer.say(Mid.SINK_AVAIL, 0, 1, 1, 0)),
    "address": _after(lambda peer: peer.say(Mid.SRC_AVAIL, 300, 1, 2**64 - 299, payload=bytes(8))),
    "rdma_length": _after(lambda peer: peer.say(Mid.RDMA_WR_COMPL, 2**31 + 1)),
    "suspend_service_id": _after(lambda peer: peer.say(Mid.SUSP_COMM, 5001)),
    "abort_early": _after(lambda peer: peer.say(Mid.ABORT_CONN)),
    "sequence": _after(lambda peer: peer.say(Mid.DATA, payload=b"a", mseq=2)),
    "acknowledgement": _after(lambda peer: peer.say(Mid.DATA, payload=b"a", ack=1)),
    "message_size": _after(lambda peer: peer.say(Mid.DATA, payload=bytes(peer.remote_size))),
    "rdma_access": _after(_read_unshown),
    "payload_amid_advert": _after(_offer, lambda peer: peer.say(Mid.DATA, payload=b"a")),
    "src_avail_mode": _after(lambda peer: peer.say(Mid.MODE_CHANGE, BUFFERED), _offer),
    "src_avail_payload": _after(lambda peer: _offer(peer, payload=0)),
    "src_avail_second": _after(_offer, _offer),
    "src_avail_cancelling": _after(_offer, lambda peer: peer.say(Mid.SRC_AVAIL_CANCEL), _offer),
    "cancel_second": _after(_offer, *[lambda peer: peer.say(Mid.SRC_AVAIL_CANCEL)] * 2),
    "read_unasked": _after(lambda peer: peer.say(Mid.RDMA_RD_COMPL, 1)),
    "sink_avail_mode": _after(lambda peer: peer.say(Mid.SINK_AVAIL, 40_000, 1, 1, 0)),
    "write_unasked": _after(lambda peer: peer.say(Mid.RDMA_WR_COMPL, 1)),
    "adverts": _after(_many_offers),
    "mode_transition": _after(lambda peer: peer.say(Mid.MODE_CHANGE, COMBINED)),
    "end_amid_advert": _after(_offer, lambda peer: peer.say(Mid.DIS_CONN)),
    "resize_second": _after(_busy_resize),
    "resize_range": _answers_resize(BUFFER // 2),
    "buffer_size": _answers_resize(36),
    "resize_unasked": _after(lambda peer: peer.say(Mid.CH_RCV_BUF_ACK, 4096)),
    "suspend_unasked": _after(lambda peer: peer.say(Mid.SUSP_COMM_ACK)),
    "suspend_amid": _after(_moving),
}

# What they come amid is often over before they come, and then nothing is broken: tests/sdp plays them by hand.
TOO_LATE = frozenset({"src_avail_cancelling", "cancel_second", "suspend_amid"})

# More ways to break one of them.
MORE: dict[str, tuple[str, Act]] = {
    "acknowledgement that goes back": (
        "acknowledgement", _after(lambda peer: peer.send(bytes(300_000)), lambda peer: peer.say(Mid.DATA, ack=0)),
    ),
    "the key of memory that is read into": ("rdma_access", _after(_void_their_own)),
    "RDMA Write to memory that is not shown": ("rdma_access", _after(_write_unshown)),
    "a key that nobody has": ("rdma_access", _after(_void_nothing)),
}  # fmt: skip

# Each Hello that must be refused: whether it is iWARP's, and which of its bytes are others than in a good one.
HELLOS: dict[str, tuple[bool, int, bytes]] = {
    "hello_version": (True, 16, b"\x21"),
    "hello_max_adverts": (True, 18, b"\0\0"),
    "hello_ip_version": (False, 17, b"\x50"),
    "hello_buffer_size": (True, 24, b"\0\0\0\x24"),
    "hello_bufs": (True, 2, b"\0\2"),
    "hello_read_depth": (True, 30, b"\0\0"),
    "hello_wrong_message": (True, 0, BSDH.pack(Mid.SEND_SM, 0, 8, 16, 0, 0)),
}

# Rules that no peer of a relay can break, and why not: tests/sdp/test_illegal.py has them, on the core itself.
BEYOND: dict[str, str] = {
    "payload_closed": "a relay closes a stream only when both directions have ended, or at once",
    "read_early": "a relay offers no memory to read: its pieces are shorter than what that is worth",
    "read_excess": "likewise",
    "sink_avail_small": "for the same reason it never goes to Pipelined mode as a source",
    "sink_avail_cancelling": "likewise",
    "write_excess": "a relay shows no memory to write: its receives are shorter than what that is worth",
    "invalidated": "over iWARP the device itself lets nobody void what was not advertised: rdma_access, below",
}


def test_every_rule_has_a_scene() -> None:
    """A rule that is new has to be broken here, or said why it cannot be."""
    in_table = {rule for _, rule, _ in ROWS.values()}
    tables = set(states.RULES) | set(header.RULES) | set(hello.RULES)
    assert in_table | set(RULES) | set(HELLOS) | set(BEYOND) == tables
    assert not set(BEYOND) & (in_table | set(RULES) | set(HELLOS))


# ---- what becomes of who does it ----


class Bystander:
    """A connection with the same program, that goes on."""

    def __init__(self, peer: HandPeer, program: socket.socket) -> None:
        self._peer, self._program, self._count = peer, program, 0

    def is_unharmed(self) -> None:
        """Bytes go both ways, and none has been lost since."""
        self._count += 1
        text = b"%06d" % self._count
        self._peer.send(text)
        assert self._program.recv(100) == text
        self._program.sendall(text)
        self._peer.until_bytes(6 * self._count)
        assert self._peer.stream[-6:] == text


def _violated(world: World, way: Way, state: State, rule: str, act: Act) -> None:
    """The connection is reset at both ends, the log names the rule, and in which way it ends depends on the state."""
    logged = len(world.log())
    with way(world) as ends:
        act(ends.peer, ends.program)
        mids, _ = ends.peer.left()
        assert Mid.DIS_CONN not in mids, "an end of stream where a reset is due"
        assert mids.count(Mid.ABORT_CONN) == (state in ABORTED)
        world.program_is_reset(ends.program)
    assert world.logs(f"[{rule}]", logged), world.log()[logged:]


def _all(world: World, cases: dict[str, tuple[State, str, Act]], way: Way = World.visit) -> None:
    before = world.there.sidestep.provider_pid
    failed: list[str] = []
    with way(world) as ends:
        bystander = Bystander(ends.peer, ends.program)
        bystander.is_unharmed()
        for name, (state, rule, act) in cases.items():
            if rule in TOO_LATE:
                continue
            try:
                _violated(world, way, state, rule, act)
            except (AssertionError, OSError) as why:
                failed.append(f"{name} [{rule}]: {type(why).__name__} {why}")
            bystander.is_unharmed()
    assert not failed, "\n".join(failed)
    assert world.there.sidestep.provider_pid == before
    assert world.there.sidestep.status()["pid"] == before


def test_what_the_states_forbid_ends_that_connection(world: World) -> None:
    _all(world, ROWS)


def test_who_breaks_a_rule_ends_that_connection(world: World) -> None:
    world.there.restart_provider()  # whose log has room for so many lines a minute
    _all(world, {rule: (State.ESTABLISHED, rule, act) for rule, act in RULES.items()})


def test_other_ways_to_break_one(world: World) -> None:
    world.there.restart_provider()
    _all(world, {name: (State.ESTABLISHED, rule, act) for name, (rule, act) in MORE.items()})


@pytest.mark.parametrize("name", ["gateway from SDP", "gateway to SDP"])
def test_who_breaks_a_rule_at_the_gateway(world: World, tmp_path: Path, name: str) -> None:
    """The same there, by clients and by servers; its log is another."""
    with ExitStack() as closing:
        made = World(closing, world.here, world.there, tmp_path / "log")
        made.gateway(tmp_path / "log")
        if name == "gateway from SDP":
            closing.enter_context(world.lends_listener(made))
        cases = ROWS | {rule: (State.ESTABLISHED, rule, act) for rule, act in RULES.items()}
        _all(made, cases, WAYS[name])


@pytest.mark.parametrize("rule", HELLOS)
def test_who_introduces_himself_badly_is_refused(world: World, rule: str) -> None:
    iwarp, offset, value = HELLOS[rule]
    good = hello_iwarp() if iwarp else hello_ib(world.here.address, world.there.address, 40000)
    changed = good[:offset] + value + good[offset + len(value) :]
    if rule == "hello_wrong_message":
        changed = value
    logged = len(world.log())
    with pytest.raises(RefusedError), world.visit(hello=changed):
        """It gets no further."""
    assert world.logs(f"[{rule}]", logged)
    with world.visit() as ends:  # the program has not even seen it
        Bystander(ends.peer, ends.program).is_unharmed()
