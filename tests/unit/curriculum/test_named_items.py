"""Items that clients name: places in a pool that grows, the same after any restart, within bounds of bytes."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from stages import run_curriculum

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.known_strategies import STRATEGIES
from lachesis.pipeline.curriculum.logic import learner as limits
from lachesis.pipeline.curriculum.logic.learner import NamedItemLearner
from lachesis.pipeline.curriculum.logic.strategy import ItemPool, Strategy
from lachesis.pipeline.errors import SettingsChangedError
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import Commit, GroupReward, RewardEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import CurriculumSnapshot
from lachesis.schemas.errors import ConfigError, SchemaError

CONFIG = RunConfig(run="r", environments={"shop": EnvironmentConfig(kind="gateway")})


def reward(n, item, success=0.5, **changes):
    fields = {
        "group": f"{n:032x}", "seq": n + 1, "item": item, "policy_step": 0, "verdict": "trainable",
        "scores": [0.0] * 4, "rewards": [0.0] * 4, "advantages": [0.0] * 4, "snapshot": "s", "mean": 0.0, "std": 0.0,
        "range": 0.0, "n_valid": 4, "success": success,
    }  # fmt: skip
    return GroupReward(**fields | changes)


def learner(strategy="irt", **settings):
    return NamedItemLearner("shop", CurriculumConfig(strategy=strategy, **settings))


def learn(one, *rewards):
    for each in rewards:
        feedback = one.feedback_of(each)
        if feedback is not None:
            one.observe(feedback, each.item)


def by_name(one):
    *weights, unknown = one.weights().weights.tolist()
    return dict(zip(one.names(), weights, strict=True)) | {None: unknown}


def test_a_half_solved_item_outweighs_a_solved_one_and_the_unknown_have_the_starting_weight():
    one = learner()
    assert by_name(one) == {None: 1.0}
    learn(one, *(reward(2 * n, "half") for n in range(30)), *(reward(2 * n + 1, "solved", 1.0) for n in range(30)))
    found = by_name(one)
    assert found["half"] > found[None] > found["solved"]
    learn(one, reward(100, "nobody could judge", None))
    assert by_name(one)["nobody could judge"] == pytest.approx(by_name(one)[None], rel=0.01)


@pytest.mark.parametrize("strategy", ["irt", "gain_per_token", "pools", "uniform"])
def test_a_pool_that_grew_weighs_its_items_as_one_that_was_large_from_the_start(strategy):
    rng = random.Random(0)
    rewards = [reward(n, f"item {rng.randrange(200)}", rng.randint(0, 4) / 4) for n in range(900)]
    one = learner(strategy)
    learn(one, *rewards)
    names = one.names()
    assert len(names) > 150
    assert one.strategy.items.count == 256

    whole = NamedItemLearner("shop", CurriculumConfig(strategy=strategy))
    whole.strategy = type(whole.strategy)(ItemPool(256), whole.strategy.config)
    for each in rewards:
        whole.strategy.observe(replace(one.feedback_of(each), item=names.index(each.item)))
    whole.strategy.items = one.strategy.items
    shown = len(names) + 1
    expected = whole.strategy.snapshot().weights[:shown]
    assert np.array_equal(one.weights().weights, expected * np.float32(shown / expected.sum(dtype=np.float64)))


@pytest.mark.parametrize("seed", range(5))
def test_state_and_deltas_give_the_same_learner_again_to_the_bit(seed):
    rng = random.Random(seed)
    one, state, deltas = learner(), None, []
    for n in range(400):
        learn(one, reward(n, f"item {rng.randrange(90)}", rng.choice([None, 0.0, 0.5, 1.0])), reward(n, "again"))
        if rng.random() < 0.2:
            deltas.append(one.take_delta())
        if rng.random() < 0.02:
            deltas.append(one.take_delta())
            state, deltas = one.state(), []
    deltas.append(one.take_delta())
    assert len(one.names()) > 64
    again = learner()
    if state is not None:
        again.load_state(state)
    for delta in deltas:
        again.apply_delta(delta)
    assert again.state() == one.state()
    assert again.weights().id == one.weights().id
    assert again.names() == one.names()
    learn(again, reward(1000, "new"))
    assert again.take_delta() == msgspec.msgpack.encode((["new"], [again.feedback_of(reward(1000, "new"))]))


def test_every_change_of_names_is_another_version():
    one, seen = learner("uniform"), set()
    for n in range(70):
        seen.add(one.weights().id)
        learn(one, reward(n, f"item {n}", None))
    assert len(seen) == 70


def test_names_are_bounded_in_number_and_bytes_and_unnamed_items_take_no_place(monkeypatch):
    one = learner("pools")
    learn(one, reward(0, "prompt-0123456789abcdef"), reward(1, "x" * 129), reward(2, "\x1b[2J"), reward(3, ""))
    assert one.names() == []
    monkeypatch.setattr(limits, "MAX_NAMED_ITEMS", 3)
    learn(one, *(reward(10 + n, f"item {n}", 1.0) for n in range(5)))
    assert one.names() == ["item 0", "item 1", "item 2"]
    learn(one, reward(20, "item 2"))
    assert by_name(one)["item 2"] > by_name(one)["item 1"], "what is known goes on to be learned"
    monkeypatch.setattr(limits, "MAX_NAMED_ITEMS", 100)
    monkeypatch.setattr(limits, "MAX_NAMES_BYTES", 6 * 3 + 4)
    learn(one, reward(30, "größe"), reward(31, "abcd"), reward(32, "e"))
    assert one.names() == ["item 0", "item 1", "item 2", "abcd"]
    again = learner("pools")
    again.load_state(one.state())
    learn(again, reward(33, "e"))
    assert again.names() == one.names()


class FixedTable(Strategy):
    """A strategy of a user that cannot grow: its table is neither by item nor of one size."""

    def arrays(self):
        return {"table": np.zeros(self.items.count // 2)}


def test_a_strategy_that_cannot_grow_says_which_array(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "own", f"{__name__}:FixedTable")
    one = learner("own")
    with pytest.raises(ConfigError, match=r"FixedTable: its array table has the shape \(32,\) for 64 items"):
        learn(one, *(reward(n, f"item {n}") for n in range(64)))


def test_a_state_of_another_strategy_and_a_malformed_one_are_refused():
    one = learner("pools")
    learn(one, reward(0, "a"))
    with pytest.raises(SettingsChangedError, match=r"curriculum\.strategy is 'irt' now"):
        learner("irt").load_state(one.state())
    for broken in (b"\xc1", b"", msgspec.msgpack.encode([["a"], {}]), msgspec.msgpack.encode([1, 2])):
        with pytest.raises(SchemaError, match="curriculum state"):
            learner("pools").load_state(broken)
    feedback = msgspec.to_builtins(one.feedback_of(reward(1, "b")))
    for broken in (b"\xc1", msgspec.msgpack.encode([feedback]), msgspec.msgpack.encode(([], [feedback]))):
        with pytest.raises(SchemaError, match="curriculum delta"):
            learner("pools").apply_delta(broken)


async def publish(lab, rewards, msg_id):
    event = RewardEvent(
        run="r", env="shop", revision="live", advantage="grpo", groups=rewards,
        commit=Commit(term="t", index=0, cursors={}, delta=b"", crc32=0),
    )  # fmt: skip
    await lab.bus.publish(subjects.event("reward", "r", "live", "shop"), encode(event), msg_id=msg_id)


async def snapshot(lab):
    entry = await lab.bus.value(keys.curriculum("live", "shop"))
    return None if entry is None else decode(CurriculumSnapshot, entry.value)


def published(lab, observed):
    async def condition():
        found = await snapshot(lab)
        return found is not None and found.observed == observed

    return condition


@pytest.mark.extension
async def test_the_service_publishes_weights_by_name_and_the_same_after_kills(lab):
    def curriculum(service):
        return run_curriculum(service, CONFIG)

    rng = random.Random(0)
    for n in range(100):
        await publish(lab, [reward(n, f"item {n * 7 % 80}", rng.randint(0, 4) / 4)], f"{n}")
    async with lab.running(curriculum, "curriculum"):
        await lab.until(published(lab, 100))
    calm = await snapshot(lab)
    assert calm.names == list(dict.fromkeys(f"item {n * 7 % 80}" for n in range(100)))
    assert len(calm.values()) == 81

    wild = type(lab)(type(lab.bus)())
    rng = random.Random(0)
    for n in range(100):
        await publish(wild, [reward(n, f"item {n * 7 % 80}", rng.randint(0, 4) / 4)], f"{n}")
        if n % 20 == 19:
            async with wild.running(curriculum, "curriculum") as service:
                await wild.until(published(wild, n + 1))
                service.kill()
    assert encode(await snapshot(wild)) == encode(calm)


@pytest.mark.extension
async def test_groups_without_a_name_are_counted_and_the_reason_is_said(lab):
    await publish(lab, [reward(0, "prompt-0123456789abcdef"), reward(1, "a")], "1")
    async with lab.running(lambda service: run_curriculum(service, CONFIG), "curriculum") as service:
        await lab.until(published(lab, 1))
        assert "shop: 1 groups name no item in group_overrides.curriculum_item" in service.vitals.status_text
    assert (await snapshot(lab)).names == ["a"]
