"""The control link: what another provider may say on it and what is answered; over loopback, in virtual time."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import ip_address
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep import limits
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.verbs import QpEndpoint
from sidestep.remote.control_link import PRIVATE_DATA_MAX, ControlLink, Kind, Rej, Rep, Req, Talker
from sidestep.remote.control_links import Question
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive
from sidestep.sdp.settings import Addresses
from sidestep.sdp.stack import stack_on

ENDPOINT = QpEndpoint(bytes(range(16)), 0x123456, 0xABCDEF, 1024)
REQ = Req("rocev2", 7, 4, 5, ENDPOINT, b"private")
REP = Rep(4, 5, ENDPOINT, b"private")


def record(kind: int, number: int = 1, body: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack(">BxHI", kind, len(body) if length is None else length, number) + body


class Listening:
    """Who is told what is said of a connection."""

    def __init__(self) -> None:
        self.heard: list[tuple[Kind, bytes]] = []
        self.lost = 0

    def handle_record(self, kind: Kind, body: bytes) -> None:
        self.heard.append((kind, body))

    def handle_lost(self) -> None:
        self.lost += 1


class Ends:
    """A link of ours, and another provider that says what it likes."""

    def __init__(self, *, answers: bool = True) -> None:
        self.fabric = Fabric(Random(1))
        one, other = (stack_on(self.fabric, self.fabric.device(name)) for name in ("one", "other"))
        self.logged: list[str] = []
        self.lost = 0
        self.asked: list[tuple[int, Req]] = []
        self.talker = Listening()
        self.answers = answers
        self.said = bytearray()  # by our link
        self.ended = False
        self._room = memoryview(bytearray(4096))
        self.link: ControlLink | None = None
        other.listen(1, self._accepted)
        self.stream: SdpStream | None = None
        addresses = Addresses(ip_address("10.0.0.1"), 2, ip_address("10.0.0.2"), 1)
        one.connect("other", addresses, self._told)
        self.fabric.run_until(lambda: self.link is not None and self.stream is not None)
        self.fabric.run()

    def _accepted(self, stream: SdpStream) -> None:
        taken = (self._asked, lambda question: question[::-1]) if self.answers else (None, None)
        self.link = ControlLink(stream, self.fabric, taken[0], self._lost, self.logged.append, taken[1])

    def _asked(self, _link: ControlLink, number: int, req: Req) -> Talker | None:
        self.asked.append((number, req))
        return self.talker

    def _lost(self) -> None:
        self.lost += 1

    def _told(self, stream: SdpStream, event: StreamEvent) -> None:
        if type(event) is StreamReceive:
            self.said += self._room[: event.filled]
            if event.filled:
                stream.receive(self._room)
        elif isinstance(event, SdpEvent):
            self.ended = self.ended or event.kind is not SdpEventKind.ESTABLISHED
            if self.stream is None:
                self.stream = stream
                stream.receive(self._room)

    def say(self, raw: bytes) -> None:
        assert self.stream is not None
        if not self.ended:
            self.stream.send_together([memoryview(raw)], bcopy_only=True)
        self.fabric.run()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    assert made.lost == (not made.link or not made.link.open)


def test_records_are_what_they_say() -> None:
    assert Req.decode(REQ.encode()) == REQ
    assert Rep.decode(REP.encode()) == REP
    assert Rej.decode(Rej(24, b"why").encode()) == Rej(24, b"why")


def test_a_request_is_heard_and_what_follows(ends: Ends) -> None:
    ends.say(record(Kind.REQ, 9, REQ.encode()) + record(Kind.RTU, 9))
    assert ends.asked == [(9, REQ)]
    assert ends.talker.heard == [(Kind.RTU, b"")]
    assert ends.link is not None
    ends.link.close()
    assert ends.talker.lost == 1


def test_a_question_is_answered_and_needs_no_connection(ends: Ends) -> None:
    ends.say(record(Kind.ASK, 5, b"abc") + record(Kind.ASK, 5, b"") + record(Kind.ASK, 6, b"d" * PRIVATE_DATA_MAX))
    answers = [record(Kind.ANSWER, 5, b"cba"), record(Kind.ANSWER, 5), record(Kind.ANSWER, 6, b"d" * PRIVATE_DATA_MAX)]
    assert ends.said == b"".join(answers)


def test_what_was_over_here_is_over_there(ends: Ends) -> None:
    ends.say(record(Kind.DREQ, 77) + record(Kind.RTU, 78) + record(Kind.ANSWER, 79))
    assert ends.said == record(Kind.DREP, 77)
    assert not ends.logged


@pytest.mark.parametrize(
    "raw",
    [
        record(0),
        record(9),
        record(255),
        record(Kind.REQ, body=b""),
        record(Kind.REQ, body=REQ.encode()[:50]),
        record(Kind.REQ, length=0xFFFF),
        record(Kind.REQ, body=Req("w", 7, 4, 5, QpEndpoint(bytes(16), 1 << 24, 0, 1024), b"").encode()),
        record(Kind.REQ, body=Req("w", 7, 4, 5, QpEndpoint(bytes(16), 1, 1 << 24, 1024), b"").encode()),
        record(Kind.REQ, body=Req("w", 7, 4, 5, QpEndpoint(bytes(16), 1, 1, 1500), b"").encode()),
    ],
)
def test_what_breaks_a_rule_ends_the_link(ends: Ends, raw: bytes) -> None:
    ends.say(raw)
    assert ends.link is not None
    assert not ends.link.open
    assert ends.ended
    (line,) = ends.logged
    assert line.startswith("the control link with ")


@pytest.mark.parametrize("kind", [Kind.REQ, Kind.ASK])
def test_an_end_that_asks_is_asked_nothing(kind: Kind) -> None:
    ends = Ends(answers=False)
    assert ends.link is not None
    ends.say(record(kind, body=REQ.encode()))
    assert not ends.link.open


def test_connections_are_bounded(ends: Ends) -> None:
    for begin in range(0, limits.CONTROL_CONNECTIONS_MAX + 2, 100):
        numbers = range(begin, min(begin + 100, limits.CONTROL_CONNECTIONS_MAX + 2))
        ends.say(b"".join(record(Kind.REQ, number, REQ.encode()) for number in numbers))
    assert len(ends.asked) == limits.CONTROL_CONNECTIONS_MAX
    refused = [limits.CONTROL_CONNECTIONS_MAX, limits.CONTROL_CONNECTIONS_MAX + 1]
    assert ends.said == b"".join(record(Kind.REJ, number, Rej(3).encode()) for number in refused)


class Asking(Ends):
    """Our link asks."""

    def __init__(self) -> None:
        super().__init__(answers=False)
        self.heard: list[bytes | None] = []
        self.question = Question(self.heard.append)
        assert self.link is not None
        self.question.begin(self.link, b"what?")
        self.fabric.run()
        assert self.said == record(Kind.ASK, 1, b"what?")


def test_an_answer_is_heard_once() -> None:
    asking = Asking()
    asking.say(record(Kind.ANSWER, 1, b"that") * 2)
    assert asking.heard == [b"that"]


def test_a_question_whose_link_breaks_is_not_answered() -> None:
    asking = Asking()
    assert asking.link is not None
    asking.link.close()
    assert asking.heard == [None]


def test_a_question_without_a_link_is_not_answered() -> None:
    heard: list[bytes | None] = []
    Question(heard.append).begin(None, b"what?")
    assert heard == [None]


def test_a_question_that_is_taken_back_hears_nothing() -> None:
    asking = Asking()
    asking.question.take_back()
    asking.say(record(Kind.ANSWER, 1, b"that"))
    assert asking.heard == []
    assert asking.link is not None
    assert asking.link.open


def test_a_connection_is_no_answer() -> None:
    asking = Asking()
    asking.say(record(Kind.REP, 1, REP.encode()))
    assert asking.heard == [None]
    assert len(asking.logged) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 3), st.binary(max_size=80), st.booleans()), max_size=12))
def test_whatever_is_said(said: list[tuple[int, int, bytes, bool]]) -> None:
    ends = Ends()
    for kind, number, body, good in said:
        ends.say(record(kind, number, REQ.encode() if good else body))
    assert ends.link is not None
    assert ends.link.open == (not ends.logged)
    ends.link.close()
    assert ends.lost == 1
