"""Chooses the held-out tasks by the seed and their prompts, the same in every process.

Every task has a rank by its key and the seed; the lowest ranks are held out. So the order of the pool does not matter,
a smaller choice is the beginning of a larger one, and tasks with the same key are on the same side. Guarantees that a
task that was ever drawn is never held out again: `limit` is the highest rank that was held out in every start of the
run, and no task above it is held out, however the pool has changed.
"""

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.tasks.item_keys import Keys, mixed
from lachesis.schemas.control import HeldOutRecord

F = TypeVar("F", np.float32, np.float64)

__all__ = [
    "ANY_RANK",
    "MIN_HELD_OUT_TASKS",
    "HeldOutRule",
    "HeldOutSplit",
    "choose_held_out",
    "mask_held_out",
    "reason_none_held_out",
]

MIN_HELD_OUT_TASKS = 8
"""If fewer tasks would be held out, none are: the error of a rate is estimated from the spread between tasks. With 8
tasks, a change beyond three of its errors happens by chance once in 100 comparisons (Student's t, 7 degrees of
freedom), with 4 once in 35."""
ANY_RANK = (1 << 63) - 1
"""The limit of a run that has drawn nothing yet."""


class HeldOutSplit(NamedTuple):
    """The indices of the held-out tasks, int64 [n] in the order of the choice, and the highest rank among them.

    That rank is the `limit` of every later choice. `withheld` counts tasks that only the limit keeps from being held
    out.
    """

    tasks: NDArray[np.int64]
    limit: int
    withheld: int = 0


class HeldOutRule(NamedTuple):
    """How the held-out tasks of an environment are chosen: `share` of all, 0 for none, and `most` of them at most.

    `seed` is the run's, where no earlier start of it has recorded another.
    """

    seed: int = 0
    share: float = 0.0
    most: int = 0

    @property
    def holds_out(self) -> bool:
        """Whether tasks are kept out of training, and evaluated instead."""
        return self.share > 0

    def split(self, keys: Keys, record: HeldOutRecord | None = None) -> HeldOutSplit:
        """Return the held-out tasks, given the keys of all tasks; often none.

        `record`: what earlier starts of the run held out; None: there is no record, or it does not matter here.
        """
        seed, limit = (self.seed, ANY_RANK) if record is None else (record.seed, record.limit)
        return choose_held_out(keys, seed, share=self.share, most=self.most, limit=limit)


def choose_held_out(keys: Keys, seed: int, *, share: float, most: int, limit: int = ANY_RANK) -> HeldOutSplit:
    """Return the held-out tasks of a pool, given the keys of all tasks.

    n is `share` of the pool, rounded down, and at most `most`. If n, or the part of it that the limit allows, is below
    `MIN_HELD_OUT_TASKS`, none are held out.
    """
    none = HeldOutSplit(np.empty(0, np.int64), 0)
    count = min(int(share * len(keys) + 1e-9), most)  # .1 * 30 must give 3 despite rounding
    if count < MIN_HELD_OUT_TASKS:
        return none
    ranks = mixed(keys ^ mixed(np.array([seed % (1 << 64)], np.uint64))) >> np.uint64(1)
    order = np.argsort(ranks, kind="stable")
    chosen = order[:count]
    if count < len(order):
        chosen = chosen[ranks[chosen] < ranks[order[count]]]  # equal ranks stay together on the other side
    kept = chosen[ranks[chosen] <= np.uint64(limit)]
    withheld = len(chosen) - len(kept)
    if len(kept) < MIN_HELD_OUT_TASKS:
        return none._replace(withheld=withheld)
    return HeldOutSplit(kept.astype(np.int64), int(ranks[kept[-1]]), withheld)


def reason_none_held_out(env: str, tasks: int, *, most: int | None, withheld: int = 0) -> str:
    """Return why an environment has no held-out tasks, and how to get some.

    `tasks`: in its pool. `most`: `evaluate.items`; None: the run holds none out. `withheld`: tasks that would be held
    out, had they not been drawn before.
    """
    if withheld:
        return (
            f"environment {env} is not evaluated: {withheld} of its {tasks} tasks would be held out, but earlier "
            "starts of this run may have trained on them, since the tasks, evaluate.held_out or the seed were changed; "
            f"add [evaluation.{env}] with tasks of its own, or start a new run"
        )
    if most is not None and most < MIN_HELD_OUT_TASKS:
        return (
            f"environment {env} is not evaluated: evaluate.items is {most}, and fewer than {MIN_HELD_OUT_TASKS} tasks "
            f"tell too little; raise it, or add [evaluation.{env}] with tasks of its own, of which any number is "
            "evaluated"
        )
    return (
        f"environment {env} is not evaluated: of its {tasks} tasks fewer than {MIN_HELD_OUT_TASKS} would be held out; "
        f"raise evaluate.held_out, or add [evaluation.{env}] with tasks of its own"
    )


def mask_held_out(weights: NDArray[F], held_out: NDArray[np.int64]) -> NDArray[F]:
    """Return `weights` [tasks] with 0 at the held-out tasks.

    If that leaves no task with a weight, all that are not held out get the same.
    """
    masked = weights.copy()
    masked[held_out] = 0.0
    if not masked.any():
        masked[:] = 1.0
        masked[held_out] = 0.0
    return masked
