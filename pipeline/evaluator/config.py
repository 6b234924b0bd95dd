"""Configuration of the evaluator."""

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["EvaluationConfig"]

PositiveInt = Annotated[int, Meta(ge=1)]


class EvaluationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evaluation of named policy versions on held-out tasks; results never enter the ledger."""

    held_out: Annotated[float, Meta(ge=0, le=0.5)] = 0.1
    """Share of each environment's tasks that are evaluated and never trained on, at most `items` of them; without
    [evaluation] only. Which ones follows from the seed and from what the tasks ask; what was ever drawn is never held
    out again. A pool of which fewer than 8 would be held out is trained on whole. 0: no evaluation. Default 0.1."""
    every_steps: PositiveInt = 10
    """Optimizer steps between evaluations, which are due at its multiples; the first and the last policy are always
    evaluated. With a multiple of training.checkpoint_every the best policy has a checkpoint of its own. Default 10."""
    items: PositiveInt = 200
    """Held-out tasks in an evaluation of the first and the last policy. Default 200."""
    items_between: PositiveInt = 50
    """Held-out tasks in the evaluations between. Default 50."""
    samples: PositiveInt = 4
    """Samples per task. Default 4."""
