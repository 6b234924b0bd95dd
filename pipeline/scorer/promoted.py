"""Decides which raters a promotion, which is only a message, may bring into a scorer.

Guarantees that a scorer loads only built-in raters and raters that its own configuration names, with the parameters in
that configuration. Only a built-in function that reads nothing but the sample takes plain parameters from a message.
"""

from collections.abc import Sequence

import msgspec

from lachesis.pipeline.common.paths import code_name
from lachesis.pipeline.common.secrets import MASK, masked
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.loader import find_rater
from lachesis.pipeline.scorer.rater import FunctionRater
from lachesis.pipeline.scorer.raters import shipped_raters
from lachesis.schemas.errors import ConfigError

__all__ = ["admit_promoted"]

_PLAIN = (bool, int, float, str)
_PATTERN = "pattern"
"""A regular expression, which runs as code does: one that backtracks without end would hold the scorer up."""


def admit_promoted(promoted: ScoringConfig, named: Sequence[RaterConfig]) -> ScoringConfig:
    """Return a promotion's scoring with the raters as the scorer's own configuration names them.

    Raises `ConfigError` for one that is not among them, `named`.

    Code lies where the configuration says, and secrets, which a promotion does not carry, are the configuration's.
    """
    return msgspec.structs.replace(promoted, raters=[_admitted(rater, named) for rater in promoted.raters])


def _admitted(asked: RaterConfig, named: Sequence[RaterConfig]) -> RaterConfig:
    alike = [one for one in named if code_name(one.rater) == code_name(asked.rater)]
    alike.sort(key=lambda one: one.name != asked.name)
    for own in alike:
        if asked.params in (own.params, masked("", own.params)):
            return msgspec.structs.replace(asked, rater=own.rater, params=own.params)
    shipped = shipped_raters()
    if asked.rater in shipped and (not asked.params or _takes_any_params(asked)):
        return asked
    what = "with these parameters " if alike or asked.rater in shipped else ""
    pattern = f" (a {_PATTERN}, above all, which runs as code does)" if _PATTERN in asked.params else ""
    raise ConfigError(
        f"the rater {asked.rater!r} is not named {what}by this scorer's own configuration, and a promotion, which is a "
        f"message, names no code{pattern}: add it, with its params, to scoring.promotable and restart the scorers, or "
        "promote another revision"
    )


def _takes_any_params(asked: RaterConfig) -> bool:
    """Whether the rater is a function of ours that reads the sample alone, and its parameters are plain values.

    A text in which something was masked is not the one that the revision was scored with.
    """
    return isinstance(find_rater(asked.rater), FunctionRater) and all(
        value is None or (name != _PATTERN and isinstance(value, _PLAIN) and MASK not in str(value))
        for name, value in asked.params.items()
    )
