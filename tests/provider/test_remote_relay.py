"""A connection between two hosts: two providers' hubs, an application at each, and a real link of SDP over iWARP."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

import pytest
from channel_app import MOST, RING, App
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_world import (
    RINGS,
    WORD,
    Stranger,
    World,
    all_of,
    close,
    consent,
    go_back,
    is_cut_off_by,
    recall,
    reset,
    see_fin,
    settle,
    shut,
    snap,
)
from selection import rotate

from sidestep import limits
from sidestep.native import _channel
from sidestep.native.layout import Acked, Back, Knows, Notice, Seen, Spacer
from sidestep.provider.carry.direction import Ending, Out, Recall
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.rdma.iwarp.device import ATTRIBUTES
from sidestep.rdma.work import Access
from sidestep.remote.link import SdpLink
from sidestep.switch.link import Control


@pytest.fixture(params=[(False, False), (True, True), (True, False)], ids=["python", "engines", "engine-python"])
def world(closing: ExitStack, request: pytest.FixtureRequest) -> Iterator[World]:
    """Two hosts; which of them have an engine makes no difference to anybody."""
    made = World(closing, engines=request.param)
    yield made
    assert not made.one.faults + made.two.faults


def test_words_are_handed_on_in_their_order(world: World) -> None:
    a, b, _, _ = world.pair(promoted=False)
    a.send_control(attached=1)
    world.rest()
    assert (a.word("attached"), b.word("attached")) == (0, 0)
    b.send_control(attached=1)
    world.rest()
    assert (a.word("attached"), b.word("attached")) == (1, 1)
    b.send_control(rx_ready=1)
    world.rest()
    assert (a.word("rx_ready"), b.word("rx_ready")) == (1, 0)
    a.send_control(tx_switch_offset=123, tx_switched=1)
    world.rest()
    assert (b.word("tx_switched"), b.word("tx_switch_offset")) == (1, 123)
    assert a.word("acked") == Acked.ROUNDS | Acked.SPACER | Acked.SWITCH


def test_what_it_has_moved_is_seen_whoever_carries_it(world: World) -> None:
    a, b, one, two = world.pair()
    assert one.moved == two.moved == 0
    a.send(b"x" * 1000)
    assert one.moved == 1000
    world.rest()
    assert two.moved == 1000
    assert b.receive() == b"x" * 1000
    b.send(b"y" * 10)
    world.rest()
    assert one.moved == two.moved == 1010
    b.poke(f"producer[{1 - b.provider_side}].tail", 1 << 40)
    assert two.moved == 0


def test_whoever_makes_room_is_told_so(world: World) -> None:
    """At both ends, and each byte is there: by ring, or to be sent again."""
    a, b, one, two = world.pair()
    sent = a.send(b"x" * 1000)
    world.rest()
    sent += a.send(b"x" * 1000)
    one.leave(crowded=True)
    world.rest()
    for app in (a, b):
        assert app.word("notice") & (Notice.DEMOTE | Notice.CROWDED) == Notice.DEMOTE | Notice.CROWDED
    all_of(a, b, sent)
    all_of(b, a, 0)
    assert not reset(a) | reset(b)
    assert one.lost
    assert two.lost


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("ends", [True, False])
def test_an_application_leaves_and_the_other_one_sleeps(world: World, *, ends: bool, turns: int) -> None:
    """All comes by ring, or what has not arrived is to be sent again: which one who has ended cannot."""
    a, b, _, _ = world.pair()
    sent = b.send(b"x" * 1000)
    if ends:
        shut(b)
    for _ in range(turns):
        world.turn()
    a.send_control(notice=Notice.DEMOTE | Notice.LEAVE)
    world.rest()
    if ends:
        assert (a.end.avail, a.word("tx_fin"), a.word("shut_wr")) == (sent, 1, 1)
    else:
        all_of(b, a, sent)
        assert a.word("tx_back") & 3 == Back.BACK
    all_of(a, b, 0)
    assert not reset(a) | reset(b)


@pytest.mark.parametrize("pins_memory", [True, False])
def test_a_device_that_pins_memory_keeps_no_ring(closing: ExitStack, *, pins_memory: bool) -> None:
    """Its application may give the pages back, and the device would go on reading those that it had."""
    attributes = replace(ATTRIBUTES, checks_local_memory=True, pins_memory=pins_memory)
    world = World(closing, attributes=attributes)
    a, b, far, _ = world.pair()
    _pass_bytes(world, a, b)
    assert world.one.stack.permanent.covers(far.memory, Access.LOCAL_READ) != pins_memory
    assert world.one.stack.regions.regions == 0
    assert world.one.stack.regions.misses > 0 or not pins_memory, "each piece was registered by itself"


def _pass_bytes(world: World, a: App, b: App) -> None:
    dice = random.Random(5)
    for sender, receiver in ((a, b), (b, a)):
        data, sent, got = dice.randbytes(100_000), 0, b""
        while len(got) < len(data):
            sent += sender.send(data[sent : sent + dice.randrange(1, 6000)])
            world.turn()
            got += receiver.receive()
        assert got == data
    world.rest()


@pytest.mark.parametrize(
    ("knows", "reader", "rounds", "answer"),
    [
        (Knows.SPACER, 0, True, Spacer.SENT),
        (Knows.SPACER, Spacer.NONE, True, Spacer.NONE),
        (0, 0, True, Spacer.NONE),
        (Knows.SPACER, 0, False, Spacer.ASKED),
    ],
    ids=["unread", "all read", "an earlier shim", "an earlier provider"],
)
def test_the_reader_s_provider_decides_about_a_spacer(
    world: World, knows: int, reader: int, answer: Spacer, *, rounds: bool
) -> None:
    a, b, *_ = world.pair(rounds=rounds)
    assert bool(a.word("acked") & Acked.SPACER) == rounds
    b.send_control(knows=knows)
    a.send(b"unread")
    go_back(a)
    world.rest()
    if reader:
        b.poke(f"side[{b.provider_side}].tx_spacer", 1 << 2 | reader)
    a.send_control(tx_spacer=1 << 2 | Spacer.ASKED)
    world.rest()
    assert a.own_word("tx_spacer") == 1 << 2 | answer
    assert b.word("tx_spacer") == (1 << 2 | (reader or answer) if knows and rounds else 0)


def test_bytes_both_ways_in_any_portions(world: World) -> None:
    a, b, _, _ = world.pair()
    _pass_bytes(world, a, b)
    assert a.end.unread == b.end.unread == 0 or max(a.end.unread, b.end.unread) <= RING // 4


def wants_room(app: App) -> int:
    """Whether the provider asks it to ring when it has read."""
    offset = _channel.HEADER_WORDS[f"producer[{app.provider_side}].want_space"][0]
    with open(app.segment, "rb", closefd=False, buffering=0) as segment:
        segment.seek(offset)
        return int.from_bytes(segment.read(4), "little")


# ---- bytes ----


def test_bytes_stay_with_the_sender_until_they_are_read(world: World) -> None:
    a, b, _, _ = world.pair()
    assert a.send(bytes(RING)) == RING
    world.rest()
    assert (b.end.avail, a.end.unread, wants_room(b)) == (RING, RING, 1)
    assert b.receive() == bytes(RING)
    world.rest()
    assert (a.end.unread, wants_room(b)) == (0, 0)


@pytest.mark.parametrize("rings", [(RING, 1 << 18), (1 << 18, RING)])
def test_rings_of_unlike_sizes_do_not_stall(world: World, rings: tuple[int, int]) -> None:
    a, b, _, _ = world.pair(rings=rings)
    for sender, receiver in ((a, b), (b, a)):
        data, sent, got = random.Random(6).randbytes(50_000), 0, b""
        while len(got) < len(data):
            before = len(got)
            for _ in range(100):
                sent += sender.send(data[sent:])
                world.turn()
                got += receiver.receive()
            assert len(got) > before, "it stands still"
        assert got == data


def test_nothing_is_carried_before_the_other_end_knows_the_offset(world: World) -> None:
    a, b, _, _ = world.pair(promoted=False)
    for words in ({"attached": 1}, {"rx_ready": 1}):
        for app in (a, b):
            app.send_control(**words)
        world.rest()
    a.send(b"early")
    world.rest()
    assert b.receive() == b""
    a.send_control(tx_switched=1)
    world.rest()
    assert b.receive() == b"early"


def test_an_idle_connection_asks_for_no_turn(world: World) -> None:
    world.pair()
    world.rest()
    assert not world.one.hub.about_to_wait()
    assert not world.two.hub.about_to_wait()


# ---- the end ----


def test_the_end_is_told_behind_the_last_byte(world: World) -> None:
    a, b, _, _ = world.pair()
    a.send(bytes(1000))
    a.send_control(shut_wr=1)
    see_fin(b)  # its FIN overtakes the bytes
    world.rest()
    assert (b.end.avail, b.word("tx_fin"), b.word("tx_fin_at"), b.word("shut_wr")) == (1000, 1, 1000, 1)
    assert not b.word("notice")
    b.send(b"the other direction goes on")
    world.rest()
    assert a.receive() == b"the other direction goes on"


def test_an_end_waits_for_bytes_that_find_no_room(world: World) -> None:
    a, b, _, _ = world.pair(rings=(2 * MOST, RING))
    assert a.send(bytes(MOST + RING)) == MOST + RING
    a.send_control(shut_wr=1)
    world.rest()
    assert (b.end.avail, b.word("tx_fin")) == (MOST, 0)
    b.receive()
    world.rest()
    assert (b.end.avail, b.word("tx_fin"), b.word("tx_fin_at")) == (RING, 1, MOST + RING)


def test_what_is_not_read_goes_behind_the_ring_and_back(world: World) -> None:
    a, b, far, _ = world.pair()
    data = bytes(range(251)) * 300
    for _ in range(3):
        for part in data[:3000], data[3000:40000], data[40000:]:
            assert a.spill(part) == len(part)
            world.rest()
        far.reclaim()
        assert (a.end.unread, b.end.avail, far.side.held) == (len(data), len(data), len(data))
        found = b.end.read(len(data) - 1000)  # it has nearly caught up: what follows lies in the ring again
        b.hint()
        world.rest()
        assert a.send(data[:500]) == 500
        world.rest()
        assert found + b.receive() == data + data[:500]
        world.rest()
        assert a.end.space == b.end.space == RING


def test_a_killed_end_is_told_as_a_close(world: World) -> None:
    a, b, _, _ = world.pair()
    a.send(b"last words")
    world.rest()
    a.connected = False  # and says nothing
    see_fin(b)
    world.rest()
    assert (b.word("tx_fin"), b.word("shut_wr"), b.word("notice")) == (1, 0, Notice.CLOSED)


def test_bytes_that_a_dead_end_left_unread_are_a_reset(world: World) -> None:
    a, b, _, _ = world.pair()
    b.send(b"never read")
    world.rest()
    see_fin(b)
    world.rest()
    assert reset(a)
    assert reset(b)
    assert world.two.counters.get("relay_reset", "unread") == 1
    assert (world.one.dropped, world.two.dropped) == (1, 1)


def test_a_close_that_left_nothing_unread_is_none(world: World) -> None:
    a, b, _, _ = world.pair()
    b.send(b"read")
    world.rest()
    a.receive()
    close(a)
    world.rest()
    assert (b.word("tx_fin"), b.word("notice")) == (1, Notice.CLOSED)
    close(b)
    world.rest()
    assert (len(world.one.hub), len(world.two.hub)) == (0, 0)
    assert not reset(a) | reset(b)
    assert not world.one.lost + world.two.lost


def test_both_ends_gone_at_once_are_noticed_by_the_kernel(world: World) -> None:
    a, b, _, _ = world.pair()
    for app, host in ((a, world.one), (b, world.two)):
        app.connected = app.held = False
        host.hub.handle_disconnect()
        host.pass_time(1)
    world.rest()
    assert (len(world.one.hub), len(world.two.hub)) == (0, 0)


def test_a_socket_that_another_process_holds_is_left_alone(world: World) -> None:
    a, b, _, _ = world.pair()
    a.connected = False
    world.one.hub.handle_disconnect()
    for _ in range(20):
        world.one.pass_time(100)
    world.rest()
    a.send(b"still here")
    world.rest()
    assert b.receive() == b"still here"


# ---- back to TCP ----


def test_going_back_is_told_behind_the_last_byte(world: World) -> None:
    a, b, far, _ = world.pair()
    a.send(bytes(100))
    go_back(a)
    world.rest()
    assert (b.word("tx_back"), b.word("tx_back_at"), b.end.avail) == (1 << 2 | Back.BACK, 100, 100)
    assert far.arrived_reported == 100


def test_who_has_shut_down_goes_back_without_a_word(world: World) -> None:
    one, other, far, far_other = world.pair()
    one.send_control(shut_wr=1)
    world.rest()
    assert far.ending is Ending.SHUT
    go_back(one)  # as it is asked to when its provider leaves
    world.rest()
    assert far.out is Out.RING
    assert not far.lost | far_other.lost
    assert not reset(one) | reset(other)


def test_who_was_invited_may_go_back_without_having_come(world: World) -> None:
    """As one that is asked back before it has switched."""
    a, b, _, _ = world.pair(promoted=False)
    for words in ({"attached": 1}, {"rx_ready": 1}):
        for app in (a, b):
            app.send_control(**words)
        world.rest()
    go_back(a)
    world.rest()
    assert (b.word("tx_back"), b.word("tx_back_at")) == (1 << 2 | Back.BACK, 0)
    assert not reset(a) | reset(b)


def test_a_request_to_go_back_is_handed_on(world: World) -> None:
    a, b, _, _ = world.pair()
    a.send_control(notice=Notice.DEMOTE)
    world.rest()
    assert b.word("notice") == Notice.DEMOTE
    assert a.word("acked") & Acked.REQUEST


def test_a_recall_is_handed_on_with_bytes_under_way(world: World) -> None:
    a, b, _, _ = world.pair()
    b.send(bytes(500))
    world.rest()
    assert len(a.end.read(200)) == 200
    b.send(bytes(300))
    assert recall(a) == 200
    world.rest()
    assert (b.word("notice"), b.word("rx_frozen")) == (Notice.RECALL | Notice.DEMOTE, 200)
    assert b.end.unread >= 600  # all of what it must send again is still there
    assert a.word("acked") == Acked.ROUNDS | Acked.SPACER | Acked.READY | Acked.SWITCH | Acked.REQUEST | Acked.RECALL
    b.send_control(shut_wr=1)
    world.rest()
    assert not reset(a) | reset(b)
    assert a.word("tx_fin") == 1


def test_a_recall_has_an_answer_of_its_own(world: World) -> None:
    """Who reads TCP on the answer to an earlier request may read what stands behind the recalled bytes."""
    app, _, stranger = world.stranger()
    app.send_control(notice=Notice.DEMOTE)
    stranger.send_control(Control.ACKED, Acked.REQUEST)
    world.rest()
    recall(app)
    world.rest()
    assert app.word("acked") & (Acked.REQUEST | Acked.RECALL) == Acked.REQUEST
    stranger.send_control(Control.ACKED, Acked.REQUEST | Acked.RECALL)  # which nobody says
    world.rest()
    assert not app.word("acked") & Acked.RECALL
    stranger.send_control(Control.RESENDS)
    world.rest()
    assert app.word("acked") & Acked.RECALL


def test_a_recall_of_what_the_provider_has_recalled_as_it_went_is_answered(world: World) -> None:
    app, _, stranger = world.stranger()
    world.one.hub.leave()
    world.rest()
    app.end.publish("rx_frozen", 0)
    assert app.end.decide(False, Back.RECALLED) == Back.RECALLED
    assert not app.word("acked") & Acked.RECALL
    stranger.send_control(Control.RESENDS)
    world.rest()
    assert app.word("acked") & Acked.RECALL
    app.send_control(notice=Notice.RECALL | Notice.DEMOTE)
    world.rest()
    assert not reset(app)


def test_a_recall_of_nothing_is_answered_by_an_end(world: World) -> None:
    """Its word may cross that of the end, and the provider lets go."""
    app, far, stranger = world.stranger()
    app.end.publish("rx_frozen", 0)
    assert app.end.decide(False, Back.RECALLED) == Back.RECALLED
    stranger.send_control(Control.CLOSED, 0)
    stranger.send_control(Control.ENDED, 0)
    close(app)
    world.rest()
    assert far.lost
    assert not reset(app)
    assert app.word("acked") & Acked.RECALL


def test_a_recall_is_answered_once_it_is_known_how_far_the_link_came(world: World) -> None:
    a, b, one, other = world.pair()
    b.send(bytes(100))
    world.rest()
    a.end.read(100)
    snap(world, one, other)
    assert recall(a) == 100
    settle(one, other)
    assert not reset(a) | reset(b)
    assert a.word("acked") & Acked.RECALL
    assert b.word("rx_frozen") == 100


def test_no_end_is_shown_before_a_recall_is_answered(world: World) -> None:
    """The end stands behind bytes that may come again, or be lost."""
    app, far, stranger = world.stranger()
    stranger.send_control(Control.DATA, 300, bytes(300))
    world.rest()
    app.end.read(100)
    far.handle_control(Control.SHUT, 300)
    recall(app)
    world.rest()
    assert app.word("tx_fin") == 0
    stranger.send_control(Control.RESENDS)
    world.rest()
    assert app.word("acked") & Acked.RECALL
    assert (app.word("tx_fin"), app.word("shut_wr")) == (1, 1)
    assert not reset(app)


def test_recalls_that_cross(world: World) -> None:
    a, b, _, _ = world.pair()
    for app in (a, b):
        app.send(bytes(300))
    world.rest()
    for app in (a, b):
        app.end.read(100)
        recall(app)
    world.rest()
    assert [app.word("rx_frozen") for app in (a, b)] == [100, 100]
    assert not reset(a) | reset(b)


def test_a_recall_of_what_has_gone_back_already_is_a_reset(world: World) -> None:
    """Its sender may have sent by TCP since, and cannot send these bytes before that."""
    a, b, _, _ = world.pair()
    b.send(bytes(300))
    world.rest()
    a.end.publish("rx_frozen", 0)
    assert a.end.decide(False, Back.RECALLED) == Back.RECALLED
    go_back(b)
    a.send_control(notice=Notice.RECALL | Notice.DEMOTE)
    world.rest()
    assert reset(a)
    assert reset(b)


def test_a_short_message_does_not_wait_for_others_bulk(world: World) -> None:
    """Every connection has its turn in each turn of a provider, and no turn is longer than its ring."""
    bulky = [world.pair() for _ in range(3)]
    a, b, _, _ = world.pair()
    moved = 0
    for _ in range(20):
        a.send(b"ping")
        turns = 0
        while b.end.avail < 4:
            for sender, receiver, _, _ in bulky:
                moved += len(receiver.receive())
                sender.send(bytes(sender.end.space))
                receiver.hint()
            world.turn()
            turns += 1
            assert turns <= 4
        assert b.receive() == b"ping"
        b.hint()
    assert moved > 20 * len(bulky) * RING / 4


# ---- leaving ----


def test_a_provider_that_leaves_needs_no_call_of_an_application(world: World) -> None:
    a, b, _, _ = world.pair()
    a.send(bytes(100))
    world.one.hub.leave()
    b.send(bytes(50))
    assert not world.one.hub.settled()
    world.turns(world.one.hub.settled)
    world.rest()
    assert not reset(a) | reset(b)
    all_of(a, b, 100)
    all_of(b, a, 50)
    assert (len(world.one.hub), len(world.two.hub)) == (0, 0)
    assert not world.one.lost + world.two.lost  # nothing was to be found out


def test_both_providers_leave_at_once(world: World) -> None:
    a, b, one, other = world.pair()
    a.send(bytes(100))
    for host in (world.one, world.two):
        host.hub.leave()
    world.turns(lambda: world.one.hub.settled() and world.two.hub.settled())
    assert one.lost
    assert other.lost
    all_of(a, b, 100)
    assert not reset(a) | reset(b)
    assert not world.one.lost + world.two.lost  # nothing was to be found out


def test_the_last_word_is_heard_by_who_has_words_on_their_way(world: World) -> None:
    """A link that were closed with words unread would be reset, and what was said last lost with it."""
    _, far, stranger = world.stranger()
    stranger.events.clear()
    stranger.read()
    for _ in range(50):
        stranger.send_control(Control.ACKED, Acked.SWITCH)
    far.reset("fault")
    stranger.send_control(Control.DATA, 5, b"bytes")
    world.turns(lambda: not stranger.open)
    assert stranger.words()[-1] == (Control.RESET, 0)
    assert "END_OF_STREAM" in stranger.events
    assert world.one.hub.finishing
    stranger.stream.close()
    world.turns(lambda: not world.one.hub.finishing)
    world.turns(lambda: stranger.events[-1] == "CLOSED")
    assert "BROKEN" not in stranger.events


def test_who_never_ends_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINK_FINISH_S", 0.3)
    _, far, stranger = world.stranger()
    stranger.read()
    far.reset("fault")
    world.turns(lambda: not stranger.open)
    assert world.one.hub.finishing
    world.turns(lambda: not world.one.hub.finishing)
    world.turns(lambda: "BROKEN" in stranger.events)


def test_who_has_attached_waits_for_a_slow_link(world: World) -> None:
    """The other provider opens the connection on hearing that, and has its application read by ring."""
    app, far, stranger = world.stranger(promoted=False)
    stranger.read()
    world.turns(lambda: bool(stranger.words()))
    world.one.wait_for_attachments()
    stranger.send_control(Control.ATTACHED, RINGS)
    stranger.send_control(Control.READY)
    world.rest()
    assert not far.lost
    app.send_control(tx_switch_offset=7, tx_switched=1)
    app.send(b"by ring")
    world.turns(lambda: (Control.DATA, 7) in stranger.words())


def test_who_never_attaches_takes_the_other_end_with_it(world: World) -> None:
    """Nothing can have gone by ring: nobody has to be asked."""
    a, b, one, two = world.pair(promoted=False)
    a.send_control(attached=1)
    world.rest()
    for host in (world.one, world.two):
        host.wait_for_attachments()
        assert host.counters.get("relay_dropped", "not_attached") == (host is world.two)
    world.turns(lambda: one.lost and two.lost)
    assert [app.word("notice") for app in (a, b)] == [Notice.OVER] * 2
    assert not world.one.lost + world.two.lost


def leaving_behind_a_gap(world: World, how: Callable[[App], object], sent: bytes) -> tuple[App, App, RemoteRelay]:
    """A provider leaves, and has all that comes resent, as the other end has gone back or ended behind some bytes."""
    a, b, one, _ = world.pair()
    b.send(sent)
    how(b)
    world.two.hub.about_to_wait()
    world.two.hub.handle_turn()  # all is with the link
    world.one.hub.leave()
    assert (one.recall, one.recalled_at) == (Recall.OURS, 0)
    return a, b, one


@pytest.mark.parametrize("how", [go_back, shut])
def test_leaving_asks_in_vain_for_what_will_not_be_sent_again(world: World, how: Callable[[App], object]) -> None:
    a, b, one = leaving_behind_a_gap(world, how, b"on its way" * 400)
    world.rest()
    assert not reset(a) | reset(b)
    assert a.receive() == b"on its way" * 400
    assert a.word("tx_back_at" if how is go_back else "tx_fin_at") == 4000
    assert one.recall is Recall.NOT


@pytest.mark.parametrize("known", [True, False], ids=["known", "not known yet"])
def test_leaving_asks_in_vain_who_was_killed(world: World, *, known: bool) -> None:
    def killed(app: App) -> None:
        app.connected = app.held = False
        if known:
            world.two.hub.handle_disconnect()
            world.two.pass_time(1)

    a, b, one = leaving_behind_a_gap(world, killed, b"last words")
    world.rest()
    assert a.receive() == b"last words"
    assert (a.word("tx_fin"), a.word("tx_fin_at")) == (1, 10)
    assert one.recall is Recall.NOT
    assert not reset(a) | reset(b)


def test_a_recall_of_what_a_dead_end_has_sent_is_a_reset(world: World) -> None:
    a, b, _, _ = world.pair()
    b.send(b"last words")
    world.rest()
    b.connected = b.held = False
    recall(a)
    world.rest()
    assert reset(a)
    assert world.two.counters.get("relay_reset", "recall") == 1


def test_a_link_breaks_whose_bytes_a_dead_end_had_sent(world: World) -> None:
    a, b, one, two = world.pair()
    snap(world, one, two)
    b.send(b"last words")
    b.connected = b.held = False
    settle(one, two)
    assert reset(a)


@pytest.mark.parametrize("how", [go_back, shut])
def test_leaving_does_not_let_tcp_be_read_behind_a_gap(world: World, how: Callable[[App], object]) -> None:
    """The link breaks before the last bytes have come, and nobody sends them again."""
    a, _, one = leaving_behind_a_gap(world, how, b"on its way")
    snap(world, one)
    one.handle_arrived(None)
    assert reset(a)
    assert (a.word("tx_back"), a.word("tx_fin")) == (0, 0)


@pytest.mark.parametrize("pieces", [1, 2], ids=["whole", "around the ring's end"])
@pytest.mark.parametrize("parted", [0, 600])
def test_leaving_keeps_what_had_its_place_in_the_ring_already(world: World, pieces: int, parted: int) -> None:
    app, far, stranger = world.stranger()
    before = b"." * (RING - 1000) if pieces == 2 else b""
    if before:
        stranger.send_control(Control.DATA, len(before), before)
        world.rest()
        assert app.receive() == before
    sent = bytes(range(250)) * 8
    stranger.write(WORD.pack(Control.DATA, len(sent)) + sent[:parted])
    world.rest()
    world.one.hub.leave()
    stranger.write(sent[parted:])
    stranger.send_control(Control.DATA, 4, b"more")
    stranger.send_control(Control.BACK, len(before) + len(sent) + 4)
    world.rest()
    assert not far.failed
    assert app.receive() == sent + b"more"
    assert app.word("tx_back_at") == len(before) + len(sent) + 4


@pytest.mark.parametrize("sent_again", [False, True])
def test_who_has_recalled_is_not_let_go_before_that_is_granted(world: World, sent_again: bool) -> None:
    """The other provider leaves, and its application may have gone back with bytes on their way."""
    app, far, stranger = world.stranger()
    stranger.send_control(Control.DATA, 3, b"one")
    world.rest()
    assert recall(app) == 0
    stranger.send_control(Control.LEAVE)
    stranger.send_control(Control.RECALL, 0)
    world.rest()
    assert not far.lost
    if sent_again:
        stranger.send_control(Control.ACKED, Acked.REQUEST)
        stranger.send_control(Control.RESENDS)
    else:
        stranger.send_control(Control.BACK, 3)
    world.rest()
    assert far.lost
    assert reset(app) != sent_again


@pytest.mark.parametrize("seen", [Seen.END, Seen.END | Seen.RESET])
def test_only_who_knows_that_tcp_is_dead_is_reset_for_that(world: World, seen: Seen) -> None:
    """Not who has shut down, whose peer has closed, and whose last bytes are late."""
    app, far, _ = world.stranger()
    app.held = False  # TIME_WAIT: to the kernel it is nobody's
    see_fin(app, seen)
    world.rest()
    world.one.pass_time(limits.SETTLE_ENDED_S - 1)
    assert not far.lost
    world.one.pass_time(2)
    assert far.failed == reset(app) == bool(seen & Seen.RESET)


@pytest.mark.parametrize(("came", "told"), [(0, False), (1, False), (200, True)], ids=["nothing", "a FIN", "bytes"])
def test_bytes_by_tcp_behind_a_gap_are_not_waited_with_for_long(world: World, came: int, told: bool) -> None:
    """Who sends them has gone back by itself; they may fill TCP's buffers, and its end not get through."""
    a, b, one, other = world.pair()
    a.send(b"lost")
    go_back(a)
    snap(world, one, other)
    assert other.break_off() is not None
    b.by_tcp = 7 + came  # it switched behind seven
    assert other.break_off() is not None
    world.two.pass_time(limits.SETTLE_ENDED_S)
    assert reset(b) == told


def test_what_has_all_arrived_needs_no_link(world: World) -> None:
    """Both ends have ended, and one still reads its ring."""
    app, far, stranger = world.stranger()
    shut(app)
    stranger.send_control(Control.DATA, 4, b"last")
    stranger.send_control(Control.SHUT, 4)
    stranger.send_control(Control.ARRIVED, 0)
    world.rest()
    app.held = False
    see_fin(app)
    snap(world, far)
    assert far.break_off() is None
    assert not reset(app)
    assert app.receive() == b"last"
    assert app.word("tx_fin_at") == 4


def test_consent_after_the_link_broke_is_not_waited_for(world: World) -> None:
    app, far, stranger = world.stranger(promoted=False)
    stranger.send_control(Control.ATTACHED, RINGS)
    world.rest()
    snap(world, far)
    assert far.break_off() == 0
    app.send_control(rx_ready=1)
    world.rest()
    assert not app.word("acked") & Acked.READY
    assert not far.handle_arrived(None)
    assert not reset(app)


def test_what_is_kept_is_bounded(world: World) -> None:
    app, far, stranger = world.stranger()
    world.one.hub.leave()
    for _ in range(4):
        stranger.send_control(Control.DATA, MOST // 4, bytes(MOST // 4))
        world.rest()
    assert not far.lost
    assert app.end.avail == 0
    stranger.send_control(Control.DATA, 1, b"!")
    world.rest()
    assert far.lost
    assert reset(app)


def test_what_is_kept_is_dropped_when_it_comes_again_by_tcp(world: World) -> None:
    app, _, stranger = world.stranger()
    world.one.hub.leave()
    stranger.send_control(Control.DATA, 3, b"one")
    world.rest()
    stranger.send_control(Control.RESENDS)
    world.rest()
    assert app.end.avail == 0
    assert app.word("tx_back_at") == 0
    assert app.word("tx_back") == 1 << 2 | Back.BACK
    assert not reset(app)


def _leaving_as_a_round_begins(world: World) -> tuple[App, RemoteRelay, Stranger]:
    """A provider leaves; the other end's first word of its ring, and three bytes by it, cross that."""
    app, far, stranger = world.stranger(promoted=False)
    stranger.send_control(Control.ATTACHED, RINGS)
    world.rest()
    app.send_control(rx_ready=1)
    world.rest()
    world.one.hub.leave()
    stranger.send_control(Control.SWITCHED, 7)
    stranger.send_control(Control.DATA, 3, b"one")
    world.rest()
    assert not app.word("tx_switched")
    return app, far, stranger


def test_a_ring_whose_bytes_come_by_tcp_is_never_shown(world: World) -> None:
    """They may be there before the word: its application would find that the ring begins in what it has read."""
    app, far, stranger = _leaving_as_a_round_begins(world)
    stranger.send_control(Control.RESENDS)
    world.rest()
    assert (app.word("tx_switched"), app.word("tx_back"), app.word("tx_back_at")) == (0, 1 << 2 | Back.BACK, 0)
    assert far.taken
    assert not reset(app)


@pytest.mark.parametrize("end", [Control.BACK, Control.SHUT])
def test_a_ring_whose_bytes_do_not_come_again_is_shown(world: World, end: Control) -> None:
    app, _, stranger = _leaving_as_a_round_begins(world)
    stranger.send_control(end, 3)
    world.rest()
    assert (app.word("tx_switched"), app.word("tx_switch_offset")) == (1, 7)
    assert app.receive() == b"one"
    assert not reset(app)


def test_nobody_is_invited_any_more_by_who_leaves(world: World) -> None:
    a, b, _, _ = world.pair(promoted=False)
    for app in (a, b):
        app.send_control(attached=1)
    world.rest()
    world.one.hub.leave()
    a.send_control(rx_ready=1)
    world.rest()
    assert b.word("rx_ready") == 0
    assert not a.word("acked") & Acked.READY
    assert all(app.word("notice") & Notice.OVER for app in (a, b))  # else it would wait to be told how the ring ends
    assert not reset(a) | reset(b)
    assert (len(world.one.hub), len(world.two.hub)) == (0, 0)


# ---- and there again ----


def by_ring(sender: App, receiver: App, data: bytes, world: World) -> None:
    """It all goes by ring, in pieces, and is read."""
    sent, got = 0, b""
    while len(got) < len(data):
        sent += sender.send(data[sent : sent + 3000])
        world.turn()
        got += receiver.receive()
    assert got == data


def another(world: World, sender: App, receiver: App, round_number: int) -> None:
    """The sender goes back from one round, and is invited to this one."""
    go_back(sender, round_number - 1)
    world.rest()
    assert receiver.word("tx_back_at") == receiver.end.received
    assert not receiver.word("acked") & Acked.READY
    consent(receiver, round_number)
    world.rest()
    assert sender.word("rx_ready") == round_number
    assert receiver.word("acked") & Acked.READY
    assert not sender.word("acked") & Acked.SWITCH
    sender.send_control(tx_switch_offset=1000 * round_number, tx_switched=round_number)
    world.rest()
    assert (receiver.word("tx_switched"), receiver.word("tx_switch_offset")) == (round_number, 1000 * round_number)
    assert sender.word("acked") & Acked.SWITCH


def test_rounds_follow_each_other_both_ways(world: World) -> None:
    a, b, one, other = world.pair()
    dice = random.Random(3)
    for round_number in range(2, 7):
        by_ring(a, b, dice.randbytes(9000), world)
        another(world, a, b, round_number)
        by_ring(b, a, dice.randbytes(dice.randrange(9000)), world)
        another(world, b, a, round_number)
    a.send(b"last")
    shut(a, 6)
    world.rest()
    assert (b.word("tx_fin"), b.word("tx_back"), b.receive()) == (1, 6 << 2 | Back.ENDED, b"last")
    assert not one.lost | other.lost


def test_a_round_in_which_nothing_was_sent_is_followed_by_another(world: World) -> None:
    a, b, _, _ = world.pair()
    go_back(a)
    world.rest()
    for round_number in range(2, 5):
        consent(b, round_number)
        world.rest()
        assert a.word("rx_ready") == round_number
        go_back(a, round_number)
        world.rest()
        assert b.word("tx_back") == round_number << 2 | Back.BACK
        assert b.word("tx_switched") == 1


def test_who_asks_no_more_may_be_sent_to_by_ring_again(world: World) -> None:
    a, b, _, _ = world.pair()
    for _ in range(3):
        a.send_control(notice=Notice.DEMOTE)
        world.rest()
        assert b.word("notice") == Notice.DEMOTE
        assert a.word("acked") & Acked.REQUEST
        a.end.revoke(Notice.DEMOTE, 0)
        a.hint()
        world.rest()
        assert b.word("notice") == 0
        assert not a.word("acked") & Acked.REQUEST


def test_consent_revokes_what_was_asked_for_in_the_round_before(world: World) -> None:
    """And what is asked for since is asked for anew: the provider sees all of it at once."""
    a, b, _, _ = world.pair()
    a.send_control(notice=Notice.DEMOTE)
    world.rest()
    go_back(b)
    world.rest()
    a.end.revoke(Notice.DEMOTE, 0)
    a.end.publish("rx_ready", 2)
    a.send_control(notice=Notice.DEMOTE)
    world.rest()
    assert (b.word("rx_ready"), b.word("notice")) == (2, Notice.DEMOTE)
    assert a.word("acked") & Acked.REQUEST


def test_nobody_consents_anew_behind_a_recall(world: World) -> None:
    a, b, one, _ = world.pair()
    another(world, b, a, 2)
    b.send(bytes(300))
    world.rest()
    assert len(a.end.read(100)) == 100
    assert recall(a, 2) == 100
    world.rest()
    assert (b.word("rx_frozen"), b.word("notice")) == (100, Notice.RECALL | Notice.DEMOTE)
    assert a.word("acked") & Acked.RECALL
    a.send_control(rx_ready=3)
    world.rest()
    assert (one.recall, b.word("rx_ready"), a.word("tx_ended")) == (Recall.GRANTED, 2, 1)
    assert not reset(a) | reset(b)


def test_a_recall_of_a_round_whose_consent_was_not_seen_yet(world: World) -> None:
    """The words change between two that are read one after the other."""
    a, b, one, _ = world.pair()
    go_back(b)
    world.rest()
    a.send_control(rx_ready=2)
    recall(a, 2)
    world.rest()
    assert b.word("tx_back") == 0  # it is ours to say
    assert (b.word("rx_ready"), b.word("rx_frozen")) == (2, 0)
    assert a.word("tx_back") == 2 << 2 | Back.RECALLED
    assert one.recall is Recall.GRANTED


def test_nobody_is_invited_again_by_who_leaves(world: World) -> None:
    a, b, _, _ = world.pair()
    go_back(b)
    world.rest()
    world.one.hub.leave()
    consent(a, 2)
    world.rest()
    assert b.word("rx_ready") == 1
    assert not a.word("acked") & Acked.READY  # else it would miss bytes that never went by ring


@pytest.mark.parametrize("rounds", [False, True])
def test_a_provider_of_before_is_not_asked_for_another_round(world: World, rounds: bool) -> None:
    """It would not know the words: no application is told of rounds, and if one consents, nobody hears of it."""
    a, b, _, _ = world.pair(rounds=rounds)
    assert bool(a.word("acked") & Acked.ROUNDS) == bool(b.word("acked") & Acked.ROUNDS) == rounds
    go_back(a)
    world.rest()
    consent(b, 2)
    b.send_control(notice=Notice.DEMOTE)
    world.rest()
    assert a.word("rx_ready") == 1 + rounds
    b.end.revoke(Notice.DEMOTE, 0)
    b.hint()
    world.rest()
    assert a.word("notice") == (0 if rounds else Notice.DEMOTE)


BACK_AGAIN = [(Control.ROUNDS, 0), (Control.BACK, 0)]


@pytest.mark.parametrize(
    ("word", "before"),
    [
        ((Control.BACK, 0), BACK_AGAIN),
        ((Control.SWITCHED, 7), BACK_AGAIN),
        ((Control.ROUNDS, 0), BACK_AGAIN),
        ((Control.ARRIVED, 0), BACK_AGAIN),
        ((Control.READY, 0), BACK_AGAIN),
        ((Control.READY, 0), []),
        ((Control.ASK, 1), []),
        ((Control.ASK, 2), BACK_AGAIN),
    ],
    ids=lambda value: value[0].name if isinstance(value, tuple) else f"{len(value)} before",
)
def test_words_of_a_round_that_is_not_the_present_one(
    world: World, word: tuple[int, int], before: list[tuple[int, int]]
) -> None:
    app, far, stranger = world.stranger()
    is_cut_off_by(word, before, world, app, far, stranger)


@pytest.mark.parametrize("said", [[(Control.ROUNDS, 0)], [(Control.ARRIVED, 0)], []], ids=["unconfirmed", "of one", ""])
def test_consent_to_another_round_before_this_one_is_over(world: World, said: list[tuple[int, int]]) -> None:
    app, far, stranger = world.stranger()
    go_back(app)
    world.rest()
    is_cut_off_by((Control.READY, 0), said, world, app, far, stranger)


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("seed", rotate(range(3)))
def test_tcp_goes_on_where_the_link_broke_in_a_later_round(world: World, steps: int, seed: int) -> None:
    dice = random.Random(seed)
    a, b, one, other = world.pair()
    for round_number in (2, 3):
        by_ring(a, b, dice.randbytes(5000), world)
        another(world, a, b, round_number)
    counts = {a: a.end.sent, b: 0}
    for _ in range(steps + 1):
        for app in (a, b):
            counts[app] += app.send(dice.randbytes(dice.randrange(1, RING // 4)))
        world.turn()
        b.end.read(dice.randrange(1, 500))
        b.hint()
    break_and_compare(world, (a, b), (one, other), counts, dice)
    assert (b.word("tx_back"), b.word("tx_ended")) == (3 << 2 | Back.BACK, 2)


# ---- the link breaks ----


def break_and_compare(
    world: World,
    apps: tuple[App, App],
    relays: tuple[RemoteRelay, RemoteRelay],
    counts: dict[App, int],
    dice: random.Random,
) -> None:
    """Their link breaks, in whatever order the two notice it, and all that was sent arrives by TCP."""
    a, b = apps
    snap(world, *relays)
    settle(*dice.sample(relays, 2))
    world.rest()
    assert not reset(a) | reset(b)
    all_of(a, b, counts[a])
    all_of(b, a, counts[b])


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("seed", rotate(range(3)))
def test_tcp_goes_on_where_the_link_broke(world: World, steps: int, seed: int) -> None:
    dice = random.Random(seed)
    a, b, one, other = world.pair()
    counts = {a: 0, b: 0}
    for app in (a, b):
        counts[app] += app.send(dice.randbytes(dice.randrange(1, RING)))
    for _ in range(steps):
        world.turn()
        app = dice.choice((a, b))
        app.end.read(dice.randrange(1, 500))
        app.hint()
        counts[app] += app.send(dice.randbytes(dice.randrange(1, 500)))
    break_and_compare(world, (a, b), (one, other), counts, dice)
    assert (len(world.one.hub), len(world.two.hub)) == (0, 0)
    for app in (a, b):
        assert app.word("acked") & Acked.REQUEST  # else it would wait for somebody who is not there any more


PREPARED = [{}, {"attached": 1}, {"rx_ready": 1}, {"tx_switch_offset": 7, "tx_switched": 1}]


@pytest.mark.parametrize(("one_said", "other_said", "heard"), list(product(range(4), range(4), (False, True))))
def test_a_link_that_breaks_while_the_ends_switch(world: World, one_said: int, other_said: int, heard: bool) -> None:
    a, b, one, other = world.pair(promoted=False)
    for round_number in range(1, 4):
        for app, said in ((a, one_said), (b, other_said)):
            if said >= round_number and (round_number < 3 or app.word("rx_ready")):
                app.send_control(**PREPARED[round_number])
        if heard or round_number < max(one_said, other_said):
            world.rest()
    snap(world, one, other)
    settle(one, other)
    assert not reset(a) | reset(b)
    for app in (a, b):
        if app.word("acked") & Acked.READY:
            assert (app.word("tx_back"), app.word("tx_back_at")) == (1 << 2 | Back.BACK, 0)


def test_who_is_back_on_tcp_needs_nobody(world: World) -> None:
    a, b, one, other = world.pair()
    for app in (a, b):
        app.send(b"last")
        go_back(app)
    world.rest()
    snap(world, one, other)
    assert not one.handle_arrived(None)  # the other host is not there any more
    assert not reset(a)
    assert one.lost


@pytest.mark.parametrize("count", [None, 101, 1 << 63, -1])
def test_a_count_that_cannot_be_resets(world: World, count: int | None) -> None:
    a, _, one, other = world.pair()
    a.send(bytes(100))
    world.rest()
    snap(world, one, other)
    assert not one.handle_arrived(count)
    assert reset(a)
    assert world.one.counters.get("relay_reset", "link_lost" if count is None else "violation") == 1


def test_a_count_below_what_was_read_resets(world: World) -> None:
    a, b, one, other = world.pair()
    a.send(bytes(RING))
    world.rest()
    b.receive()
    world.rest()
    snap(world, one, other)
    assert not one.handle_arrived(RING - 1)
    assert reset(a)


def gone_astray(world: World, how: Callable[[App], object]) -> tuple[App, App]:
    """Bytes are lost with the link, behind them an end that TCP has told already; then both hosts settle."""
    a, b, one, other = world.pair()
    a.send(b"arrives")
    world.rest()
    assert isinstance(other.link, SdpLink)
    other.link.abandon()  # what comes now does not arrive
    a.send(b"does not")
    how(a)
    one.turn(one.side)
    snap(world, one, other)
    settle(one, other)
    return a, b


@pytest.mark.parametrize(
    "how", [go_back, lambda app: app.send_control(shut_wr=1), close], ids=["back", "shut", "closed"]
)
@pytest.mark.parametrize("ended", [False, True])
def test_what_tcp_brings_is_not_read_behind_a_gap(world: World, how: Callable[[App], object], ended: bool) -> None:
    """The sender can send nothing again before what it has sent by TCP since."""

    def end(app: App) -> None:
        if ended and how is not go_back:
            app.end.decide(True, Back.ENDED)
        how(app)

    a, b = gone_astray(world, end)
    if ended or how is go_back:
        assert reset(a)
        assert reset(b)
        assert b.word("tx_back") == 0  # it was never told to read TCP
    else:
        assert not reset(b)
        assert (a.word("rx_frozen"), b.word("tx_back_at")) == (7, 7)


def test_an_end_that_was_told_before_stands(world: World) -> None:
    a, b, one, other = world.pair()
    a.send(b"all")
    a.end.decide(True, Back.ENDED)
    a.send_control(shut_wr=1)
    world.rest()
    b.send(b"more")
    snap(world, one, other)
    settle(one, other)
    assert not reset(a) | reset(b)
    assert (b.word("tx_fin"), b.word("tx_fin_at")) == (1, 3)


@pytest.mark.parametrize("heard", [False, True])
def test_a_recall_before_the_link_broke(world: World, heard: bool) -> None:
    a, b, one, other = world.pair()
    b.send(bytes(300))
    world.rest()
    a.end.read(100)
    if not heard:
        snap(world, one, other)
    recall(a)
    world.rest()
    if heard:
        snap(world, one, other)
    settle(one, other)
    assert not reset(a) | reset(b)
    assert b.word("rx_frozen") == 100
    assert b.word("notice") & Notice.RECALL


def test_a_recall_of_what_was_said_to_have_arrived_resets(world: World) -> None:
    a, b, one, other = world.pair()
    b.send(bytes(300))
    world.rest()
    snap(world, one, other)
    assert one.break_off() == 300
    recall(a)
    assert other.handle_arrived(300)
    assert one.handle_arrived(0)
    one.handle_resynced()
    assert reset(a)
    assert world.one.counters.get("relay_reset", "recall") == 1


def test_what_has_arrived_is_always_the_same(world: World) -> None:
    a, b, one, other = world.pair()
    b.send(bytes(300))
    world.rest()
    snap(world, one, other)
    assert one.break_off() == 300
    a.end.read(200)
    recall(a)
    assert one.break_off() == 300


# ---- strangers ----


def test_a_link_that_says_nothing_harms_nobody(world: World) -> None:
    app, far, stranger = world.stranger()
    stranger.write(WORD.pack(Control.DATA, 1000)[:9])  # half a word
    world.rest()
    assert not far.lost
    a, b, _, _ = world.pair()
    a.send(b"unharmed")
    world.rest()
    assert b.receive() == b"unharmed"
    stranger.stream.abort()
    world.turns(lambda: bool(world.one.lost))
    assert not reset(app)  # its end is still to be found out


def forbidden() -> Iterator[object]:
    """Words, and what was said before them."""
    ready = [(Control.ATTACHED, RINGS)]
    for count in (0, 1, RING, RING << 32, 1 << 26 << 1 | RING << 32, (1 << 64) - 1):
        yield pytest.param([], (Control.ATTACHED, count), id=f"rings {count:x}")
    yield pytest.param(ready, (Control.ATTACHED, RINGS), id="attached twice")
    yield pytest.param([], (Control.READY, 0), id="ready before it has attached")
    yield pytest.param(ready, (Control.SWITCHED, 0), id="switched without consent")
    yield pytest.param(ready, (Control.DATA, 1), id="data before the switch")
    yield pytest.param(ready, (Control.BACK, 0), id="back without consent")
    yield pytest.param(ready, (Control.ENDED, 0), id="ended and not closed")
    yield pytest.param(ready, (Control.RECALL, 1), id="recall of what was not sent")
    yield pytest.param(ready, (Control.READ, 1), id="read what was not sent")
    yield pytest.param(ready, (Control.ARRIVED, 0), id="arrived before an end")
    yield pytest.param(ready, (Control.SHUT, 1), id="shut at an impossible count")
    yield pytest.param(ready, (Control.CLOSED, 1), id="closed and read what was not sent")
    yield pytest.param(ready, (99, 0), id="no word")
    yield pytest.param(ready, (0, 0), id="zero")
    for first, second in (
        (Control.SHUT, Control.SHUT),
        (Control.CLOSED, Control.CLOSED),
        (Control.RECALL, Control.RECALL),
    ):
        yield pytest.param([*ready, (first, 0)], (second, 0), id=f"{first.name} twice")


@pytest.mark.parametrize(("before", "word"), list(forbidden()))
def test_words_out_of_their_order_end_the_connection(
    world: World, before: list[tuple[int, int]], word: tuple[int, int]
) -> None:
    is_cut_off_by(word, before, world, *world.stranger(promoted=False))
    assert len(world.one.logged) == 1


@pytest.mark.parametrize(
    ("before", "word"),
    [
        ([], (Control.SWITCHED, 7)),
        ([], (Control.READY, 0)),
        ([], (Control.DATA, 0)),
        ([], (Control.DATA, MOST + 1)),
        ([], (Control.DATA, 1 << 40)),
        ([(Control.BACK, 0)], (Control.BACK, 0)),
        ([(Control.BACK, 0)], (Control.DATA, 1)),
        ([(Control.SHUT, 0)], (Control.DATA, 1)),
        ([(Control.CLOSED, 0), (Control.ENDED, 0)], (Control.DATA, 1)),
        ([(Control.CLOSED, 0), (Control.ENDED, 0)], (Control.BACK, 0)),
        ([], (Control.BACK, 1)),
    ],
)
def test_impossible_words_of_a_sender(world: World, before: list[tuple[int, int]], word: tuple[int, int]) -> None:
    is_cut_off_by(word, before, world, *world.stranger())


def test_more_data_than_there_is_room_for(world: World) -> None:
    app, far, stranger = world.stranger()
    for length in RING, MOST - RING:
        stranger.send_control(Control.DATA, length, bytes(length))
        world.rest()
    assert (app.end.avail, far.lost) == (MOST, False)
    stranger.send_control(Control.DATA, 1, b"!")
    world.rest()
    assert far.lost
    assert reset(app)


def test_data_behind_a_recall_is_dropped_and_bounded(world: World) -> None:
    app, far, stranger = world.stranger()
    stranger.send_control(Control.DATA, 3, b"one")
    world.rest()
    recall(app)
    world.rest()
    stranger.send_control(Control.DATA, 3, b"two")
    world.rest()
    assert (app.end.avail, far.lost) == (3, False)
    stranger.send_control(Control.DATA, MOST + 1)
    world.rest()
    assert far.lost


@pytest.mark.parametrize("word", [Control.ASK, Control.FIN_SEEN, Control.ACKED, Control.READ])
def test_a_word_without_end_makes_no_queue(world: World, word: Control) -> None:
    _, far, stranger = world.stranger()
    stranger.read()
    world.rest()
    stranger.heard.clear()
    for _ in range(30):
        stranger.write(WORD.pack(word, 0) * 100)
        world.turn()
    world.rest()
    assert len(stranger.words()) <= 3
    assert not far.lost or word is Control.FIN_SEEN


def test_who_takes_no_words_costs_no_more_than_some(world: World) -> None:
    """He sends on and on, and never hears that it is read."""
    app, far, stranger = world.stranger()
    for _ in range(2 * limits.LINK_WORDS_MAX):
        stranger.send_control(Control.DATA, RING, bytes(RING))
        world.turns(lambda: app.end.avail == RING)
        for _ in range(4):
            app.end.read(RING // 4)
            app.hint()
            world.turn()
    assert isinstance(far.link, SdpLink)
    assert far.link._controls <= limits.LINK_WORDS_MAX // 2 + 1
    assert not far.lost
    assert not world.one.logged


def test_an_application_that_breaks_its_rules_harms_no_stream(world: World) -> None:
    """Its words are read while the other host's are heard, in the midst of what is told to all streams."""
    app, far, stranger = world.stranger()
    app.send(bytes(100))
    world.rest()
    tail, size = _channel.HEADER_WORDS[f"producer[{1 - app.provider_side}].tail"]
    os.pwrite(app.segment, (50).to_bytes(size, "little"), tail)  # it takes back what was read, and names no news
    stranger.send_control(Control.READ, 100)
    world.rest()
    assert far.lost
    assert not world.one.logged  # it is not the other host's fault
    a, b, _, _ = world.pair()
    a.send(b"unharmed")
    world.rest()
    assert b.receive() == b"unharmed"


def test_a_fault_of_ours_stays_with_its_connection(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app, far, stranger = world.stranger()
    a, b, _, _ = world.pair()

    def fault(_word: Control, _count: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(far, "handle_control", fault)
    stranger.send_control(Control.ASK)
    a.send(b"unharmed")
    world.rest()
    assert b.receive() == b"unharmed"
    assert far.lost
    assert reset(app)
    assert "ZeroDivisionError" in world.one.logged[0]
    assert world.one.counters.get("relay_reset", "fault") == 1


COUNTS = st.one_of(
    st.sampled_from([0, 1, 7, 100, RING, RINGS, RING + 1, (1 << 63), (1 << 64) - 1]), st.integers(0, (1 << 64) - 1)
)
HOSTILE = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([int(word) for word in Control]), COUNTS, st.booleans()),
        st.tuples(st.integers(0, 255), COUNTS, st.booleans()),
    ),
    max_size=25,
)


def be_hostile(world: World, words: list[tuple[int, int, bool]], seed: int) -> None:
    """Says these to one connection, and looks whether another is well."""
    dice = random.Random(seed)
    app, far, stranger = world.stranger(promoted=dice.random() < 0.7)
    innocent, its_other, _, _ = world.pair()
    stranger.read()
    total = got = b""
    for number, count, all_of_it in words:
        length = min(count, 5000) if number == Control.DATA else 0
        stranger.send_control(number, count, dice.randbytes(length if all_of_it else length // 2))
        deed = dice.randrange(7)
        if not far.lost:
            if deed == 0:
                app.send(dice.randbytes(200))
            elif deed == 1:
                app.receive()
            elif deed == 2:
                app.send_control(notice=dice.choice((Notice.DEMOTE, Notice.CLOSED)))
            elif deed == 3:
                app.send_control(shut_wr=1)
        part = dice.randbytes(dice.randrange(1, 500))
        total += part[: innocent.send(part)]
        if dice.random() < 0.5:
            world.turn()
        got += its_other.receive()
    if dice.random() < 0.5:
        stranger.stream.abort()
    world.rest()
    got += its_other.receive()
    world.rest()
    assert got + its_other.receive() == total
    assert not reset(innocent)
    assert not any("Traceback" in line for line in world.one.logged)


@pytest.mark.parametrize("seed", rotate(range(40), test=8, ci=20))
def test_any_words_harm_nobody_else(world: World, seed: int) -> None:
    dice = random.Random(seed)
    counts = (0, 0, 0, 1, 7, 100, RINGS, RING, RING + 1, 1 << 63, dice.getrandbits(64))
    be_hostile(world, [(dice.choice(list(Control)), dice.choice(counts), dice.random() < 0.9) for _ in range(40)], seed)


@given(words=HOSTILE, seed=st.integers(0, 1 << 16))
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_any_words_at_all(words: list[tuple[int, int, bool]], seed: int) -> None:
    with ExitStack() as stack:
        world = World(stack)
        be_hostile(world, words, seed)
        assert not world.one.faults + world.two.faults


IMPOSSIBLE: list[tuple[str, int]] = [
    ("producer[0].tail", MOST + 1),
    ("producer[0].tail", (1 << 64) - 1),
    ("consumer[1].head", 1),
    ("consumer[1].head", 1 << 63),
]


@pytest.mark.parametrize(("word", "value"), IMPOSSIBLE)
def test_an_impossible_count_ends_that_connection(world: World, word: str, value: int) -> None:
    a, b, _, _ = world.pair()
    innocent, its_other, _, _ = world.pair()
    a.poke(word, value)
    b.send(b"to be read")
    world.rest()
    assert [reset(app) for app in (a, b, innocent, its_other)] == [True, True, False, False]
    innocent.send(b"unharmed")
    world.rest()
    assert its_other.receive() == b"unharmed"


def test_sending_without_consent_ends_the_connection(world: World) -> None:
    a, b, _, _ = world.pair(promoted=False)
    for app in (a, b):
        app.send_control(attached=1)
    world.rest()
    a.send_control(tx_switched=1)
    world.rest()
    assert reset(a)
    assert reset(b)
    assert world.one.counters.get("relay_reset", "violation") == 1


def test_bytes_of_a_ring_that_was_never_gone_to_do_not_hide_the_end(world: World) -> None:
    a, b, _, _ = world.pair(promoted=False)
    for app in (a, b):
        app.send_control(attached=1, rx_ready=1)
    world.rest()
    a.poke("producer[0].tail", 1)
    world.rest()
    assert not reset(b)
    a.connected = False  # and says nothing
    see_fin(b)
    world.rest()
    assert reset(b)
