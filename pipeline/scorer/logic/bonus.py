r"""Computes the bonuses of a group's samples for form and length. Pure.

From completions, generated tokens, scores and successes it computes `GroupShaping`: the largest bonus of every sample
that failed, and the ceiling of its score. Nothing here depends on history, so every scorer gets the same result; the
environment's success rate determines later how much of the bonus counts (`bonus_fade`).

r = env + s min(cap, sum_j w_j f_j + length) for failed samples alone, r <= min_success - margin. f_j in {0, 1} are
predicates of the completion alone: no reference, no rating.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.normalizer.config.shaping import BOXED, RewardConfig, is_tag
from lachesis.pipeline.scorer.answers.last_box import boxed
from lachesis.pipeline.scorer.logic.signals import distinct_share
from lachesis.pipeline.tasks.thoughts import answer_part, closes_thought, has_one_thought, thought_opener
from lachesis.schemas.annotations import GroupShaping

__all__ = ["ShapingSample", "has_marker", "length_bonus", "shape"]

_ENDED = {"stop", "tool"}


@dataclass(frozen=True, slots=True)
class ShapingSample:
    """The input of shaping for one sample: its last completion behind the <think> that its prompt may have opened, its
    generated tokens int32 [T], why it ended, its score, and whether it succeeded (None: unknown)."""

    completion: str
    tokens: NDArray[np.int32]
    finish_reason: str
    score: float | None
    succeeded: bool | None


def shape(samples: Sequence[ShapingSample], config: RewardConfig, min_success: float) -> GroupShaping:
    """Return the samples' bonuses; `min_success` is the lowest score of a success."""
    markers = {
        marker.marker: [has_marker(sample.completion, marker.marker) for sample in samples] for marker in config.markers
    }
    length = [length_bonus(sample.tokens, sample.finish_reason, config) for sample in samples]
    earned = [
        min(config.cap, sum(m.reward for m in config.markers if markers[m.marker][i]) + length[i])
        for i in range(len(samples))
    ]
    successes = [sample.score for sample in samples if sample.succeeded and sample.score is not None]
    return GroupShaping(
        bonus=[
            bonus if sample.succeeded is False and sample.score is not None else None
            for sample, bonus in zip(samples, earned, strict=True)
        ],
        succeeded=[sample.succeeded for sample in samples],
        ceiling=min([min_success, *successes]) - config.margin,
        markers=markers,
        length=length,
    )


def has_marker(completion: str, marker: str) -> bool:
    """Return whether a completion has the marker; see `FormatMarker`."""
    if thought_opener(marker):
        return has_one_thought(completion, marker)
    if is_tag(marker):
        return _has_element(completion, marker)
    if marker == BOXED:
        return bool(boxed(completion))
    answer = answer_part(completion)
    return marker in (completion if answer and closes_thought(marker) else answer)


def _has_element(completion: str, tag: str) -> bool:
    end_tag = f"</{tag[1:]}"
    opening, closing = completion.split(tag), completion.split(end_tag)
    if len(opening) != 2 or len(closing) != 2 or len(opening[0]) > len(closing[0]):
        return False
    return opening[1].partition(end_tag)[0].strip() != ""


def length_bonus(tokens: NDArray[np.int32], finish_reason: str, config: RewardConfig) -> float:
    """Return the bonus for length.

    A ramp of length times the share of distinct 3-grams, 0 if it was cut off.
    """
    if finish_reason not in _ENDED or config.length_bounty_max == 0:
        return 0.0
    counted = len(tokens) * distinct_share(tokens)
    ramp = (counted - config.length_from) / (config.length_to - config.length_from)
    return config.length_bounty_max * min(1.0, max(0.0, ramp))
