"""Summarizes an inference test: turns a model's samples into one row of the table. Pure.

Guarantees that a failed request is never a reward: means, spreads and shares are those of the samples that succeeded,
and failures are counted by kind. An unknown figure is None.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from lachesis.pipeline.common.finite_mean import finite_mean

__all__ = ["InferenceSample", "ModelSummary", "SampleOutcome", "summarize"]

SampleOutcome = Literal["scored", "unscored", "request_failed", "request_refused", "environment_bug"]
"""request_failed: the server was unavailable or too slow at every attempt. request_refused: it answered that the
request, key or model is wrong. environment_bug: the environment's own code raised. unscored: no reward is known."""


class InferenceSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: a line of the JSON lines file."""

    model: str
    step: int
    sample: int
    item: str
    outcome: SampleOutcome
    reward: float | None = None
    parsed: bool | None = None
    """Whether every turn ended by itself and its tool calls could be read; None where there is no answer."""
    finish_reason: str | None = None
    turns: int | None = None
    tokens: int | None = None
    """Tokens that the model generated, all turns; None where the server does not count them."""
    latency_s: float | None = None
    """Seconds that the requests for tokens took, all turns, repeated requests included; the pauses between
    them not."""
    error: str | None = None
    messages: list[dict[str, Any]] = []


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the samples of one model. Shares are fractions from 0 to 1."""

    model: str
    samples: int
    outcomes: dict[str, int]
    """Samples by outcome, those that occurred."""
    parse_rate: float | None
    """Share of the answers that are parsed."""
    reward_mean: float | None
    reward_std: float | None
    """Population standard deviation of the rewards; None with fewer than two."""
    flat_groups: float | None
    """Share of the groups with two rewards or more in which all rewards are equal: nothing is learned from them."""
    tokens_mean: float | None
    cut: float | None
    """Share of the answers that were cut by the token limit."""
    latency_p50_s: float | None
    latency_max_s: float | None
    errors: dict[str, int]
    """Messages of failed requests, bugs and missing rewards, with the number of samples for each."""

    @property
    def answered(self) -> int:
        """Samples with an answer of the model that the environment could handle."""
        return self.outcomes.get("scored", 0) + self.outcomes.get("unscored", 0)


def summarize(model: str, samples: Sequence[InferenceSample]) -> ModelSummary:
    """Return the row of `model`; samples of other models must not be among `samples`."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    parsed = [sample.parsed for sample in samples if sample.parsed is not None]
    tokens = [sample.tokens for sample in samples if sample.tokens is not None]
    ended = [sample.finish_reason for sample in samples if sample.finish_reason is not None]
    answered = [sample for sample in samples if sample.outcome in ("scored", "unscored")]
    latencies = sorted(sample.latency_s for sample in answered if sample.latency_s is not None)
    return ModelSummary(
        model=model,
        samples=len(samples),
        outcomes=dict(Counter(sample.outcome for sample in samples)),
        parse_rate=finite_mean(parsed),
        reward_mean=finite_mean(rewards),
        reward_std=_deviation(rewards),
        flat_groups=_flat_groups(samples),
        tokens_mean=finite_mean(tokens),
        cut=finite_mean([reason == "length" for reason in ended]),
        latency_p50_s=latencies[(len(latencies) - 1) // 2] if latencies else None,
        latency_max_s=latencies[-1] if latencies else None,
        errors=dict(Counter(sample.error for sample in samples if sample.error is not None)),
    )


def _flat_groups(samples: Sequence[InferenceSample]) -> float | None:
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            groups[sample.step].append(sample.reward)
    return finite_mean([len(set(rewards)) == 1 for rewards in groups.values() if len(rewards) > 1])


def _deviation(values: Sequence[float]) -> float | None:
    mean = finite_mean(values)
    if mean is None or len(values) < 2:
        return None
    largest = max(abs(value - mean) for value in values)
    if largest == 0:
        return 0.0
    squares = math.fsum(((value - mean) / largest) ** 2 for value in values)  # squares of the values may overflow
    return largest * math.sqrt(squares / len(values))
