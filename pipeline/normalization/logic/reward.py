"""From a group that is ready to its reward: normalized with its snapshot, judged, turned into advantages. Pure.

The normalizer and a replay of history both use this, so that equal scores and an equal snapshot give equal bits.
"""

import msgspec

from lachesis.pipeline.advantage.config import AdvantageConfig
from lachesis.pipeline.advantage.logic import group_advantage
from lachesis.pipeline.advantage.whitening import needs_whitening
from lachesis.pipeline.health.logic.groups import fault_of
from lachesis.pipeline.normalization.logic.normalizer import Ready
from lachesis.schemas.annotations import GroupReward, GroupScore, Stamp
from lachesis.schemas.errors import DataError

__all__ = ["KEY", "group_reward"]

KEY = "score"
"""What the normalizer knows the ensemble's score by."""


def group_reward(ready: Ready, score: GroupScore, advantage: AdvantageConfig, *stamps: Stamp) -> GroupReward:
    """Return the reward of `score`'s group, with its stamps and `stamps`.

    A group that must not be trained on, or that the estimator refuses, is quarantined with the reason.
    """
    rewards = ready.snapshot.normalize(KEY, ready.values[KEY]).values
    reward = GroupReward(
        group=ready.group,
        seq=ready.seq,
        item=score.item,
        policy_step=score.policy_step,
        verdict="quarantined",
        scores=score.scores,
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
        stamps=[*score.stamps, *stamps],
    )
    fault = fault_of(score)
    if fault is not None:
        return msgspec.structs.replace(reward, reason=fault)
    try:
        result = group_advantage(rewards, advantage, score.lengths, score.ratings)
    except DataError as error:
        return msgspec.structs.replace(reward, reason=str(error))
    return msgspec.structs.replace(
        reward,
        verdict=result.verdict,
        advantages=list(result.advantages),
        mean=result.mean,
        std=result.std,
        range=result.range,
        n_valid=result.n_valid,
        lengths=score.lengths if needs_whitening(advantage) else [],
    )
