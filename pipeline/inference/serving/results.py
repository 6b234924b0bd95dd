"""Holds what an engine gives for a request: samples, each token at once, and when that was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lachesis.pipeline.inference.protocol import FinishReason, PromptLogprobs, WeightVersionSpan

__all__ = ["GenerationResult", "SampleResult", "SampledToken", "TokenListener"]


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One sample. `token_ids` holds the stop token, if one ended it; `logprobs` one value for each token, nats."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop token or the stop string that ended it; None: the end-of-sequence token, or neither."""
    weight_versions: list[WeightVersionSpan]
    allowed: list[list[int]] | None = None
    """For each token the ids among which it was sampled, none if no token was excluded; None: not requested."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of a sample as soon as it is sampled, and how that ended the sample, if it did."""

    sample: int
    token_id: int
    logprob: float
    top_logprobs: list[tuple[int, float]]
    finish_reason: FinishReason | None
    stop_reason: int | str | None


TokenListener = Callable[[SampledToken], None]
"""Called with each token of a request in the engine's thread; it must neither wait nor raise."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The samples of one request, and its prompt's logprobs if they were requested.

    When it was queued, joined the batch (None: never) and ended, by `time.perf_counter_ns`. `branch_logprobs`: of the
    own tokens of each branch.
    """

    samples: list[SampleResult]
    prompt_logprobs: PromptLogprobs | None
    queued_ns: int
    joined_ns: int | None
    ended_ns: int
    branch_logprobs: Sequence[PromptLogprobs] = ()

    @classmethod
    def merge(cls, results: Sequence[GenerationResult]) -> GenerationResult:
        """Return the requests of one call as one: all samples, from the first queued to the last ended."""
        joined_ns = [one.joined_ns for one in results if one.joined_ns is not None]
        return cls(
            samples=[sample for one in results for sample in one.samples],
            prompt_logprobs=None,
            queued_ns=min(one.queued_ns for one in results),
            joined_ns=min(joined_ns, default=None),
            ended_ns=max(one.ended_ns for one in results),
        )
