"""Strategies: their formulas, late and repeated feedback, state, determinism."""

import math
import sys
import textwrap
import types

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.known_strategies import STRATEGIES
from lachesis.pipeline.curriculum.logic.learner import PoolLearner, feedback_of
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.schedules import bins_by_rank
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool, Strategy
from lachesis.pipeline.errors import SettingsChangedError
from lachesis.schemas.annotations import GroupReward
from lachesis.schemas.errors import ConfigError, DataError, SchemaError

ALL = sorted(STRATEGIES)
ITEMS = ItemPool(60, np.arange(60.0)[::-1].copy(), np.arange(60, dtype=np.int32) % 3, ("a", "b", "c"))


def make(strategy, items=ITEMS, **config):
    return load_strategy(items, CurriculumConfig(strategy=strategy, **config))


def result(i, item, success, step=0, n=8, **fields):
    return ItemFeedback(id=f"g{i}", env="e", item=item, skill=None, n=n, success=success, policy_step=step, **fields)


def history(n=300, seed=0):
    rng = np.random.default_rng(seed)
    return [result(i, int(rng.integers(60)), float(rng.integers(9)) / 8, step=i // 10) for i in range(n)]


@pytest.mark.parametrize("name", ALL)
def test_weights_are_fit_to_draw_from_before_and_after_feedback(name):
    strategy = make(name, total_steps=30)
    for feedback in [None, *history()]:
        if feedback is not None:
            assert strategy.observe(feedback)
    snapshot = strategy.snapshot()
    assert snapshot.weights.dtype == np.float32
    assert snapshot.weights.shape == (60,)
    assert np.isfinite(snapshot.weights).all()
    assert snapshot.id.startswith("300-")
    assert len({draw.item for draw in strategy.sample(8, np.random.default_rng(0))}) == 8
    assert all(math.isfinite(value) for value in strategy.metrics().values())


@pytest.mark.parametrize("name", ALL)
def test_state_round_trip_at_any_point_continues_alike(name):
    events = history()
    whole, first = make(name), make(name)
    for feedback in events:
        whole.observe(feedback)
    for feedback in events[:137]:
        first.observe(feedback)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(first.state_dict()))
    second = make(name)
    second.load_state_dict(state)
    for feedback in events[100:]:  # with redelivery
        second.observe(feedback)
    assert second.snapshot().id == whole.snapshot().id
    assert second.sample(8, np.random.default_rng(3)) == whole.sample(8, np.random.default_rng(3))


@pytest.mark.parametrize("name", ALL)
def test_repeats_and_uninformative_feedback_change_no_state(name):
    strategy = make(name)
    strategy.observe(result(0, 3, 0.25))
    before = strategy.snapshot().id
    assert not strategy.observe(result(0, 3, 1.0))
    assert not strategy.observe(result(1, 3, None, status="infrastructure"))
    assert not strategy.observe(result(2, 3, 0.0, status="infrastructure"))
    assert not strategy.observe(result(3, 3, None, status="unscorable"))
    assert strategy.snapshot().id == before
    assert strategy.metrics()["curriculum/repeated"] == 1
    assert strategy.metrics()["curriculum/uninformative"] == 3


@pytest.mark.parametrize(
    "bad", [{"item": 60}, {"item": -1}, {"success": 1.1}, {"success": math.nan}, {"success": -0.1}, {"n": 0}, {"n": -8}]
)
@pytest.mark.parametrize("name", ALL)
def test_bad_feedback_is_refused_and_leaves_the_state_untouched(name, bad):
    strategy = make(name)
    before = strategy.state_dict()
    with pytest.raises(DataError, match="feedback g0"):
        strategy.observe(result(0, bad.get("item", 1), bad.get("success", 0.5), n=bad.get("n", 8)))
    assert strategy.state_dict() == before


def test_late_feedback_counts_less_and_then_not_at_all():
    def moved(age, n=8):
        strategy = make("irt", ItemPool(1))
        strategy.observe(result(0, 0, None, step=100, status="infrastructure"))
        taught = strategy.observe(result(1, 0, 1.0, step=100 - age, n=n))
        return taught, strategy.arrays()["difficulty"][0], strategy.arrays()["ability"][0]

    fresh, half, gone = moved(0), moved(8), moved(33)
    assert fresh[1] < half[1] < 0
    assert half[1] == moved(0, n=4)[1], "it counts as half as many samples"
    assert half[2] == pytest.approx(fresh[2] / 2)
    assert gone == (False, 0.0, 0.0)


def test_memory_of_ids_is_bounded():
    strategy = make("uniform", remembered=10)
    for i in range(50):
        strategy.observe(result(i, 0, 0.5))
    assert len(strategy.state_dict()["ids"]) == 10
    assert not strategy.observe(result(49, 0, 0.5))


@pytest.mark.parametrize(("items", "bins"), [(100, 5), (7, 7), (101, 10), (1_000, 3)])
def test_bins_have_equal_sizes(items, bins):
    sizes = np.bincount(bins_by_rank(np.arange(items), bins))
    assert len(sizes) == bins
    assert sizes.max() - sizes.min() <= 1


def test_easy_first_opens_up_from_easy_to_even():
    strategy = make("easy_first", total_steps=100, bins=3)
    start = strategy.weights()
    easy, hard = start[40:].sum(), start[:20].sum()  # difficulty falls with the index
    assert hard / easy == pytest.approx(math.exp(-2))
    strategy.observe(result(0, 0, 0.5, step=100))
    assert strategy.weights() == pytest.approx(np.full(60, 1 / 60))


def test_competence_reaches_a_growing_share_of_the_easiest():
    strategy = make("competence", total_steps=100, initial_competence=0.1)
    assert np.flatnonzero(strategy.weights()).tolist() == list(range(54, 60))
    strategy.observe(result(0, 0, 0.5, step=25))
    assert strategy.weights().sum() == int(60 * math.sqrt(25 * 0.99 / 100 + 0.01))
    strategy.observe(result(1, 0, 0.5, step=1000))
    assert strategy.weights().sum() == 60


def test_pools_by_latest_result():
    strategy = make("pools")
    for i, success in enumerate([0.25, 0.3, 0.75, 0.8]):
        strategy.observe(result(i, i, success))
    assert strategy.weights()[:5].tolist() == [0.2, 1.0, 1.0, 0.2, 1.0]


def test_sec_moves_towards_arms_with_mixed_results():
    strategy = make("sec", bins=2)
    for i in range(200):
        item = i % 60
        strategy.observe(result(i, item, 0.5 if item % 3 == 1 else 1.0))
    share = strategy.weights().reshape(20, 3).sum(axis=0)
    assert share[1] > 0.9


def test_irt_by_hand():
    strategy = make("irt", ItemPool(2))
    strategy.observe(result(0, 0, 1.0))
    arrays = strategy.arrays()
    difficulty = arrays["difficulty"][0]
    p = 1 / (1 + math.exp(difficulty))
    assert difficulty / 25 + 8 * (1.0 - p) == pytest.approx(0.0), "the most likely difficulty after 8 of 8"
    assert difficulty == pytest.approx(-3.914, abs=1e-3)
    assert arrays["variance"] == pytest.approx([1 / (1 / 25 + 8 * p * (1 - p)), 25.0])
    assert arrays["ability"].tolist() == [0.1]
    evidence = [arrays[name][0] for name in ("passes", "passes_ability", "failures", "failures_ability")]
    assert evidence == [8.0, 0.0, 0.0, 0.0]
    x = np.linspace(-60, 60, 120_001)
    sound = math.log((np.exp(-x * x / 50) / (1 + np.exp(x)) ** 8).sum() / np.exp(-x * x / 50).sum())
    chance = math.log(0.5 * 0.5**8 + 0.5 / 9)  # under a coin, or any other constant: each of 9 outcomes alike
    before = math.log(0.3 / 0.7)
    assert arrays["odds"] == pytest.approx([before + chance - sound, before])
    assert (arrays["successes"].tolist(), arrays["samples"].tolist()) == ([8.0, 0.0], [8.0, 0.0])
    stretch = np.sqrt(1 + math.pi / 8 * arrays["variance"])
    q = 1 / (1 + np.exp(-(0.1 - arrays["difficulty"]) / stretch))
    repeat = np.array([(1 / 2 / 1.5) ** 3, 1.0])  # half a pass of the 1.5 until repeats count fully
    weight = (repeat * 4 * q * (1 - q) / stretch) ** 3 / (1 + np.exp(arrays["odds"]))
    unseen = np.array([1.0, 2.0])
    assert strategy.weights() == pytest.approx(0.97 * weight / weight.sum() + 0.03 * unseen / 3)


@pytest.mark.parametrize("first", [1.0, 0.0])
def test_irt_weighs_results_that_contradict_each_other_alike(first):
    strategy = make("irt", ItemPool(2), wander=0.0, ability_rate=1e-9)
    strategy.observe(result(0, 0, first))
    strategy.observe(result(1, 0, 1.0 - first))
    assert strategy.success()[0] == pytest.approx(0.5)


def test_irt_expects_what_p_times_1_minus_p_is_on_average_under_the_error_of_a_difficulty():
    strategy = make("irt", ItemPool(50), explore=0.0, sharpness=1.0, chance=0.0)
    arrays = strategy.arrays()
    arrays["difficulty"][:], arrays["variance"][:] = (
        np.tile(np.linspace(-6, 6, 10), 5),
        np.repeat([0.01, 1, 4, 9, 25], 10),
    )
    z = np.linspace(-8, 8, 4001)
    p = 1 / (1 + np.exp(arrays["difficulty"][:, None] + np.sqrt(arrays["variance"])[:, None] * z))
    expected = (4 * p * (1 - p) * np.exp(-z * z / 2)).sum(axis=1) / np.exp(-z * z / 2).sum()
    weights = strategy.weights()
    assert weights * (expected.sum() / weights.sum()) == pytest.approx(expected, abs=0.04)


def follow(chance_decides, abilities, rate=0.5, items=60, seed=0):
    """Show every item at each of the abilities; item 0 passes at `rate` if chance decides it."""
    rng = np.random.default_rng(seed)
    strategy = make("irt", ItemPool(items), explore=0.0)
    difficulty = np.linspace(-3.0, 3.0, items)
    difficulty[0] = 0.0
    for step, ability in enumerate(abilities):
        p = 1 / (1 + np.exp(difficulty - ability))
        p[0] = rate if chance_decides else p[0]
        for item in range(items):
            strategy.observe(result(f"{step}-{item}", item, rng.binomial(8, p[item]) / 8, step=step))
    return strategy


@pytest.mark.slow
@pytest.mark.parametrize("to", [-2.5, 2.5])
@pytest.mark.parametrize("rate", [0.5, 0.3])
def test_irt_finds_what_chance_decides_whichever_way_the_ability_goes(to, rate):
    abilities = np.linspace(-to, to, 20)
    coin, sound = (follow(decides, abilities, rate).arrays()["odds"] for decides in (True, False))
    assert coin[0] > 0.5
    assert sound[0] < -1.5
    assert np.mean(coin[1:] < 0) > 0.85, "the others are sound"


def test_irt_weighs_by_the_probability_that_an_item_is_sound():
    strategy = make("irt", ItemPool(2), explore=0.0)
    strategy.arrays()["odds"][:] = [-3.0, 3.0]
    sound, chance = strategy.weights()
    assert chance / sound == pytest.approx(math.exp(-3.0))
    for i in range(10):  # it was solved half of the time; a learner that moves on makes it sound again
        strategy.observe(result(i, 1, min(1.0, 0.3 + 0.1 * i)))
    assert strategy.arrays()["odds"][1] < 3.0
    off = make("irt", ItemPool(2), explore=0.0, chance=0.0)
    off.observe(result(0, 0, 0.5))
    off.observe(result(1, 1, 0.5))
    assert off.arrays()["samples"].tolist() == [0.0, 0.0]
    assert off.metrics()["curriculum/drawn_chance"] == 0.0


@pytest.mark.slow
def test_irt_keeps_to_what_is_half_solved_while_the_learner_learns_nothing():
    strategy = follow(chance_decides=False, abilities=[0.0] * 200)
    weights, far = strategy.weights(), np.abs(np.linspace(-3.0, 3.0, 60))
    far[0] = 0.0
    assert weights[far < 0.5].mean() > 3 * weights[far > 2.5].mean()


@pytest.mark.parametrize("first", range(9))
def test_irt_does_not_starve_a_sound_item_after_one_lucky_or_unlucky_group(first):
    strategy = make("irt", ItemPool(100), explore=0.0)
    for i in range(1, 100):  # all others do as a coin would
        strategy.observe(result(f"other{i}", i, 0.5))
    strategy.observe(result(0, 0, first / 8))
    seldom = {0: 0.1, 1: 0.4}.get(min(first, 8 - first), 1.0)  # of 128 such groups one has 0 or 8 of 8, 8 have 1 or 7
    assert strategy.weights()[0] * 100 > 0.1 * seldom
    strategy.observe(result(1, 0, 0.5))
    assert strategy.weights()[0] * 100 > 0.5, "the second group is what it should be"


@pytest.mark.slow
def test_irt_draws_all_sound_items_of_a_small_pool_for_epochs():
    rng = np.random.default_rng(0)
    difficulty, coin = rng.normal(0.0, 2.0, 128), np.arange(128) % 12 == 0
    strategy = make("irt", ItemPool(128))
    for step in range(150):
        p = np.where(coin, 0.5, 1 / (1 + np.exp(difficulty + 1.0 - step / 75)))
        for n, item in enumerate(draw.item for draw in strategy.sample(16, rng)):
            strategy.observe(result(f"{step}-{n}", item, rng.binomial(8, p[item]) / 8, step=step))
    weights = strategy.weights()
    useful = ~coin & (p > 0.3) & (p < 0.7)
    assert useful.sum() > 20
    assert (weights[useful] < 0.1 / 128).mean() <= 0.05
    assert strategy.metrics()["curriculum/effective_items"] > 32
    assert weights[coin].sum() < coin.mean(), "coins are drawn less than evenly, for all their even odds"


def draw_half_a_pass(items=2000, **config):
    """Return the share of groups that were of an item met before, and the mean of p(1-p) of all."""
    rng = np.random.default_rng(0)
    difficulty = rng.normal(0.0, 3.0, items)
    strategy = make("irt", ItemPool(items), **config)
    met, repeats, spread = set(), 0, []
    for step in range(items // 2 // 16):
        for n, item in enumerate(draw.item for draw in strategy.sample(16, rng)):
            p = 1 / (1 + math.exp(difficulty[item] + 1.0))
            repeats += item in met
            met.add(item)
            spread.append(p * (1 - p))
            strategy.observe(result(f"{step}-{n}", item, rng.binomial(8, p) / 8, step=step))
    return repeats / len(spread), np.mean(spread)


def test_irt_meets_a_large_pool_once_before_it_comes_back_to_what_is_half_solved():
    default, at_once = draw_half_a_pass(), draw_half_a_pass(first_pass=0.0)
    assert default[0] < 0.05
    assert at_once[0] > 0.3
    assert at_once[1] > default[1], "which pays only where repeats teach as much"


def test_irt_prefers_a_repeat_to_an_item_that_is_hopeless_by_its_prior():
    strategy = make("irt", ItemPool(101, np.append(np.zeros(100), 1e3)), explore=0.0)
    for i in range(100):
        strategy.observe(result(i, i, 0.5))
    weights = strategy.weights()
    assert weights[100] < 0.01 * weights[:100].mean()


def test_irt_takes_repeats_for_as_good_from_the_first_passes_on():
    default, at_once = make("irt"), make("irt", first_pass=0.0)
    for n, feedback in enumerate(history(n=90)):
        differs = default.snapshot().id != at_once.snapshot().id
        assert differs == (0 < n < 90), "60 items, 1.5 passes"
        default.observe(feedback)
        at_once.observe(feedback)
    assert default.snapshot().id == at_once.snapshot().id


def test_irt_counts_passes_over_what_is_drawn():
    held_out = make("irt", ItemPool(60, held_out=np.arange(2, 60)))
    for i in range(3):
        held_out.observe(result(i, 0, 0.5))
    at_once = make("irt", ItemPool(60, held_out=np.arange(2, 60)), first_pass=0.0)
    for i in range(3):
        at_once.observe(result(i, 0, 0.5))
    assert held_out.snapshot().id == at_once.snapshot().id


groups = st.tuples(st.integers(0, 2), st.floats(0, 1), st.integers(1, 1 << 40), st.integers(0, 40))


@given(st.lists(groups, max_size=40), st.sampled_from([0.0, 0.15, 100.0]), st.sampled_from([0.0, 1e-300, 0.3, 0.999]))
def test_irt_stays_fit_to_draw_from_and_to_store_whatever_the_results(results, wander, chance):
    strategy = make("irt", ItemPool(3), wander=wander, chance=chance)
    for n, (item, success, samples, step) in enumerate(results):
        strategy.observe(result(n, item, success, step=step, n=samples))
    assert np.abs(strategy.arrays()["odds"]).max() <= 3.0
    again = make("irt", ItemPool(3), wander=wander, chance=chance)
    again.load_state_dict(strategy.state_dict())
    assert again.snapshot().id == strategy.snapshot().id
    assert np.isfinite(again.snapshot().weights).all()


def test_irt_starts_from_a_prior():
    spread = np.array([-3.0, 0.0, 3.0])
    told, untold, even = (
        make("irt", ItemPool(3, spread)),
        make("irt", ItemPool(3)),
        make("irt", ItemPool(3, np.ones(3))),
    )
    assert np.std(told.arrays()["difficulty"]) == pytest.approx(2.0)
    assert told.arrays()["variance"].tolist() == [4.0] * 3
    for strategy in (untold, even):
        assert strategy.arrays()["difficulty"].tolist() == [0.0] * 3
        assert strategy.arrays()["variance"].tolist() == [25.0] * 3


def test_irt_draws_what_is_neither_solved_nor_hopeless_and_lets_impossible_items_fade():
    rng = np.random.default_rng(0)
    difficulty = np.repeat([-4.0, 0.0, 4.0], 20)
    strategy = make("irt", ItemPool(60))
    for i in range(1200):
        item = strategy.sample(1, rng)[0].item
        p = 1 / (1 + math.exp(difficulty[item]))
        strategy.observe(result(i, item, rng.binomial(8, p) / 8))
    share = strategy.weights().reshape(3, 20).sum(axis=1)
    assert share[1] > 0.8
    assert share[2] < 0.1


def test_irt_ability_moves_every_item_of_the_skill_and_no_other():
    strategy = make("irt", ItemPool(3, skill=np.array([0, 0, 1], np.int32), skills=("x", "y")))
    before = strategy.success()
    strategy.observe(result(0, 0, 1.0))
    after = strategy.success()
    assert after[1] > before[1]
    assert after[2] == before[2]


def test_extreme_difficulties_still_draw():
    strategy = make("irt", ItemPool(2))
    strategy.arrays()["difficulty"][:] = [1e6, -1e6]
    assert strategy.snapshot().weights.sum() == pytest.approx(2.0)


def drawn(curriculum, steps=40):
    """Mean difficulty of the first and the last quarter of draws, where items pass as their difficulty says."""
    rng = np.random.default_rng(5)
    strategy = load_strategy(ItemPool(200, np.linspace(-4.0, 4.0, 200)), curriculum)
    found = []
    for step in range(steps):
        for item in [draw.item for draw in strategy.sample(16, rng)]:
            difficulty = strategy.items.difficulty[item]
            found.append(difficulty)
            success = rng.binomial(8, 1 / (1 + math.exp(difficulty + 2.0))) / 8  # a weak learner
            strategy.observe(result(len(found), item, success, step=step))
    quarter = len(found) // 4
    return np.mean(found[:quarter]), np.mean(found[-quarter:])


def test_a_strategy_chosen_on_the_command_line_changes_what_is_drawn():
    means = {}
    for name in ALL:
        sets = [f"curriculum.strategy={name}", "curriculum.total_steps=40"]
        config = load(run_config_type(), sets=sets).config.curriculum
        assert config.strategy == name
        means[name] = drawn(config)
    even = means.pop("uniform")
    assert even == pytest.approx((0.0, 0.0), abs=0.5)
    assert means["competence"][0] < means["easy_first"][0] < even[0] - 0.5  # they open up from easy to even
    assert means["easy_first"][0] < means["easy_first"][1] - 0.4
    assert means["competence"][0] < means["competence"][1] - 0.4
    for name in ("pools", "sec", "irt"):  # they find what the learner half knows: difficulties around -2
        assert means[name][1] < even[1] - 0.5
    assert means["irt"][1] == pytest.approx(-2.0, abs=0.5)


def test_a_strategy_of_ones_own_is_found_by_its_module(tmp_path, monkeypatch):
    source = """
    import numpy as np
    from lachesis.pipeline.curriculum.logic.strategy import Strategy

    class FewestResults(Strategy):
        def __init__(self, items, config):
            super().__init__(items, config)
            self._results = np.zeros(items.count, np.int64)

        def weights(self):
            return 1.0 / (1.0 + self._results)

        def learn(self, feedback, success, discount):
            self._results[feedback.item] += 1

        def arrays(self):
            return {"results": self._results}
    """
    (tmp_path / "few_results.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    config = load(run_config_type(), sets=["curriculum.strategy=few_results:FewestResults"]).config.curriculum
    first, second = load_strategy(ItemPool(4), config), load_strategy(ItemPool(4), config)
    for n in range(3):
        first.observe(result(n, 1, 0.5))
    assert first.snapshot().weights.tolist() == pytest.approx([4 / 3.25, 1 / 3.25, 4 / 3.25, 4 / 3.25])
    second.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(first.state_dict())))
    assert second.snapshot().id == first.snapshot().id


def test_a_name_that_is_no_strategy_is_refused(monkeypatch):
    class Reverse(Strategy):
        def weights(self):
            return np.arange(self.items.count, dtype=float) + 1

    module = types.ModuleType("my_curricula")
    module.Reverse, module.number = Reverse, 3
    monkeypatch.setitem(sys.modules, "my_curricula", module)
    assert make("my_curricula:Reverse").snapshot().weights[59] > 1
    for wrong in ("irtt", "my_curricula:number", "my_curricula:none", "no_such:Strategy"):
        with pytest.raises(ConfigError, match=r"curriculum\.strategy"):
            make(wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"count": 0}, {"count": 2, "difficulty": np.ones(3)}, {"count": 1, "difficulty": np.array([np.nan])},
     {"count": 1, "skill": np.array([1], np.int32)}, {"count": 1, "skill": np.array([-1], np.int32)}],
)  # fmt: skip
def test_wrong_items_are_refused(wrong):
    with pytest.raises(ConfigError, match="items"):
        ItemPool(**wrong)


def test_state_of_another_strategy_or_environment_is_refused():
    state = make("irt").state_dict()
    with pytest.raises(SettingsChangedError) as strategy:
        make("pools").load_state_dict(state)
    assert "curriculum.strategy is 'pools' now" in str(strategy.value)
    assert "Set curriculum.strategy back to 'irt', or start a new run" in str(strategy.value)
    with pytest.raises(SettingsChangedError) as items:
        make("irt", ItemPool(3)).load_state_dict(state)
    assert "there are 3 items now, but there were 60" in str(items.value)
    assert "Set the environment's params back, or start a new run" in str(items.value)
    for error in (strategy.value, items.value):
        assert not any(place.partition(":")[2] in str(error) for place in STRATEGIES.values()), (
            "a class is no word of the user's"
        )


@pytest.mark.parametrize(("successes", "samples"), [(2.0, 1.0), (-1.0, 1.0), (1e16, 1e16), (0.0, math.nan)])
def test_counts_that_cannot_be_are_refused(successes, samples):
    state = make("irt").state_dict()
    counts = {"successes": np.full(60, successes).tobytes(), "samples": np.full(60, samples).tobytes()}
    with pytest.raises(SchemaError, match="holds what cannot be"):
        make("irt").load_state_dict({**state, "arrays": {**state["arrays"], **counts}})


def test_a_state_of_a_build_that_kept_other_arrays_is_refused_and_nothing_taken_over():
    strategy = make("irt")
    strategy.observe(result(0, 3, 0.25))
    before = strategy.state_dict()
    older = {name: value for name, value in before["arrays"].items() if name not in ("odds", "successes", "samples")}
    with pytest.raises(ConfigError, match="has no odds: another build of lachesis wrote it"):
        strategy.load_state_dict({**before, "arrays": {**older, "reference": bytes(480)}})
    assert strategy.state_dict() == before


@pytest.mark.parametrize(
    "setting",
    [
        {"max_age": 0},
        {"temperature": 0.0},
        {"explore": 1.5},
        {"bins": 0},
        {"chance": -0.1},
        {"chance": 1.0},
        {"wander": 101.0},
        {"first_pass": -1.0},
        {"first_pass": float("nan")},
        {"deviation": 101.0},
        {"prior_spread": 0.0},
    ],
)
def test_wrong_settings_name_themselves(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        CurriculumConfig(**setting)


def test_a_prior_has_a_spread_and_an_error_of_its_own():
    strategy = make("irt", ItemPool(4, np.array([10.0, 20.0, 30.0, 40.0])), prior_spread=3.0, prior_deviation=0.5)
    arrays = strategy.arrays()
    assert np.std(arrays["difficulty"]) == pytest.approx(3.0)
    assert arrays["variance"].tolist() == [0.25] * 4


@pytest.mark.parametrize("name", ["easy_first", "competence"])
@pytest.mark.parametrize("difficulty", [None, np.full(4, 2.0)])
def test_without_difficulties_nothing_goes_from_easy_to_hard(name, difficulty):
    with pytest.raises(ConfigError, match=f"'{name}' goes from easy to hard, .* no difficulty that differs: give"):
        make(name, ItemPool(4, difficulty))


@pytest.mark.parametrize(("scores", "n", "success"), [([1.0, None, 0.0, None], 2, 0.5), ([None, None], 0, None)])
def test_samples_without_a_score_do_not_count(scores, n, success):
    reward = GroupReward(
        group="0" * 32, seq=1, item="i", index=3, policy_step=0, verdict="trainable", scores=scores,
        rewards=scores, advantages=scores, snapshot="s", mean=None, std=None, range=None, n_valid=n, success=0.5,
        tokens=100,
    )  # fmt: skip
    feedback = feedback_of("e", reward)
    assert (feedback.n, feedback.success) == (n, success)
    assert feedback.status == ("scored" if n else "unscorable")
    assert feedback.tokens == 100 / len(scores), "of a sample, scored or not"
    assert feedback_of("e", msgspec.structs.replace(reward, tokens=None)).tokens is None


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_state_that_cannot_be_is_refused_before_it_is_taken_over(name):
    strategy = load_strategy(ItemPool(4, np.arange(4.0)), CurriculumConfig(strategy=name))
    state = strategy.state_dict()
    wrong = [{"step": -1}, {"counts": [1, 2]}, {"counts": [-1, 0, 0, 0]}, {"ids": [1]}, {"arrays": []}]
    wrong += [{"arrays": {**state["arrays"], key: value[:-1]}} for key, value in state["arrays"].items()]
    wrong += [{"arrays": {**state["arrays"], key: b"\xff" * len(value)}} for key, value in state["arrays"].items()]
    for changes in wrong:
        with pytest.raises(SchemaError):
            strategy.load_state_dict({**state, **changes})
    assert strategy.state_dict() == state


# the pool is another than at the last start


@pytest.mark.parametrize(
    ("name", "is_told"),
    [*((name, True) for name in ALL), *((name, False) for name in ("irt", "gain_per_token", "sec", "pools"))],
)
def test_what_is_known_of_an_item_goes_with_it_into_another_pool(name, is_told):
    """`is_told`: whether the pool knows its difficulties; else they are predicted from features."""
    keys = np.arange(100, 160, dtype=np.uint64)
    order = np.random.default_rng(1).permutation(60)[:40]

    def pool(places):
        count = len(places)
        about = {"difficulty": ITEMS.difficulty[places]} if is_told else {"features": np.eye(60, 6, dtype="f4")[places]}
        return ItemPool(count, skill=ITEMS.skill[places], skills=ITEMS.skills, keys=keys[places], **about)

    whole = PoolLearner("e", pool(np.arange(60)), CurriculumConfig(strategy=name))
    for feedback in history():
        whole.observe(feedback, str(feedback.item))
    other = PoolLearner("e", pool(order), CurriculumConfig(strategy=name))
    other.load_state(whole.state())
    assert "40 of 60 are known again" in other.moved
    before, after = whole.strategy.arrays(), other.strategy.arrays()
    for array in after:
        if after[array].shape[:1] == (40,):
            np.testing.assert_array_equal(after[array], before[array][order])
        elif after[array].shape == before[array].shape:
            np.testing.assert_array_equal(after[array], before[array])
