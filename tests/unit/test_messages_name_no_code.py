"""No message names code: whatever text a decoded event holds, no service imports or runs what it names."""

import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from stages import run_normalizer, run_scorer

from lachesis.pipeline.common import user_code
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.promotion.record import write_promotions
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.promoted import admit_promoted
from lachesis.schemas.annotations import GroupScore, ScoreEvent
from lachesis.schemas.catalog import CHANNELS
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.promotion import Promotion, Promotions
from lachesis.services.promotion import config_under_promotion, make_promotion
from lachesis.services.stage_settings import scorer_settings

pytestmark = pytest.mark.hostile

CODE = (
    "planted:run",
    "pydoc:pipepager",
    "os:system",
    "/home/me/planted.py:run",
    "lachesis.pipeline.common.user_code:load_module",
)
MINE = RaterConfig(rater="/here/mine.py:mine", params={"api_key": "sk-hidden", "url": "https://judge", "scale": 2.0})
CONFIG = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="x")},
    scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match")], promotable=[MINE]),
    advantage=AdvantageConfig(estimator="grpo", promotable=["/here/mine.py:estimate"]),
)
FREE = {
    ("Promotions", "RewardSettings.scoring"): "scoring.promoted admits raters",
    ("Promotions", "RewardSettings.normalization"): "numbers and choices of NormalizationConfig",
    ("Promotions", "RewardSettings.reward_config"): "numbers of RewardConfig",
    ("Promotions", "RewardSettings.advantage"): "promotion.record admits estimators",
    ("RevisionRecord", "RevisionRecord.normalization"): "compared with a configuration, never loaded",
    ("RevisionRecord", "RevisionRecord.normalizations"): "compared with a configuration, never loaded",
    ("RevisionRecord", "RevisionRecord.advantage"): "compared with a configuration, never loaded",
    ("RolloutGroup", "RolloutGroup.task"): "data that raters are given",
    ("RolloutGroup", "RolloutGroup.metadata"): "data that raters are given",
    ("RolloutGroup", "RolloutGroup.generation"): "figures of how it was sampled",
}
"""Fields of events that hold whatever their writer likes, and what becomes of it."""


def free_fields(kind: Any, seen: set[type]) -> Iterator[str]:
    """Yield the fields at any depth of a struct type that hold values of any type."""
    for hint in (kind, *get_args(kind)):
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint not in seen:
            seen.add(hint)
            for name, inner in get_type_hints(hint).items():
                if _is_free(inner):
                    yield f"{hint.__name__}.{name}"
                yield from free_fields(inner, seen)
        elif hint is not kind:
            yield from free_fields(hint, seen)


def _is_free(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType, list, tuple):
        return any(map(_is_free, get_args(hint)))
    return hint is Any or (get_origin(hint) is dict and _is_free(get_args(hint)[1]))


def test_every_field_that_may_hold_settings_is_known():
    events = {event for channel in CHANNELS for event in channel.events}
    assert {(event.__name__, field) for event in events for field in free_fields(event, set())} == FREE.keys()


def asked(raters: list[dict[str, Any]] | None = None, advantage: Mapping[str, Any] | None = None) -> Promotion:
    one = make_promotion(CONFIG, "new", by="me", asked_ns=1)
    sums = one.environments["sums"]
    scoring = sums.scoring if raters is None else {**sums.scoring, "raters": raters}
    changed = msgspec.structs.replace(sums, scoring=scoring, advantage={**sums.advantage, **(advantage or {})})
    return msgspec.structs.replace(one, environments={"sums": changed}, first=2)


def admitted(one: Promotion) -> ScoringConfig:
    return admit_promoted(config_under_promotion(one, CONFIG).scoring_of("sums"), scorer_settings(CONFIG).named)


@pytest.mark.parametrize("code", CODE)
def test_a_promotion_brings_in_no_code(code):
    with pytest.raises(ConfigError, match=rf"the rater '{code}' is not named by this scorer's own configuration"):
        admitted(asked([{"rater": code}]))
    with pytest.raises(ConfigError, match=rf"the estimator '{code}' is not named by this service's own configuration"):
        config_under_promotion(asked(advantage={"estimator": code}), CONFIG)


@pytest.mark.parametrize(
    "rater",
    [
        {"rater": "code", "params": {"required": []}},
        {"rater": "code", "params": {"memory_mb": 1 << 40}},
        {"rater": "llm_judge", "params": {"url": "http://evil", "model": "m", "rubric": "r", "key_env": "HOME"}},
        {"rater": "pairwise_judge", "params": {"url": "http://evil", "model": "m", "rubric": "r"}},
        {"rater": "rubric_judge", "params": {"url": "http://evil", "model": "m"}},
        {"rater": "reward_model", "params": {"url": "http://evil", "model": "m"}},
        {"rater": "math", "params": {"workers": 100_000}},
        {"rater": "exact_match", "params": {"pattern": {"$ref": "file:///etc/passwd"}}},
        {"rater": "exact_match", "params": {"pattern": "(a+)+$"}},  # would hold the scorer up
        {"rater": "numeric", "params": {"tolerance": "***"}},  # masked: not what it was scored with
        {"rater": "/here/mine.py:mine", "params": {}},
        {"rater": "/here/mine.py:mine", "params": {"api_key": "***", "url": "https://evil", "scale": 2.0}},
        {"rater": "/here/mine.py:mine", "params": {"api_key": "***", "url": "https://judge", "scale": 3.0}},
    ],
)
def test_a_promotion_brings_no_parameters_that_code_obeys(rater):
    says = "is not named with these parameters by this scorer's own configuration"
    with pytest.raises(ConfigError, match=rf"(?s){says}.*scoring\.promotable") as refused:
        admitted(asked([rater]))
    assert ("a pattern, above all" in str(refused.value)) == ("pattern" in rater["params"])


def test_what_the_configuration_names_may_be_promoted_and_its_own_words_count():
    elsewhere = RaterConfig(rater="/there/mine.py:mine", params=MINE.params, weight=2.0)
    config = msgspec.structs.replace(CONFIG, scoring=ScoringConfig(raters=[elsewhere, RaterConfig(rater="length")]))
    one = make_promotion(config, "new", by="me", asked_ns=1)
    assert "sk-hidden" not in repr(one)
    [mine, length] = admitted(one).raters
    assert (mine.rater, mine.params, mine.weight) == (MINE.rater, MINE.params, 2.0)
    assert length.rater == "length"
    [plain] = admitted(asked([{"rater": "exact_match", "params": {"ignore_case": True}}])).raters
    assert plain.params == {"ignore_case": True}
    estimator = asked(advantage={"estimator": "/there/mine.py:estimate", "params": {"clip": 0.5}})
    assert config_under_promotion(estimator, CONFIG).advantage_of("sums").estimator == "/here/mine.py:estimate"
    with pytest.raises(ConfigError, match="with these parameters"):
        config_under_promotion(asked(advantage={"estimator": "mine.py:estimate", "params": {"f": "/etc"}}), CONFIG)


@pytest.fixture
def ran(monkeypatch):
    """What was imported by a name that is not ours meanwhile."""
    found: list[str] = []
    load_module = user_code.load_module

    def loading(place, what):
        if not place.startswith("lachesis."):
            found.append(f"{what}: {place}")
        return load_module(place, what)

    monkeypatch.setattr(user_code, "load_module", loading)
    return found


async def refused(lab, name, main, *, code, advantage=None):
    """Run a service on a rollout and scores that a promotion is to judge; return why it waits."""
    one = asked([{"rater": code}] if code else None, advantage)
    await lab.store(lab.group(1, task={"answer": "2"}))
    await write_promotions(lab.bus, Promotions(run="r", promotions=[one]), "live", expected=0)
    await lab.store(lab.group(2, task={"answer": "2"}))
    scored = GroupScore(group=f"{2:032x}", seq=3, item="i", policy_step=0, scores=[1.0], ratings={}, lengths=[1])
    score = ScoreEvent(run="r", env="sums", revision="live", ensemble="e", raters={}, groups=[scored], promoted=2)
    await lab.bus.publish("rl.score.r.live.sums", encode(score), msg_id="s")
    async with lab.running(lambda service: main(service, CONFIG), name) as service:
        said: list[str] = []

        async def waiting() -> bool:
            said.append(service.vitals.waits_for or "")
            return "cannot be loaded" in said[-1]

        await lab.until(waiting)
        return said[-1]


@pytest.mark.parametrize("code", CODE)
async def test_a_scorer_waits_and_says_why_instead_of_running_what_a_promotion_names(lab, ran, code):
    assert f"the rater {code!r} is not named by this scorer's own configuration" in await refused(
        lab, "scorer", run_scorer, code=code
    )
    assert ran == []


async def test_a_normalizer_waits_and_says_why_instead_of_running_what_a_promotion_names(lab, ran):
    why = await refused(lab, "normalizer", run_normalizer, code=None, advantage={"estimator": CODE[0]})
    assert f"the estimator {CODE[0]!r} is not named by this service's own configuration" in why
    assert ran == []
