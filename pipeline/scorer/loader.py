"""Loads the configured raters: built-in names, "module:name" or "path/to/file.py:name" references.

Each `RaterConfig` becomes an `EnsembleRater`: the rater with its parameters bound, under its name, with its bounds
known. Raises `ConfigError` that says what to change; nothing is rated before all raters of an ensemble have loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.common.paths import code_name
from lachesis.pipeline.common.user_code import argument_problem, load_attribute, refuse_ending
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.scorer.config import RaterConfig
from lachesis.pipeline.scorer.logic.aggregate import EnsembleMember
from lachesis.pipeline.scorer.rater import FunctionRater, Rater, check_bounds
from lachesis.pipeline.scorer.raters import rater_places
from lachesis.schemas.errors import ConfigError, LachesisError

__all__ = ["EnsembleRater", "find_rater", "load_member", "load_members"]


@dataclass(frozen=True, slots=True)
class EnsembleRater:
    """A rater in its place in an ensemble."""

    name: str
    rater: Rater
    bounds: tuple[float, float]
    config: RaterConfig

    def describe(self) -> EnsembleMember:
        """Return this member's identity in an `Ensemble` and its digest."""
        return EnsembleMember(
            name=self.name,
            reference=code_name(self.config.rater),  # the same wherever the run's folder lies
            version=self.rater.version,
            bounds=self.bounds,
            weight=self.config.weight,
            params=self.config.params,
        )


def load_members(configs: Sequence[RaterConfig]) -> list[EnsembleRater]:
    """Load the raters of an ensemble.

    Raises ConfigError with all that is wrong, also if two have the same name.
    """
    members: list[EnsembleRater] = []
    problems: list[LachesisError] = []
    for config in configs:
        try:
            members.append(load_member(config))
        except (ConfigError, StartupError) as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError("; ".join(map(str, problems)))
    names = [member.name for member in members]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two raters of the ensemble are called {name!r}; give one of them a `name`.")
    return members


def load_member(config: RaterConfig) -> EnsembleRater:
    """Load one rater. Raises ConfigError if it is unknown, refuses its parameters or has no bounds."""
    rater = _make(find_rater(config.rater), config)
    name = config.name or rater.name or type(rater).__name__
    if config.timeout_s < rater.needs_s:
        raise ConfigError(
            f"rater {name!r}: timeout_s is {config.timeout_s:g}, but by its own limits a rating may take "
            f"{rater.needs_s:g} s; an answer could make its rating missing"
        )
    check_bounds(rater.bounds, name)
    check_bounds(config.bounds, name)
    if rater.bounds is not None and config.bounds is not None and tuple(rater.bounds) != tuple(config.bounds):
        raise ConfigError(f"rater {name!r} declares bounds {rater.bounds}; remove `bounds` {config.bounds}.")
    bounds = rater.bounds or config.bounds
    if bounds is None:
        raise ConfigError(
            f"rater {name!r} has no bounds, so its scale cannot be joined with others'. Declare them "
            f"(@rater(bounds=(low, high))), or run a calibration pass over recorded samples and set `bounds`."
        )
    return EnsembleRater(name, rater, (float(bounds[0]), float(bounds[1])), config)


def find_rater(reference: str) -> object:
    """Return the rater that a reference names. Raises `ConfigError` if there is none."""
    known = rater_places()
    place, colon, name = known.get(reference, reference).rpartition(":")
    what = f"rater {reference!r}"
    if not colon:
        raise ConfigError(
            f"{what} is neither module:name nor path/to/file.py:name nor a built-in one{nearest(reference, known)}"
        )
    found: object = load_attribute(place, name, what)
    return found


def _make(found: object, config: RaterConfig) -> Rater:
    if isinstance(found, FunctionRater):
        return found.with_params(config.params)
    if isinstance(found, type) and issubclass(found, Rater):
        problem = argument_problem(found, config.params)
        if problem is not None:
            raise ConfigError(f"rater {config.rater!r}, params: {problem}")
        try:
            with refuse_ending(f"rater {config.rater!r}: its code"):
                return found(**config.params)
        except TypeError as error:
            raise ConfigError(f"rater {config.rater!r}, params {sorted(config.params)}: {error}.") from error
    if isinstance(found, Rater):
        if config.params:
            raise ConfigError(f"rater {config.rater!r} is a finished object; it takes no params.")
        return found
    if callable(found) and not isinstance(found, type):
        return FunctionRater(found).with_params(config.params)
    raise ConfigError(f"rater {config.rater!r} is a {type(found).__name__}; give a function or a Rater.")
