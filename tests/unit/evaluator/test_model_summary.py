"""The row of an inference test: figures are of answers alone, and what is not known is None."""

import pytest

from lachesis.pipeline.evaluator.logic.model_summary import InferenceSample, SampleOutcome, summarize


def sample(step: int, reward: float | None, outcome: SampleOutcome = "scored", **known: object) -> InferenceSample:
    return InferenceSample(model="m", step=step, sample=0, item="i", outcome=outcome, reward=reward, **known)  # type: ignore[arg-type]


def test_a_failed_request_is_counted_and_named_and_is_no_reward() -> None:
    row = summarize("m", [sample(0, 1.0), sample(0, None, "request_failed", error="server away", latency_s=9.0)])
    assert (row.reward_mean, row.samples, row.answered) == (1.0, 2, 1)
    assert row.outcomes == {"scored": 1, "request_failed": 1}
    assert row.errors == {"server away": 1}
    assert row.latency_max_s is None, "the time of a failed request is no latency"


def test_the_share_of_groups_without_variance() -> None:
    rewards = [(0, 1.0), (0, 1.0), (1, 0.0), (1, 1.0), (2, 0.5)]
    row = summarize("m", [sample(step, reward) for step, reward in rewards])
    assert row.flat_groups == 0.5, "the group with one reward is neither"
    assert row.reward_mean == pytest.approx(0.7)
    assert row.reward_std == pytest.approx(0.4)


def test_without_answers_nothing_is_known() -> None:
    row = summarize("m", [sample(0, None, "request_refused", error="401")])
    assert (row.reward_mean, row.reward_std, row.parse_rate, row.flat_groups) == (None, None, None, None)
    assert (row.tokens_mean, row.cut, row.latency_p50_s) == (None, None, None)


def test_shares_and_quantiles_of_answers() -> None:
    known = [
        {"parsed": True, "tokens": 4, "finish_reason": "stop", "latency_s": 1.0},
        {"parsed": False, "tokens": 8, "finish_reason": "length", "latency_s": 3.0},
        {"parsed": True, "tokens": None, "finish_reason": "stop", "latency_s": 2.0},
    ]
    row = summarize("m", [sample(0, 1e308, **one) for one in known])
    assert row.parse_rate == pytest.approx(2 / 3)
    assert (row.tokens_mean, row.latency_p50_s, row.latency_max_s) == (6, 2.0, 3.0)
    assert row.cut == pytest.approx(1 / 3)
    assert (row.reward_mean, row.reward_std) == (1e308, 0.0)
