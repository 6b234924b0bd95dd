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
    }.items()
}
