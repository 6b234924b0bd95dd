"""Which groups are under way, which are left behind, and how far calls are still needed: by headers alone."""

import pytest

from lachesis.pipeline.calls.open_groups import OpenGroups
from lachesis.schemas.calls import CallKey
from lachesis.schemas.ids import new_group_id

A, B = new_group_id(), new_group_id()


class World:
    def __init__(self):
        self.leases = {"a", "b"}
        self.groups = OpenGroups(lambda env, lease: lease in self.leases)
        self.seq = 0

    def start(self, group, lease, *, holder="p", life=1):
        return self.apply(CallKey("start", group, holder, life, lease))

    def apply(self, key, *, env="e"):
        self.seq += 1
        self.groups.apply(self.seq, env, key, self.seq * 10)
        return self.seq


@pytest.fixture
def it():
    return World()


def test_a_group_whose_lease_is_held_is_given_to_the_next_life_of_its_process_alone(it) -> None:
    it.start(A, "a")
    assert it.groups.assign("e", "q", 9, 0.0) is None
    assert it.groups.assign("e", "p", 1, 0.0) is None
    assert it.groups.assign("f", "p", 2, 0.0) is None
    assert it.groups.assign("e", "p", 2, 0.0) == A


def test_a_group_whose_lease_has_ended_is_given_to_any_process_and_to_one_at_a_time(it) -> None:
    it.start(A, "a")
    it.leases.clear()
    assert it.groups.count_free("e", 0.0) == 1
    assert it.groups.assign("e", "q", 1, 0.0) == A
    assert it.groups.assign("e", "r", 1, 29.0) is None
    assert it.groups.assign("e", "r", 1, 31.0) == A, "the first one never started"


def test_a_start_of_a_later_life_makes_the_group_that_process_s(it) -> None:
    it.start(A, "a")
    it.start(A, "b", holder="q", life=5)
    it.start(A, "a", life=2)  # of a process that was replaced, and comes late
    it.leases = {"b"}
    assert it.groups.count_free("e", 0.0) == 0
    assert it.groups.assign("e", "q", 6, 0.0) == A


def test_calls_are_needed_from_the_oldest_group_under_way_on(it) -> None:
    it.start(A, "a")
    second = it.start(B, "b")
    calls = [it.apply(CallKey("call", B)) for _ in range(3)]
    assert it.groups.lowest("e") == 1
    assert it.groups.records("e", B, second) == calls
    it.apply(CallKey("end", A))
    assert it.groups.lowest("e") == second
    last = it.apply(CallKey("end", B))
    assert it.groups.lowest("e") == last + 1
    assert len(it.groups) == 0


def test_a_group_that_is_stored_is_not_gone_on_with_though_its_process_left_no_end(it) -> None:
    it.start(A, "a")
    second = it.start(B, "b")
    it.leases.clear()
    it.groups.settle("f", B)
    it.groups.settle("e", A)
    assert it.groups.assign("e", "q", 1, 0.0) == B
    assert it.groups.lowest("e") == second


def test_what_has_no_start_or_no_header_is_part_of_no_group(it) -> None:
    it.apply(CallKey("call", A))
    it.apply(None)
    assert len(it.groups) == 0
    assert it.groups.lowest("e") == 3


def test_a_group_without_calls_for_long_is_given_up(it) -> None:
    it.start(A, "a")
    second = it.start(B, "b")
    it.apply(CallKey("call", A))
    it.groups.drop_older(second * 10 + 1)
    assert it.groups.lowest("e") == 1
    assert it.groups.dropped == 1
    assert it.groups.records("e", B, 0) == []


def test_for_lack_of_room_those_left_behind_go_first_and_those_at_work_only_where_asked(it) -> None:
    it.start(A, "a")
    it.start(B, "gone")
    assert it.groups.drop_oldest(leased=False)
    assert it.groups.lowest("e") == 1, "A, though older, is at work"
    assert not it.groups.drop_oldest(leased=False)
    assert it.groups.drop_oldest(leased=True)
    assert not it.groups.drop_oldest(leased=True)
