"""Shares at saturation, in simulated time: environments of the gateway that want more than can be trained on."""

import pytest
from unit.extensions.atropos.gateway.simulation import Env, Trained, simulate


def assert_shares(trained: Trained, envs: dict[str, Env], *, since: int, until: int | None = None) -> None:
    total = sum(env.weight for env in envs.values())
    wanted = {name: env.weight / total for name, env in envs.items()}
    assert trained.shares(since, until) == pytest.approx(wanted, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("step_s", [0.0, 1.0])
@pytest.mark.parametrize(
    "envs",
    [
        {"a": Env(weight=1), "b": Env(weight=10)},
        {"a": Env(weight=1, clients=2), "b": Env(weight=3, clients=24)},
        {"a": Env(weight=1), "b": Env(weight=2), "c": Env(weight=4)},
        {"a": Env(weight=1, takes_s=0.25), "b": Env(weight=2), "c": Env(weight=4)},
        {"a": Env(samples=4, clients=24), "b": Env(samples=8), "c": Env(samples=16)},
        {"a": Env(), "b": Env(), "c": Env(), "d": Env(), "e": Env()},
    ],
    ids=["1:10", "few-and-many-clients", "1:2:4", "slow-and-fast", "groups-of-4-8-16", "five"],
)
def test_what_is_trained_holds_the_weights_counted_in_sequences(envs: dict[str, Env], step_s: float) -> None:
    size = {2: 44, 3: 28, 5: 40}[len(envs)] if max(env.samples for env in envs.values()) == 4 else 64
    trained = simulate(envs, batch_size=size, batches=60, step_s=step_s)
    assert_shares(trained, envs, since=20)
    assert trained.incomplete == []
    assert trained.worst <= 3 * size, "no more is outstanding than can be trained before it is stale"


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_the_shares_hold_whatever_staleness_is_allowed(max_staleness: int) -> None:
    envs = {"a": Env(weight=1), "b": Env(weight=2), "c": Env(weight=4, takes_s=2.0, clients=48)}
    trained = simulate(envs, batch_size=28, batches=45, step_s=0.5, max_staleness=max_staleness)
    assert_shares(trained, envs, since=15)
    assert trained.incomplete == []


def test_next_to_nothing_is_generated_in_vain_once_environments_compete() -> None:
    envs = {"a": Env(weight=1), "b": Env(weight=2), "c": Env(weight=4)}
    short, long = (simulate(envs, batch_size=28, batches=n, step_s=0.5) for n in (20, 60))
    assert long.stale == short.stale, "only what came before a lease was granted for it"
    assert sum(long.stale.values()) <= 4 * 36, "the first group of each client at most"


@pytest.mark.parametrize("env", [Env(clients=24), Env(clients=24, takes_s=2.0)], ids=["fast", "slow"])
def test_one_alone_that_makes_more_than_can_be_trained_generates_next_to_nothing_in_vain(env: Env) -> None:
    short, long = (simulate({"a": env}, batch_size=16, batches=n, step_s=1.0) for n in (20, 60))
    assert long.stale["a"] - short.stale["a"] <= 4, "some clients may find room, and make a group without a lease"
    assert long.incomplete == []
    pauses = [later - earlier for earlier, later in zip(long.formed_s[10:], long.formed_s[11:], strict=False)]
    assert max(pauses) < 1.5 + env.takes_s


def test_the_trainer_never_waits_for_environments_that_have_groups() -> None:
    envs = {"a": Env(weight=1), "b": Env(weight=3)}
    trained = simulate(envs, batch_size=32, batches=40, step_s=1.0)
    pauses = [later - earlier for earlier, later in zip(trained.formed_s[10:], trained.formed_s[11:], strict=False)]
    assert max(pauses) < 1.5


def test_one_that_has_too_little_for_its_share_leaves_the_rest_to_the_others() -> None:
    envs = {"a": Env(weight=1), "b": Env(weight=3, clients=1, takes_s=3.0)}
    trained = simulate(envs, batch_size=32, batches=40, step_s=1.0)
    assert 0.02 < trained.shares(10)["b"] < 0.1, "all that it makes"
    assert trained.incomplete == []
    assert trained.formed_s[-1] < 60, "no batch waits for it"


def test_one_that_comes_late_has_its_share_from_then_on() -> None:
    envs = {"a": Env(weight=1), "b": Env(weight=3, joins_s=20.0)}
    trained = simulate(envs, batch_size=32, batches=60, step_s=1.0)
    assert set(trained.shares(0, 18)) == {"a"}
    assert_shares(trained, envs, since=30)


def test_when_one_vanishes_the_others_go_on_with_all_of_the_room() -> None:
    envs = {"a": Env(weight=1), "b": Env(weight=3, takes_s=1.0, leaves_s=20.0)}
    trained = simulate(envs, batch_size=32, batches=60, step_s=1.0)
    assert set(trained.shares(45)) == {"a"}
    pauses = [later - earlier for earlier, later in zip(trained.formed_s, trained.formed_s[1:], strict=False)]
    assert max(pauses) < 10, "until its leases are given back: after a few times what its groups took"
    assert trained.incomplete == []


def test_a_batch_leaves_incomplete_only_if_no_groups_can_fill_it() -> None:
    odd = simulate({"a": Env(samples=3), "b": Env(samples=5)}, batch_size=32, batches=30, step_s=0.5)
    assert odd.incomplete == []
    never = simulate({"a": Env(samples=5), "b": Env(samples=5)}, batch_size=32, batches=10, step_s=0.5)
    assert [batch.total() for batch in never.batches] == [30] * 10
