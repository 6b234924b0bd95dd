"""Configuration of scoring: which raters judge an environment and how their ratings become one score."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lachesis.pipeline.common.field_types import check_field_types
from lachesis.pipeline.common.paths import CodeParams, CodePath
from lachesis.schemas.errors import ConfigError

__all__ = ["Aggregation", "RaterConfig", "ScoringConfig"]

PositiveInt = Annotated[int, Meta(ge=1)]
Aggregation = Literal[
    "mean", "weighted", "median", "trimmed", "min", "uwo", "lcb", "majority", "dawid_skene", "borda", "reliability"
]


class RaterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rater of an ensemble."""

    rater: CodePath
    """A built-in rater's name ("exact_match"), or "module:name" or "path/to/file.py:name" of a rater of your own."""
    name: str = ""
    """What ratings, metrics and errors call it, unique in the scoring. Default: the rater's own name."""
    params: CodeParams = {}
    """Keyword arguments for the rater."""
    weight: float = 1.0
    """Relative weight, for aggregations "weighted" and "dawid_skene" only. Default 1."""
    bounds: tuple[float, float] | None = None
    """Lowest and highest rating, for a rater that declares none itself, found by a calibration pass."""
    timeout_s: float = 10.0
    """Seconds for one sample (for one group if the rater takes whole groups), retries included. Default 10."""
    concurrency: int = 8
    """Calls of this rater under way at once in one process. Default 8."""
    retries: int = 3
    """Further attempts after an infrastructure failure; any other failure is final. Default 3."""
    backoff_s: float = 0.1
    """Seconds before the first further attempt, doubled before each one after it; up to half of a pause is left out at
    random. Default 0.1."""
    breaker_failures: PositiveInt = 10
    """Calls in a row that infrastructure failed after which the rater is left alone for a while. Default 10."""
    breaker_s: float = 15.0
    """Seconds for which it is: its ratings are then missing at once. Default 15."""

    def __post_init__(self) -> None:
        check_field_types(self)
        where = f"rater {self.name or self.rater!r}"
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"{where}: timeout_s is {self.timeout_s}; give a positive number of seconds.")
        if self.concurrency < 1:
            raise ConfigError(f"{where}: concurrency is {self.concurrency}; it must be at least 1.")
        if self.retries < 0 or not self.backoff_s >= 0:
            raise ConfigError(f"{where}: retries ({self.retries}) and backoff_s ({self.backoff_s}) cannot be negative.")
        if not 0 < self.breaker_s < float("inf"):
            raise ConfigError(f"{where}: breaker_s is {self.breaker_s}; give a positive number of seconds.")
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"{where}: weight is {self.weight}; it must be positive. Leave the rater out instead.")


class ScoringConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several raters and the rule that joins them."""

    raters: list[RaterConfig] = []
    """The raters, each as { rater = "module:name", params = {...} }, with name, weight, bounds, timeout_s, concurrency,
    retries and backoff_s where they matter. They should differ in kind: no rule sees an error they share. Default
    empty: groups are scored by the rewards their environment gave."""
    promotable: list[RaterConfig] = []
    """Further raters that a promotion may bring in, each as in `raters`. A promotion is a message, so a scorer takes
    from it no code that its own configuration does not name, and no parameters of it: those written here count.
    Raters known by a name need no entry, save for parameters of code, llm_judge, math, pairwise_judge, reasoning_gym
    (which an extension adds), reward_model and rubric_judge. Default none."""
    groups_at_once: PositiveInt = 16
    """Groups that one replica of the scorer rates at once. Default 16."""
    patience_s: float = 10.0
    """Seconds for which a replica tries a group again whose raters are unavailable, before it gives the group back and
    goes on with those behind it. The group comes again, to any replica, after 1 s, then 2, 4 and every 5, and is tried
    for half as long as the time before. Default 10."""
    aggregation: Aggregation | None = None
    """mean, weighted, median, trimmed, min (worst case), uwo (mean - penalty * variance), lcb (mean - penalty * std),
    majority (of ratings above `threshold`; a tie is unscorable), dawid_skene (a majority in which votes have the
    raters' weights, log(a / (1 - a)) for one that is right with probability a; `lachesis verify` estimates them from
    verdicts), borda (mean centred rank within the group), reliability (a mean in which a rater weighs in proportion to
    1 / the variance of its ratings around the other raters', at most half of all; the normalizer applies what was known
    two windows before, and until then raters weigh alike; two that copy each other outvote fewer than three others;
    success is determined before that). Default: lcb for three or more raters, min for two."""
    quorum: int | None = None
    """Ratings a sample needs to be scored. Default: half of the raters, at least two; all of them for min, which would
    rise when one is missing; for trimmed at least as many as one is dropped of at each end, 4 at a trim of 0.25."""
    penalty: float | None = None
    """Lambda of uwo and lcb. Default None: 0.5 for uwo, and 1 / sqrt(m - 1) for lcb over the m ratings present. With
    that lcb lies between the lowest rating and the mean of all but the highest, so that no single rater can lift it
    beyond what the others say, whatever part of its bounds they use; for two raters it is min."""
    controls: float = 1 / 8
    """Share of the groups whose answers are rated once more as answers to another task, from 0 to 1; so much more do
    the raters cost, judges among them. No score depends on it: the health check `task_blindness` sees by it that a
    rater pays whatever the task is. 0 switches it off. Default 1/8, .125."""
    fixed_samples: float = 1 / 128
    """Share of further ratings, of fixed samples: 32 answers of the environment's first groups, which are rated again
    and again, one beside a group, so that the health check `rater_drift` sees a rater that changes. From 0 to 1, and at
    most one rating a group. The answers, with all that raters see, are stored in the run's bucket, 2 MiB at most. 0
    switches it off: nothing is stored. Default 1/128, .0078."""
    trim: float = 0.25
    """Share of ratings that trimmed drops at each end, below 0.5. Default 0.25."""
    threshold: float = 0.5
    """Calibrated rating above which a rater's vote is yes, for majority and dawid_skene. Default 0.5."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.quorum is not None and not 1 <= self.quorum <= max(1, len(self.raters)):
            raise ConfigError(f"scoring.quorum is {self.quorum}; it must lie between 1 and {len(self.raters)} raters.")
        if self.penalty is not None and not 0 <= self.penalty < float("inf"):
            raise ConfigError(f"scoring.penalty is {self.penalty}; it cannot be negative.")
        if not 0 <= self.patience_s < float("inf"):
            raise ConfigError(f"scoring.patience_s is {self.patience_s}; give a number of seconds, 0 or more.")
        if not 0 <= self.controls <= 1:
            raise ConfigError(f"scoring.controls is {self.controls}; it is a share of the groups, from 0 to 1.")
        if not 0 <= self.fixed_samples <= 1:
            raise ConfigError(
                f"scoring.fixed_samples is {self.fixed_samples}; it is a share of the ratings, from 0 to 1."
            )
        if not 0 <= self.trim < 0.5:
            raise ConfigError(f"scoring.trim is {self.trim}; it must be at least 0 and below 0.5.")
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"scoring.threshold is {self.threshold}; calibrated ratings lie between 0 and 1.")

    @property
    def weighs_by_reliability(self) -> bool:
        """Whether the normalizer weighs the raters by their reliability."""
        return bool(self.raters) and self.aggregation == "reliability"
