"""The offer table and the budget against plain models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sidestep import limits
from sidestep.native.layout import Refusal
from sidestep.switch.budget import GRANTS_UNSWEPT, SETTLE_S, SWEEP_AFTER_S, SWEEP_INTERVAL_S, ChannelBudget
from sidestep.switch.offers import ClientId, ConnectionKey, Offer, OfferTable

EXPIRY_S = 2.0
PENDING_MAX = 3
TOTAL_MAX = 5

clients = st.integers(1, 3).map(ClientId)
tokens = st.integers(1, 4)
ports = st.integers(1, 4)


class Brought:
    """Stands for descriptors: knows whether it has been closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def key(local_port: int, remote_port: int) -> ConnectionKey:
    return ConnectionKey(1, bytes(16), local_port, bytes(15) + b"\1", remote_port)


def offer(client: ClientId, token: int, connection: ConnectionKey) -> Offer[Brought]:
    return Offer(client, token, connection, (4096, 4096), bytes(16), bytes(16), 0, "local", Brought())


class OfferTableMachine(RuleBasedStateMachine):
    """Every operation on the table and on a list that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.table: OfferTable[Brought] = OfferTable(expiry_s=EXPIRY_S, pending_max=PENDING_MAX, total_max=TOTAL_MAX)
        self.model: list[tuple[float, Offer[Brought]]] = []
        self.now = 0.0

    def expected_refusal(self, new: Offer[Brought]) -> Refusal | None:
        for _, old in self.model:
            if old.key == new.key or (old.client, old.token) == (new.client, new.token):
                return Refusal.DUPLICATE
        of_client = [old for _, old in self.model if old.client == new.client]
        return Refusal.TOO_MANY if len(of_client) >= PENDING_MAX or len(self.model) >= TOTAL_MAX else None

    @rule(client=clients, token=tokens, local_port=ports, remote_port=ports)
    def offers(self, client: ClientId, token: int, local_port: int, remote_port: int) -> None:
        new = offer(client, token, key(local_port, remote_port))
        expected = self.expected_refusal(new)
        assert self.table.check(client, token, new.key) == expected
        assert self.table.handle_offer(new, now=self.now) == expected
        if expected is None:
            self.model.append((self.now + EXPIRY_S, new))

    @rule(local_port=ports, remote_port=ports)
    def claims(self, local_port: int, remote_port: int) -> None:
        claim = key(local_port, remote_port)._replace(local_addr=bytes(15) + b"\1", remote_addr=bytes(16))
        expected = [old for _, old in self.model if old.key == key(remote_port, local_port)]
        found = self.table.find(claim)
        assert found is (expected[0] if expected else None)
        if found is not None:
            self.table.handle_claimed(found)
            self.model = [entry for entry in self.model if entry[1] is not found]

    @rule(client=clients, token=tokens)
    def withdraws(self, client: ClientId, token: int) -> None:
        expected = [old for _, old in self.model if (old.client, old.token) == (client, token)]
        assert self.table.handle_withdraw(client, token) is (expected[0] if expected else None)
        self.model = [entry for entry in self.model if entry[1] not in expected]

    @rule(client=clients)
    def disconnects(self, client: ClientId) -> None:
        assert self.table.handle_disconnect(client) == [old for _, old in self.model if old.client == client]
        self.model = [entry for entry in self.model if entry[1].client != client]

    @precondition(lambda self: self.model)
    @rule(step=st.floats(0, 2 * EXPIRY_S))
    def time_passes(self, step: float) -> None:
        self.now += step
        expired = []
        while (found := self.table.poll_expired(now=self.now)) is not None:
            expired.append(found)
        assert expired == [old for deadline, old in self.model if deadline <= self.now]
        self.model = [entry for entry in self.model if entry[0] > self.now]

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.table) == len(self.model)
        assert self.table.next_deadline() == (self.model[0][0] if self.model else None)
        for client in (ClientId(1), ClientId(2), ClientId(3)):
            new = offer(client, 5, key(5, 5))  # no rule offers such a one: only the bounds can refuse it
            assert self.table.check(client, new.token, new.key) == self.expected_refusal(new)


TestOfferTable = OfferTableMachine.TestCase


def test_an_offer_matches_only_the_other_end_of_its_connection() -> None:
    table: OfferTable[Brought] = OfferTable()
    mine = key(10, 20)
    assert table.handle_offer(offer(ClientId(1), 1, mine), now=0) is None
    assert table.find(mine) is None
    assert table.find(mine.mirrored()._replace(netns_cookie=2)) is None
    assert table.find(mine.mirrored()) is not None


def test_the_budget_refuses_what_does_not_fit_and_takes_grants_back() -> None:
    budget = ChannelBudget(100)
    assert budget.reserve(b"a", 60, now=0)
    assert not budget.reserve(b"b", 41, now=0)
    assert not budget.reserve(b"a", 1, now=0)
    assert budget.reserve(b"b", 40, now=0)
    budget.release(b"a")
    assert budget.used_bytes == 40
    with pytest.raises(KeyError):
        budget.release(b"a")


def test_a_sweep_releases_only_what_has_settled_and_is_not_in_use() -> None:
    budget = ChannelBudget(100)
    for segment_id, granted_at in ((b"used", 0.0), (b"gone", 0.0), (b"new", SETTLE_S)):
        assert budget.reserve(segment_id, 10, now=granted_at)
    assert budget.may_sweep(now=0.0)
    budget.handle_sweep({b"used": 0}, now=SETTLE_S + 0.5)
    assert {segment_id for segment_id in (b"used", b"gone", b"new") if segment_id in budget} == {b"used", b"new"}
    assert budget.used_bytes == 20
    assert not budget.may_sweep(now=SETTLE_S + 0.5)
    assert budget.may_sweep(now=SETTLE_S + 0.5 + SWEEP_INTERVAL_S)


def test_a_long_ledger_is_swept_before_the_budget_is_used_up() -> None:
    budget = ChannelBudget(1 << 40)

    def grant(first: int, end: int) -> None:
        for number in range(first, end):
            assert budget.reserve(number.to_bytes(16), 1, now=0.0)

    budget.handle_sweep({}, now=-SWEEP_INTERVAL_S)
    grant(0, GRANTS_UNSWEPT - 1)
    assert not budget.wants_sweep(now=0.0)
    grant(GRANTS_UNSWEPT - 1, GRANTS_UNSWEPT)
    assert budget.wants_sweep(now=0.0)
    budget.handle_sweep({}, now=0.0)  # nothing has settled: the next is worth it at twice the length
    grant(GRANTS_UNSWEPT, 2 * GRANTS_UNSWEPT)
    assert not budget.wants_sweep(now=SWEEP_INTERVAL_S / 2)
    assert budget.wants_sweep(now=SWEEP_INTERVAL_S)
    budget.handle_sweep(None, now=SETTLE_S + 1)
    assert budget.used_bytes == 2 * GRANTS_UNSWEPT
    budget.handle_sweep({}, now=SETTLE_S + 1)
    assert budget.used_bytes == 0


def test_what_is_spilled_counts_until_it_is_given_back() -> None:
    budget = ChannelBudget(100, owner_max=lambda owner: 60 if owner else 100)
    assert budget.reserve(b"a", 10, now=0, owner=7)
    assert budget.reserve(b"b", 10, now=0, owner=8)
    budget.handle_sweep({b"a": 50, b"b": 7, b"somebody's": 1000}, now=1)
    assert budget.used_bytes == 77
    assert not budget.reserve(b"c", 1, now=1, owner=7)  # all of its share
    assert not budget.reserve(b"c", 24, now=1)
    budget.handle_sweep({b"a": 50, b"b": 7}, now=2)  # it is not counted twice
    assert budget.used_bytes == 77
    budget.handle_sweep({b"a": 20, b"b": 9}, now=3)
    assert budget.used_bytes == 49
    assert budget.reserve(b"c", 30, now=3, owner=7)
    budget.handle_sweep(None, now=4)
    assert budget.used_bytes == 79
    budget.release(b"a")  # with what it has spilled
    assert budget.used_bytes == 49
    assert budget.reserve(b"d", 30, now=4, owner=7)
    budget.handle_sweep({b"c": 5, b"d": 0}, now=3 + SETTLE_S)  # the rest is not known yet, or gone
    assert budget.used_bytes == 60  # of 65: nobody has more than his share
    assert b"b" not in budget


def test_who_has_spilled_more_than_all_is_granted_nothing() -> None:
    budget = ChannelBudget(100)
    assert budget.reserve(b"a", 10, now=0)
    budget.handle_sweep({b"a": 1000}, now=1)
    assert budget.used_bytes == 100
    assert not budget.reserve(b"b", 1, now=1)
    budget.handle_sweep({b"a": 0}, now=2)
    assert budget.reserve(b"b", 90, now=2)


def test_what_one_user_has_spilled_takes_nothing_from_others() -> None:
    budget = ChannelBudget(100, owner_max=lambda owner: 30 if owner else 100)
    assert budget.reserve(b"a", 10, now=0, owner=7)
    budget.handle_sweep({b"a": 1 << 40}, now=1)
    assert budget.used_bytes == 30
    assert not budget.reserve(b"b", 1, now=1, owner=7)
    assert budget.reserve(b"b", 30, now=1, owner=8)
    assert budget.reserve(b"c", 40, now=1)
    budget.release(b"a")
    assert budget.used_bytes == 70
    assert budget.reserve(b"a", 30, now=1, owner=7)


def test_an_old_ledger_is_swept_as_spills_may_have_grown() -> None:
    budget = ChannelBudget(100)
    assert not budget.wants_sweep(now=0.0)  # there is nothing to look for
    assert budget.reserve(b"a", 10, now=0.0)
    assert budget.wants_sweep(now=0.0)
    budget.handle_sweep({b"a": 0}, now=0.0)
    assert not budget.wants_sweep(now=SWEEP_AFTER_S / 2)
    assert budget.wants_sweep(now=SWEEP_AFTER_S)


def test_a_user_has_a_share_of_the_offers() -> None:
    table: OfferTable[Brought] = OfferTable(owner_max=lambda owner: 2 if owner else 100)
    for port in (1, 2):
        assert table.handle_offer(replace(offer(ClientId(port), 1, key(port, 80)), owner=7), now=0) is None
    greedy = replace(offer(ClientId(3), 1, key(3, 80)), owner=7)
    assert table.handle_offer(greedy, now=0) is Refusal.TOO_MANY
    assert table.handle_offer(replace(greedy, owner=0), now=0) is None
    table.handle_disconnect(ClientId(1))
    assert table.handle_offer(replace(greedy, client=ClientId(4), key=key(4, 80)), now=0) is None


def test_offers_of_equal_addresses_are_found_in_every_namespace_but_ones_own() -> None:
    table: OfferTable[Brought] = OfferTable()
    made = [offer(ClientId(n), 1, key(5, 80)._replace(netns_cookie=n)) for n in range(1, limits.ENDS_OFFERED_MAX + 1)]
    for one in made:
        assert table.handle_offer(one, now=0) is None
    claim = key(5, 80).mirrored()
    assert table.find(claim) is made[0]
    assert table.find_elsewhere(claim) == made[1:]
    one_more = offer(ClientId(99), 1, key(5, 80)._replace(netns_cookie=99))
    assert table.handle_offer(one_more, now=0) is Refusal.TOO_MANY
    table.handle_claimed(made[3])
    assert made[3] not in table.find_elsewhere(claim)
    assert table.handle_offer(one_more, now=0) is None


def test_a_user_has_a_share_of_the_budget() -> None:
    budget = ChannelBudget(1000, owner_max=lambda owner: 250 if owner else 1000)
    assert budget.reserve(b"1", 200, now=0, owner=7)
    assert not budget.reserve(b"2", 100, now=0, owner=7)
    assert budget.reserve(b"2", 100, now=0, owner=8)
    budget.release(b"1")
    assert budget.reserve(b"3", 250, now=0, owner=7)
    assert budget.reserve(b"4", 650, now=0)
