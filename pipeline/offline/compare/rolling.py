"""Two revisions compared as they go on: the newest groups that both have rewarded. Pure, and bounded.

The figures are those of `compare`, by the same definitions, over a window instead of all history.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

from lachesis.pipeline.offline.compare.significance import flipped
from lachesis.pipeline.offline.compare.statistics import rank_correlation
from lachesis.schemas.annotations import GroupReward

__all__ = ["WINDOW_GROUPS", "RollingComparison", "RollingFigures"]

WINDOW_GROUPS = 512
"""Groups of an environment that are compared."""
_MAX_WAITING = 8192
"""Groups of an environment, by side, that wait for the other side; beyond it the oldest are forgotten."""


class RollingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of `pairs` groups, the live revision's first; None: not defined, or too little data.

    `rank_correlation` is that of the scores, the lowest of any environment; `sign_flips` the share of groups, trainable
    in both, in which a sample's advantage changed its sign; the others are shares of groups without variance.
    """

    pairs: int = 0
    rank_correlation: float | None = None
    sign_flips: float | None = None
    zero_variance_live: float | None = None
    zero_variance: float | None = None


class _EnvWindow:
    def __init__(self) -> None:
        self.waiting: tuple[OrderedDict[str, GroupReward], OrderedDict[str, GroupReward]] = OrderedDict(), OrderedDict()
        self.pairs: deque[tuple[GroupReward, GroupReward]] = deque(maxlen=WINDOW_GROUPS)
        self.paired: OrderedDict[str, None] = OrderedDict()

    def add_reward(self, side: int, reward: GroupReward) -> None:
        group = reward.group
        if group in self.paired or group in self.waiting[side]:
            return  # the first stored counts
        other = self.waiting[1 - side].pop(group, None)
        if other is None:
            self.waiting[side][group] = reward
            if len(self.waiting[side]) > _MAX_WAITING:
                self.waiting[side].popitem(last=False)
            return
        self.paired[group] = None
        if len(self.paired) > _MAX_WAITING:
            self.paired.popitem(last=False)
        if len(other.scores) == len(reward.scores):  # or one id was given to two rollouts
            self.pairs.append((reward, other) if side == 0 else (other, reward))


class RollingComparison:
    """Feed it the rewards of both sides, in any order."""

    def __init__(self) -> None:
        self._envs: dict[str, _EnvWindow] = {}

    def live(self, env: str, rewards: Iterable[GroupReward]) -> None:
        """Take in rewards of the live revision."""
        self._add_reward(env, 0, rewards)

    def shadow(self, env: str, rewards: Iterable[GroupReward]) -> None:
        """Take in rewards of the other one."""
        self._add_reward(env, 1, rewards)

    def _add_reward(self, env: str, side: int, rewards: Iterable[GroupReward]) -> None:
        kept = self._envs.setdefault(env, _EnvWindow())
        for reward in rewards:
            kept.add_reward(side, msgspec.structs.replace(reward, stamps=[]))

    def figures(self) -> RollingFigures:
        """Return how the two differ over the newest groups of each environment."""
        pairs = [pair for env in self._envs.values() for pair in env.pairs]
        if not pairs:
            return RollingFigures()
        comparable = [(a, b) for a, b in pairs if a.verdict == b.verdict == "trainable"]
        ranks = [_ranks(env.pairs) for env in self._envs.values() if env.pairs]
        known = [rho for rho in ranks if rho is not None]
        live, shadow = (sum(pair[side].verdict == "zero_variance" for pair in pairs) / len(pairs) for side in (0, 1))
        return RollingFigures(
            pairs=len(pairs),
            rank_correlation=min(known) if len(known) == len(ranks) else None,
            sign_flips=sum(flipped(a, b) for a, b in comparable) / len(comparable) if comparable else None,
            zero_variance_live=live,
            zero_variance=shadow,
        )


def _ranks(pairs: Iterable[tuple[GroupReward, GroupReward]]) -> float | None:
    columns = [[x for pair in pairs for x in pair[side].scores] for side in (0, 1)]
    return rank_correlation(*columns)
