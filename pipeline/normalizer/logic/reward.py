"""Turns a group's scores into its reward.

Selects the values that the normalizer folds, and computes the results of a group that is ready.

A group that is ready is normalized with its snapshot, shaped, given a verdict, and turned into advantages. Pure: the
normalizer and a replay of history both use this, so that equal scores and an equal snapshot give equal bits.
"""

from collections.abc import Sequence

import msgspec

from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.normalizer.estimators.estimator import NOISE, GroupAdvantage
from lachesis.pipeline.normalizer.estimators.loader import load_estimator
from lachesis.pipeline.normalizer.estimators.shaping import shaped_advantage
from lachesis.pipeline.normalizer.logic.answer_faults import find_group_fault
from lachesis.pipeline.normalizer.logic.bonus_fade import scale
from lachesis.pipeline.normalizer.logic.normalizer import SUCCESS, Columns, ReadyGroup
from lachesis.pipeline.normalizer.logic.reliability import residuals, shares, weighted
from lachesis.pipeline.normalizer.logic.snapshot import NormalizationSnapshot
from lachesis.pipeline.normalizer.logic.turns import turn_advantages
from lachesis.schemas.annotations import GroupReward, GroupScore, GroupShaping, Stamp
from lachesis.schemas.errors import DataError

__all__ = ["KEY", "RewardRule", "reliability_shares", "shaping_metrics"]

KEY = "score"
"""What the normalizer knows the ensemble's score by."""
RATING, RESIDUAL = ".rating/", ".residual/"
"""What it knows each rater's ratings and residuals by, before the rater's name."""

_MAX_REASON = 400
"""Characters of the reason for a verdict."""


class RewardRule:
    """How one environment's scores become rewards. `reliability`: scores weigh raters by their residual variance."""

    def __init__(self, advantage: AdvantageConfig, shaping: RewardConfig, *, reliability: bool = False) -> None:
        """Raises `ConfigError` where an estimator of a user's own cannot be loaded."""
        self.advantage = advantage
        self.estimator = load_estimator(advantage)
        self.shaping = shaping
        self.reliability = reliability

    def columns(self, score: GroupScore) -> Columns:
        """Return the values of a group's scores that are folded."""
        columns: dict[str, Sequence[float | None]] = {KEY: score.scores}
        if score.shaping is not None:
            columns[SUCCESS] = [None if one is None else float(one) for one in score.shaping.succeeded]
        if self.reliability:
            columns |= {RATING + name: column for name, column in score.ratings.items()}
            columns |= {RESIDUAL + name: column for name, column in residuals(score.ratings).items()}
        return columns

    def finish(self, columns: Columns, snapshot: NormalizationSnapshot) -> Columns:
        """Return the columns with the score that `snapshot` makes of them."""
        if not self.reliability:
            return columns
        ratings = {key.removeprefix(RATING): column for key, column in columns.items() if key.startswith(RATING)}
        weights = reliability_shares(snapshot)
        if not ratings or not set(ratings) <= set(weights):
            return columns  # not known of every rater: they weigh alike, as the scorer had it
        return {**columns, KEY: weighted(ratings, columns[KEY], weights)}

    def reward(self, ready: ReadyGroup, score: GroupScore, *stamps: Stamp) -> GroupReward:
        """Return the reward of `score`'s group, with its stamps and `stamps`.

        A group that must not be trained on, or that the estimator refuses, is quarantined with the reason.
        """
        scores = list(ready.values[KEY])
        rewards = ready.snapshot.normalize(KEY, scores)
        added, in_force = self._added(ready, rewards, score.shaping)
        reward = GroupReward(
            group=ready.group,
            seq=ready.seq,
            item=score.item,
            policy_step=score.policy_step,
            verdict="quarantined",
            scores=scores,
            rewards=rewards,
            advantages=[None] * len(rewards),
            snapshot=ready.snapshot.id,
            mean=None,
            std=None,
            range=None,
            n_valid=0,
            index=score.index,
            skill=score.skill,
            success=score.success,
            shaping=added,
            shaping_scale=in_force,
            tokens=sum(score.lengths),
            stamps=[*score.stamps, *stamps],
        )
        fault = find_group_fault(score)
        if fault is not None:
            return msgspec.structs.replace(reward, reason=fault)
        try:
            result = self._advantage(rewards, added, score)
            turns = self._turn_advantages(result, score)
        except DataError as error:
            return msgspec.structs.replace(reward, reason=str(error))
        return msgspec.structs.replace(
            reward,
            verdict="trainable" if _differ(turns, result) else result.verdict,
            reason=_why_unscorable(score, result.n_valid) if result.verdict == "unscorable" else None,
            advantages=list(result.advantages),
            mean=result.mean,
            std=result.std,
            range=result.range,
            n_valid=result.n_valid,
            lengths=_trained_lengths(score) if self.estimator.whitens else [],
            turn_advantages=turns,
        )

    def _advantage(
        self, rewards: Sequence[float | None], added: Sequence[float | None], score: GroupScore
    ) -> GroupAdvantage:
        if any(added):
            return shaped_advantage(rewards, added, self.advantage, score.lengths)
        return self.estimator.advantages(rewards, score.lengths, score.ratings)

    def _turn_advantages(self, result: GroupAdvantage, score: GroupScore) -> list[list[float] | None]:
        """Return the advantages of turns; none without rewards of turns, or where nothing can be compared."""
        if not score.turn_rewards or result.verdict == "unscorable":
            return []
        discount, estimator = self.advantage.turn_discount, self.advantage.estimator
        return turn_advantages(
            result.advantages, score.turn_rewards, score.turn_parents, discount=discount, estimator=estimator
        )

    def _added(
        self, ready: ReadyGroup, rewards: Sequence[float | None], shaping: GroupShaping | None
    ) -> tuple[list[float | None], float | None]:
        """Return each normalized reward's bonus for form and length, and the share of bonuses in force.

        A bonus counts in units of the score: it moves the reward by as much, or by less where normalization shrinks it.
        So it is never scaled up with the rewards of an environment in which hardly anything succeeds, and no shaped
        reward is above that of the ceiling.
        """
        if shaping is None:
            return [], None
        so_far = ready.snapshot.keys.get(SUCCESS)
        share = scale(self.shaping, ready.snapshot.success, None if so_far is None else so_far.mean)
        scores = ready.values[KEY]
        moves = [
            0.0 if x is None or bonus is None else max(0.0, min(share * bonus, shaping.ceiling - x))
            for x, bonus in zip(scores, shaping.bonus, strict=True)
        ]
        moved = ready.snapshot.normalize(
            KEY, [None if x is None else x + move for x, move in zip(scores, moves, strict=True)]
        )
        added = [
            None if a is None or b is None else max(0.0, min(move, b - a))
            for move, a, b in zip(moves, rewards, moved, strict=True)
        ]
        return added, share


def _differ(turns: Sequence[Sequence[float] | None], result: GroupAdvantage) -> bool:
    """Return whether rewards of turns give something to learn from where those of the samples do not differ."""
    values = [value for one in turns for value in one or ()]
    return result.verdict == "zero_variance" and max(map(abs, values), default=0.0) > NOISE


def _trained_lengths(score: GroupScore) -> list[int]:
    """Return the tokens of each sample that are trained on: none of one that its environment excludes."""
    excluded = set(score.excluded)
    return [0 if sample in excluded else length for sample, length in enumerate(score.lengths)]


def _why_unscorable(score: GroupScore, n_valid: int) -> str | None:
    if not score.failures:
        return None
    text = "; ".join(f"rater {name}: {text}" for name, text in sorted(score.failures.items()))
    return f"{n_valid} of {len(score.scores)} samples have a reward; {text}"[:_MAX_REASON]


def reliability_shares(snapshot: NormalizationSnapshot) -> dict[str, float]:
    """Return each rater's share of the weight as far as `snapshot` knows it.

    {} while it knows too little of any.
    """
    known = {key: stats for key, stats in snapshot.keys.items() if key.startswith(RESIDUAL)}
    fewest, groups = snapshot.config.warmup_samples, snapshot.config.warmup_groups
    if not known or any(stats.count < fewest or stats.groups < groups for stats in known.values()):
        return {}
    return shares({key.removeprefix(RESIDUAL): stats.std * stats.std for key, stats in known.items()})


def shaping_metrics(env: str, rewards: Sequence[GroupReward]) -> dict[str, float]:
    """Return the share of bonuses in force and what they added to a reward on average.

    Nothing without shaping.
    """
    added = [value for reward in rewards for value in reward.shaping if value is not None]
    in_force = [reward.shaping_scale for reward in rewards if reward.shaping_scale is not None]
    if not added or not in_force:
        return {}
    return {f"reward_shaping/{env}/scale": in_force[-1], f"reward_shaping/{env}/mean": sum(added) / len(added)}
