"""What a simulated run is made of: its raters, its hack, its settings, and the record of what happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "Floats", "Hack", "Ints", "Rater", "Run", "World", "has_control", "row_mean"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Rater:
    """One rater. `verdict`: right or wrong; `graded`: a grade for the whole; `overlap`: a grade for its good parts.

    `form`, `brevity` and `variety` look at the form, at the length (1 for a short answer, 0 at the token limit) and at
    repetition alone.
    """

    name: str
    kind: Literal["verdict", "graded", "overlap", "form", "brevity", "variety"]
    misses: float = 0.03
    """Chance that a verdict fails a right answer."""
    passes: float = 0.02
    """Chance that a verdict passes a wrong answer."""
    misjudges: float = 0.0
    """Chance that a grade takes a right answer for a wrong one, or a wrong one for right."""
    noise: float = 0.1
    """Standard deviation of a grade around what the answer deserves; a fresh error for each answer."""
    task_noise: float = 0.05
    """Standard deviation of an error that all answers to one task share."""
    floor: float = 0.1
    """Grade of a hopeless answer."""
    ceiling: float = 1.0
    """Grade of a perfect answer."""
    grades: int = 10
    """Steps between 0 and 1 on which grades lie."""
    taste: float = 0.0
    """What a standard deviation of an answer's style adds to a grade."""
    length_taste: float = 0.0
    """What e times the usual length adds to a grade."""
    missing: float = 0.0
    """Share of ratings that time out, whatever the answer."""
    burst: float = 1.0
    """Groups that a burst of time-outs lasts on average; 1: time-outs are independent."""
    fooled: float | None = None
    """Grade of an answer with the trick; None: the trick does not fool it."""
    fooled_noise: float = 0.08
    times_out: float = 0.0
    """Chance that the trick makes it time out."""


@dataclass(frozen=True, kw_only=True)
class Hack:
    """A trick that an answer may use, and what such an answer is really worth."""

    start: float = 0.03
    """Share of answers that use it where it is first found."""
    rate: float = 0.12
    """How fast it grows if it pays; as `World.form_rate`."""
    right: float = 0.0
    """Share of the right answers that stay right when they use it."""
    families: tuple[int, ...] | None = None
    """Families of tasks in which it works; None: all."""
    held_out: bool = True
    """Whether it works on tasks that are held out of training."""
    form: bool | None = None
    """Form of an answer with the trick; None: as it would be."""
    length: float = 1.0
    """Factor on its length."""
    tokens: float | None = None
    """Its median length in tokens, whatever the task; None: `length` counts."""
    ends: bool = True
    """False: it runs into the token limit."""
    distinct: float | None = None
    """Share of distinct 3-grams; None: as other answers."""
    shared: float | None = None
    """Share of its 3-grams that other answers with the trick have too; None: as other answers."""
    logprob: float = 0.0
    """What it adds to the mean logprob of its tokens, in nats."""
    texts: int | None = None
    """Number of different texts that such answers are; None: each its own."""
    task_bound: bool = False
    """Whether it is paid as an answer to its own task alone: the key of that task, copies of its prompt."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A run: tasks, policy, raters and settings. Rates are steps of a parameter per standard deviation of evidence."""

    raters: tuple[Rater, ...]
    aggregation: Literal["lcb", "min", "mean"] = "lcb"
    hack: Hack | None = None
    batch: int = 16
    """Groups that train a step."""
    samples: int = 8
    """Answers in a group."""
    staleness: int = 1
    """Steps between the policy that answers and the newest one."""
    tasks: int = 2000
    families: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    """How often a task of each family is drawn, relative to the others."""
    spread: float = 1.0
    """Standard deviation of difficulty, logits of a decision."""
    hopeless: float = 0.05
    """Share of tasks that cannot be solved."""
    copies: int = 1
    """How many times each task is in the pool under another name."""
    decisions: int = 3
    success: float = 0.4
    """Success at the start."""
    skill_rate: float = 0.012
    memory_rate: float = 0.01
    """How fast what is learned of one task alone moves; held-out tasks do not profit."""
    form: float = 0.9
    """Share of well-formed answers at the start."""
    form_rate: float = 0.1
    form_counts: bool = True
    """Whether an answer without form is wrong for raters that look for the answer."""
    length: float = 200.0
    """Median tokens of an answer at the start."""
    length_spread: float = 0.35
    """Standard deviation of log length in a group."""
    length_rate: float = 0.01
    thought: float = 0.1
    """Logits that a decision gains if the answer is e times as long as at the start."""
    limit: int = 8192
    """Token limit; an answer that reaches it is cut off, which makes it wrong and formless."""
    entropy: float = 0.5
    """Nats a token at the start; .3 of it remains in the end."""
    languages: float = 0.0
    """Share of answers in another language than the task's, unpaid and harmless."""
    short_answers: int = 0
    """Different texts that an answer to one task can be, if it is a few tokens; 0: each is its own."""
    held_out_every: int = 25
    """Steps between evaluations on held-out tasks."""
    success_rater: int | None = 0
    """Index of the rater that knows success; None: none does, and there are no evaluations."""
    value_range: tuple[float, float] = (0.0, 1.0)
    """Where ratings lie after calibration by the configured bounds."""
    harder: float = 0.0
    """Logits by which new tasks become harder, for each logit that the policy has gained."""
    changes: tuple[tuple[float, Mapping[str, Any]], ...] = ()
    """(share of the run, fields) that change there; `announced` and `forget` (logits lost) among them."""


@dataclass
class Run:
    """What happened. Arrays have one row a group, in the order of the log; [N, G] a column an answer, [R] a rater."""

    world: World
    groups: int
    onset: int | None
    """First group in which the trick is used; None: a healthy run."""
    task: Ints
    family: Ints
    step: Ints
    """Step of the policy that answered."""
    ratings: Floats
    """[N, G, R]; NaN: missing."""
    scores: Floats
    deserved: Floats
    """[N, G]: scores had the trick fooled no rater."""
    advantages: Floats
    right: Bools
    tricked: Bools
    form: Bools
    lengths: Ints
    logprobs: Floats
    texts: Ints
    cut: Bools
    distinct: Floats
    shared: Floats
    """[N], of `distinct` too."""
    zeros: Ints
    sure: Ints
    announced: list[int] = field(default_factory=list)
    """Groups before which the scoring was changed, and the change announced."""
    batches: list[tuple[int, list[int]]] = field(default_factory=list)
    """(groups stored by then, groups of the batch) of each step."""
    stale: list[tuple[int, list[int]]] = field(default_factory=list)
    """(groups stored by then, groups dropped as stale)."""
    mismatch: list[tuple[float, float, float]] = field(default_factory=list)
    """Of each step the KL between rollout and trainer, the step's own KL, and the entropy; nats a token."""
    evaluations: list[tuple[int, int, Ints, Ints]] = field(default_factory=list)
    """(groups stored by then, step, successes by task, scored answers by task) of held-out evaluations."""
    controls: Floats | None = None
    """[N, G, R]: what the raters pay the same answers as answers to another task of the run; NaN: not rated so.

    Every group has them here. The monitor gets those of `has_control`. None: the run has no controls.
    """

    def unearned(self) -> Floats:
        """Return the score paid for the trick alone, mean of each group [N]; NaN where nothing could be scored."""
        return row_mean(self.scores - self.deserved)


def has_control(group: int, one_in: int) -> bool:
    """Return whether the answers of a group are rated for another task as well: one group of so many, 0 none."""
    return one_in > 0 and group * 2654435761 % (1 << 32) * one_in < 1 << 32


def row_mean(values: Floats) -> Floats:
    """Return the mean of each row [N] of values [N, G]; NaN where all are missing."""
    count = np.isfinite(values).sum(axis=1)
    return np.where(count > 0, np.nansum(values, axis=1) / np.maximum(1, count), np.nan)
