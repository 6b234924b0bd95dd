"""The interface that raters implement.

A rater gets a `Sample` and returns a number, or None to abstain. It is a function under `@rater` or a subclass of
`Rater`, sync or async, over one sample or over a whole group. It declares its bounds, so that raters of different
scales can be joined, and a version, which is part of the ensemble's digest. It raises `lachesis.RaterUnavailable` when
a service that it depends on is unavailable; then the group waits. The usual clients' connection errors, time limits and
statuses 408, 429 and 5xx do the same (see `pipeline.common.outages`). Any other exception makes only this rating
missing. A missing rating is None, never 0.

    @rater(bounds=(0.0, 1.0), version="1")
    def brevity(sample: Sample, *, limit: int = 100) -> float:
        return min(1.0, limit / max(sample.token_count, 1))
"""

import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import msgspec

from lachesis.pipeline.common.real_number import real_number
from lachesis.pipeline.common.user_code import argument_problem
from lachesis.pipeline.tasks.thoughts import opened_thought
from lachesis.schemas.errors import ConfigError

__all__ = [
    "MAX_FIGURES",
    "MAX_FIGURE_NAME_CHARS",
    "FunctionRater",
    "Rater",
    "Rating",
    "RatingStatus",
    "Sample",
    "rater",
    "rating_within",
    "to_rating",
]

MAX_FIGURES = 32
"""Figures of one rating."""
MAX_FIGURE_NAME_CHARS = 64

RatingStatus = Literal["ok", "timeout", "error", "abstain", "nonfinite", "unavailable"]
"""unavailable: infrastructure failed, however often it was tried; this says nothing about the sample."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to be rated. `task` holds the environment's record for raters, the reference under "answer"."""

    prompt: str
    completion: str
    messages: Sequence[Mapping[str, Any]] = ()
    task: Mapping[str, Any] = msgspec.field(default_factory=dict)
    token_count: int = 0
    finish_reason: str = "stop"
    item: str = ""
    env: str = ""
    opened: str = ""
    """What the chat template began of the completion at the end of the prompt, "<think>" say."""

    @property
    def text(self) -> str:
        """The completion behind what the prompt began of it: with both tags of its thinking."""
        opened = self.opened or opened_thought(self.prompt)
        return self.completion if self.completion.lstrip().startswith(opened) else opened + self.completion


class Rating(msgspec.Struct, frozen=True, gc=False):
    """A raw rating, or None with the reason: `status`, and in words `detail`.

    `figures` are what a rater says further of the sample, by name: how well it meets each criterion of a rubric, say.
    They enter no score.
    """

    value: float | None
    status: RatingStatus = "ok"
    detail: str = ""
    figures: Mapping[str, float] | None = None


Rated = float | Rating | None | Awaitable[float | Rating | None]
RatedGroup = Sequence[float | Rating | None] | Awaitable[Sequence[float | Rating | None]]


class Rater:
    """Base class of raters: override `rate`, or `rate_group` to rate all samples of a group in one call."""

    name: str = ""
    version: str = "1"
    bounds: tuple[float, float] | None = None
    """Lowest and highest rating; None if they are not known before a calibration pass."""
    needs_s: float = 0.0
    """Seconds that one rating may take by the rater's own limits; its `timeout_s` must be longer."""
    inline: bool = False
    """Call a sync rater on the event loop: only for one that is sure to finish within about 100 us, since no timeout
    can reach it. Otherwise it runs in a worker thread."""

    def rate(self, sample: Sample) -> Rated:
        """Return the rating of one sample, None to abstain. May be `async def`."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither rate nor rate_group")

    def rate_group(self, samples: Sequence[Sample]) -> RatedGroup:
        """Return one rating a sample, in their order. May be `async def`."""
        raise NotImplementedError(f"{type(self).__name__} does not rate groups")

    calls_at_once: int | None = None
    """Calls that it can work on at once, if it has a bound of its own: further ones wait before their time begins."""

    @property
    def rates_groups(self) -> bool:
        """Whether `rate_group` is the method to call."""
        return type(self).rate_group is not Rater.rate_group


class FunctionRater(Rater):
    """A rater made of a function; calling it calls the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        version: str = "1",
        bounds: tuple[float, float] | None = None,
        inline: bool = False,
        group: bool = False,
        apart: Sequence[str] = (),
        check: Callable[..., object] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise ConfigError(f"rater is {function!r:.80}; give a function of a Sample.")
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.version = version
        self.bounds = bounds
        self.group = group
        self.apart = tuple(apart)
        self.check = check
        self.params = dict(params or {})
        self.runs_apart = any(self.params.get(param) is not None for param in apart)
        """Whether it is called in a worker process, because an answer could keep it busy for ever."""
        self.inline = inline and not self.runs_apart
        self.call = partial(function, **self.params)
        """The function with its parameters bound."""
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def rate(self, sample: Sample) -> Rated:
        """Call the function on one sample."""
        result: Rated = self.call(sample)
        return result

    def rate_group(self, samples: Sequence[Sample]) -> RatedGroup:
        """Call the function on a whole group."""
        result: RatedGroup = self.call(samples)
        return result

    @property
    def rates_groups(self) -> bool:
        """Whether the function takes a whole group."""
        return self.group

    def with_params(self, params: Mapping[str, Any]) -> "FunctionRater":
        """Return a copy with keyword arguments bound. Raises ConfigError if the function does not take them."""
        problem = argument_problem(self.function, [*self.params, *params], positional=1)
        if problem is not None:
            raise ConfigError(f"rater {self.name!r}, params: {problem}")
        if self.check is not None:
            try:
                self.check(**{**self.params, **params})
            except TypeError as error:
                raise ConfigError(f"rater {self.name!r}, params: {error}") from error
        return FunctionRater(
            self.function,
            name=self.name,
            version=self.version,
            bounds=self.bounds,
            inline=self.inline,
            group=self.group,
            apart=self.apart,
            check=self.check,
            params={**self.params, **params},
        )


@overload
def rater(function: Callable[..., Any], /) -> FunctionRater: ...
@overload
def rater(
    *,
    bounds: tuple[float, float] | None = None,
    version: str = "1",
    name: str = "",
    inline: bool = False,
    group: bool = False,
    apart: Sequence[str] = (),
    check: Callable[..., object] | None = None,
) -> Callable[[Callable[..., Any]], FunctionRater]: ...


def rater(
    function: Callable[..., Any] | None = None,
    /,
    *,
    bounds: tuple[float, float] | None = None,
    version: str = "1",
    name: str = "",
    inline: bool = False,
    group: bool = False,
    apart: Sequence[str] = (),
    check: Callable[..., object] | None = None,
) -> FunctionRater | Callable[[Callable[..., Any]], FunctionRater]:
    """Make a rater of a function: its first argument is the sample (with `group`, the list of samples).

    Further keyword arguments are its parameters; if one of `apart` is given, the rater is called in a worker process
    (`worker_process`), for which it must be found under its name in its module. `check` is called with the parameters
    when an ensemble is loaded, and raises ConfigError if they are wrong. Raises ConfigError if the bounds are not two
    finite rising numbers.
    """
    check_bounds(bounds, name or getattr(function, "__name__", "rater"))

    def wrap(inner: Callable[..., Any]) -> FunctionRater:
        return FunctionRater(
            inner,
            name=name,
            version=version,
            bounds=bounds,
            inline=inline,
            group=group,
            apart=apart,
            check=check,
        )

    return wrap if function is None else wrap(function)


def check_bounds(bounds: tuple[float, float] | None, name: str) -> None:
    """Raise ConfigError unless `bounds` is None or (low, high), finite, low < high."""
    if bounds is None:
        return
    numbers = isinstance(bounds, Sequence) and all(isinstance(bound, int | float) for bound in bounds)
    if not (numbers and len(bounds) == 2 and bounds[0] < bounds[1] and math.isfinite(bounds[1] - bounds[0])):
        raise ConfigError(f"rater {name!r}: bounds {bounds!r:.80} must be two finite numbers, the lower one first.")


def to_rating(value: object, bounds: tuple[float, float] | None) -> Rating:
    """Check a rater's result: return a finite number within its bounds, or None with the reason."""
    if isinstance(value, Rating):
        return _checked(value, bounds)
    if value is None:
        return Rating(None, "abstain")
    try:
        number = real_number(value)
    except ValueError as error:
        return Rating(None, "error", f"returned {error}")
    if not math.isfinite(number):
        return Rating(None, "nonfinite", f"returned {number}")
    if bounds is not None and not bounds[0] <= number <= bounds[1]:
        low, high = bounds
        slack = 1e-6 * (high - low)
        if not low - slack <= number <= high + slack:
            return Rating(None, "error", f"returned {number}, outside its declared bounds [{low}, {high}]")
        number = min(max(number, low), high)
    return Rating(number)


def rating_within(bounds: tuple[float, float] | None) -> Callable[[object], Rating]:
    """Return `to_rating` for these bounds.

    It accepts a number within them quickly.
    """
    low, high = bounds or (-sys.float_info.max, sys.float_info.max)

    def judge(value: object) -> Rating:
        if type(value) is float and low <= value <= high:
            return Rating(value)
        return to_rating(value, bounds)

    return judge


def _checked(given: Rating, bounds: tuple[float, float] | None) -> Rating:
    """Return a rating as its rater made it, with its value and figures checked."""
    if given.value is None:
        return given if given.status != "ok" else Rating(None, "abstain")
    rating, figures = to_rating(given.value, bounds), given.figures
    if figures is None or rating.value is None:
        return rating
    if len(figures) <= MAX_FIGURES and all(_is_figure(name, value) for name, value in figures.items()):
        return Rating(rating.value, figures={name: float(value) for name, value in figures.items()})
    return Rating(
        None,
        "error",
        f"returned figures {figures!r:.80}; give at most {MAX_FIGURES} finite numbers, with names of at most "
        f"{MAX_FIGURE_NAME_CHARS} characters and without a slash",
    )


def _is_figure(name: object, value: object) -> bool:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_FIGURE_NAME_CHARS or "/" in name:
        return False
    return isinstance(value, int | float) and math.isfinite(value)
