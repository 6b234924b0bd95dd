"""An estimator of one's own: found in a user's folder, refused with a reason, live and in a replay to equal bits."""

from pathlib import Path

import pytest
from stages import run_normalizer, run_scorer

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.health.logic.advantages import AdvantageCheck
from lachesis.pipeline.health.logic.check import HealthWindow
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.normalizer.estimators.estimator import Estimator, RewardGroup
from lachesis.pipeline.normalizer.estimators.loader import (
    builtin_estimator,
    describe_estimator,
    group_advantage,
    load_estimator,
)
from lachesis.pipeline.normalizer.known_estimators import ESTIMATORS
from lachesis.pipeline.offline.replay.logic.fold import RewardFold
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.schemas.annotations import RewardEvent
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.services.preflight.loading import _load_checks
from lachesis.services.stage_settings import reward_settings

EXAMPLE = Path(__file__).parents[2] / "examples" / "above_median.py"

CODE = """
import lachesis

@lachesis.estimator(version="7", whitens=True)
def whitened(group): return group.centred

def bare(group, *, scale): return [scale * x for x in group.rewards]

def fails(group): raise RuntimeError("no " + str(group.n))
def short(group): return [0.0]
def nan(group): return [float("nan")] * group.n
def huge(group): return [1e9] * group.n
def text(group): return ["a"] * group.n
async def waits(group): return group.rewards
def by_length(group): return [float(n) for n in group.lengths]
def by_rating(group): return [x or 0.0 for x in group.ratings["style"]]
class Kind: pass
number = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def advantages(code: Path, name: str, rewards=(0.0, 1.0, None, 2.0), **settings):
    config = AdvantageConfig(estimator=f"{code}:{name}", **settings)
    return group_advantage(rewards, config, [1, 2, 3, 4], {"style": [0.5, None, 0.1, 0.2]})


def test_a_function_of_a_users_file_is_an_estimator(code: Path) -> None:
    assert advantages(EXAMPLE, "above_median").advantages == (-1.0, 0.0, None, 1.0)
    assert advantages(EXAMPLE, "above_median", params={"scale": 2.0}).advantages == (-2.0, 0.0, None, 2.0)
    assert advantages(code, "bare", params={"scale": 3.0}).advantages == (0.0, 3.0, None, 6.0)


def test_it_sees_lengths_and_ratings_of_the_samples_that_have_a_reward(code: Path) -> None:
    assert advantages(code, "by_length").advantages == (1.0, 2.0, None, 4.0)
    assert advantages(code, "by_rating").advantages == (0.5, 0.0, None, 0.2)


def test_it_is_not_asked_where_there_is_nothing_to_learn(code: Path) -> None:
    assert advantages(code, "fails", (1.0, 1.0, None, 1.0)).verdict == "zero_variance"
    assert advantages(code, "fails", (None, 1.0, None, None)).verdict == "unscorable"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "mine.py:fails@1: RuntimeError: no 3"),
        ("short", "returned 1 advantages for 3 rewards"),
        ("nan", "returned nan"),
        ("huge", "at most 1e"),
        ("text", "ValueError"),
    ],
)
def test_what_it_does_wrong_costs_its_group_with_the_reason(code: Path, name: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        advantages(code, name)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("none", {}, "has no 'none'"),
        ("number", {}, "is a int; give a function of a RewardGroup"),
        ("Kind", {}, "is a type; give a function"),
        ("waits", {}, "asynchronous"),
        ("bare", {}, "missing argument 'scale'"),
        ("bare", {"params": {"scael": 1}}, "unknown argument 'scael'; did you mean 'scale'"),
    ],
)
def test_what_is_no_estimator_is_refused_before_anything_runs(code: Path, name: str, settings, says: str) -> None:
    config = AdvantageConfig(estimator=f"{code}:{name}", **settings)
    with pytest.raises(ConfigError, match=says):
        load_estimator(config)
    run = RunConfig(environments={"sums": EnvironmentConfig(kind="x", advantage=config)})
    with pytest.raises(ConfigError, match=says):
        dict(_load_checks(run, set()))["environments.sums.advantage"]()


def test_a_place_that_does_not_exist_and_params_of_a_built_in_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load_estimator(AdvantageConfig(estimator=f"{tmp_path}/none.py:f"))
    with pytest.raises(ConfigError, match="module 'no_such_module_here' was not found"):
        load_estimator(AdvantageConfig(estimator="no_such_module_here:f"))
    with pytest.raises(ConfigError, match="of your own, not grpo"):
        AdvantageConfig(estimator="grpo", params={"x": 1})


def test_it_does_not_go_with_shaping() -> None:
    settings = EnvironmentConfig(kind="x", reward_config=RewardConfig(length_bounty_max=0.05))
    with pytest.raises(ConfigError, match="reward_config gives bonuses"):
        RunConfig(environments={"a": settings}, advantage=AdvantageConfig(estimator="m:f"))


def test_the_path_is_relative_to_the_file_that_names_it(tmp_path: Path, code: Path) -> None:
    (tmp_path / "run.toml").write_text('[advantage]\nestimator = "mine.py:bare"\nparams = { scale = 2.0 }\n')
    config = load(run_config_type(), file=tmp_path / "run.toml").config.advantage
    assert config.estimator == f"{code}:bare"
    assert load_estimator(config).name == "mine.py:bare@1"


def test_a_revision_records_its_version_and_not_where_it_lies(code: Path) -> None:
    recorded = describe_estimator(AdvantageConfig(estimator=f"{code}:whitened"))
    assert recorded == {"estimator": "mine.py:whitened", "version": "7", "std_floor": 1e-3, "weights": {}}
    assert describe_estimator(AdvantageConfig()) == {"estimator": "centred", "std_floor": 1e-3, "weights": {}}
    assert load_estimator(AdvantageConfig(estimator=f"{code}:whitened")).whitens


class Halved(Estimator):
    """What somebody adds: one class, and one line in the list."""

    name = "halved"

    def estimate(self, group: RewardGroup) -> list[float]:
        return [reward / 2 for reward in group.rewards]

    def bound(self, group: RewardGroup) -> float:
        return group.range


def test_a_new_estimator_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ESTIMATORS, "halved", f"{__name__}:Halved")
    added = load_estimator(AdvantageConfig(estimator="halved"))
    assert added.estimate(RewardGroup([1.0, 3.0], 1e-3)) == [0.5, 1.5]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_records_the_name_by_which_it_is_configured(name: str) -> None:
    kind = builtin_estimator(name)
    assert kind is not None
    assert kind.name == name


async def test_live_rewards_and_a_replay_have_equal_bits_and_name_it(lab) -> None:
    own = AdvantageConfig(estimator=f"{EXAMPLE}:above_median", params={"scale": 0.5})
    config = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x", advantage=own)})
    groups = [lab.group(n, samples=3, rewards={"environment": [0.0, 1.0, n / 8]}) for n in range(1, 9)]

    async def done():
        return sum(len(event.groups) for event in await lab.events("reward", RewardEvent)) == len(groups)

    async with (
        lab.running(lambda service: run_scorer(service, config), "scorer"),
        lab.running(lambda service: run_normalizer(service, config), "normalizer"),
    ):
        seqs = [await lab.store(group) for group in groups]
        await lab.until(done)
    events = await lab.events("reward", RewardEvent)
    assert {event.advantage for event in events} == {"above_median.py:above_median@1"}
    live = [reward.replace(stamps=[]) if hasattr(reward, "replace") else reward for e in events for reward in e.groups]
    assert live[0].advantages == [-0.0625, 0.4375, 0.0]
    fold = RewardFold("sums", config.normalization_of("sums"), reward_settings(config)["sums"].rule())
    scorer = EnvironmentScorer(config.scoring, config.environments["sums"])
    for seq, group in zip(seqs, groups, strict=True):
        fold.add_group(seq, group.id, await scorer.score(group, seq))
    replayed = fold.step().rewards
    assert [one.advantages for one in replayed] == [one.advantages for one in live]
    assert [one.snapshot for one in replayed] == [one.snapshot for one in live]
    finding = AdvantageCheck().evaluate(HealthWindow(rewards=list(live), estimator=events[0].advantage))
    assert finding.severity != "halt"
