"""When to evaluate: the first policy, the last one, and one every so many steps between. Pure."""

from dataclasses import dataclass

from lachesis.pipeline.config.run import EvaluationConfig

__all__ = ["Schedule"]


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
        return self.config.items_between if step - self.done >= self.config.every_steps else None

    def is_last(self, step: int) -> bool:
        """Whether the run ends with this step."""
        return self.last_step is not None and step >= self.last_step
