"""What leads from one state of the network to another, checked against a plain set of facts."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep import limits
from sidestep.provider.network.state import Hop, NetworkState, Record, RouteChange, RouteKey, Unclear
from sidestep.routing import AddressEvent, Change, ChangesLost, LinkEvent, NetworkEvent, RouteEvent, RouteKind

_INDEXES = st.integers(1, 3)
_HOSTS = st.integers(1, 3).map(IPv4Address)
_CHANGES = st.sampled_from(Change)
_HOPS = st.builds(Hop, st.just(RouteKind.UNICAST), st.none() | _HOSTS, _INDEXES)
_KEYS = st.builds(
    RouteKey,
    st.sampled_from([IPv4Network("10.0.0.0/8"), IPv4Network("10.0.0.0/16")]),
    st.just(IPv4Network("0.0.0.0/0")),
    st.sampled_from([254, 100]),
    st.integers(0, 1),
    st.just(0),
)


@st.composite
def links(draw: st.DrawFn) -> LinkEvent:
    change, index = draw(_CHANGES), draw(_INDEXES)
    up = change is Change.ADDED and draw(st.booleans())
    return LinkEvent(change, draw(st.sampled_from(["left", "right"])), index, up)


_RECORDS: st.SearchStrategy[Record] = st.one_of(
    links(),
    st.builds(AddressEvent, _CHANGES, _INDEXES, _HOSTS, st.just(24)),
    st.builds(RouteChange, _CHANGES, _KEYS, st.frozensets(_HOPS, max_size=3), st.booleans()),
)
_HISTORIES = st.lists(_RECORDS, max_size=12)


def believe(known: set[NetworkEvent], events: list[NetworkEvent]) -> set[NetworkEvent]:
    """What somebody knows after these events; each must be news."""
    known = set(known)
    for event in events:
        assert not isinstance(event, ChangesLost)
        there = replace(event, change=Change.ADDED)
        same: set[NetworkEvent]
        if isinstance(event, LinkEvent):
            same = {one for one in known if isinstance(one, LinkEvent) and one.interface_index == event.interface_index}
        else:
            same = known & {there}
        assert same or event.change is Change.ADDED, f"{event} was not there"
        assert there not in known or event.change is Change.REMOVED, f"{event} was there"
        known -= same
        if event.change is Change.ADDED:
            known.add(event)
    return known


def state_after(history: list[Record]) -> NetworkState:
    state = NetworkState()
    for record in history:
        state.handle(record)
    return state


@given(_HISTORIES)
def test_who_believes_every_event_knows_the_state(history: list[Record]) -> None:
    state, known = NetworkState(), set[NetworkEvent]()
    for record in history:
        known = believe(known, state.handle(record))
        assert known == set(state.present())


@given(_HISTORIES, _HISTORIES)
def test_the_difference_of_two_states_leads_from_one_to_the_other(before: list[Record], later: list[Record]) -> None:
    old, new = state_after(before), state_after(later)
    assert believe(set(old.present()), list(old.becomes(new))) == set(new.present())
    assert list(new.becomes(new)) == []


def test_what_depends_on_something_goes_before_it_and_comes_after_it() -> None:
    link = LinkEvent(Change.ADDED, "left", 1, True)
    address = AddressEvent(Change.ADDED, 1, IPv4Address(1), 24)
    key = RouteKey(IPv4Network("10.0.0.0/8"), IPv4Network("0.0.0.0/0"), 254, 0, 0)
    route = RouteChange(Change.ADDED, key, frozenset({Hop(RouteKind.UNICAST, None, 1)}), replaces=False)
    full = state_after([link, address, route])
    come = list(NetworkState().becomes(full))
    assert [type(event) for event in come] == [LinkEvent, AddressEvent, RouteEvent]
    gone = list(full.becomes(NetworkState()))
    assert [type(event) for event in gone] == [RouteEvent, AddressEvent, LinkEvent]
    assert LinkEvent(Change.REMOVED, "left", 1, False) in gone


def _hop(number: int) -> Hop:
    return Hop(RouteKind.UNICAST, IPv4Address(number), 1)


def _route(change: Change, *numbers: int, replaces: bool = False) -> RouteChange:
    key = RouteKey(IPv4Network("10.0.0.0/8"), IPv4Network("0.0.0.0/0"), 254, 0, 0)
    return RouteChange(change, key, frozenset(map(_hop, numbers)), replaces)


@pytest.mark.parametrize(
    ("before", "record", "doubtful"),
    [
        ([], LinkEvent(Change.ADDED, "left", 1, True), False),
        ([LinkEvent(Change.ADDED, "left", 1, True)], LinkEvent(Change.ADDED, "left", 1, False), True),
        ([LinkEvent(Change.ADDED, "left", 1, False)], LinkEvent(Change.ADDED, "left", 1, True), True),
        ([LinkEvent(Change.ADDED, "left", 1, True)], LinkEvent(Change.ADDED, "renamed", 1, True), False),
        ([LinkEvent(Change.ADDED, "left", 1, True)], LinkEvent(Change.REMOVED, "left", 1, False), True),
        ([], LinkEvent(Change.REMOVED, "left", 1, False), False),
        ([], AddressEvent(Change.ADDED, 1, IPv4Address(1), 24), False),
        (
            [AddressEvent(Change.ADDED, 1, IPv4Address(1), 24)],
            AddressEvent(Change.REMOVED, 1, IPv4Address(1), 24),
            True,
        ),
        ([], AddressEvent(Change.REMOVED, 1, IPv4Address(1), 24), False),
        ([_route(Change.ADDED, 1)], _route(Change.ADDED, 2), False),
        ([_route(Change.ADDED, 1)], _route(Change.ADDED, 2, replaces=True), False),
        ([_route(Change.ADDED, 1, 2)], _route(Change.ADDED, 3, replaces=True), True),
        ([_route(Change.ADDED, 1, 2)], _route(Change.REMOVED, 1), False),
        ([], Unclear(), True),
    ],
)
def test_what_the_kernel_does_not_tell_makes_a_state_doubtful(
    before: list[Record], record: Record, doubtful: bool
) -> None:
    state = state_after(before)
    state.doubtful = False
    state.handle(record)
    assert state.doubtful is doubtful


def test_more_than_is_followed_is_told_but_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NETWORK_FOLLOWED_MAX", 2)
    state = NetworkState()
    three = [AddressEvent(Change.ADDED, 1, IPv4Address(number), 24) for number in (1, 2, 3)]
    assert [event for address in three for event in state.handle(address)] == three
    assert list(state.present()) == []
    gone = replace(three[0], change=Change.REMOVED)
    assert state.handle(gone) == [gone]
    link = LinkEvent(Change.ADDED, "left", 1, False)
    assert state.handle(link) == [link]  # the others go on
    assert list(state.present()) == [link]
    assert list(NetworkState().becomes(state)) == [ChangesLost(), link]
    assert list(state.becomes(state_after([link, three[0]]))) == [ChangesLost(), link, three[0]]


def test_a_change_of_what_is_known_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NETWORK_FOLLOWED_MAX", 2)
    up = [LinkEvent(Change.ADDED, name, index, False) for index, name in ((1, "left"), (2, "right"))]
    state = state_after(
        [*up, LinkEvent(Change.ADDED, "left", 1, True), _route(Change.ADDED, 1), _route(Change.ADDED, 2)]
    )
    assert not state.full
    assert len(state.links) == 2
