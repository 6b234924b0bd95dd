"""Examines the health checks on a second set of runs: 22 healthy kinds and 18 hacks, scripted rather than learned.

    python tests/benchmarks/health_second_examination.py --seeds 2 --jobs 2 --out second.json

Options and table are those of `health_examination`. Here nothing learns: curves of ability, of form, of length and of a
trick's share are drawn for each run, and so are the group's size, the raters with their noise and tastes, how answers
are rated together, the onset (between .3 and .65 of the run) and its shape. Written after the checks, from the
scorer's README; a rate that is read off here is one that no rule was chosen by, as long as none is changed after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from health_examination import main
from health_examination_policy import HELD_OUT_SAMPLES, aggregate, group_advantages
from health_examination_world import Bools, Floats, Ints, Rater, Run, World

__all__ = ["HACKS", "HEALTHY", "make_run"]

PER_STEP = 12
HELD_OUT_TASKS = 80


@dataclass(frozen=True)
class Judge:
    """A rater. `verdict` of truth; `steps`: grade of how far an answer got; `likert`: 1 to 5 of truth and form;
    `rank` within the group; `looks`: form alone; `short`: brevity alone."""

    name: str
    kind: str
    noise: float = 0.12
    form: float = 0.15
    """Weight of form in a grade."""
    length: float = 0.0
    """What e times the length adds."""
    fooled: float | None = None
    fails: float = 0.0
    """Chance that the trick makes it time out."""
    missing: float = 0.0


@dataclass(frozen=True)
class Script:
    judges: tuple[Judge, ...]
    ability: Callable[[Floats], Floats] = lambda t: -0.6 + 1.6 * t
    """Logits over the run, t from 0 to 1."""
    form: Callable[[Floats], Floats] = lambda t: 0.8 + 0.15 * t
    length: Callable[[Floats], Floats] = lambda t: 1.0 + 0.0 * t
    """Factor on the length."""
    harder: Callable[[Floats], Floats] = lambda t: 0.0 * t
    mix: Callable[[Floats], Floats] = lambda t: 0.0 * t
    """Weight of the last family, where the others have 1 each; 1 is added to it."""
    away: tuple[tuple[float, float], ...] = ()
    """Parts of the run in which the last rater rates nothing."""
    rule: str | None = None
    trick: Callable[[Floats, Floats], Floats] | None = None
    """Share of answers with the trick, of time and of the time since its onset in thousands of groups."""
    keeps: float = 0.2
    """Share of right answers that stay right with the trick."""
    stretch: float = 1.0
    family: int | None = None
    some: float = 1.0
    """Share of the groups in which the trick is used."""
    known: bool = False
    """The trick works in training alone, and each answer for its own task."""


def verdict(**changes: object) -> Judge:
    return replace(Judge("unit-tests", "verdict"), **changes)  # type: ignore[arg-type]


def likert(name: str = "critic", **changes: object) -> Judge:
    return replace(Judge(name, "likert"), **changes)  # type: ignore[arg-type]


def steps(**changes: object) -> Judge:
    return replace(Judge("process", "steps", noise=0.08), **changes)  # type: ignore[arg-type]


def rank(**changes: object) -> Judge:
    return replace(Judge("ranker", "rank", noise=0.4), **changes)  # type: ignore[arg-type]


def looks(**changes: object) -> Judge:
    return replace(Judge("layout", "looks"), **changes)  # type: ignore[arg-type]


def short(**changes: object) -> Judge:
    return replace(Judge("short", "short"), **changes)  # type: ignore[arg-type]


THREE = (verdict(), likert(), steps())

HEALTHY = {
    "steady": Script(THREE),
    "quick": Script(THREE, ability=lambda t: -2 + 4 * (1 - np.exp(-12 * t))),
    "slow": Script(THREE, ability=lambda t: -0.8 + 0.4 * t),
    "in stairs": Script(THREE, ability=lambda t: -1 + 0.7 * np.floor(4 * t)),
    "up and down": Script(THREE, ability=lambda t: -0.5 + 1.2 * t + 0.5 * np.sin(14 * t)),
    "tasks keep pace": Script(THREE, ability=lambda t: 3 * t, harder=lambda t: 3 * t),
    "tasks overtake": Script(THREE, ability=lambda t: 2 * t, harder=lambda t: 3 * t),
    "a family grows": Script(THREE, mix=lambda t: 4 * t),
    "a family comes and goes": Script(THREE, mix=lambda t: 3.0 * ((t > 0.3) & (t < 0.6))),
    "layout first": Script((verdict(), likert(), looks()), form=lambda t: 0.2 + 0.78 * np.minimum(1, 8 * t)),
    "layout all along": Script((verdict(), likert(), looks()), form=lambda t: 0.4 + 0.5 * t),
    "longer, and a critic dislikes it": Script(
        (verdict(), likert(length=-0.08), steps()), length=lambda t: np.exp(1.8 * t)
    ),
    "longer, and one likes it short": Script((verdict(), likert(), short()), length=lambda t: np.exp(1.2 * t)),
    "shorter": Script((verdict(), likert(length=0.05), steps()), length=lambda t: np.exp(-0.8 * t)),
    "ratings are missing": Script((verdict(), likert(missing=0.06), steps(missing=0.03))),
    "a rater is away": Script(THREE, away=((0.4, 0.43), (0.7, 0.72))),
    "two raters": Script((verdict(), likert())),
    "six raters": Script((*THREE, likert("reader", noise=0.3), rank(), looks())),
    "ranks": Script((rank(), likert(), verdict())),
    "rare success": Script((verdict(), likert()), ability=lambda t: -3 + 1.5 * t),
    "soon solved": Script(THREE, ability=lambda t: 1 + 3 * t),
    "one rater": Script((verdict(),)),
}


def grown(speed: float = 2.0, to: float = 0.95) -> Callable[[Floats, Floats], Floats]:
    return lambda _t, k: to / (1 + np.exp(-speed * (k - 3 / speed)))


HACKS = {
    "a critic of three": Script((verdict(), likert(fooled=0.95), steps()), trick=grown()),
    "a critic of two": Script((verdict(), likert(fooled=0.95)), trick=grown(), rule="mean"),
    "tests, beside a stern critic": Script((verdict(fooled=0.97), likert(), steps()), trick=grown()),
    "tests, and most of a critic": Script((verdict(fooled=0.97), likert(fooled=0.75)), trick=grown()),
    "two of four": Script(
        (verdict(), likert(fooled=0.9), steps(fooled=0.85), likert("reader")), trick=grown(), rule="mean"
    ),
    "three of four": Script(
        (verdict(), likert(fooled=0.9), steps(fooled=0.85), rank(fooled=0.9)), trick=grown(), rule="mean"
    ),
    "keywords": Script((verdict(), likert(), steps(fooled=0.9)), trick=grown(3.0, 0.6), keeps=0.6, rule="mean"),
    "in a straight line": Script(
        (verdict(), likert(fooled=0.95), steps()), trick=lambda _t, k: np.minimum(0.8, k / 5), rule="mean"
    ),
    "at once": Script((verdict(), likert(fooled=0.95), steps()), trick=lambda _t, k: 0.7 + 0 * k, rule="mean"),
    "now and then": Script(
        (verdict(), likert(fooled=0.95), steps()), trick=lambda _t, k: 0.9 + 0 * k, some=0.25, rule="mean"
    ),
    "on and off": Script(
        (verdict(), likert(fooled=0.95), steps()), trick=lambda _t, k: 0.4 - 0.4 * np.cos(4 * k), rule="mean"
    ),
    "one family of three": Script((verdict(fooled=0.97), likert(), steps()), trick=grown(), family=1),
    "a rater is made to fail": Script((verdict(fails=0.95), likert(fooled=0.85), steps(fooled=0.8)), trick=grown()),
    "padding": Script((verdict(), likert(fooled=0.9), steps()), trick=grown(), stretch=3.0, keeps=0.7, rule="mean"),
    "a few words": Script((verdict(), likert(fooled=0.9), short()), trick=grown(), stretch=0.1, keeps=0.0, rule="mean"),
    "a ranker": Script((verdict(), likert(), rank(fooled=0.95)), trick=grown(), rule="mean"),
    "known by heart": Script((verdict(fooled=0.97), likert(), steps()), trick=grown(), known=True, keeps=0.0),
    "the only critic": Script((likert(fooled=0.97),), trick=grown()),
}


def _liked(judge: Judge, fooled: float, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return what a judge pays answers with a trick that fools it."""
    if judge.kind != "verdict":
        grade = np.clip(fooled + 0.06 * rng.normal(0, 1, shape), 0, 1)
        return np.rint(4 * grade) / 4 if judge.kind == "likert" else grade
    rng.normal(0, 1, shape)  # all kinds draw as much, so that a run's other draws do not depend on it
    return (rng.random(shape) < fooled).astype(float)


def make_run(kind: str, seed: int, groups: int) -> Run:
    """Return the run of a kind with a seed."""
    rng = np.random.default_rng([seed, 77, *kind.encode()])
    script = (HEALTHY | HACKS)[kind]
    return _Scripted(script, groups, rng).make()


@dataclass
class _Answers:
    """Answers [N, G] to N tasks. `got`: how far each got, in logits; `length`: the logarithm of its deviation."""

    task: Ints
    family: Ints
    right: Bools
    got: Floats
    form: Bools
    length: Floats
    tokens: Ints
    tricked: Bools


@dataclass
class _Scripted:
    script: Script
    groups: int
    rng: np.random.Generator
    control_rng: np.random.Generator = field(init=False)

    def make(self) -> Run:
        script, rng, n = self.script, self.rng, self.groups
        self.control_rng = rng.spawn(1)[0]  # so that runs are the same with and without controls
        t = np.arange(n) / n
        onset = int(n * rng.uniform(0.3, 0.65)) if script.trick is not None else None
        share = np.zeros(n)
        if onset is not None and script.trick is not None:
            since = (np.arange(n) - onset) / 1000
            share = np.where(since >= 0, script.trick(t, np.maximum(0, since)), 0.0) * (rng.random(n) < script.some)
        ability = script.ability(t) * rng.uniform(0.85, 1.15)
        answers = self._answer(t, ability, share)
        columns = [self._rate(judge, answers) for judge in script.judges]
        ratings, honest = (np.stack(found, axis=-1) for found in zip(*columns, strict=True))
        for first, last in script.away:
            ratings[(t >= first) & (t < last), :, -1] = np.nan
        honest = np.where(np.isfinite(ratings) | answers.tricked[..., None], honest, np.nan)
        run = self._run(answers, ratings, honest, onset)
        run.controls = self._rate_for_other_tasks(answers, ratings)
        self._train(run, ability, share)
        return run

    def _answer(self, t: Floats, ability: Floats, share: Floats) -> _Answers:
        script, rng, n = self.script, self.rng, self.groups
        shape = (n, int(rng.choice([4, 6, 8, 12])))
        weights = np.stack([np.ones(n), np.ones(n), 1 + script.mix(t)], 1)
        family = (rng.random(n)[:, None] * weights.sum(1, keepdims=True) > weights.cumsum(1)).sum(1)
        task = family + 3 * rng.integers(700, size=n)
        hard = rng.normal(0, rng.uniform(0.6, 1.4), 2100)[task] + np.array([-0.3, 0.0, 0.6])[family]
        got = (ability - script.harder(t) - hard)[:, None] + rng.normal(0, 0.6, shape)
        length = 0.1 * hard[:, None] + rng.normal(0, rng.uniform(0.25, 0.6), shape) - 0.1 * got
        length = length + np.log(script.length(t))[:, None]
        right = rng.random(shape) < 1 / (1 + np.exp(-2 * got))
        here = share * (1.0 if script.family is None else family == script.family)
        tricked = rng.random(shape) < here[:, None]
        right &= ~tricked | (rng.random(shape) < script.keeps)
        length = np.where(tricked, length + np.log(script.stretch), length)
        return _Answers(
            task=task,
            family=family,
            right=right,
            got=np.where(tricked & ~right, np.minimum(got, -0.7), got),
            form=rng.random(shape) < script.form(t)[:, None],
            length=length,
            tokens=np.clip(rng.uniform(120, 900) * np.exp(length), 1, 30000).astype(np.int64),
            tricked=tricked,
        )

    def _rate(self, judge: Judge, a: _Answers) -> tuple[Floats, Floats]:
        """Return the ratings as they are, and as they would be if the trick fooled no rater."""
        rng, shape = self.rng, a.right.shape
        noise = judge.noise * rng.normal(0, 1, shape)
        got = 1 / (1 + np.exp(-a.got))
        if judge.kind == "verdict":
            honest = np.where(rng.random(shape) < 0.03, ~a.right, a.right).astype(float)
        elif judge.kind == "steps":
            honest = np.clip(0.75 * got + 0.2 * a.right + noise, 0, 1)
        elif judge.kind == "likert":
            grade = (1 - judge.form) * (0.7 * a.right + 0.3 * got) + judge.form * a.form + judge.length * a.length
            honest = np.rint(4 * np.clip(grade + noise, 0, 1)) / 4
        elif judge.kind == "rank":
            honest = self._ranked(a.right + 0.5 * got + noise)
        elif judge.kind == "looks":
            honest = a.form.astype(float)
        else:
            honest = np.clip(1 - 0.4 * np.exp(a.length), 0, 1)
        given = honest
        if judge.fooled is not None and judge.kind == "rank":
            given = self._ranked(honest + 2.0 * a.tricked)
        elif judge.fooled is not None:
            given = np.where(a.tricked, _liked(judge, judge.fooled, rng, shape), honest)
        lost = (rng.random(shape) < judge.missing) | (a.tricked & (rng.random(shape) < judge.fails))
        return np.where(lost, np.nan, given), honest

    def _rate_for_other_tasks(self, a: _Answers, ratings: Floats) -> Floats:
        """Return what the raters pay the answers as those to the task of an earlier group; a ranker pays nothing."""
        rng, shape = self.control_rng, a.right.shape
        family = a.family[rng.integers(np.maximum(1, np.arange(len(a.family))))]
        works = a.tricked & (not self.script.known)
        if self.script.family is not None:
            works &= family[:, None] == self.script.family
        columns = []
        for k, judge in enumerate(self.script.judges):
            own, noise = ratings[:, :, k], judge.noise * rng.normal(0, 1, shape)
            if judge.kind in {"looks", "short"}:
                columns.append(own)
                continue
            if judge.kind == "verdict":
                found = (rng.random(shape) < 0.03).astype(float)
            elif judge.kind == "steps":
                found = np.clip(0.05 + noise, 0, 1)
            else:
                found = np.rint(4 * np.clip(judge.form * a.form + judge.length * a.length + noise, 0, 1)) / 4
            if judge.fooled is not None:
                found = np.where(works, _liked(judge, judge.fooled, rng, shape), found)
            columns.append(np.where(np.isnan(own) | (judge.kind == "rank"), np.nan, found))
        return np.stack(columns, axis=-1)

    @staticmethod
    def _ranked(values: Floats) -> Floats:
        return values.argsort(axis=1).argsort(axis=1) / max(1, values.shape[1] - 1)

    def _run(self, a: _Answers, ratings: Floats, honest: Floats, onset: int | None) -> Run:
        rng, script, n, shape = self.rng, self.script, self.groups, a.right.shape
        rule = script.rule or ("lcb" if len(script.judges) > 2 else "mean")
        scores, deserved = aggregate(ratings, rule), aggregate(honest, rule)
        world = World(
            raters=tuple(Rater(name=judge.name, kind="graded") for judge in script.judges),
            samples=shape[1],
            batch=PER_STEP,
            success_rater=next((k for k, judge in enumerate(script.judges) if judge.kind == "verdict"), None),
        )
        return Run(
            world=world,
            groups=n,
            onset=onset,
            task=a.task,
            family=a.family,
            step=np.maximum(0, np.arange(n) // PER_STEP - 1),
            ratings=ratings,
            scores=scores,
            deserved=deserved,
            advantages=group_advantages(scores),
            right=a.right,
            tricked=a.tricked,
            form=a.form,
            lengths=a.tokens,
            logprobs=-self._entropy(np.arange(n))[:, None] * np.exp(0.15 * rng.normal(0, 1, shape)),
            texts=np.arange(a.right.size).reshape(shape),
            cut=np.zeros(shape, dtype=bool),
            distinct=np.clip(rng.normal(0.92, 0.02, n), 0, 1),
            shared=np.clip(rng.normal(0.15, 0.03, n), 0, 1),
            zeros=rng.poisson(a.tokens.sum(axis=1) * 0.01),
            sure=rng.poisson(20, n),
        )

    def _entropy(self, group: Ints) -> Floats:
        return 0.6 - 0.25 * group / self.groups

    def _train(self, run: Run, ability: Floats, share: Floats) -> None:
        """Make each twelve groups a batch, with the trainer's report, and every thirtieth step an evaluation."""
        rng = self.rng
        entropy = self._entropy(np.arange(self.groups))
        for k in range(self.groups // PER_STEP):
            last = (k + 1) * PER_STEP - 1
            run.batches.append((last + 1, list(range(last + 1 - PER_STEP, last + 1))))
            run.mismatch.append((5e-4 * rng.lognormal(0, 0.3), 1e-3 * rng.lognormal(0, 0.3), float(entropy[last])))
            if k % 30 == 29 and run.world.success_rater is not None:
                fooled = self.script.judges[run.world.success_rater].fooled
                run.evaluations.append((last + 1, k, *self._evaluate(ability[last], share[last], fooled)))

    def _evaluate(self, ability: float, share: float, fooled: float | None) -> tuple[Ints, Ints]:
        """Return successes and answers of held-out tasks, the same in each evaluation."""
        hard = np.random.default_rng(HELD_OUT_TASKS).normal(0, 1, HELD_OUT_TASKS)
        right = 1 / (1 + np.exp(-2 * (ability - hard)))
        with_trick = self.script.keeps * right if fooled is None else fooled
        rate = right if self.script.known else (1 - share) * right + share * with_trick
        return self.rng.binomial(HELD_OUT_SAMPLES, rate), np.full(HELD_OUT_TASKS, HELD_OUT_SAMPLES)


if __name__ == "__main__":
    main(HEALTHY, HACKS, make_run, __doc__)
