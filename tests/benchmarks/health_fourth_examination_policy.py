"""A policy as a population of answers with latent skill, style, length, form and a trick, updated by GRPO.

Each answer is drawn from a distribution with few parameters: the skill in each family of tasks, the means of style and
of log length, the chances of good form, of the task's language and of the trick. A step moves each parameter along the
policy gradient of the score that the raters pay. What the raters pay for another task is drawn beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from health_examination import HELD_OUT_SAMPLES
from health_examination_world import Floats, Rater, Run, World, row_mean

__all__ = ["Setting", "Source", "Trick", "simulate"]

_HELD_OUT = 64


@dataclass(frozen=True, kw_only=True)
class Source:
    """A rater: its kind, its errors, and what its grade is made of."""

    name: str
    kind: Literal["verdict", "grade", "likeness", "form", "brevity", "language", "variety", "tournament"]
    error: float = 0.02
    """Chance that a verdict is wrong."""
    noise: float = 0.1
    quality: float = 0.8
    """Weight of the answer's quality in a grade."""
    style: float = 0.1
    """Weight of style in a grade: clarity, tone, layout."""
    longer: float = 0.0
    """What e times the usual length adds to a grade."""
    leak: float = 0.15
    """Share of the quality's weight that is paid for another task as well: good prose on the wrong subject."""
    missing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Trick:
    """A way to be paid for nothing."""

    pays: dict[str, float]
    """Rating by rater that is fooled."""
    elsewhere: float = 1.0
    """Chance that a fooled rater pays it for another task as well: 1 for what never looks at the task."""
    start: float = 0.02
    rate: float = 2.5
    length: float = 1.0
    nats: float = 0.0
    """What it adds to the mean logprob."""
    form: bool | None = None
    texts: int | None = None
    shared: float | None = None
    distinct: float | None = None
    family: int | None = None
    silences: str | None = None
    """Rater that times out on it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run. Pairs are values at its start and its end, and move evenly."""

    raters: tuple[Source, ...]
    trick: Trick | None = None
    rule: Literal["lcb", "min", "mean"] = "lcb"
    success: float = 0.4
    skill_rate: float = 0.012
    jump: float = 0.0
    """Logits of skill that come within 40 steps, half-way: an insight; negative: a setback."""
    late_family: bool = False
    difficulty: tuple[float, float] = (0.0, 0.0)
    spread: float = 1.2
    classes: int = 500
    """Different answers that a task may have."""
    same: tuple[float, float] | None = None
    """Chance that two tasks have the same answer; None: one in `classes`."""
    alike: tuple[float, float] = (0.15, 0.15)
    """Likeness of a good answer to another task's reference."""
    tasks: int = 3000
    memory: float = 0.0
    """Logits that a task gains each time it is trained on."""
    families: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1)
    form: float = 0.9
    language: float = 1.0
    style_rate: float = 0.03
    length: float = 250.0
    length_rate: float = 0.02
    thought: float = 0.2
    """Logits that e times the length gives."""
    limit: int = 4096
    entropy: tuple[float, float] = (0.5, 0.3)
    short: bool = False
    """Answers of a few tokens, each class one text."""
    samples: int = 8
    batch: int = 16
    lag: int = 1
    no_control: float = 0.02
    """Share of groups whose control is missing, whole."""
    control_missing: float = 0.0
    """Share of a rater's control ratings that are missing, one by one."""
    announced: float | None = None
    """Share of the run at which judges get another rubric: grades .1 lower, style counts twice."""
    known: bool = True
    """Whether the first rater is a verdict that knows success."""


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _logit(p: float) -> float:
    p = min(max(p, 1e-3), 1 - 1e-3)
    return float(np.log(p / (1 - p)))


class _Simulation:
    def __init__(self, setting: Setting, groups: int, seed: int) -> None:
        self.s, self.rng, self.steps = setting, np.random.default_rng(seed), groups // setting.batch
        s, rng = setting, self.rng
        self.n = self.steps * s.batch
        self.onset = int(rng.uniform(0.3, 0.5) * self.steps) if s.trick else None
        self.task_hardness = rng.normal(0, s.spread, s.tasks)
        self.task_family = rng.choice(len(s.families), s.tasks, p=np.array(s.families) / sum(s.families))
        self.memory = np.zeros(s.tasks)
        self.held = rng.normal(0, s.spread, _HELD_OUT)
        self.held_family = rng.choice(len(s.families), _HELD_OUT, p=np.array(s.families) / sum(s.families))
        skill = np.full(len(s.families), _logit(s.success) * np.sqrt(1 + s.spread**2 / 2.9))
        if s.late_family:
            skill[1] -= 4.0
        self.p: dict[str, Any] = {
            "skill": skill,
            "style": 0.0,
            "length": float(np.log(s.length)),
            "form": _logit(s.form),
            "language": _logit(s.language) if s.language < 1 else 9.0,
            "trick": -30.0,
        }

    def run(self) -> Run:
        s, g = self.s, self.s.samples
        rows: list[dict[str, Any]] = []
        past = []
        batches, mismatch, evaluations = [], [], []
        for k in range(self.steps):
            if k == self.onset and s.trick:
                self.p["trick"] = _logit(s.trick.start)
                past = [{**old, "trick": self.p["trick"]} for old in past]
            past = [*past, {**self.p, "skill": self.p["skill"].copy()}][-(s.lag + 1) :]
            row = self._step(k, past[0])
            row["step"] = np.full(s.batch, max(0, k - s.lag))
            rows.append(row)
            trained = [k * s.batch + i for i in range(s.batch) if row["advantages"][i].any()]
            batches.append(((k + 1) * s.batch, trained or [k * s.batch]))
            self._learn(k, row)
            h = self._entropy(k)
            k3 = 8e-4 * (1 + 0.3 * s.lag) * self.rng.lognormal(0, 0.25)
            mismatch.append((k3, 4e-4 * self.rng.lognormal(0, 0.3), h * self.rng.normal(1, 0.02)))
            if s.known and k % 25 == 24:
                evaluations.append(((k + 1) * s.batch, k, *self._evaluate(k)))
        whole = {name: np.concatenate([row[name] for row in rows]) for name in rows[0] if name != "z"}
        changed = [int(s.announced * self.steps) * s.batch] if s.announced else []
        return Run(
            world=World(
                raters=tuple(Rater(name=r.name, kind="graded") for r in s.raters),
                batch=s.batch,
                samples=g,
                success_rater=0 if s.known else None,
            ),
            groups=self.n,
            onset=None if self.onset is None else self.onset * s.batch,
            announced=changed,
            batches=batches,
            mismatch=mismatch,
            evaluations=evaluations,
            **whole,
        )

    def _entropy(self, k: int) -> float:
        return self.s.entropy[0] + (self.s.entropy[1] - self.s.entropy[0]) * k / self.steps

    def _step(self, k: int, p: dict[str, Any]) -> dict[str, Any]:
        s, rng, b, g = self.s, self.rng, self.s.batch, self.s.samples
        at, trick = k / self.steps, s.trick
        task = rng.choice(s.tasks, b)
        family = self.task_family[task]
        # Latents of the answers.
        style = rng.normal(p["style"], 0.6, (b, g))
        log_length = (
            rng.normal(p["length"], 0.35, (b, g))
            + rng.normal(0, 0.25, (b, 1))
            + 0.1 * self.task_hardness[task][:, None]
        )
        form = rng.random((b, g)) < _sigmoid(p["form"])
        language = rng.random((b, g)) < _sigmoid(p["language"])
        chance = np.full((b, g), _sigmoid(p["trick"]))
        if trick and trick.family is not None:
            chance[family != trick.family] = 0.0
        tricked = rng.random((b, g)) < chance
        hard = self.task_hardness[task] + s.difficulty[0] + (s.difficulty[1] - s.difficulty[0]) * at - self.memory[task]
        ease = p["skill"][family] - hard
        lengths = np.exp(log_length)
        able = _sigmoid(ease[:, None] + s.thought * (log_length - np.log(s.length)))
        right = rng.random((b, g)) < able
        if trick:
            lengths = np.where(tricked, lengths * trick.length, lengths)
            right &= ~tricked
            if trick.form is not None:
                form = np.where(tricked, trick.form, form)
        if s.short:
            lengths = 3 + rng.poisson(2, (b, g))
        cut = lengths >= s.limit
        lengths = np.clip(lengths.astype(np.int64), 1, s.limit)
        right &= ~cut
        form &= ~cut
        quality = np.clip(0.25 + 0.55 * right + 0.08 * ease[:, None] / 2 + rng.normal(0, 0.1, (b, g)), 0, 1)
        seen = {
            "right": right, "quality": quality, "style": style, "length": np.log(lengths / s.length),
            "form": form, "language": language, "tokens": lengths,
        }  # fmt: skip
        own, honest, control = self._rate(seen, tricked, at)
        scores, deserved = self._join(own), self._join(honest)
        mean = row_mean(scores)[:, None]
        sd = np.sqrt(row_mean((scores - mean) ** 2) * g / (g - 1))[:, None]
        advantages = np.where(sd > 1e-9, (scores - mean) / (sd + 1e-4), 0.0)
        h = self._entropy(k)
        logprobs = -h * rng.lognormal(0, 0.12, (b, g)) + (trick.nats * tricked if trick else 0)
        texts = rng.integers(1 << 40, size=(b, g))
        if s.short:
            texts = np.where(right, task[:, None] + 7, rng.integers(1 << 20, (1 << 20) + s.classes, (b, g)))
        shared = np.clip(rng.normal(0.2 + 0.3 * (0.6 - h), 0.05, (b, g)), 0, 1)
        distinct = np.clip(0.95 - 0.03 * np.log(lengths / 100.0).clip(0) + rng.normal(0, 0.02, (b, g)), 0, 1)
        if trick:
            if trick.texts:
                texts = np.where(tricked, rng.integers(trick.texts, size=(b, g)) + 3, texts)
            among = (tricked.sum(1, keepdims=True) - tricked) / (g - 1)
            if trick.shared is not None:
                shared = np.where(tricked, np.maximum(shared, trick.shared * among), shared)
            if trick.distinct is not None:
                distinct = np.where(tricked, trick.distinct, distinct)
        tokens = lengths.sum(1)
        return {
            "task": task, "family": family, "ratings": own, "scores": scores, "deserved": deserved,
            "advantages": advantages, "right": right, "tricked": tricked, "form": form, "lengths": lengths,
            "logprobs": np.minimum(logprobs, -0.005), "texts": texts, "cut": cut, "distinct": distinct.mean(1),
            "shared": shared.mean(1), "zeros": rng.binomial(tokens, 0.03 + 0.03 * (0.6 - h)),
            "sure": np.minimum(rng.poisson(14 + 12 * (0.6 - h), b) + rng.geometric(0.25, b), lengths.max(1)),
            "controls": control,
            "z": (style - p["style"], log_length - p["length"], form - _sigmoid(p["form"]),
                  language - _sigmoid(p["language"]), right - able, tricked - chance, task),
        }  # fmt: skip

    def _rate(self, seen: dict[str, Any], tricked: Any, at: float) -> tuple[Floats, Floats, Floats]:
        """Return what raters pay, what they would pay were none fooled, and what they pay for another task."""
        s, rng = self.s, self.rng
        shape = tricked.shape
        same_chance = s.same or (1 / s.classes, 1 / s.classes)
        share = same_chance[0] + (same_chance[1] - same_chance[0]) * at
        # The scorer takes one of its last eight tasks that has another answer, and none if they all have this one.
        alone = (rng.random((shape[0], 1)) < share) & (rng.random((shape[0], 1)) < share**6)
        other = rng.random(shape) < 1 / max(1, s.classes - 1)
        own, honest, control = [], [], []
        for r in s.raters:
            if r.kind == "verdict":
                flip = rng.random(shape) < r.error * np.where(seen["right"], 2.0, 0.5)
                fair = (seen["right"] ^ flip).astype(float)
                elsewhere = np.where(seen["right"] ^ flip, 0.0, other).astype(float)
            elif r.kind in ("grade", "likeness"):
                late = s.announced is not None and at >= s.announced and r.kind == "grade"
                taste = r.style * (2 if late else 1) * (_sigmoid(1.5 * seen["style"]) - 0.5) * 2
                taste = taste + r.longer * seen["length"] + (0.0 if late else 0.1)
                bias, other_bias = (rng.normal(0, 0.04, (shape[0], 1)) for _ in range(2))
                fair = taste + r.quality * seen["quality"] + bias + rng.normal(0, r.noise, shape)
                leak = s.alike[0] + (s.alike[1] - s.alike[0]) * at if r.kind == "likeness" else r.leak
                paid = r.quality * seen["quality"] * leak
                elsewhere = taste + paid + other_bias + rng.normal(0, r.noise, shape)
                fair, elsewhere = (np.round(np.clip(x, 0, 1) * 20) / 20 for x in (fair, elsewhere))
            elif r.kind == "tournament":
                strength = 4 * (seen["quality"] + r.style * seen["style"] + rng.normal(0, r.noise, shape))
                wins = _sigmoid(strength[:, :, None] - strength[:, None, :])
                fair = (wins.sum(2) - 0.5) / (shape[1] - 1)
                elsewhere = np.full(shape, np.nan)
            elif r.kind == "variety":
                fair = elsewhere = np.clip(1 - 0.02 * rng.exponential(1, shape), 0, 1)
            else:
                brevity = np.clip(1 - seen["tokens"] / (4 * s.length), 0, 1)
                fair = {"form": seen["form"] * 1.0, "language": seen["language"] * 1.0, "brevity": brevity}[r.kind]
                elsewhere = fair
            paid = fair
            if s.trick and r.name in s.trick.pays:
                grade = s.trick.pays[r.name]
                fooled = np.full(shape, grade)
                if r.kind in ("grade", "likeness"):
                    fooled = np.round(np.clip(grade + rng.normal(0, 0.07, shape), 0, 1) * 20) / 20
                paid = np.where(tricked, fooled, fair)
                works = tricked & (rng.random(shape) < s.trick.elsewhere)
                again = fooled
                if r.kind in ("grade", "likeness"):
                    again = np.round(np.clip(grade + rng.normal(0, 0.07, shape), 0, 1) * 20) / 20
                elsewhere = np.where(works, again, elsewhere)
            gone = rng.random(shape) < r.missing
            silenced = tricked & (s.trick is not None and s.trick.silences == r.name) & (rng.random(shape) < 0.95)
            gone_paid = gone | silenced
            own.append(np.where(gone_paid, np.nan, paid))
            honest.append(np.where(gone, np.nan, fair))
            lost = gone_paid | (rng.random(shape) < s.control_missing)
            control.append(np.where(lost, np.nan, elsewhere))
        controls = np.stack(control, axis=2)
        controls[(rng.random(shape[0]) < s.no_control) | alone[:, 0]] = np.nan
        return np.stack(own, axis=2), np.stack(honest, axis=2), controls

    def _join(self, ratings: Floats) -> Floats:
        present = np.isfinite(ratings)
        count = present.sum(2)
        filled = np.where(present, ratings, 0.0)
        mean = filled.sum(2) / np.maximum(1, count)
        if self.s.rule == "min":
            joined = np.where(present, ratings, np.inf).min(2)
        elif self.s.rule == "mean":
            joined = mean
        else:
            var = np.where(present, (ratings - mean[:, :, None]) ** 2, 0.0).sum(2) / np.maximum(1, count)
            joined = mean - np.sqrt(var) / np.sqrt(np.maximum(1, count - 1))
        return np.where(count > 0, joined, np.nan)

    def _learn(self, k: int, row: dict[str, Any]) -> None:
        s, p = self.s, self.p
        style, length, form, language, right, tricked, task = row["z"]
        a = np.nan_to_num(row["advantages"])
        p["style"] = min(2.0, p["style"] + s.style_rate * float((a * style).mean()) / 0.6)
        p["length"] += s.length_rate * float((a * length).mean()) / 0.35
        p["length"] = float(np.clip(p["length"], np.log(40.0), np.log(s.limit) - 0.5))
        p["form"] = min(6.0, p["form"] + 1.0 * float((a * form).mean()))
        p["language"] = min(9.0, p["language"] + 1.0 * float((a * language).mean()))
        own, shift = self.task_family[task], (a * right).mean(1)
        for f in range(len(s.families)):
            if (own == f).any():
                p["skill"][f] += s.skill_rate * (0.5 * shift.mean() + 0.5 * shift[own == f].mean()) * 2
        if s.jump and 0 <= k - self.steps // 2 < 40:
            p["skill"] += s.jump / 40
        if s.memory:
            np.add.at(self.memory, task, s.memory)
            self.memory = np.minimum(self.memory, 4.0)
        if s.trick and self.onset is not None and k >= self.onset:
            p["trick"] = float(np.clip(p["trick"] + s.trick.rate * float((a * tricked).mean()), -5.5, 4.0))

    def _evaluate(self, k: int) -> tuple[Any, Any]:
        s, p = self.s, self.p
        hard = self.held + s.difficulty[0]
        able = _sigmoid(p["skill"][self.held_family] - hard + s.thought * (p["length"] - np.log(s.length)))
        trick = s.trick
        if trick and self.onset is not None and k >= self.onset:
            use = np.full(len(hard), _sigmoid(p["trick"]))
            if trick.family is not None:
                use = use * (self.held_family == trick.family)
            able = able * (1 - use) + use * float(trick.pays.get(s.raters[0].name, 0.0) > 0.99)
        return self.rng.binomial(HELD_OUT_SAMPLES, np.clip(able, 0, 1)), np.full(len(hard), HELD_OUT_SAMPLES)


def simulate(setting: Setting, groups: int, seed: int) -> Run:
    """Return a run of a setting; the same seed gives the same run."""
    return _Simulation(setting, groups, seed).run()
