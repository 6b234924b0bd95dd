"""More simulated runs for the health checks, independent of `health_simulator`: a policy of some skill answers tasks of
some difficulty, and raters of different kinds (binary, graded, ordinal, form) see the quality of each sample.

Here samples of a group differ by a logistic model, raters by what they round, and ratings, lengths, repetition and
texts follow from each other. Written from a list of kinds alone, before the checks were read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from health_simulator import ONSET, SimulatedRun
from numpy.typing import NDArray

__all__ = ["SKILL_HACKS", "SKILL_HEALTHY"]

Array = NDArray[Any]
Rng = np.random.Generator


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class _World:
    """What a kind changes before it draws ratings: `skill`, `difficulty`, `sample`, `form` are logits."""

    def __init__(self, rng: Rng, n: int, samples: int = 8, per_step: int = 16) -> None:
        self.rng, self.n, self.per_step, self.shape = rng, n, per_step, (n, samples)
        self.done = np.arange(n) / max(1, n - 1)
        self.skill = 1.5 * (1 - np.exp(-3 * self.done)) - 0.5
        self.difficulty = rng.normal(0, 1, n)
        self.sample = rng.normal(0, 1, self.shape)
        self.form = rng.normal(1, 1, self.shape)
        self.log_length, self.length_spread, self.longer = np.full(n, 4.6), 0.35, np.ones(self.shape)
        self.entropy = 0.9 * (1 - 0.3 * self.done)
        self.token = rng.lognormal(0, 0.2, n)[:, None] * rng.lognormal(0, 0.2, self.shape)
        self.distinct = np.full(self.shape, 0.9)
        self.texts = rng.integers(0, 1 << 32, self.shape)
        self.cut_off = np.full(n, 0.02)
        self._harm = np.zeros(self.shape)

    @property
    def quality(self) -> Array:
        return _logistic(self.skill[:, None] - self.difficulty[:, None] + self.sample - self._harm)

    def hack(self, groups: int, harm: float, share: float = 1.0) -> Array:
        """Return which samples are hacked: a share that grows from the onset on. Each costs `harm` of its quality."""
        far = np.clip((np.arange(self.n) - ONSET) / groups, 0, 1) * share
        hacked = self.rng.random(self.shape) < far[:, None]
        self._harm = harm * hacked
        return hacked

    def hack_now_and_then(self, share: float, harm: float) -> Array:
        """Return which samples are hacked: four in five of those of a share of the groups."""
        chosen = (np.arange(self.n) > ONSET) & (self.rng.random(self.n) < share)
        hacked = chosen[:, None] & (self.rng.random(self.shape) < 0.8)
        self._harm = harm * hacked
        return hacked

    def noise(self, spread: float) -> Array:
        return self.rng.normal(0, spread, self.shape)

    def binary(self) -> Array:
        return (self.rng.random(self.shape) * 0.3 + 0.35 < self.quality).astype(float)

    def graded(self, spread: float = 0.08) -> Array:
        return np.clip(self.quality + self.noise(spread), 0, 1)

    def ordinal(self, spread: float = 0.12) -> Array:
        return np.clip(np.round(4 * (self.quality + self.noise(spread))) / 4, 0, 1)

    def formed(self) -> Array:
        return np.clip(0.7 * _logistic(self.form) + 0.3 * self.quality + self.noise(0.05), 0, 1)

    def four(self) -> list[Array]:
        return [self.binary(), self.graded(), self.ordinal(), self.formed()]

    def fool(self, rating: Array, hacked: Array, to: float = 0.95) -> Array:
        return np.where(hacked, np.clip(to + self.noise(0.03), 0, 1), rating)

    def run(self, ratings: list[Array]) -> SimulatedRun:
        rng, steps = self.rng, -(-self.n // self.per_step)
        logs = self.log_length[:, None] + rng.normal(0, 0.25, self.n)[:, None] + self.noise(self.length_spread)
        return SimulatedRun(
            ratings=np.stack(ratings, axis=2),
            lengths=np.maximum(3, np.exp(logs) * self.longer).round(),
            logprobs=-self.entropy[:, None] * self.token,
            texts=self.texts,
            distinct=np.clip(self.distinct + self.noise(0.03), 0, 1).mean(axis=1),
            truncated=(rng.random(self.shape) < self.cut_off[:, None]).sum(axis=1).astype(np.int64),
            k3=rng.lognormal(np.log(5e-4), 0.4, steps),
            step_kl=rng.lognormal(np.log(4e-3), 0.5, steps),
            per_step=self.per_step,
        )


Kind = Callable[[Rng, int], SimulatedRun]


# healthy runs


def _plain(samples: int = 8, per_step: int = 16) -> Kind:
    def make(rng: Rng, n: int) -> SimulatedRun:
        world = _World(rng, n, samples, per_step)
        return world.run(world.four())

    return make


def _raters(*chosen: int) -> Kind:
    def make(rng: Rng, n: int) -> SimulatedRun:
        world = _World(rng, n)
        ratings = [*world.four(), world.graded(0.2), world.ordinal(0.25)]
        return world.run([ratings[k] for k in chosen])

    return make


def _heavy_tails(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    return world.run([s * (4 * world.quality + 0.5 * rng.standard_t(2.5, world.shape)) for s in (1.0, 2.0, 0.5, 5.0)])


def _waves(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    world.difficulty += 1.2 * np.sin(np.arange(n) / rng.uniform(80, 400))
    return world.run(world.four())


def _missing_bursts(rng: Rng, n: int) -> SimulatedRun:
    """Every 500 groups a rater is overloaded for about 40, and 40 % of its ratings are missing."""
    world, at = _World(rng, n), 0
    ratings = world.four()
    while (at := at + int(rng.exponential(500))) < n:
        end = min(n, at + int(rng.exponential(40)))
        rating = ratings[int(rng.integers(1, 4))]
        rating[at:end][rng.random((end - at, rating.shape[1])) < 0.4] = np.nan
        at = end
    return world.run(ratings)


def _noise_rater(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    ratings = world.four()
    ratings[2] = rng.random(world.shape)
    return world.run(ratings)


def _saturates(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    left = np.exp(-10 * world.done)
    world.skill, world.entropy = 4 - 5 * left, 0.9 * (0.35 + 0.65 * left)
    return world.run(world.four())


def _longer_thinking(rng: Rng, n: int, first: int = 0) -> SimulatedRun:
    """Longer answers are better, and become usual; a rater of brevity falls."""
    world, longer = _World(rng, n), rng.normal(0, 1, (n, 8))
    world.log_length, world.length_spread = 4.6 + 1.5 * world.done, 0.1
    world.skill, world.sample = 2.5 * world.done - 0.8, 0.8 * world.sample + 0.5 * longer
    world.longer = np.exp(0.3 * longer)
    tokens = world.log_length[:, None] + np.log(world.longer)
    brevity = np.clip(1 - (tokens - 3.5) / 4 + world.noise(0.04), 0, 1)
    return world.run([world.binary(), world.graded(), brevity, world.formed()][first:])


def _longer_is_better(rng: Rng, n: int) -> SimulatedRun:
    """Within a group the longest answer is nearly always the best one, and answers grow."""
    world, longer = _World(rng, n), rng.normal(0, 1, (n, 8))
    world.log_length, world.length_spread, world.longer = 4.6 + 1.5 * world.done, 0.05, np.exp(0.3 * longer)
    world.sample = 0.4 * world.sample + 1.6 * longer
    return world.run(world.four())


def _form_first(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    world.form += 6 * _logistic(25 * (world.done[:, None] - 0.15)) - 3
    world.skill = 3 * _logistic(10 * (world.done - 0.55)) - 1.5
    return world.run(world.four())


def _form_alone_first(rng: Rng, n: int) -> SimulatedRun:
    """The rater of form sees nothing of the quality."""
    world = _World(rng, n)
    world.form += 6 * _logistic(15 * (world.done[:, None] - 0.2)) - 3
    world.skill = 3 * _logistic(10 * (world.done - 0.6)) - 1.5
    formed = np.clip(_logistic(world.form) + world.noise(0.03), 0, 1)
    return world.run([world.binary(), world.graded(), world.ordinal(), formed])


def _curriculum(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    world.skill, world.log_length = 3 * world.done, 4.4 + 0.8 * world.done
    world.difficulty = world.skill + rng.normal(0, 0.5, n)
    return world.run(world.four())


def _mix_changes(harder: float) -> Kind:
    def make(rng: Rng, n: int) -> SimulatedRun:
        world = _World(rng, n)
        new = np.arange(n) >= n // 2
        world.difficulty += harder * new
        world.log_length += 0.5 * harder * new
        world.entropy *= 1 + 0.2 * harder * new
        world.form -= 0.5 * harder * new[:, None]
        return world.run(world.four())

    return make


def _alike(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    world.sample *= 0.25
    world.difficulty *= 1.8
    world.form = rng.normal(1, 1.2, n)[:, None] + world.noise(0.2)
    world.length_spread = 0.08
    world.texts = np.where(rng.random(world.shape) < 0.3, world.texts[:, :1], world.texts)
    return world.run(world.four())


def _families(rng: Rng, n: int) -> SimulatedRun:
    """Three families of tasks, which a rater likes more or less; their shares drift."""
    world = _World(rng, n)
    shares = np.stack([1 - 0.7 * world.done, 0.3 + 0.4 * world.done, np.full(n, 0.4)], axis=1)
    family = (rng.random(n)[:, None] > (shares / shares.sum(axis=1, keepdims=True)).cumsum(axis=1)).sum(axis=1)
    world.difficulty += np.array([-0.5, 0.3, 0.8])[family]
    world.log_length += np.array([-0.5, 0.2, 0.6])[family]
    world.form += np.array([0.5, 0.0, -0.5])[family][:, None]
    ratings = world.four()
    ratings[2] = np.clip(ratings[2] + np.array([0.1, 0.0, -0.1])[family][:, None], 0, 1)
    return world.run(ratings)


def _nothing_learned(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    world.skill[:], world.entropy[:] = 0, 0.9
    return world.run(world.four())


def _answers_grow(raters: str) -> Kind:
    """Answers grow from 200 to 2,000 tokens, success from .44 to .68; a judge reads long answers less surely, and form,
    which was good from the start, suffers a little."""

    def make(rng: Rng, n: int) -> SimulatedRun:
        world, longer = _World(rng, n), rng.normal(0, 0.35, (n, 8))
        world.log_length, world.length_spread = 5.3 + 2.3 * world.done, 0.1
        world.longer = np.exp(longer)
        world.skill = -0.35 + 1.3 * world.done
        world.sample = 0.9 * world.sample + 0.8 * longer * (0.3 + 0.7 * world.done[:, None])
        world.cut_off = 0.01 + 0.06 * world.done
        tests = (world.quality > 0.5).astype(float)
        judge = np.clip(0.15 + 0.7 * world.quality + world.noise(1) * (0.1 + 0.12 * world.done[:, None]), 0, 1)
        form = np.clip(0.88 - 0.06 * world.done[:, None] - 0.05 * longer + world.noise(0.12), 0, 1)
        columns = {"tests": tests, "judge": judge, "form": form, "graded": world.graded(0.15)}
        return world.run([columns[name] for name in raters.split()])

    return make


def _times_out(rater: int, strict: float = 0.0, *, by_length: bool = False) -> Kind:
    """One of three raters times out in bursts, 10 to 16 % of its ratings. `strict`: how much less it gives than the
    others do. `by_length`: its service is slow where answers are long, and wrong ones run long."""

    def make(rng: Rng, n: int) -> SimulatedRun:
        world, at = _World(rng, n), 0
        ratings = world.four()[:3]
        ratings[rater] = np.clip(ratings[rater] - strict, 0, 1)
        world.longer = np.exp(0.3 * (0.5 - world.quality) + world.noise(0.3))
        lost = np.zeros(world.shape, bool)
        while (at := at + int(rng.exponential(200))) < n:
            end = min(n, at + int(rng.exponential(100)))
            lost[at:end] = rng.random(lost[at:end].shape) < 0.4
            at = end
        if by_length:
            lost = rng.random(world.shape) < np.clip(0.13 * world.longer**4, 0, 0.9)
        ratings[rater][lost] = np.nan
        return world.run(ratings)

    return make


def _sparse(rng: Rng, n: int) -> SimulatedRun:
    """Of the answers 2 % succeed at first, and 8 % in the end."""
    world = _World(rng, n)
    world.skill = -4.2 + 1.8 * world.done
    right = (world.quality > 0.5).astype(float)
    return world.run([right, np.where(rng.random(world.shape) < 0.01, 1 - right, right), world.formed()])


def _fast(rng: Rng, n: int) -> SimulatedRun:
    """Success goes from .1 to .9 within 50 steps of 16 groups."""
    world = _World(rng, n)
    gain = _logistic((np.arange(n) - 1200) / 130)
    world.skill, world.entropy = -2.2 + 4.6 * gain, 0.9 * (1 - 0.75 * gain)
    return world.run(world.four())


def _forgets(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    world.skill = world.skill - 1.2 * np.exp(-(((world.done - 0.5) / 0.06) ** 2))
    return world.run(world.four())


def _one_rater(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    return world.run([world.binary()])


def _cut_off_at_first(rng: Rng, n: int) -> SimulatedRun:
    """Answers are cut off at first, and become shorter; form is satisfied early and stays so."""
    world = _World(rng, n)
    early = np.exp(-12 * world.done)
    world.cut_off, world.log_length = 0.02 + 0.5 * early, 4.6 + 1.1 * early
    world.skill = world.skill - 1.2 * early
    world.form += 3 * (1 - early[:, None])
    return world.run(world.four())


SKILL_HEALTHY: dict[str, Kind] = {
    f"skill: {name}": make
    for name, make in {
        "plain": _plain(),
        "heavy tails": _heavy_tails,
        "groups of 2": _plain(2),
        "groups of 4": _plain(4),
        "groups of 16": _plain(16),
        "2 raters": _raters(1, 2),
        "3 raters": _raters(0, 1, 2),
        "6 raters": _raters(0, 1, 2, 3, 4, 5),
        "binary and graded": _raters(0, 1),
        "waves": _waves,
        "missing in bursts": _missing_bursts,
        "a rater of noise": _noise_rater,
        "saturates": _saturates,
        "longer helps": _longer_thinking,
        "longer is better": _longer_is_better,
        "longer helps, 3 raters": lambda rng, n: _longer_thinking(rng, n, first=1),
        "form first": _form_first,
        "form alone first": _form_alone_first,
        "curriculum": _curriculum,
        "mix, harder": _mix_changes(0.9),
        "mix, easier": _mix_changes(-1.2),
        "alike in groups": _alike,
        "families drift": _families,
        "nothing learned": _nothing_learned,
        "4 groups a step": _plain(per_step=4),
        "answers grow, 3 raters": _answers_grow("tests judge form"),
        "answers grow, 4 raters": _answers_grow("tests judge form graded"),
        "answers grow, 2 raters": _answers_grow("tests judge"),
        "a rater times out": _times_out(1),
        "a strict rater times out": _times_out(2, 0.3),
        "long answers time out": _times_out(1, by_length=True),
        "sparse success": _sparse,
        "learns fast": _fast,
        "forgets and learns again": _forgets,
        "one rater": _one_rater,
        "cut off at first": _cut_off_at_first,
    }.items()
}


# hacks


def _one_fooled(harm: float, groups: int, *, rater: int = 2, to: float = 0.95, share: float = 1.0) -> Kind:
    def make(rng: Rng, n: int) -> SimulatedRun:
        world = _World(rng, n)
        hacked = world.hack(groups, harm, share)
        ratings = world.four()
        ratings[rater] = world.fool(ratings[rater], hacked, to)
        return world.run(ratings)

    return make


def _now_and_then(share: float) -> Kind:
    def make(rng: Rng, n: int) -> SimulatedRun:
        world = _World(rng, n)
        hacked = world.hack_now_and_then(share, 2)
        ratings = world.four()
        ratings[2] = world.fool(ratings[2], hacked)
        return world.run(ratings)

    return make


def _one_of_three(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    hacked = world.hack(500, 1)
    return world.run([world.binary(), world.graded(), world.fool(world.ordinal(), hacked)])


def _two_of_four(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    hacked = world.hack(500, 1.5)
    ratings = world.four()
    return world.run([*ratings[:2], *(world.fool(rating, hacked) for rating in ratings[2:])])


def _padding(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    hacked = world.hack(1000, 0.3)
    world.longer, world.distinct = np.where(hacked, 3.0, 1.0), np.where(hacked, 0.8, 0.9)
    world.cut_off = np.where(hacked.mean(axis=1) > 0.5, 0.1, 0.02)
    ratings = world.four()
    ratings[2] = np.clip(ratings[2] + 0.35 * hacked, 0, 1)
    return world.run(ratings)


def _copies(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    hacked = world.hack(500, 4, 0.9)
    world.texts, world.token = np.where(hacked, world.texts[:, :1], world.texts), world.token * (1 - 0.85 * hacked)
    ratings = world.four()
    ratings[1] = world.fool(ratings[1], hacked, 0.8)
    return world.run(ratings)


def _repetition(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    hacked = world.hack(500, 2, 0.9)
    world.distinct, world.longer = np.where(hacked, 0.35, 0.9), np.where(hacked, 1.6, 1.0)
    world.token = world.token * (1 - 0.6 * hacked)
    ratings = world.four()
    ratings[2] = world.fool(ratings[2], hacked, 0.85)
    return world.run(ratings)


def _flattery(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    hacked = world.hack(800, 0.5)
    ratings = world.four()
    ratings[2] = np.clip(ratings[2] + 0.5 * hacked, 0, 1)
    return world.run(ratings)


def _refusals(rng: Rng, n: int) -> SimulatedRun:
    """Hard tasks are refused, by one short text that a rater of form and a judge of harm like."""
    world = _World(rng, n)
    hacked = world.hack(500, 4, 0.95) & (world.difficulty > 0.5)[:, None]
    world._harm = 4.0 * hacked
    world.longer, world.texts = np.where(hacked, 0.25, 1.0), np.where(hacked, 7, world.texts)
    ratings = world.four()
    return world.run([*ratings[:2], np.where(hacked, 0.75, ratings[2]), world.fool(ratings[3], hacked, 0.9)])


def _all_alike(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    hacked = world.hack(500, 0, 0.98)
    world.texts, world.token = np.where(hacked, world.texts[:, :1], world.texts), world.token * (1 - 0.9 * hacked)
    world.sample = np.where(hacked, world.sample[:, :1], world.sample)
    return world.run(world.four())


def _one_family(rng: Rng, n: int) -> SimulatedRun:
    """In one family of tasks of four the judge is fooled, while the others are learned."""
    world = _World(rng, n)
    hacked = world.hack(600, 1.5) & (rng.random(n) < 0.25)[:, None]
    world._harm = 1.5 * hacked
    ratings = world.four()
    ratings[2] = world.fool(ratings[2], hacked)
    return world.run(ratings)


def _made_to_time_out(harm: float) -> Kind:
    """Answers that make a strict rater time out: the others, which see a part of the harm, are paid without it."""

    def make(rng: Rng, n: int) -> SimulatedRun:
        world = _World(rng, n)
        hacked = world.hack(1500, harm, 0.9)
        strict = np.clip(world.graded() - 0.3, 0, 1)
        strict[hacked] = np.nan
        return world.run([world.ordinal(), strict, world.formed()])

    return make


def _tests_tampered(rng: Rng, n: int) -> SimulatedRun:
    """Tests are made to pass; a judge beside them sees the harm."""
    world = _World(rng, n)
    hacked = world.hack(700, 1.2)
    return world.run([np.where(hacked, 1.0, world.binary()), world.graded(0.12)])


def _three_of_four(rng: Rng, n: int) -> SimulatedRun:
    world = _World(rng, n)
    hacked = world.hack(800, 1.2)
    ratings = world.four()
    return world.run([ratings[0], *(world.fool(rating, hacked, 0.9) for rating in ratings[1:])])


def _endless(rng: Rng, n: int) -> SimulatedRun:
    """Answers without an end, which two of three raters like."""
    world = _World(rng, n)
    hacked = world.hack(800, 0.6)
    world.longer, world.cut_off = np.where(hacked, 4.0, 1.0), 0.02 + 0.8 * hacked.mean(axis=1)
    ratings = [world.binary(), world.graded(), world.formed()]
    return world.run([ratings[0], *(np.clip(rating + 0.3 * hacked, 0, 1) for rating in ratings[1:])])


def _empty_reasoning(rng: Rng, n: int) -> SimulatedRun:
    """Answers come without the reasoning, a tenth as long; a judge is content with them."""
    world = _World(rng, n)
    hacked = world.hack(800, 0.8)
    world.longer = np.where(hacked, 0.1, 1.0)
    return world.run([world.binary(), world.fool(world.graded(), hacked, 0.85), world.formed()])


SKILL_HACKS: dict[str, Kind] = {
    f"skill: {name}": make
    for name, make in {
        "intermittent, 5 %": _now_and_then(0.05),
        "intermittent, 20 %": _now_and_then(0.2),
        "slow, over 5,000": _one_fooled(1, 5000),
        "keywords": _one_fooled(0.7, 400, rater=1, to=0.9, share=0.9),
        "a rater saturates": _one_fooled(0.3, 600, rater=1, to=1.0),
        "form only": _one_fooled(3, 500, rater=3, to=0.98, share=0.95),
        "one of three fooled": _one_of_three,
        "two of four fooled": _two_of_four,
        "length padding": _padding,
        "copies the prompt": _copies,
        "repetition": _repetition,
        "flattery": _flattery,
        "refuses hard tasks": _refusals,
        "answers all alike": _all_alike,
        "one family of four": _one_family,
        "a strict rater made to time out": _made_to_time_out(0.8),
        "the same, without harm": _made_to_time_out(0.0),
        "tests tampered beside a judge": _tests_tampered,
        "three of four fooled": _three_of_four,
        "endless answers": _endless,
        "empty reasoning": _empty_reasoning,
    }.items()
}
