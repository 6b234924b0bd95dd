"""Advantages of a group with shaping: bonuses for form and length change only the samples' values.

It takes the group's rewards and their bonuses, and returns the same as `group_advantage`. Verdict, mean, deviation and
range are those of the rewards alone, so a bonus cannot hide that nothing succeeds, and its own small deviation cannot
scale it up: where rewards differ less than the bonuses do, or not at all, the group is centred without a divisor.
"""

from collections.abc import Sequence

import msgspec

from lachesis.pipeline.common.number_arguments import number_column
from lachesis.pipeline.normalizer.config.advantage import SHAPEABLE, AdvantageConfig
from lachesis.pipeline.normalizer.estimators.estimator import LIMIT, GroupAdvantage
from lachesis.pipeline.normalizer.estimators.loader import group_advantage, load_estimator
from lachesis.schemas.errors import DataError

__all__ = ["shaped_advantage"]


def shaped_advantage(
    rewards: Sequence[float | None],
    bonus: Sequence[float | None],
    config: AdvantageConfig,
    lengths: Sequence[int] | None = None,
) -> GroupAdvantage:
    """Return the advantages of r = rewards + bonus; a missing bonus is none.

    Of an estimator that divides by the deviation, as grpo: (r - mean r) / s, with s the deviation of the rewards, or
    of r where that is larger, so that the bound holds.
    Raises DataError as `group_advantage`, and for an estimator that shaping does not go with.
    """
    if config.estimator not in SHAPEABLE:
        raise DataError(f"estimator {config.estimator} does not go with shaping; use {', '.join(SHAPEABLE)}.")
    bonus = number_column("bonus", bonus, largest=LIMIT)
    plain = group_advantage(rewards, config, lengths)
    if len(bonus) != len(plain.advantages):
        raise DataError(f"bonus: {len(bonus)} of them for {len(plain.advantages)} rewards; give one for each.")
    if plain.verdict == "unscorable" or not any(bonus):
        return plain
    r = [None if x is None else x + (b or 0.0) for x, b in zip(rewards, bonus, strict=True)]
    divides = load_estimator(config).divides
    undivided = msgspec.structs.replace(config, estimator="centred") if divides else config
    moved = group_advantage(r, undivided, lengths)
    advantages = moved.advantages
    added = [b or 0.0 for x, b in zip(rewards, bonus, strict=True) if x is not None]
    if divides and max(added) - min(added) < (plain.range or 0.0):
        divisor = max(plain.std or 0.0, moved.std or 0.0, config.std_floor)
        advantages = tuple(None if a is None else a / divisor for a in advantages)
    return msgspec.structs.replace(plain, advantages=advantages)
