"""Bonuses for form and length: each predicate by example, and the formula against a slow textbook version of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.pipeline.advantage.config import AdvantageConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.scoring.config import ScoringConfig
from lachesis.pipeline.scoring.judge import EnvironmentScorer
from lachesis.pipeline.scoring.logic.signals import distinct_share
from lachesis.pipeline.shaping.config import FormatMarker, RewardConfig
from lachesis.pipeline.shaping.logic.bonus import Shapeable, has_marker, length_bonus, shape
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

THINK = FormatMarker(marker="<think>", reward=0.05)
BOXED = FormatMarker(marker="\\boxed", reward=0.1)
CONFIG = RewardConfig(format_markers=[THINK, BOXED], length_bounty_max=0.05, length_from=2, length_to=10, cap=0.12)


@pytest.mark.parametrize(
    ("text", "think", "boxed", "answer"),
    [
        ("<think>a</think> b", True, False, False),
        ("<think>a</think>  ", False, False, False),  # nothing follows
        ("<think>a</think> b <think>c</think> d", False, False, False),  # twice
        ("<think>a</think></think> b", False, False, False),
        ("</think>a<think> b", False, False, False),
        ("<think>a", False, False, False),
        ("<think></think>b", True, False, False),
        (r"<think>\boxed{1}</think> \boxed{2}", True, True, False),
        (r"<think>\boxed{1}</think> two", True, False, False),  # only what follows the thinking counts
        (r"<think> \boxed{1}", False, False, False),  # still thinking
        (r"\boxed{\frac{1}{2}}", False, True, False),
        (r"\boxed{", False, False, False),
        (r"\boxed{ }", False, False, False),
        (r"\boxed{1} \boxed{", False, False, False),  # the last one counts
        ("<answer>4</answer>", False, False, True),
        ("<answer> </answer> 4", False, False, False),
        ("", False, False, False),
    ],
)
def test_markers(text, think, boxed, answer):
    assert (has_marker(text, "<think>"), has_marker(text, "\\boxed"), has_marker(text, "<answer>")) == (
        think,
        boxed,
        answer,
    )


def test_length_counts_times_what_is_distinct_and_not_at_all_if_cut_off():
    fresh, again = np.arange(10, dtype=np.int32), np.zeros(10, np.int32)
    assert length_bonus(fresh, "stop", CONFIG) == 0.05
    assert length_bonus(fresh, "length", CONFIG) == 0.0
    assert length_bonus(again, "stop", CONFIG) == 0.0, "10 tokens of one kind count as 10/8"
    assert length_bonus(fresh[:6], "stop", CONFIG) == pytest.approx(0.025)
    assert length_bonus(np.arange(1000, dtype=np.int32), "stop", CONFIG) == 0.05
    assert length_bonus(fresh[:0], "stop", CONFIG) == 0.0


def test_who_succeeded_or_cannot_be_judged_gets_nothing():
    samples = [
        Shapeable("<think>a</think> b", np.arange(20, dtype=np.int32), "stop", score, succeeded)
        for score, succeeded in ((0.0, False), (1.0, True), (None, None), (0.4, None))
    ]
    made = shape(samples, CONFIG, 1.0)
    assert made.bonus == [pytest.approx(0.1), None, None, None]
    assert made.succeeded == [False, True, None, None]
    assert made.markers == {"<think>": [True] * 4, "\\boxed": [False] * 4}
    assert made.ceiling == 0.9
    low = [Shapeable("", np.arange(2, dtype=np.int32), "stop", 0.6, True), samples[0]]
    assert shape(low, CONFIG, 1.0).ceiling == pytest.approx(0.5), "no success in the group is outdone either"


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", r"\boxed{", "}", "{", "x", " ", "\n"]), max_size=12
).map("".join)
SAMPLES = st.lists(
    st.builds(
        Shapeable,
        PIECES,
        st.lists(st.integers(0, 3), max_size=14).map(lambda ids: np.array(ids, np.int32)),
        st.sampled_from(["stop", "length", "tool", "abort"]),
        st.one_of(st.none(), st.floats(0, 1)),
        st.sampled_from([True, False, None]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=400, deadline=None)
@given(SAMPLES)
def test_the_formula_against_a_textbook_version(samples):
    made = shape(samples, CONFIG, 1.0)
    for sample, bonus in zip(samples, made.bonus, strict=True):
        if sample.succeeded is not False or sample.score is None:
            assert bonus is None
            continue
        total = 0.05 * textbook_think(sample.completion) + 0.1 * textbook_boxed(sample.completion)
        assert bonus == pytest.approx(min(0.12, total + textbook_length(sample)), abs=1e-12)


def textbook_think(text):
    """One opening, one closing later, and something that is not white space after it."""
    opens = [i for i in range(len(text)) if text[i : i + 7] == "<think>"]
    closes = [i for i in range(len(text)) if text[i : i + 8] == "</think>"]
    return (
        len(opens) == len(closes) == 1 and opens[0] < closes[0] and any(not c.isspace() for c in text[closes[0] + 8 :])
    )


def textbook_boxed(text):
    """After the thinking, the last box: count its braces."""
    if "<think>" in text and "</think>" not in text:
        return False
    text = text.split("</think>")[-1]
    if r"\boxed{" not in text:
        return False
    inside, depth = "", 1
    for c in text.split(r"\boxed{")[-1]:
        depth += {"{": 1, "}": -1}.get(c, 0)
        if depth == 0:
            return bool(inside.strip())
        inside += c
    return False


def textbook_length(sample):
    if sample.finish_reason in {"length", "abort"}:
        return 0.0
    ids = sample.tokens.tolist()
    grams = [tuple(ids[i : i + 3]) for i in range(len(ids) - 2)]
    share = len(set(grams)) / len(grams) if grams else 1.0
    assert distinct_share(sample.tokens) == share
    return 0.05 * min(1.0, max(0.0, (len(ids) * share - 2) / 8))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format_markers": [THINK, THINK]}, "twice"),
        ({"length_from": 512}, "below length_to"),
        ({"fade_from": 0.4}, "below fade_to"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        RewardConfig(**changes)
    with pytest.raises(ConfigError, match="neither"):
        FormatMarker(marker="think", reward=0.1)


def test_a_run_refuses_shaping_that_would_be_blown_up_or_reach_a_success():
    def run(**environment):
        return RunConfig(environments={"sums": EnvironmentConfig(kind="x", reward_config=CONFIG, **environment)})

    assert run().reward_config_of("sums") is CONFIG
    with pytest.raises(ConfigError, match="estimator maxrl"):
        run(advantage=AdvantageConfig(estimator="maxrl"))
    with pytest.raises(ConfigError, match="min_success must say"):
        run(success_rater="exact")
    with pytest.raises(ConfigError, match="needs a success_rater"):
        run(scoring=ScoringConfig(aggregation="reliability"))


async def test_the_scorer_gives_bonuses_and_names_what_they_depend_on(lab):
    settings = EnvironmentConfig(kind="x")
    scorer, plain = EnvironmentScorer(ScoringConfig(), settings, CONFIG), EnvironmentScorer(ScoringConfig(), settings)
    talk = [[Message(role="assistant", content=text)] for text in ("<think>a</think> b", "c")]
    group = lab.group(1, tokens=8, messages=talk, rewards={"environment": [0.0, 0.0]})
    made = (await scorer.score(group, 1)).shaping
    assert made.markers["<think>"] == [True, False]
    assert made.bonus == pytest.approx([0.05 + made.length[0], made.length[1]])
    assert made.length[0] > 0
    assert (await plain.score(group, 1)).shaping is None
    assert (
        len(
            {
                scorer.digest,
                plain.digest,
                EnvironmentScorer(ScoringConfig(), settings, RewardConfig(length_bounty_max=0.01)).digest,
            }
        )
        == 3
    )
