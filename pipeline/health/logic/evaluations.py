"""The check of held-out evaluations: whether a rate fell since the first one, or below the best."""

from lachesis.pipeline.evaluator.logic.history import FALL_BELOW_FIRST_ERRORS, EvaluationHistory
from lachesis.pipeline.evaluator.logic.rates import compare
from lachesis.pipeline.health.logic.check import CheckResult
from lachesis.schemas.annotations import EvalEvent

__all__ = ["HeldOutCheck"]


class HeldOutCheck:
    """Warns while the newest held-out rate lies below the first by more than 3 standard errors of the difference, or
    below the best by more than 4. The value is by how much it lies below.

    Unlike other checks it judges evaluations, each when it comes. `judged_ns` is when the newest of them had ended.
    """

    name = "held_out"

    def __init__(self) -> None:
        self.judged_ns = 0
        self._evaluations = EvaluationHistory.of()

    def remember(self, event: EvalEvent) -> None:
        """Take in an evaluation that was checked before."""
        self._evaluations.record(event)

    def evaluate(self, event: EvalEvent) -> CheckResult | None:
        """Take in an evaluation and judge it, None where that was done before."""
        self._evaluations.record(event)
        if event.ended_ns <= self.judged_ns:
            return None
        self.judged_ns = event.ended_ns
        env = self._evaluations.envs[event.env]
        fall = env.find_fall()
        if fall is not None:
            change = fall.difference
            return CheckResult("warn", -change.value, fall.bound * change.error, fall.describe())
        found = None if env.first is env.newest else compare(env.first, env.newest)
        if found is None:
            return CheckResult("idle", reason="there is no earlier evaluation to compare it with")
        return CheckResult("ok", -found.value, FALL_BELOW_FIRST_ERRORS * found.error)
