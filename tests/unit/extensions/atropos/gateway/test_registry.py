"""What the API tells environments of themselves and of each other."""

import pytest

from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.extensions.atropos.gateway.logic.registry import (
    MAX_REGISTRATIONS,
    Registry,
    describe_unmet_allocation,
    environment_of,
)
from lachesis.pipeline.extensions.atropos.gateway.policies import PolicyVersions
from lachesis.pipeline.extensions.atropos.gateway.protocol import RegisterEnv
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import DataError


def asked(name="words", **changes):
    fields = {"max_token_length": 100, "desired_name": name, "weight": 1.0, "group_size": 4, **changes}
    return RegisterEnv(**fields)


def test_names_count_and_ids_are_never_used_again():
    registry, first = Registry().register(asked(), "words")
    registry, second = registry.register(asked(), "words")
    assert [registry.of(n).name for n in (first, second)] == ["words_0", "words_1"]
    registry, third = registry.reset().register(asked(), "words")
    assert third not in (first, second)
    with pytest.raises(NotFoundError, match="register"):
        registry.of(first)


def test_weights_are_by_length_and_count_the_connected_alone():
    registry, one = Registry().register(asked(max_token_length=300), "words")
    registry, other = registry.register(asked("sums", max_token_length=100, min_batch_allocation=0.25), "sums")
    assert registry.weight(one) == pytest.approx(0.75)
    assert registry.unallocated() == pytest.approx(0.75)
    alone = registry.disconnect(other)
    assert alone.weight(one) == 1.0
    assert alone.unallocated() == 1.0
    assert alone.weight(other) == pytest.approx(1 / 3)
    assert registry.register(asked("none", weight=0.0), "none")[0].weight(2) == 0.01


def test_those_that_are_gone_make_room_and_nobody_else():
    registry = Registry()
    for _ in range(MAX_REGISTRATIONS):
        registry, _ = registry.register(asked(), "words")
    with pytest.raises(DataError, match="disconnect"):
        registry.register(asked(), "words")
    registry, number = registry.disconnect(3).register(asked(), "words")
    assert number == MAX_REGISTRATIONS
    assert 3 not in registry.registered
    assert len(registry.registered) == MAX_REGISTRATIONS


def test_an_environment_is_found_by_its_name():
    assert environment_of("my env/1", ["my_env_1"]) == "my_env_1"
    with pytest.raises(DataError, match=r"add \[environments.other\]"):
        environment_of("other", ["words"])


def test_a_policy_is_found_by_the_time():
    policies = PolicyVersions()
    assert policies.version_at(0) is None
    for step in (2, 0, 1):
        version = f"{step}-a-b"
        policies.record_version(
            PolicyRecord(
                run="r", version=version, weights="", tokenizer_hash="", written_ns=100 * step, earlier=["0-a-a"]
            )
        )
    assert [policies.version_at(t).version[0] for t in (-1, 0, 99, 100, 250)] == ["0", "0", "0", "1", "2"]
    assert policies.newest_version.version == "2-a-b"
    assert policies.newest_version.earlier == ["0-a-a"]
    assert {policies.version_at(t).earlier for t in (0, 100)} == {None}, "thousands of these are remembered"


@pytest.mark.parametrize(
    ("asked", "mix", "said"),
    [(None, {}, None), (0.5, {}, "mix is not set"), (0.5, {"words": 1.0}, None), (0.6, {"words": 1.0}, "gives it 50%"),
     (0.6, {"words": 3.0}, None), (0.2, {"sums": 9.0}, "gives it 10%")],
)  # fmt: skip
def test_a_minimum_that_the_mix_does_not_keep_is_named(asked, mix, said):
    found = describe_unmet_allocation(asked, "words", ["words", "sums"], mix)
    assert found is None if said is None else said in found
    assert describe_unmet_allocation(asked, "words", ["words"], mix) is None, "it is alone"
