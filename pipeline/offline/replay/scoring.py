"""Scores stored rollouts for a replay.

Turns a stored rollout into its score, or the reason why it has none. Knows neither order nor commits, and no pace.
"""

import gc
import time
from collections.abc import Callable, Iterable

import msgspec

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.runtime.retries import OutageRetries
from lachesis.pipeline.runtime.rollouts import read_rollout
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.schemas.annotations import GroupScore, Stamp
from lachesis.schemas.errors import DataError

__all__ = ["STAGE", "ReplayScorer", "ScoreOrReason", "collect_seldom", "load_scorers"]

STAGE = "replay"
_GC_THRESHOLD = 5000


class ScoreOrReason(msgspec.Struct, frozen=True, array_like=True):
    """The score of a rollout, or the reason why it has none."""

    score: GroupScore | None
    reason: str = ""


def load_scorers(config: RunConfig, envs: Iterable[str]) -> dict[str, EnvironmentScorer]:
    """Return the scorer of each environment. Raises `ConfigError` where a rater cannot be loaded."""
    return {
        env: EnvironmentScorer(config.scoring_of(env), config.environments[env], config.reward_config_of(env))
        for env in envs
    }


class ReplayScorer:
    """Scores the rollouts of `envs`, each by its own raters. `retrying` says how long an outage is waited for.

    Raises `ConfigError` where a rater cannot be loaded.
    """

    def __init__(self, config: RunConfig, envs: Iterable[str], retrying: Callable[[str], OutageRetries]) -> None:
        self._retrying = retrying
        self.scorers = load_scorers(config, envs)

    def is_asynchronous(self, env: str) -> bool:
        """Whether any rater of `env` is asynchronous."""
        return self.scorers[env].is_asynchronous

    async def score_rollout(self, env: str, message: StoredMessage) -> ScoreOrReason:
        """Return what becomes of the rollout of `env` that `message` holds.

        Raises `InfrastructureError` where an outage of its raters lasts too long.
        """
        scorer = self.scorers[env]
        start_ns = time.time_ns()
        try:
            rollout = read_rollout(message)
            try:
                score = await scorer.score(rollout.group, rollout.seq)
            except InfrastructureError:
                score = await self._retrying(f"score a rollout of {env}")(scorer.score, rollout.group, rollout.seq)
        except DataError as error:
            return ScoreOrReason(None, error_text(error))
        stamp = Stamp(STAGE, message.time_ns, start_ns, time.time_ns())
        return ScoreOrReason(msgspec.structs.replace(score, stamps=[stamp]))


def collect_seldom() -> None:
    """Run Python's garbage collector less often, in a process that only scores and folds.

    It makes many objects and hardly a cycle, and spent a tenth of its time on the search.
    """
    gc.set_threshold(_GC_THRESHOLD)
