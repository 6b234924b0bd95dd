"""Makes promotions of a run's configuration, and the configuration that holds under a promotion. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from lachesis.pipeline.common.paths import code_name
from lachesis.pipeline.common.secrets import masked
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.normalizer.known_estimators import ESTIMATORS
from lachesis.pipeline.promotion.logic import settings_digest
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.promotion import Promotion, RewardSettings

__all__ = ["config_under_promotion", "make_promotion"]

_OF_THE_PROCESS = frozenset({"controls", "fixed_samples", "groups_at_once", "patience_s", "promotable"})
"""Settings of scoring and advantages that change no score."""


def make_promotion(config: RunConfig, revision: str, *, by: str, asked_ns: int, give_up: bool = False) -> Promotion:
    """Return the promotion of `revision`, whose settings are those of `config`."""
    environments = {
        env: RewardSettings(
            scoring=_recorded(config.scoring_of(env)),
            normalization=msgspec.to_builtins(config.normalization_of(env)),
            reward_config=msgspec.to_builtins(config.reward_config_of(env)),
            advantage=_recorded(config.advantage_of(env)),
            success_rater=settings.success_rater,
            success_threshold=settings.success_threshold,
        )
        for env, settings in config.environments.items()
    }
    std_floor = config.advantage.std_floor
    return Promotion(
        revision=revision,
        digest=settings_digest(environments, std_floor),
        by=by,
        asked_ns=asked_ns,
        environments=environments,
        std_floor=std_floor,
        give_up=give_up,
    )


def _recorded(settings: msgspec.Struct) -> dict[str, Any]:
    """Return settings as a promotion stores them in ROLLOUTS: without secrets, since every reader sees them."""
    plain: dict[str, Any] = masked("", msgspec.to_builtins(settings))
    return {name: value for name, value in plain.items() if name not in _OF_THE_PROCESS}


def config_under_promotion(promotion: Promotion, config: RunConfig) -> RunConfig:
    """Return `config` with the settings of a promotion; environments that it does not name stay unchanged.

    Its raters are those of the message; check them with `scorer.promoted` before they are loaded. Raises `ConfigError`
    if the two do not fit together, if this build does not know a setting of the promotion, or if it names an estimator
    that `config` does not.
    """
    named = [config.advantage, *(env.advantage for env in config.environments.values() if env.advantage is not None)]
    environments = dict(config.environments)
    for env in environments.keys() & promotion.environments.keys():
        where = f"revision {promotion.revision}, environment {env}"
        try:
            environments[env] = _env_settings(environments[env], promotion.environments[env], named)
        except msgspec.ValidationError as error:  # a newer build's settings, or such as it alone allows
            raise ConfigError(f"{where}: {error}; upgrade this service") from error
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return msgspec.structs.replace(config, environments=environments)


def _env_settings(
    settings: EnvironmentConfig, judging: RewardSettings, named: Sequence[AdvantageConfig]
) -> EnvironmentConfig:
    return msgspec.structs.replace(
        settings,
        scoring=msgspec.convert(judging.scoring, ScoringConfig),
        normalization=msgspec.convert(judging.normalization, NormalizationConfig),
        reward_config=msgspec.convert(judging.reward_config, RewardConfig),
        advantage=_admitted_advantage(msgspec.convert(judging.advantage, AdvantageConfig), named),
        success_rater=judging.success_rater,
        success_threshold=judging.success_threshold,
    )


def _admitted_advantage(asked: AdvantageConfig, named: Sequence[AdvantageConfig]) -> AdvantageConfig:
    """Return the advantages of a promotion, with an estimator of one's own as `named` has it.

    Raises `ConfigError` where none has it: a message names no code.
    """
    if asked.estimator in ESTIMATORS:
        return asked
    for own in named:
        params = own.own_params
        if code_name(own.estimator) == code_name(asked.estimator) and asked.own_params in (params, masked("", params)):
            return msgspec.structs.replace(asked, estimator=own.estimator, params=own.params)
    promotable = {code_name(path): path for own in named for path in (own.estimator, *own.promotable) if ":" in path}
    path = promotable.get(code_name(asked.estimator))
    if path is None or not all(isinstance(value, bool | int | float) for value in asked.own_params.values()):
        what = "with these parameters " if path else ""
        raise ConfigError(
            f"the estimator {asked.estimator!r} is not named {what}by this service's own configuration, and a "
            "promotion, which is a message, names no code: name it in advantage.promotable and restart scorers, "
            "normalizer and batcher, or promote another revision"
        )
    return msgspec.structs.replace(asked, estimator=path)
