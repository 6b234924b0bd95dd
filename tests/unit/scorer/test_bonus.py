"""Bonuses for form and length: each predicate by example, and the formula against a slow textbook version of it."""

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.load import settings as settings_of
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.shaping import FormatMarker, RewardConfig
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.scorer.logic.bonus import ShapingSample, has_marker, length_bonus, shape
from lachesis.pipeline.scorer.logic.signals import distinct_share
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so\n#### 42", True),
        ("<think>#### 41</think> 42", False),  # only what follows the thinking counts
        ("<think>a</think> #### 42", True),
        ("<think> #### 42", False),  # still thinking
        ("### 42", False),
        ("", False),
    ],
)
def test_any_other_text_is_looked_for_after_the_thinking(text, found):
    assert has_marker(text, "####") is found


@pytest.mark.parametrize(
    ("marker", "closer"),
    [("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]"),
     ("<seed:think>", "</seed:think>"), ("◁think▷", "◁/think▷"), ("<|START_THINKING|>", "<|END_THINKING|>"),
     ("<|begin_of_thought|>", "<|end_of_thought|>"), ("<|think|>", "<|/think|>")],
)  # fmt: skip
def test_every_marker_of_thoughts_is_one(marker, closer):
    settings = FormatMarker(marker=f"{marker}...{closer}")
    assert settings.marker == FormatMarker(marker=marker).marker == marker
    assert has_marker(f"{marker}a{closer} b", marker)
    for text in (
        f"{marker}a",
        f"{marker}a{closer} ",
        f"{closer}a{marker} b",
        f"{marker}a{closer}{marker}b{closer}c",
        "b",
    ):
        assert not has_marker(text, marker)
    thought = f"{marker}#### 1 \\boxed{{1}}{closer} two"
    assert not has_marker(thought, "####")
    assert not has_marker(thought, "\\boxed")
    assert has_marker(f"{thought} #### 2 \\boxed{{2}}", "####")
    assert has_marker(f"{thought} #### 2 \\boxed{{2}}", "\\boxed")
    assert not has_marker(f"{marker} #### 2", "####")


def test_a_thought_in_a_channel_of_its_own():
    thought = "<|channel|>analysis<|message|>#### 1<|end|><|start|>assistant<|channel|>final<|message|>"
    assert has_marker(f"{thought}2<|return|>", "<|channel|>analysis")
    assert not has_marker("<|channel|>analysis<|message|>a", "<|channel|>analysis")
    assert not has_marker(f"{thought}2", "####")
    assert has_marker(f"{thought}#### 2", "####")


def test_a_text_is_no_pattern_and_the_end_of_thinking_may_be_one():
    assert has_marker("Answer: 4", "Answer:")
    assert not has_marker("answer: 4", "Answer:")
    assert has_marker("is [a-z]+ .", "[a-z]+")
    assert not has_marker("is abc.", "[a-z]+")
    assert has_marker("a</think> b", "</think>")


BOXES = ["\\boxed", "\\boxed{", "\\boxed{}", "\\boxed{...}", "\boxed{}"]
TAGS = ["<think>", "<think></think>", "<think>...</think>"]


@pytest.mark.parametrize(
    ("written", "meant"), [*((box, "\\boxed") for box in BOXES), *((tag, "<think>") for tag in TAGS)]
)
def test_a_box_and_a_tag_may_be_written_as_people_write_them(written, meant):
    assert FormatMarker(marker=written, reward=0.1) == FormatMarker(marker=meant, reward=0.1)


def test_a_list_of_texts_is_a_list_of_markers(tmp_path):
    toml = r'format_markers = ["<think>", "\boxed{}", "Answer:", { marker = "####", reward = 0.1 }]'
    config = written(tmp_path, toml).config.reward_config
    assert [(one.marker, one.reward) for one in config.markers] == [
        ("<think>", 0.05), ("\\boxed", 0.05), ("Answer:", 0.05), ("####", 0.1),
    ]  # fmt: skip
    made = shape([ShapingSample("Answer: 4 #### 4", np.arange(9, dtype=np.int32), "stop", 0.0, False)], config, 1.0)
    assert made.markers == {"<think>": [False], "\\boxed": [False], "Answer:": [True], "####": [True]}
    assert made.bonus == [pytest.approx(0.15)]


def written(folder, toml, *sets):
    file = folder / "run.toml"
    file.write_text(f"[reward_config]\n{toml}\n")
    return load(run_config_type(), file=file, sets=[f"reward_config.{one}" for one in sets])


def test_length_bounty_is_length_bounty_max(tmp_path):
    loaded = written(tmp_path, "length_bounty = 0.02")
    assert loaded.config.reward_config == RewardConfig(length_bounty_max=0.02) == RewardConfig(length_bounty=0.02)
    assert (
        written(tmp_path, "length_bounty_max = 0.02", "length_bounty=0.03").config.reward_config.length_bounty_max
        == 0.03
    )
    origins = {one.path: one.origin for one in settings_of(loaded)}
    assert origins["reward_config.length_bounty_max"] == str(tmp_path / "run.toml")
    assert "reward_config.length_bounty" not in origins
    assert "length_bounty" not in msgspec.to_builtins(loaded.config.reward_config), "what is stored has one name for it"
    with pytest.raises(ConfigError, match="one setting under two names"):
        written(tmp_path, "length_bounty = 0.02\nlength_bounty_max = 0.01")


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ('" "', "no text that could be looked for"),
        (r'"\frac{}"', "between single quotes"),
        ("3", "expected `str | object`"),
        ('{ marker = "<think>", reward = -1 }', r"format_markers\[0\].reward: expected `float` > 0"),
        ('{ marker = "<think>", rewrd = 1 }', "did you mean 'reward'"),
        (f'"{"x" * 257}"', "at most 256"),
    ],
)
def test_a_marker_that_cannot_be_meant_is_refused(tmp_path, marker, says):
    with pytest.raises(ConfigError, match=says):
        written(tmp_path, f"format_markers = [{marker}]")


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
        ShapingSample("<think>a</think> b", np.arange(20, dtype=np.int32), "stop", score, succeeded)
        for score, succeeded in ((0.0, False), (1.0, True), (None, None), (0.4, None))
    ]
    made = shape(samples, CONFIG, 1.0)
    assert made.bonus == [pytest.approx(0.1), None, None, None]
    assert made.succeeded == [False, True, None, None]
    assert made.markers == {"<think>": [True] * 4, "\\boxed": [False] * 4}
    assert made.ceiling == 0.9
    low = [ShapingSample("", np.arange(2, dtype=np.int32), "stop", 0.6, True), samples[0]]
    assert shape(low, CONFIG, 1.0).ceiling == pytest.approx(0.5), "no success in the group is outdone either"


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", r"\boxed{", "}", "{", "x", " ", "\n"]), max_size=12
).map("".join)
SAMPLES = st.lists(
    st.builds(
        ShapingSample,
        PIECES,
        st.lists(st.integers(0, 3), max_size=14).map(lambda ids: np.array(ids, np.int32)),
        st.sampled_from(["stop", "length", "tool", "abort"]),
        st.one_of(st.none(), st.floats(0, 1)),
        st.sampled_from([True, False, None]),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(SAMPLES)
@example([ShapingSample(r"</think>\boxed{<think>}", np.array([], np.int32), "stop", 0.0, False)])
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
    text = text.split("</think>")[-1]
    if "<think>" in text or r"\boxed{" not in text:  # thinking, again or still
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
        ({"format_markers": [BOXED, "\\boxed{}"]}, "twice"),
        ({"length_bounty": 0.01, "length_bounty_max": 0.02}, "one setting under two names"),
        ({"length_from": 512}, "below length_to"),
        ({"fade_from": 0.4}, "below fade_to"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        RewardConfig(**changes)


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


async def test_thinking_that_the_prompt_opened_is_paid_and_cut_off_thinking_is_not(lab):
    scorer = EnvironmentScorer(ScoringConfig(), EnvironmentConfig(kind="x"), CONFIG)
    texts = ("a</think> b", "a", r"a \boxed{1}", r"a</think> \boxed{1}", "a</think>", "<think>a</think> b")
    talk = [[Message(role="assistant", content=text)] for text in texts]

    async def markers(**metadata):
        group = lab.group(1, samples=len(texts), tokens=8, messages=talk, rewards={"environment": [0.0] * len(texts)})
        return (await scorer.score(group.replace(metadata=metadata), 1)).shaping.markers

    opened = await markers(prompt_opens="<think>")
    assert opened["<think>"] == [True, False, False, True, False, True]
    assert opened["\\boxed"] == [False, False, False, True, False, False]
    plain = await markers()
    assert plain["<think>"] == [False, False, False, False, False, True]
    assert await markers(prompt_opens=["<think>"]) == await markers(prompt_opens="x") == plain
