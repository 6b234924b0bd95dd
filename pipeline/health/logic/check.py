"""The base class of health checks: evaluates one window of one environment at a time.

A window holds the messages stored since the previous one, in the order of the stream, so a check is a function of the
stream alone. Guarantees that a value that is missing, NaN, infinite or beyond +-1e12 never counts as healthy: it is
left out, and a check without any value reports `idle`. The normalizer also refuses values beyond 1e12. The fourth power
of every kept value is finite, so no statistic overflows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeGuard

from lachesis.pipeline.normalizer.logic.accumulator import MAX_ABS_VALUE
from lachesis.schemas.alerts import Severity
from lachesis.schemas.annotations import GroupReward, GroupScore

__all__ = [
    "AGREEING_K3",
    "FAST_STEPS",
    "LADDER",
    "MAX_EXAMPLES",
    "START_WINDOWS",
    "Check",
    "CheckResult",
    "HealthWindow",
    "RunSettings",
    "finite",
    "graded",
    "is_number",
    "mean",
]

LADDER: tuple[Severity, ...] = ("idle", "ok", "inform", "warn", "quarantine", "halt")
"""Severities, the least first."""
MAX_EXAMPLES = 4
"""Groups that an alert names."""
START_WINDOWS = 2
"""First windows of a run, which say what its task and its raters are like before anything is learned."""
FAST_STEPS = 32
"""Optimizer steps in which no policy that learns loses most of its entropy."""
AGREEING_K3 = 0.1
"""k3 up to which the inference server and the trainer compute the same of one policy."""


class RunSettings(NamedTuple):
    """The run's settings that checks need: a threshold must not forbid what the run allows.

    `max_staleness`: optimizer steps, see `batching.max_staleness`. `sampling_temperature` is that of the environment
    (None: it generates elsewhere), `trainer_temperature` the one that the trainer divides its logits by. `max_step_kl`:
    nats a token that a step may move the policy, see `training.learner.max_step_kl` (None: not measured). `env` is the
    environment's name in the trainer's reports.
    """

    max_staleness: int = 2
    sampling_temperature: float | None = None
    trainer_temperature: float = 1.0
    max_step_kl: float | None = 0.1
    env: str | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The check warns when `value` is beyond `threshold`. `grows`: a lasting warning becomes a quarantine. What
    learning itself can cause, such as a drifting reward, only informs. `unhalted`: what a halt becomes where
    `health.halts` does not name the check.
    """

    severity: Severity
    value: float | None = None
    threshold: float | None = None
    reason: str = ""
    examples: Sequence[str] = ()
    grows: bool = False
    unhalted: Severity = "warn"


@dataclass(slots=True)
class HealthWindow:
    """Scores and rewards of one environment's groups, `dead` groups without any, and `before`: the mean scores of the
    groups of the four windows before. `estimator` is the one of the advantages.
    """

    scores: list[GroupScore] = field(default_factory=list)
    rewards: list[GroupReward] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    before: Sequence[float] = ()
    estimator: str = ""

    @property
    def newest(self) -> list[str]:
        """The scored groups that came last, as many as an alert names."""
        return [score.group for score in self.scores[-MAX_EXAMPLES:]]

    @property
    def groups(self) -> int:
        return len(self.scores) + len(self.dead)

    def means(self) -> list[float]:
        """Return the mean score of each group that has any."""
        return [value for score in self.scores if (value := mean(score.scores)) is not None]


class Check(ABC):
    """One check. `name` is its name in alerts and in the configuration."""

    name: ClassVar[str]

    @abstractmethod
    def evaluate(self, window: HealthWindow) -> CheckResult:
        """Judge one window; called once for each, in order."""

    def ends_early(self, window: HealthWindow) -> bool:
        """Return whether the open window is to be evaluated as it is.

        Called after each message: it must be cheap, and depend on the window and on what `state_dict` holds alone.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the check's state between windows, for msgpack."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`. Without a state there is nothing to do."""
        return


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether it is a number that checks judge by: there, and within +-1e12."""
    return value is not None and abs(value) <= MAX_ABS_VALUE


def finite(values: Iterable[float | None]) -> Iterator[float]:
    """Yield the values that are numbers, see `is_number`."""
    return (value for value in values if value is not None and abs(value) <= MAX_ABS_VALUE)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are numbers, None without any."""
    kept = list(finite(values))
    return math.fsum(kept) / len(kept) if kept else None


def graded(value: float, steps: Sequence[tuple[float, Severity]]) -> tuple[Severity, float]:
    """Return the severity of the highest threshold that `value` exceeds, and that threshold.

    Ok with the lowest one.

    `steps` are (threshold, severity), rising.
    """
    found: tuple[Severity, float] = ("ok", steps[0][0])
    for threshold, severity in steps:
        if value > threshold:
            found = (severity, threshold)
    return found
