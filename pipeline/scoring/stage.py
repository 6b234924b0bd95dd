"""The scorer: rollout groups in, scores out, through the stateless stage runtime.

Each environment is judged by its own ensemble, or by the run's. A group whose environment is judged by none is scored
by the rewards the environment itself gave; one without either is a dead letter, for nobody could ever score it.
"""

from collections import defaultdict

import msgspec

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.scoring.judge import EnvironmentScorer
from lachesis.pipeline.scoring.logic.agreement import Agreement
from lachesis.pipeline.stage.service import Service
from lachesis.pipeline.stage.stateless import Rollout, StatelessStage, run_stateless
from lachesis.schemas.annotations import GroupScore, ScoreEvent, Stamp
from lachesis.schemas.errors import ConfigError

__all__ = ["run_scorer"]

_TOLD = 8
"""Groups from one look at how far raters agree to the next."""


async def run_scorer(service: Service, config: RunConfig) -> None:
    """Run one replica of the scorer until the service drains.

    Raises `ConfigError` when a rater cannot be loaded, or advantages need the ratings of one that there is not.
    """
    shared = EnvironmentScorer(config.scoring, None)
    scorers = {
        env: EnvironmentScorer(settings.scoring or config.scoring, settings, config.reward_config_of(env))
        for env, settings in config.environments.items()
    }

    for env, scorer in scorers.items():
        unknown = sorted(set(config.advantage_of(env).weights) - set(scorer.versions))
        if unknown and scorer.versions:
            raise ConfigError(
                f"environment {env}: advantage.weights names {', '.join(unknown)}; its raters are "
                f"{', '.join(scorer.versions)}"
            )

    agreement: defaultdict[str, Agreement] = defaultdict(Agreement)

    async def handle(rollout: Rollout) -> GroupScore:
        env = rollout.group.env
        scored = await scorers.get(env, shared).score(rollout.group, rollout.seq)
        agreement[env].add(scored)
        if service.vitals.handled % _TOLD == 0:
            service.vitals.metrics |= agreement[env].metrics(env)
        return scored

    def event(env: str, groups: list[GroupScore]) -> ScoreEvent:
        scorer = scorers.get(env, shared)
        return ScoreEvent(
            run=service.run,
            env=env,
            revision=service.revision,
            ensemble=scorer.digest,
            raters=scorer.versions,
            groups=groups,
        )

    def stamp(item: GroupScore, times: Stamp) -> GroupScore:
        return msgspec.structs.replace(item, stamps=[times])

    await run_stateless(
        service,
        StatelessStage(
            kind="score", handle=handle, event=event, stamp=stamp, concurrency=config.scoring.groups_at_once
        ),
    )
