"""Makes the settings of each stage from the configuration of a run. Pure.

Each stage of the pipeline takes a struct of its own, and knows nothing else of the configuration. That of an extension
takes what its `ServiceSpec.settings` makes, or the whole of it. What extensions and offline trainers need as well is
made in `pipeline/config/`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from lachesis.pipeline.batcher.settings import BatcherSettings
from lachesis.pipeline.config.evaluation_sources import evaluable_steps, evaluated_environments, held_out_rule
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.servers import role_access, server_settings
from lachesis.pipeline.config.trainer_settings import trainer_settings
from lachesis.pipeline.curriculum.drawn_environments import curriculum_environments
from lachesis.pipeline.curriculum.settings import CurriculumEnv, CurriculumSettings
from lachesis.pipeline.environment.settings import EnvironmentSettings
from lachesis.pipeline.evaluator.settings import EvaluatedEnvSettings, EvaluatorSettings
from lachesis.pipeline.governor.settings import GovernorSettings
from lachesis.pipeline.health.logic.check import RunSettings
from lachesis.pipeline.health.settings import EnvHealthSettings, HealthSettings
from lachesis.pipeline.inference.policy_context import context_of_server
from lachesis.pipeline.inference.settings import TokenizerSource
from lachesis.pipeline.ledger.audit import LedgerRules
from lachesis.pipeline.ledger.settings import LedgerSettings
from lachesis.pipeline.normalizer.estimators.loader import builtin_estimator
from lachesis.pipeline.normalizer.settings import EnvRewardSettings, NormalizerSettings
from lachesis.pipeline.retention.settings import HistorySettings, ReaderSettings, RecoverySettings
from lachesis.pipeline.scorer.settings import EnvScoringSettings, ScorerSettings
from lachesis.pipeline.teacher.settings import TeacherServer, TeacherSettings
from lachesis.services.promotion import config_under_promotion

__all__ = [
    "SETTINGS",
    "batcher_settings",
    "curriculum_settings",
    "environment_settings",
    "evaluated_settings",
    "evaluator_settings",
    "governor_settings",
    "health_settings",
    "history_settings",
    "ledger_settings",
    "normalizer_settings",
    "policy_context",
    "reader_settings",
    "recovery_settings",
    "reward_settings",
    "scorer_settings",
    "scoring_settings",
    "teacher_settings",
]


def ledger_settings(config: RunConfig) -> LedgerSettings:
    """Return where the history of a run is."""
    return LedgerSettings(
        run=config.run,
        revision=config.revision,
        trainer=config.training.name,
        folder=config.path,
        replicas=config.streams.replicas,
    )


def recovery_settings(config: RunConfig) -> RecoverySettings:
    """Return what a recovery has to know of a run."""
    return RecoverySettings(
        **dataclasses.asdict(ledger_settings(config)),
        environments=tuple(config.environments),
        trains=config.mode == "train",
        has_own_server=config.nats is None,
    )


def history_settings(config: RunConfig) -> HistorySettings:
    """Return what may be deleted of a run's history."""
    return HistorySettings(
        run=config.run,
        revision=config.revision,
        trainer=config.training.name,
        readers=reader_settings(config),
        retention=config.flow.retention,
    )


def reader_settings(config: RunConfig) -> ReaderSettings:
    """Return which of a run's services read its history."""
    return ReaderSettings(
        environments=tuple(config.environments),
        learned=tuple(curriculum_environments(curriculum_settings(config))),
        learns_names=config.curriculum.missing_of_pool(is_foreign=True) is None,
        has_teacher=config.teacher.enabled,
        has_health=config.health.enabled,
        has_webhook=config.health.webhook_file is not None,
    )


def governor_settings(config: RunConfig) -> GovernorSettings:
    """Return the settings of the governor."""
    return GovernorSettings(
        flow=config.flow,
        batching=config.batching,
        environments=tuple(config.environments),
        trainer=config.training.name,
        steps=config.training.steps if config.mode == "train" else None,
        history=history_settings(config),
        folder=config.path,
        store=config.store,
    )


def batcher_settings(config: RunConfig) -> BatcherSettings:
    """Return the settings of the batcher."""
    return BatcherSettings(
        batching=config.batching,
        advantage=config.advantage,
        ledger=ledger_settings(config),
        environments=tuple(config.environments),
        ends_batched=config.mode == "observe",
    )


def environment_settings(config: RunConfig, name: str) -> EnvironmentSettings:
    """Return the settings of the process of environment `name`; empty: of all that generate here."""
    policy = config.role("policy")
    return EnvironmentSettings(
        environments=config.environments,
        own=[name] if name else [env for env, one in config.environments.items() if not one.is_foreign],
        held_out={env: held_out_rule(config, env) for env in config.environments},
        seed=config.seed,
        folder=config.path,
        policy=role_access(config, "policy"),
        tokenizer=TokenizerSource(config.tokenizer_of("policy"), config.chat_template_of("policy")),
        policy_says=policy.spec.says if policy.url is None else None,
        draws_by_epoch=config.curriculum.strategy == "epoch",
        reads=config.trainer_reads,
        temperature=config.trained_temperature,
    )


def evaluator_settings(config: RunConfig) -> EvaluatorSettings:
    """Return the settings of the evaluator."""
    return EvaluatorSettings(
        environments=evaluated_settings(config),
        evaluate=config.evaluate,
        access=role_access(config, "eval"),
        folder=config.path,
        trainer=config.training.name,
        last_step=config.training.steps,
        ends=config.mode == "train",
        evaluable=evaluable_steps(config),
    )


def evaluated_settings(config: RunConfig) -> dict[str, EvaluatedEnvSettings]:
    """Return, by environment that is evaluated, how it is."""
    return {
        name: EvaluatedEnvSettings(
            run=config.run,
            config=env,
            scoring=env.scoring or config.scoring,
            evaluate=config.evaluate,
            held_out=held_out_rule(config, name),
            seed=config.seed,
        )
        for name, env in evaluated_environments(config).items()
    }


def policy_context(config: RunConfig) -> int | None:
    """Return the tokens of the policy's context, None where only its server knows."""
    elsewhere = config.trains_elsewhere("inference", "policy") is not None
    return context_of_server(config.role("policy"), config.model, elsewhere=elsewhere)


def curriculum_settings(config: RunConfig) -> CurriculumSettings:
    """Return the settings of the curriculum."""
    return CurriculumSettings(
        config=config.curriculum,
        trainer=config.training.name,
        environments={
            name: CurriculumEnv(env.kind, env.params, env.is_foreign, held_out_rule(config, name))
            for name, env in config.environments.items()
        },
    )


def health_settings(config: RunConfig) -> HealthSettings:
    """Return the settings of the health service."""
    estimators = {env: builtin_estimator(config.advantage_of(env).estimator) for env in config.environments}
    zero_mean = {env for env, one in estimators.items() if one is not None and one.zero_mean and not one.whitens}
    return HealthSettings(
        config=config.health,
        trainer=config.training.name,
        environments={env: _env_health(config, env) for env in config.environments},
        rules=LedgerRules(config.batching.max_staleness, zero_mean, staleness_of=config.batching.staleness_of),
    )


def _env_health(config: RunConfig, env: str) -> EnvHealthSettings:
    """Return what the checks of an environment need.

    The evaluation of its name is checked with it, and with the run's first environment those of no environment's name.
    """
    settings, first = config.environments[env], next(iter(config.environments))
    return EnvHealthSettings(
        run=RunSettings(
            max_staleness=config.batching.max_staleness,
            sampling_temperature=None if settings.is_foreign else settings.temperature,
            trainer_temperature=config.training.learner.temperature,
            max_step_kl=config.training.learner.max_step_kl,
            env=env,
        ),
        evaluations=tuple(
            name
            for name in evaluated_environments(config)
            if name == env or (env == first and name not in config.environments)
        ),
    )


def normalizer_settings(config: RunConfig) -> NormalizerSettings:
    """Return the settings of the normalizer."""
    return NormalizerSettings(
        environments=reward_settings(config),
        lost_deadline_s=config.batching.lost_deadline_s,
        promoted=lambda promotion: reward_settings(config_under_promotion(promotion, config)),
    )


def reward_settings(config: RunConfig) -> dict[str, EnvRewardSettings]:
    """Return, by environment, how its scores become advantages."""
    return {
        env: EnvRewardSettings(
            config.normalization_of(env),
            config.reward_config_of(env),
            config.advantage_of(env),
            config.scoring_of(env).weighs_by_reliability,
        )
        for env in config.environments
    }


def scorer_settings(config: RunConfig) -> ScorerSettings:
    """Return the settings of the scorer."""
    own = [config.scoring, *(env.scoring for env in config.environments.values() if env.scoring is not None)]
    return ScorerSettings(
        scoring=config.scoring,
        environments=scoring_settings(config),
        named=[rater for scoring in own for rater in (*scoring.raters, *scoring.promotable)],
        reads=config.trainer_reads,
        excerpts=config.health.enabled and config.health.excerpts,
        promoted=lambda promotion: scoring_settings(config_under_promotion(promotion, config)),
    )


def scoring_settings(config: RunConfig) -> dict[str, EnvScoringSettings]:
    """Return, by environment, how its groups are scored."""
    return {
        env: EnvScoringSettings(
            scoring=config.scoring_of(env),
            shaping=config.reward_config_of(env),
            success_rater=settings.success_rater,
            success_threshold=settings.success_threshold,
            weighted=tuple(config.advantage_of(env).weights),
        )
        for env, settings in config.environments.items()
    }


def teacher_settings(config: RunConfig) -> TeacherSettings:
    """Return the settings of the teacher stage."""
    return TeacherSettings(
        config=config.teacher,
        servers={
            role: TeacherServer(
                role_access(config, role), TokenizerSource(config.tokenizer_of(role), config.chat_template_of(role))
            )
            for role in config.teacher.roles(config.environments)
        },
        policy_tokenizer=TokenizerSource(config.tokenizer_name, config.chat_template),
    )


SETTINGS: dict[str, Callable[..., Any]] = {
    "batcher": batcher_settings,
    "curriculum": curriculum_settings,
    "environment": environment_settings,
    "evaluator": evaluator_settings,
    "governor": governor_settings,
    "health": health_settings,
    "inference": server_settings,
    "normalizer": normalizer_settings,
    "scorer": scorer_settings,
    "teacher": teacher_settings,
    "trainer": trainer_settings,
}
"""By service: functions of the configuration and, where a service has parts, of the part that it plays."""
