"""Leases of groups that clients generate: kept for the next group, given back if none comes."""

from lachesis.pipeline.extensions.atropos.gateway.logic.next_leases import NextLeases


def leases(*granted_s: float) -> NextLeases:
    it = NextLeases()
    for n, at_s in enumerate(granted_s):
        it.put(n, f"l{n}", 4, 100, at_s)
    return it


def test_the_oldest_lease_of_the_client_that_is_large_enough_is_for_its_group() -> None:
    it = leases(0.0, 0.0)
    it.put(1, "large", 8, 100, 0.0)
    it.put(1, "later", 4, 100, 0.0)
    assert it.sequences == 20
    assert it.use(1, 8, 100, 1.0) == "large"
    assert it.use(1, 4, 101, 1.0) is None
    assert [it.use(1, 4, 100, 1.0) for _ in range(3)] == ["l1", "later", None]
    assert it.use(None, 4, 100, 1.0) is None
    assert it.use(0, 4, 100, 1.0) == "l0"


def test_a_lease_waits_a_few_times_as_long_as_groups_have_taken() -> None:
    it = leases(0.0, 0.0, 0.0)
    assert it.use(0, 4, 1, 10.0) == "l0"
    assert it.give_back_overdue(30.0, silent=False) == []
    assert it.give_back_overdue(31.0, silent=False) == ["l1", "l2"]
    assert it.sequences == 0


def test_the_lease_of_a_client_that_is_gone_is_given_back_while_others_of_its_environment_go_on() -> None:
    it = leases(0.0, 0.0)
    given_back = []
    for n in range(1, 6):
        assert it.use(0, 4, 1, 10.0 * n) is not None
        it.put(0, f"next{n}", 4, 100, 10.0 * n)
        given_back += it.give_back_overdue(10.0 * n, silent=False)
    assert given_back == ["l1"]


def test_a_group_that_is_too_large_for_its_lease_ends_that_all_the_same() -> None:
    it = leases(0.0, 0.0)
    assert it.use(1, 4, 101, 1.0) is None
    assert it.give_back_too_small(1, 1.0) == ["l1"]
    assert it.give_back_too_small(1, 1.0) == []
    assert it.sequences == 4


def test_a_group_that_comes_after_its_lease_was_given_back_teaches_to_wait_longer() -> None:
    it = leases(0.0)
    assert it.give_back_overdue(61.0, silent=False) == ["l0"], "nothing is known of how long it takes"
    assert it.use(7, 4, 1, 9000.0) is None, "of another client"
    assert it.use(0, 4, 1, 300.0) is None
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
