"""The demo's verdict and its figures. Pure: makes a `DemoSummary` of everything that was seen.

Guarantees that the gate passes only on what was measured: the held-out pass rate of the policy before the first step
and of the one after the last, both sampled at temperature 1 on the same prompts. What was not measured is None.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from lachesis.pipeline.common.finite_mean import finite_mean
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.annotations import EvalEvent
from lachesis.services.demo.observed import RunObservation
from lachesis.services.demo.prepare import PreparedModel
from lachesis.services.observe.run_state import DEMO_FIELDS, RunState, StateName, project
from lachesis.services.observe.services import Quantiles
from lachesis.services.observe.summary import totals_of

__all__ = [
    "REQUIRED_POINTS",
    "DemoExample",
    "DemoGate",
    "DemoSummary",
    "TeacherDistance",
    "WallTimes",
    "end_to_end",
    "latest_figures",
    "summarize",
    "teacher_distance",
]

REQUIRED_POINTS = 20.0
"""Percentage points by which the held-out pass rate must rise."""


class DemoGate(msgspec.Struct, frozen=True, kw_only=True):
    """Pass rates from 0 to 1; gains and what is required in percentage points. `passed` is None if not requested.

    If samples could not be scored, the gate is not passed, whatever the others say.
    """

    before: float | None
    after: float | None
    gain: float | None
    greedy_before: float | None
    greedy_after: float | None
    required: float
    prompts: int | None
    samples: int | None
    temperature: float | None
    unjudged: int | None
    passed: bool | None


class TeacherDistance(msgspec.Struct, frozen=True, kw_only=True):
    """KL of the policy to the teacher that it learns from, nats a token: means over the first and the last steps."""

    before: float
    after: float
    steps: int
    """How many steps each mean is over."""


class DemoExample(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out task, and what the first and the last policy answered at temperature 0, with the scores."""

    prompt: str
    before: str
    before_score: float | None
    after: str
    after_score: float | None


class WallTimes(msgspec.Struct, kw_only=True):
    """Wall time, seconds. prepare: the model, made or found. start: until the first batch. train: from there to the
    last step. finish: the last evaluation and the stop."""

    prepare: float = 0.0
    start: float | None = None
    train: float | None = None
    finish: float | None = None
    total: float = 0.0


class DemoSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How the run stood at its end, and what a demo alone has. Sizes are bytes.

    Of `run`, rates are per second of training and `end_to_end` is exact. generated_groups and so on: what environments
    published. oversampling: groups that had an outcome for each one trained. teacher None: the policy does not learn
    from one, or no two steps have been measured. held_out: a row an evaluation, with step, items, avg and greedy.
    """

    run: RunState
    gate: DemoGate
    seed: int
    warm_start: Literal["made", "cached", "given"]
    warm_start_key: str | None
    shuffled_advantages: bool
    walls: WallTimes
    generated_groups: int
    generated_sequences: int
    generated_tokens: int
    oversampling: float | None
    teacher: TeacherDistance | None
    dead_letters: int
    held_out: list[dict[str, float | None]]
    examples: list[DemoExample]
    peak_rss_bytes: int
    next: list[str]

    @property
    def ok(self) -> bool:
        """Whether the run finished and its gate, if requested, was passed."""
        return self.run.state == "finished" and self.gate.passed is not False

    def fields(self) -> dict[str, Any]:
        """Return what `summary.json` holds: what that of every run does, and the demo's own."""
        own = {name: getattr(self, name) for name in self.__struct_fields__ if name != "run"}
        return project(self.run, DEMO_FIELDS) | own


def summarize(
    observed: RunObservation,
    prepared: PreparedModel,
    figures: Sequence[Mapping[str, float]],
    walls: WallTimes,
    *,
    state: StateName,
    reason: str | None = None,
    gate: bool = True,
    places: Mapping[str, str],
) -> DemoSummary:
    """Return the summary of a run that has ended.

    `figures`: one mapping a step, as `latest_figures` gives them.
    """
    config, evals = observed.config, observed.evals
    groups = observed.outcomes["batched"]
    tokens = sum(batch.tokens for batch in observed.batches.values())
    run = msgspec.structs.replace(
        observed.state(now_ns=0),
        state=state,
        problems=[] if reason is None else [reason],
        first_step=0,
        totals=totals_of(figures),
        wall_s=walls.total,
        groups_per_s=groups / walls.train if walls.train else None,
        tokens_per_s=tokens / walls.train if walls.train else None,
        end_to_end=end_to_end(observed, figures),
        places=dict(places),
        **({"step": int(figures[-1]["train/step"])} if figures else {}),
    )
    return DemoSummary(
        run=run,
        gate=_gate(config, evals, wanted=gate),
        seed=config.seed,
        warm_start="given" if prepared.key is None else "cached" if prepared.cached else "made",
        warm_start_key=prepared.key,
        shuffled_advantages=config.training.shuffle_advantages,
        walls=walls,
        generated_groups=len(observed.started_ns),
        generated_sequences=observed.generated_sequences,
        generated_tokens=observed.generated_tokens,
        oversampling=observed.outcomes.total() / groups if groups else None,
        teacher=teacher_distance(figures) if config.training.learner.loss.teacher_coef else None,
        dead_letters=observed.dead_letters,
        held_out=[
            {"step": event.policy_step, "items": event.items, "avg": event.avg, "greedy": event.greedy}
            for _, event in sorted(evals.items())
        ],
        examples=_examples(evals.get(0), evals.get(config.training.steps or 0)),
        peak_rss_bytes=observed.peak_rss_bytes,
        next=_next(places, config.training.steps or 0),
    )


def latest_figures(lines: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return one mapping a step, in order: of a step that a restarted trainer took again, the later one.

    A void batch has no figures and is left out.
    """
    return [
        figures for _, figures in sorted({line["train/step"]: line for line in lines if "train/step" in line}.items())
    ]


def teacher_distance(figures: Sequence[Mapping[str, float]]) -> TeacherDistance | None:
    """Return how far from its teacher the policy was in the first fifth of the steps and in the last.

    Over the teacher's likeliest tokens if they are known, else of the sampled tokens.
    """
    for name in ("teacher/kl_topk", "teacher/kl"):
        values = [step[name] for step in figures if name in step]
        if len(values) > 1:
            count = max(1, len(values) // 5)
            first, last = finite_mean(values[:count]), finite_mean(values[-count:])
            if first is not None and last is not None:
                return TeacherDistance(before=first, after=last, steps=count)
    return None


def end_to_end(observed: RunObservation, figures: Sequence[Mapping[str, float]]) -> Quantiles:
    """Return exact quantiles of the time from a task's start to the end of its step, over all groups."""
    ended = {int(step["train/step"]) - 1: step["train/time"] for step in figures if "train/time" in step}
    times = [
        ended[number] - observed.started_ns[group] / 1e9
        for number, batch in observed.batches.items()
        for group in batch.groups
        if number in ended and group in observed.started_ns
    ]
    return Quantiles(*map(float, np.quantile(times, [0.5, 0.95, 0.99]))) if times else Quantiles()


def _gate(config: RunConfig, evals: Mapping[int, EvalEvent], *, wanted: bool) -> DemoGate:
    before, after = evals.get(0), evals.get(config.training.steps or 0)
    # a multiple of 1/8 point, but for the float noise that the rounding takes away
    gain = round(100 * (after.avg - before.avg), 6) if before and after else None
    comparable = before is not None and after is not None and before.items == after.items and before.k == after.k
    unjudged = before.unjudged + after.unjudged if before and after else None
    return DemoGate(
        before=before.avg if before else None,
        after=after.avg if after else None,
        gain=gain,
        greedy_before=before.greedy if before else None,
        greedy_after=after.greedy if after else None,
        required=REQUIRED_POINTS,
        prompts=before.items if before else None,
        samples=before.k if before else None,
        temperature=before.temperature if before else None,
        unjudged=unjudged,
        passed=(comparable and unjudged == 0 and gain is not None and gain >= REQUIRED_POINTS) if wanted else None,
    )


def _examples(before: EvalEvent | None, after: EvalEvent | None) -> list[DemoExample]:
    if before is None or after is None:
        return []
    latter = {example.task: example for example in after.examples}
    return [
        DemoExample(
            prompt=example.prompt,
            before=example.answer,
            before_score=example.score,
            after=latter[example.task].answer,
            after_score=latter[example.task].score,
        )
        for example in before.examples
        if example.task in latter
    ]


def _next(places: Mapping[str, str], steps: int) -> list[str]:
    config = f"--config {shlex.quote(places['config'])}"
    return [
        f"lachesis tail reward {config} --last 5 --no-follow    # what its rollouts earned",
        f"lachesis replay {config} --revision median --set scoring.aggregation=median    # score them again",
        f"lachesis compare live median {config}    # what that would have changed",
        f"lachesis up {config} --set training.steps={2 * steps}    # train on, and while it runs, elsewhere:",
        f"lachesis top {config}",
    ]
