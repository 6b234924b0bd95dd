"""Decides for evaluations whether a sampled answer succeeded, by a success_rater or the environment.

A `success_rater` of the environment decides, also for tasks that it holds out of training. Without one the environment
decides itself, by `score` or by a `reward` that is a single number; this shows when training only pleases the raters.
An environment that leaves this to raters, or gives several rewards, is scored like its rollouts: by the raters, or
without raters by the sum of its rewards.
"""

from collections.abc import Sequence
from functools import cache

from lachesis.pipeline.common.real_number import finite_number
from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.environment.config import EnvironmentConfig
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.group_environment import GroupEnvironment
from lachesis.pipeline.environment.rollout import GroupDraft, build_group
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.pipeline.evaluator.evaluate import GroupScorer
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.schemas.errors import LachesisError

__all__ = ["can_be_judged", "success_scorer"]


def can_be_judged(env: Environment, scoring: ScoringConfig) -> bool:
    """Whether a rater, or the environment itself, can decide which answers succeed."""
    kind = type(env)
    own = kind.reward is not Environment.reward or kind.score is not Environment.score
    return own or isinstance(env, GroupEnvironment) or bool(scoring.raters)


def success_scorer(
    env: Environment, name: str, settings: EnvironmentConfig, scoring: ScoringConfig, run: str
) -> GroupScorer:
    """Return a scorer for `evaluate`.

    It gives 1.0 for a session that succeeded, 0.0 for one that did not, None if that is unknown. If raters decide,
    `settings` names the rater and the rating from which on a session succeeds. The scorer raises EnvironmentCodeError
    if the environment's `score` fails, else as `EnvironmentScorer.score` does.
    """

    @cache  # raters are loaded where they are needed: an environment that judges by itself needs none of their packages
    def load_scorer() -> EnvironmentScorer:
        return EnvironmentScorer(scoring, settings)

    scores_itself = type(env).score is not Environment.score

    async def by_environment(draft: GroupDraft) -> list[float | None]:
        try:
            scores = [await env.score(draft.task, session) for session in draft.sessions]
            return [None if score is None else finite_number(score) for score in scores]
        except LachesisError:
            raise
        except Exception as error:
            raise EnvironmentCodeError(f"{type(env).__name__}.score: {error_text(error)}") from error

    async def by_raters(draft: GroupDraft) -> Sequence[float | None]:
        group = build_group(draft, run=run, env=name, producer="evaluator", epoch=0, counter=0, tokenizer_hash="-")
        scored = await load_scorer().score(group, seq=1)
        if settings.success_rater is None:
            return scored.scores
        return scored.ratings.get(settings.success_rater, [None] * len(scored.scores))

    async def succeeded(draft: GroupDraft) -> list[float | None]:
        if settings.success_rater is not None:
            scores, threshold = list(await by_raters(draft)), settings.success_threshold
        elif scores_itself:
            scores, threshold = await by_environment(draft), env.success_threshold
        elif all(len(rewards) == 1 for rewards in draft.rewards):
            scores = [value for rewards in draft.rewards for value in rewards.values()]
            threshold = env.success_threshold
        else:
            scores, threshold = list(await by_raters(draft)), settings.success_threshold
        return [None if score is None else float(score >= threshold) for score in scores]

    return succeeded
