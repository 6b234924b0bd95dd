"""Summarizes a run's evaluations: first, newest, best, and whether the rate dropped. Pure.

It reads `EvalEvent`s in the order of their stream. Guarantees that its memory does not grow with the run, that policies
are compared on the tasks that both have, and that repeated events change nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from lachesis.pipeline.evaluator.logic.rates import Difference, compare
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.ids import PolicyVersion

__all__ = ["FALL_BELOW_BEST_ERRORS", "FALL_BELOW_FIRST_ERRORS", "EnvEvaluations", "EvaluationHistory", "RateDrop"]

FALL_BELOW_FIRST_ERRORS = 3.0
"""Standard errors by which the newest rate must lie below the first to count as fallen. Of rates that do not change,
one comparison is beyond it by chance with probability .0013 (.004 on 20 tasks, .01 on 8), and a run makes one at each
evaluation. Simulated with both bounds, 2.5 % of runs with ten evaluations ever warn without a cause, 5 % of those with
thirty; the next evaluation mostly says that it is over."""
FALL_BELOW_BEST_ERRORS = 4.0
"""The same below the best so far, which is the best by chance too: the largest of ten equal rates lies 1.5 of its
errors above their mean, that of a hundred 2.5. Beyond this bound is then one comparison in 500 or fewer."""


class RateDrop(NamedTuple):
    """The held-out rate of `env` at step `step` lies below that of `since_step` by more than chance explains.

    `bound`: standard errors of the difference from which it counts as fallen.
    """

    env: str
    since_step: int
    step: int
    difference: Difference
    bound: float

    def describe(self, rewards: tuple[float, float] | None = None) -> str:
        """Return it as a sentence without its full stop.

        `rewards`: of training, at the first of the two steps and at the second.
        """
        change = self.difference
        on = f" on {change.tasks} tasks" if change.tasks else ""
        text = (
            f"the held-out rate of {self.env} fell from {change.before:.2f} to {change.after:.2f} (difference "
            f"{change.value:+.2f} +- {change.error:.2f}{on}) between step {self.since_step} and {self.step}"
        )
        if rewards is None:
            return text
        before, after = rewards
        went = "rose" if after > before else "fell" if after < before else "stayed"
        how = "while" if went != "fell" else "and"
        return f"{text}, {how} the training reward {went} from {before:.2f} to {after:.2f}"


class EnvEvaluations(msgspec.Struct, kw_only=True):
    """The evaluations of one environment that count: the first, the newest, and the one of the run's best policy."""

    first: EvalEvent
    newest: EvalEvent
    best: EvalEvent | None = None

    def find_fall(self) -> RateDrop | None:
        """Return how far the newest rate is below the first, else below the best; None if it is not."""
        for earlier, bound in ((self.first, FALL_BELOW_FIRST_ERRORS), (self.best, FALL_BELOW_BEST_ERRORS)):
            if earlier is None or earlier.policy_version == self.newest.policy_version:
                continue
            change = compare(earlier, self.newest)
            if change is not None and change.value < -bound * change.error:
                return RateDrop(self.newest.env, earlier.policy_step, self.newest.policy_step, change, bound)
        return None


@dataclass(slots=True)
class EvaluationHistory:
    """`best`: the policy with the best rate so far; of a run with several environments by the mean over them.

    Of equal ones the newest is the best. A policy that was not evaluated on every environment is never it.
    """

    envs: dict[str, EnvEvaluations]
    best: PolicyVersion | None = None

    @classmethod
    def of(cls, events: Iterable[EvalEvent] = ()) -> "EvaluationHistory":
        """Return the history of these events."""
        made = cls({})
        for event in events:
            made.record(event)
        return made

    def record(self, event: EvalEvent) -> bool:
        """Record an evaluation; return whether it is new."""
        known = self.envs.get(event.env)
        if known is None:
            self.envs[event.env] = EnvEvaluations(first=event, newest=event)
        elif known.newest.policy_version == event.policy_version or event.ended_ns <= known.newest.ended_ns:
            return False
        else:
            known.newest = event
        self._compare_with_best(event.policy_version)
        return True

    def falls(self) -> list[RateDrop]:
        """Return every environment's fall, by the order in which they were first evaluated."""
        return [fall for env in self.envs.values() if (fall := env.find_fall()) is not None]

    def _compare_with_best(self, version: str) -> None:
        if any(env.newest.policy_version != version for env in self.envs.values()):
            return
        if self.best is not None and str(self.best) != version and self._is_worse():
            return
        self.best = PolicyVersion.parse(version)
        for env in self.envs.values():
            env.best = env.newest

    def _is_worse(self) -> bool:
        """Whether the newest policy is worse than the best, or cannot be compared with it."""
        changes = [compare(env.best, env.newest) for env in self.envs.values() if env.best is not None]
        values = [change.value for change in changes if change is not None]
        return not values or sum(values) < 0
