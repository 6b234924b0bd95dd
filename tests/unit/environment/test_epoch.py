"""The epoch order: a permutation an epoch, and what becomes of claims when processes die at any moment."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.environment.epoch import MAX_FAILURES_PER_CLAIM, Claimer, EpochOrder
from lachesis.pipeline.errors import SettingsChangedError
from lachesis.schemas.control import EpochClaim

ONE, TWO = Claimer("environment-e-1", 1), Claimer("environment-e-2", 1)
TTL_NS = 1000


def order(items=10, held_out=(), seed=0):
    drawable = np.ones(items, bool)
    drawable[list(held_out)] = False
    return EpochOrder(seed, drawable, np.arange(items, dtype=np.uint64))


def items_of(one, epoch):
    return [one.item(EpochClaim(epoch=epoch, place=i, holder="", life=0, since_ns=0)) for i in range(len(one))]


def test_an_epoch_has_every_drawable_item_once_and_another_order_than_the_next():
    one = order(1000, held_out=range(0, 1000, 7))
    first, second = items_of(one, 0), items_of(one, 1)
    assert sorted(first) == sorted(second) == [i for i in range(1000) if i % 7]
    assert first != second
    assert first == items_of(order(1000, held_out=range(0, 1000, 7)), 0), "the same in every process"
    assert first != items_of(order(1000, held_out=range(0, 1000, 7), seed=1), 0)
    assert abs(np.corrcoef(first, np.arange(len(first)))[0, 1]) < 0.1


def test_the_order_is_the_same_on_every_machine_and_with_every_numpy():
    assert items_of(order(8, seed=7), 3) == [7, 2, 3, 5, 1, 4, 0, 6]


def test_a_shuffled_pool_goes_on_in_the_same_epoch():
    keys = np.random.default_rng(1).integers(0, 1 << 63, 50).astype(np.uint64)
    shuffled = np.random.default_rng(2).permutation(50)
    one, other = (EpochOrder(3, np.ones(50, bool), k) for k in (keys, keys[shuffled]))
    assert one.digest == other.digest
    assert [keys[i] for i in items_of(one, 4)] == [keys[shuffled][i] for i in items_of(other, 4)]


@pytest.mark.parametrize("other", [order(11), order(10, held_out=[3]), order(10, seed=5)])
def test_a_record_of_other_items_or_another_seed_is_refused(other):
    with pytest.raises(SettingsChangedError, match=r"evaluate\.held_out and seed back"):
        order().claim(other.first(), ONE, at_work=(), now_ns=0, ttl_ns=TTL_NS)


def test_a_claim_of_another_process_is_taken_over_only_after_its_time():
    one = order()
    record, claim = one.claim(one.first(), TWO, at_work=(), now_ns=0, ttl_ns=TTL_NS)
    record, new = one.claim(record, ONE, at_work=(), now_ns=TTL_NS, ttl_ns=TTL_NS)
    assert (claim.key, new.key) == ((0, 0), (0, 1))
    record, taken = one.claim(record, ONE, at_work={new.key}, now_ns=TTL_NS + 1, ttl_ns=TTL_NS)
    assert (taken.key, taken.holder) == (claim.key, ONE.holder)
    again, _ = one.give_back(record, claim, failed=True)
    assert again == record, "it is no longer its own to give back"
    assert [held.key for held in one.settle(record, claim).claims] == [new.key], "stored is stored, whoever made it"


def test_a_later_life_takes_over_at_once_and_an_earlier_one_never_from_it():
    one, later = order(), Claimer(ONE.holder, 2)
    record, claim = one.claim(one.first(), ONE, at_work=(), now_ns=0, ttl_ns=TTL_NS)
    record, taken = one.claim(record, later, at_work=(), now_ns=1, ttl_ns=TTL_NS)
    assert taken.key == claim.key
    record, new = one.claim(record, ONE, at_work={claim.key}, now_ns=2, ttl_ns=TTL_NS)
    assert new.key == (0, 1)


def test_an_item_that_keeps_failing_is_left_out_of_its_epoch_alone():
    one = order(2)
    record, claim = one.claim(one.first(), ONE, at_work=(), now_ns=0, ttl_ns=TTL_NS)
    for failure in range(MAX_FAILURES_PER_CLAIM):
        record, left_out = one.give_back(record, claim, failed=True)
        assert left_out == (failure == MAX_FAILURES_PER_CLAIM - 1)
        record, claim = one.claim(record, ONE, at_work=(), now_ns=0, ttl_ns=TTL_NS)
    assert claim.key == (0, 1)
    record, claim = one.claim(record, ONE, at_work={claim.key}, now_ns=0, ttl_ns=TTL_NS)
    assert claim.key == (1, 0)


class World:
    """Three processes over one record. A stored group is known by its (epoch, place)."""

    def __init__(self, size):
        self.order = order(size)
        self.record, self.now, self.deaths = self.order.first(), 0, 0
        self.lives, self.at_work = [1, 1, 1], [{}, {}, {}]
        self.stored = []

    def claim(self, p):
        self.now += 1
        mine = self.at_work[p]
        claimer = Claimer(f"p{p}", self.lives[p])
        self.record, claim = self.order.claim(self.record, claimer, at_work=set(mine), now_ns=self.now, ttl_ns=TTL_NS)
        assert claim.key not in mine
        mine[claim.key] = claim

    def settle(self, p):
        if self.at_work[p]:
            key, claim = self.at_work[p].popitem()
            self.stored.append(key)
            self.record = self.order.settle(self.record, claim)

    def give_back(self, p):
        if self.at_work[p]:
            self.record, _ = self.order.give_back(self.record, self.at_work[p].popitem()[1], failed=False)

    def die(self, p):
        self.deaths += len(self.at_work[p])
        self.lives[p], self.at_work[p] = self.lives[p] + 1, {}

    def store_and_die(self, p):
        self.stored += list(self.at_work[p])[:1]
        self.die(p)

    def fall_silent(self, _):
        self.now += TTL_NS + 1
        self.deaths += sum(map(len, self.at_work))


moves = st.sampled_from(["claim", "claim", "claim", "settle", "store_and_die", "die", "give_back", "fall_silent"])


@pytest.mark.slow
@given(st.lists(st.tuples(moves, st.integers(0, 2)), max_size=200), st.integers(1, 7))
def test_every_place_is_stored_whatever_dies_and_twice_only_after_a_death(history, size):
    world = World(size)
    for move, p in history:
        getattr(world, move)(p)
    for p in range(3):
        while world.at_work[p]:
            world.settle(p)
    last = world.record.epoch
    while world.record.epoch <= last or any(held.epoch <= last for held in world.record.claims):
        world.now += TTL_NS + 1
        world.claim(0)
        world.settle(0)
    whole = {(epoch, place) for epoch in range(last + 1) for place in range(size)}
    assert {key for key in world.stored if key[0] <= last} == whole
    assert len(world.stored) - len(set(world.stored)) <= world.deaths
