"""sidestep.native._engine: what it takes, what it refuses, and what a loan keeps alive."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from channel_app import App

from sidestep.native import layout
from sidestep.native._channel import Channel, RemoteDoorbell
from sidestep.native._engine import Engine, Loan
from sidestep.native._framing import Inbound, Outbound
from sidestep.native.layout import PeerState

ASKED, ENDED = 1, 4


@dataclass
class Line:
    """What a loan is made of."""

    app: App
    channel: Channel
    doorbell: RemoteDoorbell
    inbound: Inbound
    outbound: Outbound
    wire: socket.socket
    far: socket.socket

    def lend(self, engine: Engine, **changes: Any) -> Loan:
        record = dict.fromkeys((name for name, _, _ in layout.RECORDS["engine_record"]), 0) | {
            "sends": 1, "receives": 1, "local_size": 4112, "remote_size": 4112, "credit": 16, "posted": 16,
            "last_bufs_sent": 16, "tx_msn": 1, "rx_msn": 1, "window": 4096, "read_step": 1024,
        }  # fmt: skip
        given: dict[str, Any] = {
            "record": layout.pack("engine_record", **record), "channel": self.channel,
            "words": PeerState(*self.channel.remote()), "doorbell": self.doorbell, "number": 1,
            "inbound": self.inbound, "outbound": self.outbound, "fd": self.wire.fileno(),
        } | changes  # fmt: skip
        return engine.lend(*given.values())


@pytest.fixture
def line() -> Iterator[Line]:
    with ExitStack() as stack:
        app = App(0)
        stack.callback(app.close)
        end = app.given()
        wire, far = (stack.enter_context(each) for each in socket.socketpair())
        bell = RemoteDoorbell(end.doorbell_fd, end.doorbell_page_fd, end.doorbell_index)
        outbound = Outbound(1400, crc=True, markers=False)
        yield Line(app, end.channel, bell, Inbound(crc=True, markers=False), outbound, wire, far)


def test_what_is_lent_is_of_no_other_use(line: Line) -> None:
    engine = Engine()
    loan = line.lend(engine)
    with pytest.raises(ValueError, match="it cannot be lent as it is"):
        line.lend(engine)
    with pytest.raises(RuntimeError):
        line.inbound.parse()
    with pytest.raises(RuntimeError):
        line.outbound.send(line.wire.fileno())
    reason, error, record = loan.take()
    assert (reason, error, len(record)) == (ASKED, 0, layout.size("engine_record"))
    assert line.inbound.parse() == []
    for call in loan.take, loan.look:
        with pytest.raises(ValueError, match="it was taken back"):
            call()


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ({"record": b"short"}, ValueError), ({"words": (-1,) * 10}, OverflowError),
        ({"channel": None}, TypeError), ({"doorbell": None}, TypeError), ({"inbound": None}, TypeError),
        ({"outbound": None}, TypeError), ({"fd": -1}, OSError),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_lent_stays_as_it_is(line: Line, what: dict[str, Any], error: type[Exception]) -> None:
    engine = Engine()
    with pytest.raises(error):
        line.lend(engine, **what)
    line.lend(engine).take()


def test_a_loan_that_is_forgotten_is_taken_back(line: Line) -> None:
    engine = Engine()
    loan: Loan | None = line.lend(engine)
    line.far.close()
    while not engine.step(10):
        pass
    del loan
    gc.collect()
    assert engine.returned() == []
    assert line.inbound.parse() == []
    kept = line.lend(engine)
    del engine
    gc.collect()
    assert kept.take()[0] in (ASKED, ENDED)


def test_a_channel_that_is_closed_stays_mapped_while_it_is_lent(line: Line) -> None:
    engine = Engine()
    loan = line.lend(engine)
    line.channel.close()
    line.app.send(b"who reads this")
    for _ in range(3):
        engine.step()
    assert b"who reads this" in line.far.recv(1000)
    loan.take()
    with pytest.raises(ValueError, match="closed"):
        line.channel.readable(0)


def test_each_loan_of_many_is_its_own() -> None:
    """Half of them are forgotten while the thread works, and then the engine is."""
    with ExitStack() as stack:
        engine, loans, far = Engine(), [], []
        engine.start()
        for number in range(1, 60):
            app = App(0)
            stack.callback(app.close)
            end = app.given()
            wire, other = (stack.enter_context(each) for each in socket.socketpair())
            bell = RemoteDoorbell(end.doorbell_fd, end.doorbell_page_fd, end.doorbell_index)
            pair = Inbound(crc=True, markers=False), Outbound(1400, crc=True, markers=False)
            made = Line(app, end.channel, bell, *pair, wire, other)
            app.send(number.to_bytes(2) * 50)
            loans.append(made.lend(engine, number=number))
            far.append(other)
        for number, each in enumerate(far, 1):
            assert number.to_bytes(2) * 50 in each.recv(4096)
        del loans[::2]
        gc.collect()
        assert [loan.take()[0] for loan in loans] == [ASKED] * len(loans)
        del engine
