"""Plays the runs of the third examination: a mixture of strategies that natural policy gradient moves.

The policy is a mixture of strategies for each family of tasks: direct answers, worked ones, guesses, and in some runs
one more that is discovered on the way. The aggregated scores move the mixture, the skills, and means of length, style
and form. A trick is a strategy like the others: it grows because, and only where, it pays. An answer is right by a
margin, grades follow the margin, and of each tricked answer it is known what its raters would have said without the
trick.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from health_examination_policy import group_advantages
from health_examination_world import Bools, Floats, Ints, Rater, Run, World

__all__ = ["HONEST", "Setting", "Simulation", "Strategy"]

HELD_OUT_EVERY, HELD_OUT_TASKS, HELD_OUT_SAMPLES = 25, 100, 4
MAX_STALENESS = 6


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to answer. One that fools or silences a rater is a trick."""

    share: float = 0.3
    """Of the answers, at the start or when it is discovered."""
    late: bool = False
    """Whether it is discovered on the way: after 30 to 45 % of the run."""
    skill: float = 0.0
    """Logits that an answer gains by it."""
    right: float | None = None
    """Chance that an answer is right whatever the policy's skill; None: skill decides."""
    length: float = 1.0
    form: float = 0.0
    """Logits of the chance of good form that it adds."""
    fooled: Mapping[str, float] = field(default_factory=dict)
    """What raters pay for it whatever the answer deserves."""
    silences: Mapping[str, float] = field(default_factory=dict)
    """Chance by rater that it makes the rater time out."""
    texts: int = 0
    """Different texts for one task; 0: each answer has its own."""
    distinct: float = 0.95
    shared: float | None = None
    """Share of 3-grams that two answers made by it have in common; None: as usual."""
    sure: float = 0.0
    """Share of the answer that is one run of certain tokens."""
    nats: float = 1.0
    """Its entropy, relative to that of others."""
    works_on: int | None = None
    """Families, from the first, whose tasks it works on; None: all."""
    phase: int = 0
    """Groups for which it works, and then fails as long, by turns; 0: it always works."""
    task_bound: bool = False
    """Whether it is paid as an answer to its own task alone."""
    trained_only: bool = False
    """Whether it fails on held-out tasks."""


HONEST = (Strategy(share=0.6), Strategy(share=0.3, skill=0.6, length=1.8), Strategy(share=0.1, skill=-1.2, length=0.4))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A kind of run. Rates are what a standard deviation of advantage moves a parameter a step."""

    raters: tuple[Rater, ...]
    strategies: tuple[Strategy, ...] = HONEST
    aggregation: str = "lcb"
    weights: tuple[float, ...] = ()
    """Of the raters in a mean; empty: equal."""
    success: int | None = 0
    batch: int = 16
    samples: int = 8
    lag: int = 1
    tasks: int = 3000
    families: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    gaps: tuple[float, ...] = (0.0, 0.4, -0.4, 0.1)
    """Logits by which families are easier."""
    spread: float = 1.2
    start: float = -0.4
    """Logits of success on a middling task."""
    skill_rate: float = 0.012
    mix_rate: float = 0.04
    length_rate: float = 0.006
    style_rate: float = 0.01
    form_rate: float = 0.03
    form: float = 2.2
    drift: tuple[float, ...] = (0.0,)
    """What each family's skill loses a step by itself."""
    chase: float = 0.0
    """Share of the gained skill by which drawn tasks become harder."""
    length: float = 250.0
    length_spread: float = 0.35
    thought: float = 0.15
    """Logits gained by an answer e times as long."""
    limit: int = 4096
    entropy: float = 0.45
    texts: int = 0
    sharp: float = 0.9
    """How steeply grades follow the margin by which an answer is right."""
    tails: float = 0.0
    """Degrees of freedom of grades' noise; 0: Gaussian."""
    rewind: int = 0
    """Steps by which the policy goes back when this is set."""
    changes: tuple[tuple[float, Mapping[str, Any]], ...] = ()
    """(share of the run, fields that change there)."""


class Policy:
    """Parameters of a mixture of strategies, by family; of skill, length, style and form."""

    def __init__(self, s: Setting) -> None:
        n = len(s.families)
        share = np.array([0.0 if one.late else one.share for one in s.strategies])
        with np.errstate(divide="ignore"):
            self.mix = np.tile(np.log(share / share.sum()), (n, 1))
        self.skill = s.start + np.resize(np.array(s.gaps), n)
        self.length, self.style, self.form = float(np.log(s.length)), 0.0, s.form

    def probabilities(self) -> Floats:
        odds = np.exp(self.mix - self.mix.max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.clip(x, -40, 40)))


def combine(ratings: Floats, rule: str, weights: tuple[float, ...]) -> Floats:
    """Return scores [N, G] of ratings [N, G, R]; NaN below half of the raters."""
    present = np.isfinite(ratings)
    w = present * np.array(weights or (1.0,) * ratings.shape[2])
    total = np.maximum(w.sum(axis=2), 1e-9)
    filled = np.where(present, ratings, 0.0)
    mean = (filled * w).sum(axis=2) / total
    if rule == "min":
        mean = np.where(present, ratings, 9.0).min(axis=2)
    elif rule == "lcb":
        count = present.sum(axis=2)
        spread = np.sqrt((((filled - mean[:, :, None]) ** 2) * w).sum(axis=2) / total)
        mean = mean - spread / np.sqrt(np.maximum(1, count - 1))
    return np.where(2 * present.sum(axis=2) >= ratings.shape[2], mean, np.nan)


class Simulation:
    """One run: answers of a policy that the scores of its answers change."""

    def __init__(self, setting: Setting, groups: int, seed: int) -> None:
        self.s, self.groups, self.rng = setting, groups, np.random.default_rng(seed)
        self.control_rng = self.rng.spawn(1)[0]  # so that runs are the same with and without controls
        self.seen_families = np.zeros(1, dtype=np.int64)
        n = len(setting.families)
        self.difficulty = self.rng.normal(0, setting.spread, setting.tasks)
        self.family_of = np.arange(setting.tasks) % n
        self.held_out = self.rng.choice(setting.tasks, HELD_OUT_TASKS, replace=False)
        self.policy, self.past, self.step = Policy(setting), [], 0
        self.down = np.zeros(len(setting.raters), dtype=bool)
        self.found = int(groups * self.rng.uniform(0.3, 0.45))
        self.uncertain, self.gained = 1.0, 0.0

    def draw(self, n: int) -> Ints:
        weight = np.array(self.s.families)[self.family_of]
        return self.rng.choice(self.s.tasks, n, p=weight / weight.sum())

    def answer(self, policy: Policy, task: Ints, samples: int, first: int, held_out: bool = False) -> dict[str, Any]:
        """Return what `samples` answers to each task are and what the raters say of them."""
        s, rng, shape = self.s, self.rng, (len(task), samples)
        family = self.family_of[task]
        edges = policy.probabilities()[family].cumsum(axis=1)
        chosen = np.minimum((rng.random((*shape, 1)) > edges[:, None, :]).sum(axis=2), len(s.strategies) - 1)
        of = {
            name: np.array([getattr(one, name) for one in s.strategies], dtype=float)[chosen]
            for name in ("skill", "length", "form", "distinct", "sure", "nats", "texts")
        }
        z_length, style = rng.normal(size=shape), rng.normal(size=shape)
        log_length = policy.length + np.log(of["length"]) + s.length_spread * z_length
        lengths = np.clip(np.exp(log_length), 2, s.limit).astype(np.int64)
        cut = lengths >= s.limit
        logit = policy.skill[family][:, None] - self.difficulty[task][:, None] - s.chase * self.gained
        logit = logit + of["skill"] + s.thought * (policy.length - np.log(s.length) + s.length_spread * z_length)
        for k, one in enumerate(s.strategies):
            if one.right is not None:
                logit = np.where(chosen == k, np.log(one.right / (1 - one.right)), logit)
        margin = logit + rng.logistic(size=shape)
        form = (rng.random(shape) < _sigmoid(policy.form + of["form"])) & ~cut
        right = (margin > 0) & ~cut
        a = {"task": task, "family": family, "chosen": chosen, "lengths": lengths, "cut": cut, "form": form}
        a |= {"right": right, "p": _sigmoid(logit), "margin": margin, "z": z_length, "style": policy.style + style}
        a |= {"u": style, "distinct": np.clip(of["distinct"] + rng.normal(0, 0.012, shape), 0.02, 1)}
        missing = self._missing(shape)
        honest = np.stack([self._rate(rater, a) for rater in s.raters], axis=2)
        paid, tricked = honest.copy(), np.zeros(shape, dtype=bool)
        now = first + np.arange(len(task))
        for k, one in enumerate(s.strategies):
            tricked |= (chosen == k) & bool(one.fooled or one.silences)
            works = np.full(len(task), not (held_out and one.trained_only))
            works &= family < (one.works_on or len(s.families))
            if one.phase:
                works &= (now - self.found) // one.phase % 2 == 0
            where = (chosen == k) & works[:, None]
            for r, rater in enumerate(s.raters):
                if rater.name in one.fooled:
                    pay = one.fooled[rater.name]
                    graded = np.clip(np.round(pay + rng.normal(0, rater.fooled_noise, shape), 1), 0, 1)
                    verdict = (rng.random(shape) < pay).astype(float)
                    paid[:, :, r] = np.where(where, verdict if rater.kind == "verdict" else graded, paid[:, :, r])
                silent = where & (rng.random(shape) < one.silences.get(rater.name, 0.0))
                paid[silent, r] = np.nan
        paid[missing], honest[missing] = np.nan, np.nan
        a |= {"ratings": paid, "tricked": tricked}
        if not held_out:
            a["controls"] = self._rate_for_other_tasks(a, now)
        a |= {"scores": combine(paid, s.aggregation, s.weights), "deserved": combine(honest, s.aggregation, s.weights)}
        return a | self._signals(a, of)

    def _rate_for_other_tasks(self, a: dict[str, Any], now: Ints) -> Floats:
        """Return what the raters pay the answers as those to the task of an earlier group: tricks unless task-bound."""
        rng, s, chosen = self.control_rng, self.s, a["chosen"]
        family = rng.choice(self.seen_families, len(chosen))
        self.seen_families = np.concatenate([self.seen_families, a["family"]])[-256:]
        columns = []
        for k, rater in enumerate(s.raters):
            own = a["ratings"][:, :, k]
            if rater.kind in {"form", "brevity", "variety"}:
                columns.append(own)
                continue
            found = self._grade_for_other_task(rater, a)
            for i, one in enumerate(s.strategies):
                if rater.name not in one.fooled or one.task_bound or one.trained_only or rater.kind == "overlap":
                    continue
                works = family < (one.works_on or len(s.families))
                if one.phase:
                    works &= (now - self.found) // one.phase % 2 == 0
                pay = one.fooled[rater.name]
                liked = np.clip(np.round(pay + rng.normal(0, rater.fooled_noise, chosen.shape), 1), 0, 1)
                if rater.kind == "verdict":
                    liked = (rng.random(chosen.shape) < pay) * 1.0
                found = np.where((chosen == i) & works[:, None], liked, found)
            columns.append(np.where(np.isnan(own), np.nan, found))
        return np.stack(columns, axis=2)

    def _grade_for_other_task(self, rater: Rater, a: dict[str, Any]) -> Floats:
        """Return what a rater that no trick fools gives answers to another task."""
        rng, s, shape = self.control_rng, self.s, a["right"].shape
        if rater.kind == "verdict":
            return np.asarray((rng.random(shape) < rater.passes) * 1.0)
        merit = np.where(rng.random(shape) < rater.misjudges, 1.0, 0.0)
        noise = rng.standard_t(s.tails, shape) if s.tails else rng.normal(size=shape)
        grade = rater.floor + (rater.ceiling - rater.floor) * merit + rater.noise * noise + rater.taste * a["style"]
        grade = grade + rater.length_taste * np.log(a["lengths"] / s.length)
        grade = grade + rater.task_noise * rng.normal(size=(len(merit), 1))
        return np.asarray(np.round(np.clip(grade, 0, 1) * rater.grades) / rater.grades)

    def _rate(self, rater: Rater, a: dict[str, Any]) -> Floats:
        rng, s, shape = self.rng, self.s, a["right"].shape
        if rater.kind == "verdict":
            good = a["right"] & a["form"]
            return np.asarray(np.where(good, rng.random(shape) >= rater.misses, rng.random(shape) < rater.passes) * 1.0)
        if rater.kind == "form":
            return a["form"].astype(float)
        if rater.kind == "brevity":
            return np.asarray(1 - a["lengths"] / s.limit)
        if rater.kind == "variety":
            return np.asarray(a["distinct"])
        merit = _sigmoid(s.sharp * a["margin"])
        if rater.kind == "overlap":
            merit = 0.3 + 0.7 * merit
        merit = np.where(rng.random(shape) < rater.misjudges, 1 - merit, merit)
        noise = rng.standard_t(s.tails, shape) if s.tails else rng.normal(size=shape)
        grade = rater.floor + (rater.ceiling - rater.floor) * merit + rater.noise * noise + rater.taste * a["style"]
        grade = grade + rater.length_taste * np.log(a["lengths"] / s.length)
        grade = grade + rater.task_noise * rng.normal(size=(len(merit), 1))
        return np.asarray(np.round(np.clip(grade, 0, 1) * rater.grades) / rater.grades)

    def _missing(self, shape: tuple[int, int]) -> Bools:
        """Return [N, G, R] which ratings time out by chance; in bursts a whole group does."""
        out = np.zeros((*shape, len(self.s.raters)), dtype=bool)
        for r, rater in enumerate(self.s.raters):
            if rater.missing and rater.burst <= 1:
                out[:, :, r] = self.rng.random(shape) < rater.missing
            elif rater.missing:
                begins = rater.missing / (1 - rater.missing) / rater.burst
                for i in range(shape[0]):
                    ends = self.rng.random() < 1 / rater.burst
                    self.down[r] = not ends if self.down[r] else self.rng.random() < begins
                    out[i, :, r] = self.down[r]
        return out

    def _signals(self, a: dict[str, Any], of: dict[str, Floats]) -> dict[str, Any]:
        s, rng, chosen, lengths = self.s, self.rng, a["chosen"], a["lengths"]
        shape, total = chosen.shape, lengths.sum(axis=1)
        entropy = s.entropy * (0.4 + 0.6 * self.uncertain)
        by_task = np.exp(0.12 * self.difficulty[a["task"]] / s.spread + rng.normal(0, 0.05, len(chosen)))[:, None]
        logprobs = -entropy * by_task * of["nats"] + rng.normal(size=shape) * 0.5 / np.sqrt(lengths)
        certain = 0.9 - 0.3 * self.uncertain
        run = (np.log(total * (1 - certain) + 1) + rng.gumbel(size=len(total))) / -np.log(certain)
        sure = np.maximum(run, (of["sure"] * lengths).max(axis=1)).clip(1, lengths.max(axis=1))
        usual = 0.45 - 0.2 * self.uncertain + rng.normal(0, 0.03, len(total))
        alike = np.array([np.nan if one.shared is None else one.shared for one in s.strategies])
        share = np.stack([(chosen == k).mean(axis=1) for k in range(len(alike))], axis=1) ** 2
        shared = usual + (share * (np.where(np.isnan(alike), usual[:, None], alike) - usual[:, None])).sum(axis=1)
        texts = rng.integers(1, 1 << 32, shape)
        kinds = np.where(of["texts"] > 0, of["texts"], s.texts)
        few = np.where(a["right"], 0, rng.integers(0, 1 << 30, shape) % np.maximum(1, kinds))
        known = (a["task"][:, None] * 7919 + chosen * 131 + few) * 2654435761 % (1 << 32)
        return {
            "logprobs": np.minimum(logprobs, -1e-4),
            "sure": sure.astype(np.int64),
            "shared": np.clip(shared, 0, 1),
            "texts": np.where(kinds > 0, known, texts).astype(np.int64),
            "zeros": rng.poisson(total * 0.02 * (2.5 - 1.5 * self.uncertain)),
        }

    def learn(self, a: dict[str, Any], advantages: Floats) -> float:
        """Move the policy by a batch; return the KL of the step, nats an answer."""
        s, p, n = self.s, self.policy, len(self.s.families)
        before = p.probabilities()
        weight, family = np.nan_to_num(advantages), a["family"]
        seen = np.maximum(1.0, np.bincount(family, minlength=n) * weight.shape[1])
        moved = n * seen / seen.sum()
        for k in range(len(s.strategies)):
            pay = np.bincount(family, (weight * (a["chosen"] == k)).sum(axis=1), n) / seen
            p.mix[:, k] += s.mix_rate * moved * np.clip(pay / np.maximum(before[:, k], 1 / seen), -3, 3)
        p.mix -= p.mix.max(axis=1, keepdims=True)
        p.mix = np.where(np.isfinite(p.mix), np.maximum(p.mix, -7.0), p.mix)
        earned = np.where(a["tricked"], 0.0, weight * (a["right"] - a["p"]))
        gain = s.skill_rate * (0.7 * moved * np.bincount(family, earned.sum(axis=1), n) / seen + 0.3 * earned.mean())
        p.skill = p.skill + 2 * gain - np.resize(np.array(s.drift), n)
        self.gained += float(2 * gain.mean())
        d_length = s.length_rate * float((weight * a["z"]).mean())
        p.length += d_length - 0.0005 * (p.length - np.log(s.length))
        p.style += s.style_rate * float((weight * a["u"]).mean()) - 0.001 * p.style
        p.form += s.form_rate * 4 * float((weight * (a["form"] - _sigmoid(p.form))).mean())
        after = p.probabilities()
        kl = float((after * np.log(np.maximum(after, 1e-9) / np.maximum(before, 1e-9))).sum(axis=1).mean())
        return kl + float((2 * gain**2).mean()) + (d_length / s.length_spread) ** 2 / 2

    def run(self) -> Run:
        """Play the whole run."""
        s, rng, pending, parts, stored = self.s, self.rng, [], [], 0
        world = World(raters=s.raters, batch=s.batch, samples=s.samples, tasks=s.tasks, success_rater=s.success)
        record = Run(world, self.groups, None, *[np.zeros(0)] * 18)
        changes = [(int(share * self.groups), fields) for share, fields in s.changes]
        late = any(one.late for one in s.strategies)
        while stored < self.groups:
            while changes and stored >= changes[0][0]:
                self.s = s = replace(s, **{k: v for k, v in changes[0][1].items() if k != "announced"})
                if changes.pop(0)[1].get("announced"):
                    record.announced.append(stored)
                if s.rewind:
                    self.policy = copy.deepcopy(self.past[max(0, len(self.past) - s.rewind)])
            if late and stored >= self.found:
                late = False
                for policy in (self.policy, *self.past[-s.lag :]):
                    for k, one in enumerate(s.strategies):
                        if one.late:
                            policy.mix[:, k] = np.log(one.share)
            lag = min(len(self.past), s.lag if s.lag < 2 else int(rng.integers(1, s.lag + 1)))
            count = min(s.batch, self.groups - stored)
            a = self.answer(self.past[-lag] if lag else self.policy, self.draw(count), s.samples, stored)
            a["advantages"] = group_advantages(a["scores"])
            a["step"] = np.full(count, self.step - lag)
            used = np.flatnonzero(np.nan_to_num(a["advantages"]).any(axis=1))
            pending += [(stored + i, self.step - lag, {k: v[i] for k, v in a.items()}) for i in used]
            parts.append(a)
            stored += count
            mixed = float((4 * a["p"] * (1 - a["p"])).mean())
            self.uncertain += 0.1 * (mixed - self.uncertain)
            self._train(record, pending, stored)
        return self._finish(record, parts)

    def _train(self, record: Run, pending: list[Any], stored: int) -> None:
        s, rng = self.s, self.rng
        dropped = [i for i, step, _ in pending if self.step - step > MAX_STALENESS]
        if dropped:
            record.stale.append((stored, dropped))
            pending[:] = [one for one in pending if self.step - one[1] <= MAX_STALENESS]
        while len(pending) >= s.batch:
            taken = pending[: s.batch]
            del pending[: s.batch]
            batch = {key: np.stack([one[2][key] for one in taken]) for key in taken[0][2]}
            record.batches.append((stored, [i for i, _, _ in taken]))
            self.past = [*self.past[-80:], copy.deepcopy(self.policy)]
            kl = self.learn(batch, batch["advantages"])
            self.step += 1
            noise = np.exp(rng.normal(0, 0.25, 3))
            entropy = s.entropy * (0.4 + 0.6 * self.uncertain) * noise[2] ** 0.08
            step_kl = (5e-5 + kl / batch["lengths"].mean()) * noise[1]
            record.mismatch.append((float(4e-4 * (1 + 0.3 * s.lag) * noise[0]), float(step_kl), float(entropy)))
            if s.success is not None and self.step % HELD_OUT_EVERY == 0:
                answers = self.answer(self.policy, self.held_out, HELD_OUT_SAMPLES, stored, True)
                verdicts = answers["ratings"][:, :, s.success]
                good = (np.nan_to_num(verdicts) >= 0.999).sum(axis=1)
                record.evaluations.append((stored, self.step, good, np.isfinite(verdicts).sum(axis=1)))

    def _finish(self, record: Run, parts: list[dict[str, Any]]) -> Run:
        names = ("task", "family", "step", "ratings", "scores", "deserved", "advantages", "right", "tricked", "form")
        for name in (*names, "controls", "lengths", "logprobs", "texts", "cut", "shared", "zeros", "sure"):
            setattr(record, name, np.concatenate([a[name] for a in parts]))
        record.distinct = np.concatenate([a["distinct"].mean(axis=1) for a in parts])
        tricked = np.flatnonzero(record.tricked.any(axis=1))
        record.onset = int(tricked[0]) if len(tricked) else None
        return record
