"""A provider that lies: each word of the link between two providers said at the wrong time, or with a false count.

The liar is made by hand (`sdp_by_hand`): it opens the TCP connection itself, asks for it to be carried, and says what
it likes. Which words there are, and which rules the receiving provider has, is taken from `sidestep`: a new one without
a case fails. An ordinary promoted connection of the same hosts goes on all the while.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fcntl import ioctl
from hashlib import sha256
from pathlib import Path
from typing import Final

import pytest
from common import standing_still
from hosts import ENGINE, NETWORK, hosts, need_namespaces
from raw_iwarp import Ended
from sdp_by_hand import HandPeer, RefusedError, ask_port, hello_ib
from talking import PORT, ends_well, line, promoted, serving, talking
from ways import WAIT_S, World

from sidestep import limits
from sidestep.native import layout
from sidestep.provider.carry import remote_relay as far
from sidestep.remote import link, promotion
from sidestep.settings import RemoteSettings
from sidestep.switch.link import Control

pytestmark = pytest.mark.slow

WORD: Final = struct.Struct(">B7xQ")
BESIDE: Final = struct.Struct(">8sBBHIQ16s")  # beside the Hello; 32 bytes of HMAC behind it
CARRY, RESYNC, ARRIVED, RESYNCED, FAILED = 1, 2, 3, 4, 5
_SIOCOUTQ: Final = 0x5411  # linux/sockios.h
_ROUNDS: Final = 50
INBOUND: Final = 7
RING: Final = 1 << 16  # bytes of what the liar says are its rings
READ_STEP: Final = RING // 4  # bytes read that are worth a word
_DISCARD: Final = f"""
import socket, sys
with socket.create_server((sys.argv[1], {PORT + 1})) as listener:
    print("listens", flush=True)
    while True:
        with listener.accept()[0] as connection:
            connection.settimeout({WAIT_S})
            connection.sendall(connection.recv(1))
            left = {READ_STEP}
            try:
                while piece := connection.recv(left):
                    left = left - len(piece) or {READ_STEP}
                    if left == {READ_STEP}:
                        print("read", flush=True)
            except OSError as error:
                print(error, flush=True)
"""


def beside(
    hello: bytes,
    purpose: int,
    name: bytes,
    *,
    port: int = PORT,
    version: int = 1,
    arrived: int = 0,
    key: bytes | None = None,
) -> bytes:
    """What stands beside a Hello."""
    told = BESIDE.pack(b"sidestep", version, purpose, port, 0, arrived, name)
    return told + (hmac.digest(key, hello + told, sha256) if key else bytes(32))


class Liar:
    """One connection, and its link."""

    def __init__(self, world: World, closing: ExitStack, port: int = PORT, *, echoes: bool = True) -> None:
        self.world = world
        source, target = world.here.address, world.there.address
        self.tcp = closing.enter_context(socket.create_connection((target, port), WAIT_S, (source, 0)))
        self.name = secrets.token_bytes(16)
        self.hello = hello_ib(source, target, self.tcp.getsockname()[1])
        self.own_port = ask_port(source, target, 0)
        self._taken = 0  # bytes of words that were read
        self.on_ring = False  # it sends by ring
        self._echoes = echoes
        self._resting = threading.Event()
        self._beat = threading.Thread(target=self._talk)
        self.tcp.sendall(b".")
        self.tcp.recv(1)
        self._beat.start()
        closing.callback(self.rest)
        self.peer = closing.enter_context(self.ask(beside(self.hello, CARRY, self.name, port=port)))

    def ask(self, told: bytes) -> HandPeer:
        """A request to the provider, with this beside the Hello; raises RefusedError."""
        where = (self.world.there.address, self.own_port)
        return HandPeer.connect(self.world.here.address, where, self.hello + told)

    def _talk(self) -> None:
        """The program has to make calls for its shim to see what is offered."""
        try:
            while not self._resting.wait(0.0 if self._echoes else 0.02):
                self.tcp.sendall(b".")
                if self._echoes:
                    self.tcp.recv(100)
        except OSError:
            return

    def rest(self) -> None:
        """The program is left alone from now on."""
        self._resting.set()
        if self._beat.is_alive():
            self._beat.join(WAIT_S)

    def say(self, word: int, count: int = 0, data: bytes = b"") -> None:
        """A word of the link."""
        self.peer.send(WORD.pack(word, count) + data)

    def hear(self, wanted: Control) -> int:
        """The count of the next word of that kind; what comes before it is dropped."""
        while True:
            self.peer.until_bytes(self._taken + WORD.size)
            word, count = WORD.unpack_from(self.peer.stream, self._taken)
            self._taken += WORD.size
            if word == Control.DATA:
                self._taken += count
                self.peer.until_bytes(self._taken)
            if word == wanted:
                return int(count)

    # ---- how far it has come ----

    def attached(self) -> None:
        """Both have."""
        self.hear(Control.ATTACHED)
        self.say(Control.ATTACHED, RING << 32 | RING)

    def invited(self) -> None:
        """The program may be sent to by ring."""
        self.attached()
        self.hear(Control.READY)

    def switched(self) -> None:
        """The liar sends by ring."""
        self.invited()
        self.rest()
        self.on_ring = True
        self.say(Control.SWITCHED, self._sent())
        self.hear(Control.ACKED)

    def _sent(self) -> int:
        """Bytes that have gone by TCP, all of which the other end's kernel acknowledges (tcp(7), TCP_INFO)."""
        while ioctl(self.tcp, _SIOCOUTQ, bytes(4)) != bytes(4):
            self._resting.wait(0.01)
        info = self.tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int(struct.unpack_from("Q", info, 120)[0]) - 1

    def both_ways(self) -> None:
        """And so does the program."""
        self.switched()
        self.say(Control.READY)
        self.say(Control.DATA, 4, b"echo")
        self.hear(Control.SWITCHED)
        assert self.hear(Control.DATA) == 4


Lie = Callable[[Liar], None]


def _then(reach: Callable[[Liar], None] | None, *words: tuple[int, int]) -> Lie:
    def lie(liar: Liar) -> None:
        if reach is not None:
            reach(liar)
        for word, count in words:
            liar.say(word, count)

    return lie


def _overfill(liar: Liar) -> None:
    """More than there is room for, while the program reads nothing."""
    liar.switched()
    with standing_still(liar.world.server_pid):
        for _ in range(0, layout.CHANNEL_SPILL, 1 << 18):
            liar.say(Control.DATA, 1 << 18, bytes(1 << 18))
        liar.say(Control.DATA, 1, b"x")
        liar.peer.left()


def _go_uninvited(liar: Liar) -> None:
    """Another round, while the program cannot consent to one."""
    liar.both_ways()
    with standing_still(liar.world.server_pid):
        for word, count in ((Control.ROUNDS, 0), (Control.BACK, 4), (Control.SWITCHED, 9)):
            liar.say(word, count)
        liar.peer.left()


_OPEN, _ONCE, _NEVER = Liar.attached, Liar.both_ways, None
LIES: dict[Control | str, list[tuple[str, str, Lie]]] = {
    Control.ATTACHED: [
        ("twice", "link_order", _then(_OPEN, (Control.ATTACHED, RING << 32 | RING))),
        ("no rings", "link_order", _then(_NEVER, (Control.ATTACHED, 0))),
        ("rings of 4 GiB", "link_order", _then(_NEVER, (Control.ATTACHED, 2**64 - 1))),
    ],
    Control.READY: [
        ("too early", "link_order", _then(_NEVER, (Control.READY, 0))),
        ("twice", "link_order", _then(_OPEN, (Control.READY, 0), (Control.READY, 0))),
    ],
    Control.SWITCHED: [
        ("without consent", "link_order", _then(_NEVER, (Control.SWITCHED, 0))),
        ("twice", "link_order", _then(Liar.switched, (Control.SWITCHED, 0))),
    ],
    Control.DATA: [
        ("by who has not switched", "link_data", _then(Liar.invited, (Control.DATA, 10))),
        ("none", "link_data", _then(Liar.switched, (Control.DATA, 0))),
        ("2^64 - 1 bytes", "link_data", _then(Liar.switched, (Control.DATA, 2**64 - 1))),
        ("more than the ring", "link_data", _then(Liar.switched, (Control.DATA, layout.CHANNEL_SPILL + 1))),
        ("more than there is room for", "link_data", _overfill),
        ("behind the end", "link_data", _then(_ONCE, (Control.SHUT, 4), (Control.DATA, 1))),
    ],
    Control.READ: [
        ("what was not sent", "link_count", _then(_OPEN, (Control.READ, 1))),
        ("more than was sent", "link_count", _then(_ONCE, (Control.READ, 5))),
        ("less than before", "link_count", _then(_ONCE, (Control.READ, 4), (Control.READ, 3))),
    ],
    Control.RECALL: [
        ("what was not sent", "link_count", _then(_ONCE, (Control.RECALL, 5))),
        ("what was read", "link_count", _then(_ONCE, (Control.READ, 4), (Control.RECALL, 3))),
        ("twice", "link_count", _then(_ONCE, (Control.RECALL, 4), (Control.RECALL, 4))),
    ],
    Control.BACK: [
        ("by who was not invited", "link_order", _then(_NEVER, (Control.BACK, 0))),
        ("at another byte", "link_count", _then(_ONCE, (Control.BACK, 5))),
        ("twice", "link_order", _then(_ONCE, (Control.BACK, 4), (Control.BACK, 4))),
    ],
    Control.SHUT: [
        ("at another byte", "link_count", _then(_ONCE, (Control.SHUT, 3))),
        ("twice", "link_order", _then(_ONCE, (Control.SHUT, 4), (Control.SHUT, 4))),
    ],
    Control.CLOSED: [
        ("having read what was not sent", "link_count", _then(_ONCE, (Control.CLOSED, 5))),
        ("twice", "link_count", _then(_ONCE, (Control.CLOSED, 4), (Control.CLOSED, 4))),
    ],
    Control.ENDED: [
        ("without being closed", "link_order", _then(_ONCE, (Control.ENDED, 4))),
        ("at another byte", "link_count", _then(_ONCE, (Control.CLOSED, 4), (Control.ENDED, 5))),
    ],
    Control.ASK: [
        ("of before rounds, and no more", "link_order", _then(_ONCE, *[(Control.ASK, 0)] * 1000, (Control.ASK, 1))),
        ("more than to ask, or not", "link_order", _then(_ONCE, (Control.ROUNDS, 0), (Control.ASK, 2))),
    ],
    Control.ROUNDS: [
        ("twice", "link_order", _then(_OPEN, (Control.ROUNDS, 0), (Control.ROUNDS, 0))),
        ("and consent to a second round at once", "link_order", _then(_ONCE, (Control.ROUNDS, 0), (Control.READY, 0))),
        ("and goes where it was not invited", "link_order", _go_uninvited),
    ],
    Control.SPACER: [
        ("behind no round", "link_order", _then(_NEVER, (Control.SPACER, 1))),
        ("twice", "link_order", _then(_ONCE, (Control.SPACER, 1), (Control.SPACER, 1))),
    ],
    Control.ARRIVED: [("where no end was told", "link_count", _then(_ONCE, (Control.ARRIVED, 4)))],
    "no word": [
        ("0", "link_word", _then(_OPEN, (0, 0))),
        ("the next one", "link_word", _then(_OPEN, (max(Control) + 1, 0))),
        ("255", "link_word", _then(_OPEN, (255, 2**64 - 1))),
    ],
}

# What may be said at any time: it harms nobody but who says it.
FREE: dict[Control, str] = {
    Control.FIN_SEEN: "of its own socket", Control.ACKED: "of what it has done itself",
    Control.RESET: "of its own connection", Control.LEAVE: "its connections go back to TCP",
    Control.RESENDS: "heard when it was asked for",
}  # fmt: skip


def test_every_word_and_every_rule_has_a_lie() -> None:
    assert {each for each in LIES if isinstance(each, Control)} | set(FREE) == set(Control)
    assert not set(FREE) & set(LIES)
    sources = Path(far.__file__).read_text() + Path(link.__file__).read_text()
    told = {rule for lies in LIES.values() for _, rule, _ in lies} | {"link_words"}
    assert told == set(re.findall(r'rule="(\w+)"', sources))


@contextmanager
def _world(folder: Path, key: Path | None = None) -> Iterator[World]:
    need_namespaces()
    remote = RemoteSettings.parse(NETWORK, str(key) if key is not None else None, engine=ENGINE)
    with ExitStack() as closing:
        here, there = closing.enter_context(hosts(2, remote=remote, log=folder / "log"))
        made = World(closing, here, there, folder / "log")
        made.server_pid = serving(there).pid
        yield made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One provider for all that it is told."""
    with _world(tmp_path_factory.mktemp("lies")) as made:
        yield made


@contextmanager
def bystander(world: World) -> Iterator[None]:
    """An ordinary promoted connection of the two hosts, of which each byte is right until the end."""
    pid = world.there.sidestep.provider_pid
    client = talking(world.here, world.there.address, pause_s=0.02)
    promoted(world.here, world.there)
    yield
    ends_well(client)
    assert world.there.sidestep.status()["pid"] == pid


def _is_over(liar: Liar) -> None:
    """Its link is gone, and its connection is reset; one that had not left TCP may go on there."""
    liar.rest()
    liar.peer.left()
    was_reset = False
    try:
        for _ in range(_ROUNDS):  # the program hears of it in its next call
            liar.tcp.sendall(b".")
            if not liar.tcp.recv(1000):
                break
    except (ConnectionResetError, BrokenPipeError):
        was_reset = True
    assert was_reset or not liar.on_ring, "it goes on"


@pytest.mark.parametrize("word", LIES, ids=str)
def test_who_lies_loses_that_connection(world: World, word: Control | str) -> None:
    failed = []
    with bystander(world):
        for name, rule, lie in LIES[word]:
            logged = len(world.log())
            with world.here.namespace.inside(), ExitStack() as closing:
                liar = Liar(world, closing)
                try:
                    lie(liar)
                    _is_over(liar)
                except (AssertionError, OSError) as why:
                    failed.append(f"{name}: {type(why).__name__} {why}")
            if not world.logs(f"[{rule}]", logged):
                failed.append(f"{name}: {rule} is not named: {world.log()[logged:]}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("word", FREE, ids=str)
def test_what_may_be_said_a_thousand_times(world: World, word: Control) -> None:
    with bystander(world), world.here.namespace.inside(), ExitStack() as closing:
        liar = Liar(world, closing)
        liar.both_ways()
        try:
            for _ in range(1000):
                liar.say(word)
        except (Ended, OSError):
            """It has ended for what was said."""
        liar.peer.raw.socket.close()


def test_who_takes_no_words_is_told_no_more(world: World) -> None:
    """LINK_WORDS_MAX: of what is read it would be told, and never grants the credit that a word needs.

    It sends no more before all is read, so that each READ_STEP brings a word; and it keeps to its own credit, else
    iWARP would end the stream wherever the provider is slower than the liar (RFC 5041 7.1: no receive is left).
    """
    with ExitStack() as closing:
        server = world.there.popen(
            [sys.executable, "-c", _DISCARD, world.there.address], stdout=subprocess.PIPE, text=True
        )
        assert line(server) == "listens"
        closing.enter_context(bystander(world))
        closing.enter_context(world.here.namespace.inside())
        logged = len(world.log())
        liar = Liar(world, closing, PORT + 1, echoes=False)
        liar.switched()
        liar.peer.bufs = 2  # §9.3: enough for what brings the liar credit, and never for payload
        liar.peer.refreshes = False
        for _ in range(2 * limits.LINK_WORDS_MAX):
            liar.say(Control.DATA, READ_STEP, bytes(READ_STEP))
            assert line(server) == "read"
        assert len(world.log()) == logged


# ---- what is asked for ----


def test_a_request_that_is_not_believed(world: World) -> None:
    """Another version, another purpose, other addresses, a name that is taken: refused, and the link goes on."""
    with bystander(world), world.here.namespace.inside(), ExitStack() as closing:
        liar = Liar(world, closing)
        liar.both_ways()
        hello = liar.hello
        other = hello_ib("198.18.7.9", world.there.address, 40000)
        cases = {
            "promotion_version": (hello, beside(hello, CARRY, secrets.token_bytes(16), version=2)),
            "promotion_purpose": (hello, beside(hello, 99, secrets.token_bytes(16))),
            "promotion_host": (other, beside(other, CARRY, secrets.token_bytes(16))),
            "promotion_name": (hello, beside(hello, CARRY, liar.name)),  # as who replays it would
        }
        sources = Path(promotion.__file__).read_text()
        assert set(re.findall(r'rule="(promotion_\w+)"', sources)) <= set(cases) | {"promotion_key"}
        for rule, (told, what) in cases.items():
            logged = len(world.log())
            liar.hello = told
            with pytest.raises(RefusedError):
                liar.ask(what)
            assert world.logs(f"[{rule}]", logged), f"{rule}: {world.log()[logged:]}"
        liar.say(Control.DATA, 4, b"more")
        assert liar.hear(Control.DATA) == 4


@pytest.mark.parametrize("purpose", [RESYNC, ARRIVED, RESYNCED, FAILED])
def test_nobody_settles_what_is_not_his(world: World, purpose: int) -> None:
    """The right Hello with another name, and the right name with another Hello: no answer, and the link goes on."""
    with world.here.namespace.inside(), ExitStack() as closing:
        victim = Liar(world, closing)
        victim.both_ways()
        other = Liar(world, closing)
        other.both_ways()
        for hello, name in ((victim.hello, secrets.token_bytes(16)), (other.hello, victim.name)):
            victim_hello, victim.hello = victim.hello, hello
            with pytest.raises(RefusedError) as refused:
                victim.ask(beside(hello, purpose, name, arrived=4))
            assert not refused.value.args[0], "an answer"
            victim.hello = victim_hello
        for each in (victim, other):
            each.say(Control.DATA, 4, b"more")
            assert each.hear(Control.DATA) == 4


def test_a_visit_with_a_hello_that_must_be_refused(world: World) -> None:
    """Nobody is connected with: the program does not even see it."""
    good = hello_ib(world.here.address, world.there.address, 40000)
    bad = good[:19] + b"\0" + good[20:]  # MaxAdverts
    logged = len(world.log())
    with world.here.namespace.inside():
        where = (world.there.address, ask_port(world.here.address, world.there.address, 0))
    with world.here.namespace.inside(), pytest.raises(RefusedError):
        HandPeer.connect(world.here.address, where, bad + beside(bad, INBOUND, secrets.token_bytes(16)))
    assert world.logs("[hello_max_adverts]", logged)
    assert " goes to " not in world.log()[logged:]


def test_without_the_key_nothing_is_carried(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 40)
    key.chmod(0o600)
    with _world(tmp_path, key) as world, bystander(world), world.here.namespace.inside(), ExitStack() as closing:
        logged = len(world.log())
        with pytest.raises(RefusedError):
            Liar(world, closing)
        assert world.logs("[promotion_key]", logged)
        hello = hello_ib(world.here.address, world.there.address, 40000)
        right = beside(hello, CARRY, secrets.token_bytes(16), key=b"k" * 40)
        where = (world.there.address, ask_port(world.here.address, world.there.address, 0))
        for told in (right[:16] + b"\xff" + right[17:], right[:-1] + bytes([right[-1] ^ 1])):
            logged = len(world.log())
            with pytest.raises(RefusedError):
                HandPeer.connect(world.here.address, where, hello + told)
            assert world.logs("[promotion_key]", logged)


def test_a_visit_that_was_recorded_is_not_made_again(tmp_path: Path) -> None:
    """Who has read a request off the wire has not the key: the listener does not even see him."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 40)
    key.chmod(0o600)
    with _world(tmp_path, key) as world, bystander(world), world.here.namespace.inside():
        hello = hello_ib(world.here.address, world.there.address, 40000)
        recorded = hello + beside(hello, INBOUND, secrets.token_bytes(16), key=b"k" * 40)
        where = (world.there.address, ask_port(world.here.address, world.there.address, 0))
        with HandPeer.connect(world.here.address, where, recorded):
            pass
        assert world.logs(" has ended, ", 0)
        logged = len(world.log())
        with pytest.raises(RefusedError):
            HandPeer.connect(world.here.address, where, recorded)
        assert world.logs("[promotion_name]", logged)
        assert " goes to " not in world.log()[logged:]
