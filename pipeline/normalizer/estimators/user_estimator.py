"""Estimators of your own: functions of a group's rewards, with or without `@estimator`.

    from lachesis import RewardGroup, estimator

    @estimator(version="1")
    def above_median(group: RewardGroup, *, scale: float = 1.0) -> list[float]:
        middle = statistics.median(group.rewards)
        return [scale * (reward - middle) for reward in group.rewards]

It must be pure and quick: the normalizer calls it on its event loop, and a replay calls it again and compares the bits.
If it raises or returns something else than advantages (NaN, infinity, a wrong number of values), only its group is
quarantined.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.common.user_code import log_failure, refuse_ending
from lachesis.pipeline.normalizer.estimators.estimator import Estimator, RewardGroup
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["EstimatorFunction", "OwnEstimator", "estimator"]

MAX_ABS_ADVANTAGE = 1e6
"""Largest magnitude of an advantage that is taken from a user's function."""

_MAX_REASON = 400
"""Characters of what a user's function says that a group's reason repeats."""

Function = Callable[..., Sequence[float]]


class EstimatorFunction:
    """A function marked as an estimator: see `estimator`."""

    def __init__(self, function: Function, *, version: str = "1", whitens: bool = False) -> None:
        """Raises `ConfigError` unless it is a function."""
        if not callable(function):
            raise ConfigError(f"estimator is {function!r:.80}; give a function of a RewardGroup.")
        self.function = function
        self.version = version
        self.whitens = whitens
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = function.__doc__

    def __call__(self, group: RewardGroup, **params: Any) -> Sequence[float]:
        """Call the function, as if it were not marked."""
        return self.function(group, **params)


@overload
def estimator(function: Function, /) -> EstimatorFunction: ...


@overload
def estimator(*, version: str = "1", whitens: bool = False) -> Callable[[Function], EstimatorFunction]: ...


def estimator(
    function: Function | None = None, /, *, version: str = "1", whitens: bool = False
) -> EstimatorFunction | Callable[[Function], EstimatorFunction]:
    """Make an estimator of a function.

    Its first argument is the group, further keyword arguments are its parameters.

    `version` is recorded with the advantages: change it with the code. `whitens`: the batcher whitens its advantages
    over the batch.
    """

    def wrap(inner: Function) -> EstimatorFunction:
        return EstimatorFunction(inner, version=version, whitens=whitens)

    return wrap if function is None else wrap(function)


class OwnEstimator(Estimator):
    """A user's function in the place of an estimator. `name` is its reference without the folders of its file."""

    def __init__(
        self, reference: str, function: EstimatorFunction, params: Mapping[str, Any], std_floor: float
    ) -> None:
        super().__init__(std_floor)
        if inspect.iscoroutinefunction(function.function):
            raise ConfigError(f"estimator {reference!r} is asynchronous; give a plain function, which cannot wait.")
        self.name = f"{reference}@{function.version}"
        self.version = function.version
        self.whitens = function.whitens
        self._function = function.function
        self._params = dict(params)

    def estimate(self, group: RewardGroup) -> list[float]:
        """Return the function's advantages of the group. Raises `DataError` if they cannot be trained on."""
        try:
            with refuse_ending("its code"):
                values = [float(value) for value in self._function(group, **self._params)]
        except Exception as error:  # the user's code: it costs its group, with the reason
            log_failure(f"estimator {self.name}", error)
            raise DataError(f"estimator {self.name}: {error_text(error)}"[:_MAX_REASON]) from error
        if len(values) != group.n:
            raise DataError(f"estimator {self.name} returned {len(values)} advantages for {group.n} rewards.")
        wrong = next((value for value in values if not abs(value) <= MAX_ABS_ADVANTAGE), None)
        if wrong is not None:
            raise DataError(
                f"estimator {self.name} returned {wrong}; advantages are finite and at most {MAX_ABS_ADVANTAGE:g}."
            )
        return values

    def bound(self, group: RewardGroup) -> float:
        """Return no bound: `estimate` has checked its values."""
        return math.inf
