"""Loads an estimator from the configuration: a built-in name, `module:name` or `path/to/file.py:name`."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec

from lachesis.pipeline.common.paths import code_name
from lachesis.pipeline.common.secrets import masked
from lachesis.pipeline.common.user_code import argument_problem, load_attribute
from lachesis.pipeline.extension import added, load_place
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.estimator import Estimator, GroupAdvantage
from lachesis.pipeline.normalizer.estimators.gdpo import Gdpo
from lachesis.pipeline.normalizer.estimators.user_estimator import EstimatorFunction, OwnEstimator
from lachesis.pipeline.normalizer.known_estimators import ESTIMATORS
from lachesis.schemas.errors import ConfigError

__all__ = ["builtin_estimator", "describe_estimator", "group_advantage", "load_estimator"]


def builtin_estimator(name: str) -> type[Estimator] | None:
    """Return the class of a built-in estimator; None: it is not one."""
    if name not in ESTIMATORS:
        return None
    kind: Any = load_place(ESTIMATORS[name])
    return cast("type[Estimator]", kind)


def load_estimator(config: AdvantageConfig) -> Estimator:
    """Return the estimator that the configuration names.

    Raises `ConfigError` where a user's own cannot be loaded, is no function of a group, or refuses its parameters.
    """
    return _loaded(msgspec.json.encode(config))


def describe_estimator(config: AdvantageConfig) -> dict[str, Any]:
    """Return what identifies an estimator in the record of a revision.

    The settings, and the version of a user's own.

    A user's file is named without its folders, so that the record is the same wherever the run's folder lies.
    """
    settings: dict[str, Any] = masked("", msgspec.to_builtins(config))
    del settings["promotable"]
    if config.turn_discount == 1:  # so that records of runs which know of no other stay as they are
        del settings["turn_discount"]
    version = load_estimator(config).version
    return settings if version is None else settings | {"estimator": code_name(config.estimator), "version": version}


def group_advantage(
    rewards: Sequence[float | None],
    config: AdvantageConfig,
    lengths: Sequence[int] | None = None,
    ratings: Mapping[str, Sequence[float | None]] | None = None,
) -> GroupAdvantage:
    """Return the advantages of one complete group by the configured estimator; see `Estimator.advantages`."""
    return load_estimator(config).advantages(rewards, lengths, ratings)


@lru_cache(maxsize=64)
def _loaded(encoded: bytes) -> Estimator:
    config = msgspec.json.decode(encoded, type=AdvantageConfig)
    if config.estimator == Gdpo.name:
        return Gdpo(config.std_floor, config.weights)
    kind = builtin_estimator(config.estimator)
    if kind is not None:
        return kind(config.std_floor)
    place, _, name = added("estimators").get(config.estimator, config.estimator).rpartition(":")
    what = f"advantage.estimator {config.estimator!r}"
    found: object = load_attribute(place, name, what)
    if not isinstance(found, EstimatorFunction):
        if not callable(found) or isinstance(found, type):
            raise ConfigError(f"{what} is a {type(found).__name__}; give a function of a RewardGroup.")
        found = EstimatorFunction(found)
    params = config.own_params
    problem = argument_problem(found.function, params, positional=1)
    if problem is not None:
        raise ConfigError(f"{what}, params: {problem}")
    return OwnEstimator(code_name(config.estimator), found, params, config.std_floor)
