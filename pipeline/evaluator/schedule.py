"""Decides when to evaluate: the first policy, the last one, and one every few steps between. Pure.

Between them, a policy is due at every multiple of `every_steps`, where the default checkpoints are, or as soon after it
as the previous evaluation is done.
"""

from dataclasses import dataclass

from lachesis.pipeline.evaluator.config import EvaluationConfig

__all__ = ["EvaluableSteps", "Schedule"]


@dataclass(frozen=True, slots=True)
class EvaluableSteps:
    """The steps whose policies have weights that can be evaluated: multiples of `every`, and from `last` on.

    Weights in shared memory are gone with the next step; only those due for evaluation have a file. `every` 1: all
    steps; None: none.
    """

    every: int | None = 1
    last: int | None = None

    def __contains__(self, step: int) -> bool:
        if self.every is None:
            return False
        return step % self.every == 0 or (self.last is not None and step >= self.last)


@dataclass(slots=True)
class Schedule:
    """`last_step`: the step after which the run ends, None if it never does. `done`: newest step evaluated so far."""

    config: EvaluationConfig
    last_step: int | None
    done: int | None = None

    def due(self, step: int) -> int | None:
        """Return how many items to evaluate the policy of `step` on, None if it is not due."""
        if self.done is not None and step <= self.done:
            return None
        if self.done is None or self.is_last(step):
            return self.config.items
        every = self.config.every_steps
        return self.config.items_between if step // every > self.done // every else None

    def is_last(self, step: int) -> bool:
        """Whether the run ends with this step."""
        return self.last_step is not None and step >= self.last_step
