"""A made-up policy that learns from what raters pay, answer by answer; it knows nothing of the health checks.

An answer is made of hidden draws: a few decisions that must all be right, its form, its length, and whether it uses a
trick. Each draw depends on a parameter, and a parameter moves by REINFORCE, with the advantages of GRPO, over the
batches that the run would train on. So whatever earns more than the rest of its group grows, be it skill or trick. An
answer is rated twice with the same noise: as the raters are (`scores`), and as they would be if no trick fooled them
(`deserved`). `right` is the truth, which no rater sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from health_examination_world import Bools, Floats, Ints, Rater, Run, World, row_mean

__all__ = ["HELD_OUT_SAMPLES", "aggregate", "group_advantages", "simulate"]


HELD_OUT_TASKS, HELD_OUT_SAMPLES = 100, 4
MAX_REFILL = 12
"""Waves of groups after which a step is made of fewer groups than a batch."""


def aggregate(ratings: Floats, rule: str, quorum: int | None = None) -> Floats:
    """Return the scores [...] of ratings [..., R], as the scorer joins them; NaN where ratings lack a quorum."""
    raters = ratings.shape[-1]
    present = np.isfinite(ratings)
    count = present.sum(axis=-1)
    if quorum is None:
        quorum = raters if rule == "min" else min(raters, max(2, (raters + 1) // 2))
    known = np.where(present, ratings, 0.0)
    mean = known.sum(axis=-1) / np.maximum(1, count)
    if rule == "min":
        joined = np.where(present, ratings, np.inf).min(axis=-1)
    elif rule == "lcb":
        variance = np.where(present, (ratings - mean[..., None]) ** 2, 0.0).sum(axis=-1) / np.maximum(1, count)
        joined = mean - np.sqrt(variance / np.maximum(1, count - 1))
    else:
        joined = mean
    return np.where(count >= quorum, joined, np.nan)


def group_advantages(scores: Floats) -> Floats:
    """Return GRPO's advantages of scores [N, G]: NaN for a missing score, 0 in a group whose scores are alike."""
    centred = scores - row_mean(scores)[:, None]
    count = np.isfinite(scores).sum(axis=1)
    deviation = np.sqrt(np.nansum(centred**2, axis=1) / np.maximum(1, count - 1))
    return np.where(np.isfinite(scores), centred / np.where(deviation > 1e-6, deviation, np.inf)[:, None], np.nan)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.clip(x, -30, 30)))


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


@dataclass
class _Policy:
    """The parameters, each the mean or the logit of something that an answer draws."""

    skills: Floats
    """[families]: logits of a decision."""
    memory: Floats
    """[tasks]: the same for one task alone."""
    form: float
    length: float
    """Mean of log length."""
    tricks: Floats
    """[families]: logits of using the trick; -inf where there is none."""

    def copy(self) -> _Policy:
        return replace(self, skills=self.skills.copy(), memory=self.memory.copy(), tricks=self.tricks.copy())


@dataclass
class _Answers:
    """Answers [n, G] to n tasks, with the standardized draws that their parameters are learned from."""

    task: Ints
    family: Ints
    good: Floats
    """Share of right decisions."""
    right: Bools
    form: Bools
    tricked: Bools
    cut: Bools
    length: Floats
    style: Floats
    foreign: Bools
    seen_decisions: Floats
    seen_form: Floats
    seen_length: Floats
    seen_trick: Floats


class _Simulation:
    """One run under way. `rng` decides everything."""

    def __init__(self, world: World, groups: int, rng: np.random.Generator, onset: int | None) -> None:
        self.world, self.rng, self.onset = world, rng, onset
        self.control_rng = rng.spawn(1)[0]  # so that runs are the same with and without controls
        families, tasks = len(world.families), world.tasks
        self.family = rng.integers(families, size=tasks)
        self.difficulty = world.spread * rng.standard_normal(tasks)
        self.difficulty[rng.random(tasks) < world.hopeless] = 12.0
        original = np.arange(tasks) // world.copies * world.copies
        self.family, self.difficulty = self.family[original], self.difficulty[original]
        self.original = original
        self.start_length = math.log(world.length)
        skill = self._skill_for(world.success)
        self.policy = _Policy(
            skills=skill + 0.3 * rng.standard_normal(families),
            memory=np.zeros(tasks),
            form=_logit(world.form),
            length=self.start_length,
            tricks=np.full(families, -np.inf),
        )
        self.start_skill = float(self.policy.skills.mean())
        self.older = [self.policy]
        self.task_errors = rng.standard_normal((len(world.raters), tasks))[:, original]
        self.away = np.zeros(len(world.raters), dtype=bool)
        self.deck: list[int] = []
        self.seen_tasks: list[int] = []
        self.moved = self.progress = 0.0
        self.text = int(rng.integers(1 << 20))
        answers = (groups, world.samples)
        self.run = Run(
            world=world,
            groups=groups,
            onset=onset,
            task=np.zeros(groups, dtype=np.int64),
            family=np.zeros(groups, dtype=np.int64),
            step=np.zeros(groups, dtype=np.int64),
            ratings=np.zeros((*answers, len(world.raters))),
            scores=np.zeros(answers),
            deserved=np.zeros(answers),
            advantages=np.zeros(answers),
            right=np.zeros(answers, dtype=bool),
            tricked=np.zeros(answers, dtype=bool),
            form=np.zeros(answers, dtype=bool),
            lengths=np.zeros(answers, dtype=np.int64),
            logprobs=np.zeros(answers),
            texts=np.zeros(answers, dtype=np.int64),
            cut=np.zeros(answers, dtype=bool),
            distinct=np.zeros(groups),
            shared=np.zeros(groups),
            zeros=np.zeros(groups, dtype=np.int64),
            sure=np.zeros(groups, dtype=np.int64),
            controls=np.zeros((*answers, len(world.raters))),
        )  # fmt: skip
        self.evidence = {name: np.zeros(answers) for name in ("decisions", "form", "length", "trick")}

    def _skill_for(self, success: float) -> float:
        """Return the skill with which the pool's mean success is `success`, form and its like aside."""
        low, high = -12.0, 12.0
        for _ in range(40):
            middle = (low + high) / 2
            reached = (_sigmoid(middle - self.difficulty) ** self.world.decisions).mean()
            low, high = (middle, high) if reached < success / max(self.world.form, 0.5) else (low, middle)
        return (low + high) / 2

    def simulate(self) -> Run:
        run, stored, step = self.run, 0, 0
        waiting: list[int] = []
        pending = list(self.world.changes)
        while stored < run.groups:
            while pending and stored >= pending[0][0] * run.groups:
                self._change(dict(pending.pop(0)[1]), stored)
            if self.onset is not None and stored >= self.onset:
                self._find_trick(stored)
            for _ in range(MAX_REFILL):
                n = min(self.world.batch, run.groups - stored)
                waiting += self._store_wave(stored, n, max(0, step - self.world.staleness))
                stored += n
                if len(waiting) >= self.world.batch or stored == run.groups:
                    break
            chosen, waiting = waiting[: self.world.batch], waiting[self.world.batch :]
            chosen = self._drop_stale(chosen, stored)
            if chosen:
                self._learn(chosen)
                run.batches.append((stored, chosen))
                run.mismatch.append(self._mismatch())
                step += 1
                if self.world.success_rater is not None and step % self.world.held_out_every == 0:
                    self._evaluate(stored, step)
        return run

    def _change(self, fields: dict[str, Any], stored: int) -> None:
        self.policy.skills -= fields.pop("forget", 0.0)
        if fields.pop("announced", False):
            self.run.announced.append(stored)
        self.world = replace(self.world, **fields)

    def _find_trick(self, stored: int) -> None:
        hack = self.world.hack
        if hack is not None and not np.isfinite(self.policy.tricks).any():
            where = list(hack.families) if hack.families is not None else slice(None)
            self.policy.tricks[where] = _logit(hack.start)
            self.run.onset = stored

    def _drop_stale(self, chosen: list[int], stored: int) -> list[int]:
        """With much staleness the longest answers come too late now and then."""
        if self.world.staleness < 4 or self.rng.random() > 0.3:
            return chosen
        longest = max(chosen, key=lambda i: float(self.run.lengths[i].mean()))
        self.run.stale.append((stored, [longest]))
        return [i for i in chosen if i != longest]

    # --- answers ----------------------------------------------------------------------------------------------------

    def _draw_tasks(self, n: int) -> Ints:
        """Draw each task once an epoch, families by their weights."""
        while len(self.deck) < n:
            weights = np.array(self.world.families)[self.family]
            keep = self.rng.random(self.world.tasks) < weights / weights.max()
            self.deck += self.rng.permutation(np.flatnonzero(keep)).tolist()
        drawn, self.deck = self.deck[:n], self.deck[n:]
        return np.array(drawn, dtype=np.int64)

    def _answer(self, policy: _Policy, task: Ints, samples: int, *, held_out: bool = False) -> _Answers:
        world, rng = self.world, self.rng
        shape = (len(task), samples)
        family = self.family[task]
        hard = self.difficulty[task] + world.harder * max(0.0, float(self.policy.skills.mean()) - self.start_skill)
        draw = rng.standard_normal(shape)
        log_length = policy.length + 0.15 * np.clip(hard, -2, 2)[:, None] + world.length_spread * draw
        skill = policy.skills[family] - hard + (0.0 if held_out else policy.memory[self.original[task]])
        p = _sigmoid(skill[:, None] + world.thought * (log_length - self.start_length))
        decisions = rng.binomial(world.decisions, p)
        well = _sigmoid(policy.form)
        form = rng.random(shape) < well
        with_trick = _sigmoid(policy.tricks[family])
        if held_out and world.hack is not None and not world.hack.held_out:
            with_trick = np.zeros(len(task))
        tricked = rng.random(shape) < with_trick[:, None]
        length = np.exp(log_length)
        right = decisions == world.decisions
        hack = world.hack
        if hack is not None:
            right &= ~tricked | (rng.random(shape) < hack.right)
            if hack.form is not None:
                form = np.where(tricked, hack.form, form)
            usual = np.exp(math.log(hack.tokens) + 0.3 * draw) if hack.tokens is not None else length * hack.length
            length = np.where(tricked, usual if hack.ends else 2.0 * world.limit, length)
        cut = length >= world.limit
        length = np.clip(np.rint(length), 1, world.limit)
        trick_spread = np.sqrt(np.maximum(1e-4, with_trick * (1 - with_trick)))[:, None]
        return _Answers(
            task=task,
            family=family,
            good=decisions / world.decisions * np.where(cut, 0.5, 1.0),
            right=right & ~cut & (form if world.form_counts else True),
            form=form & ~cut,
            tricked=tricked,
            cut=cut,
            length=length,
            style=rng.standard_normal(shape),
            foreign=rng.random(shape) < world.languages,
            seen_decisions=(decisions - world.decisions * p) / np.sqrt(world.decisions * np.maximum(0.02, p * (1 - p))),
            seen_form=(form - well) / math.sqrt(max(1e-4, well * (1 - well))),
            seen_length=np.where(tricked, 0.0, draw),
            seen_trick=(tricked - with_trick[:, None]) / trick_spread,
        )

    def _rate(self, a: _Answers) -> tuple[Floats, Floats]:
        """Return the ratings [n, G, R] as they are, and as they would be if the trick fooled no rater."""
        actual, honest = [], []
        for k, rater in enumerate(self.world.raters):
            fair = self._fair(k, rater, a)
            missing = self._missing(k, rater, a.right.shape)
            noise = rater.fooled_noise * self.rng.standard_normal(a.right.shape)
            lucky = self.rng.random(a.right.shape)
            given = fair
            if rater.fooled is not None:
                grade = self._graded(rater, rater.fooled + noise)
                verdict = (lucky < rater.fooled).astype(float)
                given = np.where(a.tricked, verdict if rater.kind == "verdict" else grade, fair)
            given = np.where(a.tricked & (lucky < rater.times_out), np.nan, given)
            actual.append(np.where(missing, np.nan, given))
            honest.append(np.where(missing, np.nan, fair))
        low, high = self.world.value_range
        return low + (high - low) * np.stack(actual, axis=-1), low + (high - low) * np.stack(honest, axis=-1)

    def _rate_for_other_tasks(self, a: _Answers, ratings: Floats) -> Floats:
        """Return what the raters pay the answers as those to other tasks [n, G, R]: tricks work unless task-bound.

        Only raters of form look at nothing that depends on the task. A missing rating is missing here as well.
        """
        world, rng, shape = self.world, self.control_rng, a.right.shape
        task = self._draw_other_tasks(a)
        hack, low, high = world.hack, *world.value_range
        works = np.zeros(shape, dtype=bool)
        if hack is not None and not hack.task_bound:
            reached = np.isin(self.family[task], hack.families if hack.families is not None else self.family)
            works = a.tricked & reached[:, None]
        columns = []
        for k, rater in enumerate(world.raters):
            if rater.kind in {"form", "brevity", "variety"}:
                columns.append(ratings[:, :, k])
                continue
            if rater.kind == "verdict":
                found = (rng.random(shape) < np.where(a.form, rater.passes, 0.0)).astype(float)
            else:
                taken = 0.65 * (rng.random(shape) < rater.misjudges) if rater.kind == "graded" else 0.0
                grade = rater.floor + (rater.ceiling - rater.floor) * taken + rater.noise * rng.standard_normal(shape)
                grade += rater.task_noise * self.task_errors[k][task][:, None] + rater.taste * a.style
                found = self._graded(rater, grade + rater.length_taste * (np.log(a.length) - self.start_length))
            if rater.fooled is not None and rater.kind != "overlap":
                liked = self._graded(rater, rater.fooled + rater.fooled_noise * rng.standard_normal(shape))
                if rater.kind == "verdict":
                    liked = (rng.random(shape) < rater.fooled).astype(float)
                found = np.where(works, liked, found)
            columns.append(np.where(np.isnan(ratings[:, :, k]), np.nan, low + (high - low) * found))
        return np.stack(columns, axis=-1)

    def _draw_other_tasks(self, a: _Answers) -> Ints:
        """Return for each group a task of those before it, which are drawn as its own is."""
        seen = self.seen_tasks
        task = self.control_rng.choice(seen, len(a.task)) if seen else a.task
        self.seen_tasks = [*seen, *a.task.tolist()][-256:]
        return np.asarray(task)

    def _fair(self, k: int, rater: Rater, a: _Answers) -> Floats:
        shape, rng = a.right.shape, self.rng
        if rater.kind == "verdict":
            chance = np.where(a.right, 1 - rater.misses, np.where(a.form, rater.passes, 0.0))
            return (rng.random(shape) < chance).astype(float)
        if rater.kind == "form":
            return a.form.astype(float)
        if rater.kind == "brevity":
            return self._graded(rater, 1 - a.length / self.world.limit)
        if rater.kind == "variety":
            bad = self.world.hack is not None and self.world.hack.distinct is not None
            return self._graded(rater, np.where(a.tricked & bad, 0.1, 0.97) + 0.02 * rng.standard_normal(shape))
        good = a.good * np.where(a.tricked, self.world.hack.right if self.world.hack else 1.0, 1.0)
        taken = a.right ^ (rng.random(shape) < rater.misjudges)
        worth = good if rater.kind == "overlap" else 0.65 * taken + 0.35 * good
        grade = rater.floor + (rater.ceiling - rater.floor) * worth
        grade = grade + rater.noise * rng.standard_normal(shape)
        grade = grade + rater.task_noise * self.task_errors[k][a.task][:, None] + rater.taste * a.style
        return self._graded(rater, grade + rater.length_taste * (np.log(a.length) - self.start_length))

    def _graded(self, rater: Rater, grade: Floats) -> Floats:
        return np.rint(np.clip(grade, 0.0, 1.0) * rater.grades) / rater.grades

    def _missing(self, k: int, rater: Rater, shape: tuple[int, ...]) -> Bools:
        """Time-outs that have nothing to do with the answer: a rater is slow for some groups, then well again."""
        if rater.burst <= 1:
            return self.rng.random(shape) < rater.missing
        slow = np.zeros(shape[0], dtype=bool)
        share = min(1.0, rater.missing / 0.7)  # in a burst 70 % time out
        for i in range(shape[0]):
            leave, enter = 1 / rater.burst, share / max(1e-9, 1 - share) / rater.burst
            self.away[k] = self.rng.random() >= leave if self.away[k] else self.rng.random() < enter
            slow[i] = self.away[k]
        return slow[:, None] & (self.rng.random(shape) < 0.7)

    def _store_wave(self, at: int, n: int, policy_step: int) -> list[int]:
        """Answer and rate `n` tasks; return those groups whose scores differ."""
        run = self.run
        policy = self.older[max(0, len(self.older) - 1 - self.world.staleness)]
        task = self._draw_tasks(n)
        if self.onset is not None and np.isfinite(self.policy.tricks).any():
            policy.tricks = np.where(np.isfinite(policy.tricks), policy.tricks, self.policy.tricks)
        a = self._answer(policy, task, self.world.samples)
        rows = slice(at, at + n)
        ratings, honest = self._rate(a)
        assert run.controls is not None
        run.controls[rows] = self._rate_for_other_tasks(a, ratings)
        run.task[rows], run.family[rows], run.step[rows] = task, a.family, policy_step
        run.ratings[rows] = ratings
        run.scores[rows] = aggregate(ratings, self.world.aggregation)
        run.deserved[rows] = aggregate(honest, self.world.aggregation)
        run.advantages[rows] = group_advantages(run.scores[rows])
        run.right[rows], run.tricked[rows], run.form[rows], run.cut[rows] = a.right, a.tricked, a.form, a.cut
        run.lengths[rows] = a.length
        self._store_tokens(rows, a)
        for name, values in self.evidence.items():
            values[rows] = getattr(a, f"seen_{name}")
        useful = np.nanmax(np.abs(np.nan_to_num(run.advantages[rows])), axis=1) > 0
        return [at + int(i) for i in np.flatnonzero(useful)]

    def _store_tokens(self, rows: slice, a: _Answers) -> None:
        """What the tokens look like: logprobs, texts, repetition, and what answers of a group have in common."""
        world, rng, run = self.world, self.rng, self.run
        shape, hack = a.right.shape, world.hack
        entropy = self._entropy()
        logprob = -entropy * np.exp(0.12 * rng.standard_normal((shape[0], 1)) + 0.08 * rng.standard_normal(shape))
        logprob = logprob + 0.02 * a.right - 0.15 * entropy * a.foreign
        texts = self.text + np.arange(a.right.size).reshape(shape)
        self.text += a.right.size
        if world.short_answers:
            choice = np.where(a.right, 0, rng.integers(1, max(2, world.short_answers), size=shape))
            texts = a.task[:, None] * 1009 + choice
        sharp = 1 - entropy / world.entropy
        distinct = np.clip(
            0.93 + 0.025 * rng.standard_normal(shape) - 0.05 * sharp - 0.4 * (a.cut & ~a.tricked), 0.02, 1
        )
        shared = np.clip(0.14 + 0.2 * sharp + 0.03 * rng.standard_normal(shape) - 0.08 * a.foreign, 0, 1)
        sure = rng.poisson(np.minimum(400, 6 / np.maximum(0.03, entropy) * np.log1p(a.length / 40)))
        if hack is not None:
            logprob = logprob + hack.logprob * a.tricked
            if hack.texts is not None:
                texts = np.where(a.tricked, 7 + rng.integers(hack.texts, size=shape), texts)
            if hack.distinct is not None:
                distinct = np.where(
                    a.tricked, np.clip(hack.distinct + 0.05 * rng.standard_normal(shape), 0.02, 1), distinct
                )
            if hack.shared is not None:
                rivals = np.maximum(0, a.tricked.sum(axis=1, keepdims=True) - 1) / max(1, shape[1] - 1)
                shared = np.where(a.tricked, shared + (hack.shared - shared) * rivals, shared)
        run.logprobs[rows] = np.minimum(logprob, -0.005)
        run.texts[rows] = texts % (1 << 32)
        run.distinct[rows], run.shared[rows] = distinct.mean(axis=1), shared.mean(axis=1)
        run.sure[rows] = np.minimum(sure.max(axis=1), a.length.max(axis=1))
        run.zeros[rows] = rng.poisson(a.length.sum(axis=1) * 0.02 * (1 + 2 * sharp))

    # --- learning ---------------------------------------------------------------------------------------------------

    def _learn(self, chosen: list[int]) -> None:
        """Move each parameter by its score function times the advantages of the batch."""
        world, run = self.world, self.run
        advantages = np.nan_to_num(run.advantages[chosen])
        evidence = {name: values[chosen] * advantages for name, values in self.evidence.items()}
        new = self.policy.copy()
        size = advantages.size
        family, task = run.family[chosen], self.original[run.task[chosen]]
        for f in range(len(world.families)):
            own = family == f
            new.skills[f] += world.skill_rate * len(world.families) * evidence["decisions"][own].sum() / size
            if world.hack is not None and np.isfinite(new.tricks[f]):
                share = max(0.05, own.mean())
                new.tricks[f] += world.hack.rate * evidence["trick"][own].sum() / (size * share)
        if world.hack is not None and world.hack.families is None:
            new.tricks[:] = new.tricks.mean()
        new.tricks = np.where(np.isfinite(new.tricks), np.clip(new.tricks, -8, 5), new.tricks)
        np.add.at(new.memory, task, world.memory_rate * evidence["decisions"].mean(axis=1))
        new.form = min(7.0, new.form + world.form_rate * float(evidence["form"].mean()))
        new.length += world.length_rate * float(evidence["length"].mean())
        found = np.isfinite(self.policy.tricks)
        self.moved = float(
            np.abs(new.skills - self.policy.skills).mean()
            + abs(new.form - self.policy.form) * 0.2
            + abs(new.length - self.policy.length)
            + np.abs(new.tricks[found] - self.policy.tricks[found]).sum() * 0.2 / len(found)
        )
        self.progress += self.moved
        self.policy = new
        self.older = [*self.older[-world.staleness - 1 :], new]

    def _entropy(self) -> float:
        """Entropy falls with what was learned, to .3 of what it was."""
        return self.world.entropy * (0.3 + 0.7 * math.exp(-self.progress / 6))

    def _mismatch(self) -> tuple[float, float, float]:
        step_kl = (0.0006 + 0.6 * self.moved**2) * math.exp(0.25 * self.rng.standard_normal())
        k3 = 4e-4 * math.exp(0.3 * self.rng.standard_normal()) + 0.7 * self.world.staleness * step_kl
        return k3, step_kl, self._entropy() * math.exp(0.04 * self.rng.standard_normal())

    def _evaluate(self, stored: int, step: int) -> None:
        """Answer held-out tasks, the same each time, and have the rater of success judge them."""
        rater = self.world.success_rater
        if rater is None:
            return
        tasks = np.arange(0, self.world.tasks, max(1, self.world.tasks // HELD_OUT_TASKS))[:HELD_OUT_TASKS]
        away, self.away = self.away, np.zeros_like(self.away)
        a = self._answer(self.policy, tasks, HELD_OUT_SAMPLES, held_out=True)
        ratings = self._rate(a)[0][:, :, rater]
        self.away = away
        low, high = self.world.value_range
        successes = (np.nan_to_num(ratings, nan=low) >= low + 0.999 * (high - low)).sum(axis=1)
        self.run.evaluations.append((stored, step, successes, np.isfinite(ratings).sum(axis=1)))


def simulate(world: World, groups: int, rng: np.random.Generator, onset: int | None = None) -> Run:
    """Return a run of `groups` groups. From group `onset` on the policy uses the world's trick; None: never."""
    return _Simulation(world, groups, rng, onset).simulate()
