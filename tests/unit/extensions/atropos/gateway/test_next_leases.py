"""Leases of groups that clients generate: kept for the next group, given back if none comes."""

from lachesis.pipeline.extensions.atropos.gateway.logic.next_leases import NextLeases


def leases(*granted_s: float) -> NextLeases:
    it = NextLeases()
    for n, at_s in enumerate(granted_s):
        it.put(n, f"l{n}", 4, 100, at_s)
    return it


def test_the_oldest_lease_that_is_large_enough_is_for_the_group_that_comes() -> None:
    it = leases(0.0, 0.0)
    it.put(2, "large", 8, 100, 0.0)
    assert it.sequences == 16
    assert it.use(8, 100, 1.0) == "large"
    assert it.use(4, 101, 1.0) is None
    assert [it.use(4, 100, 1.0) for _ in range(3)] == ["l0", "l1", None]


def test_a_lease_waits_a_few_times_as_long_as_groups_have_taken() -> None:
    it = leases(0.0, 0.0, 0.0)
    assert it.use(4, 1, 10.0) == "l0"
    assert it.give_back_overdue(30.0, silent=False) == []
    assert it.give_back_overdue(31.0, silent=False) == ["l1", "l2"]
    assert it.sequences == 0


def test_a_group_that_comes_after_its_lease_was_given_back_teaches_to_wait_longer() -> None:
    it = leases(0.0)
    assert it.give_back_overdue(61.0, silent=False) == ["l0"], "nothing is known of how long it takes"
    assert it.use(4, 1, 300.0) is None
    it.put(0, "next", 4, 100, 300.0)
    assert it.give_back_overdue(1100.0, silent=False) == []
    assert it.give_back_overdue(1300.0, silent=False) == ["next"]


def test_of_a_silent_environment_a_lease_waits_as_long_as_one_that_nobody_renews() -> None:
    it = leases(0.0)
    assert it.give_back_overdue(19.0, silent=True) == []
    assert it.give_back_overdue(21.0, silent=True) == ["l0"]


def test_a_client_that_leaves_gives_its_own_back() -> None:
    it = leases(0.0, 0.0)
    assert it.give_back(1) == ["l1"]
    assert it.give_back_all() == ["l0"]
