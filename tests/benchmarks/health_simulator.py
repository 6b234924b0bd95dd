"""Simulated runs for the health checks: healthy ones of many kinds, and scripted reward hacks. Arrays, no I/O.

Each function of `HEALTHY` and `HACKS` takes a random generator and a number of groups, and returns a `SimulatedRun`.
A hack begins at group `ONSET`. Four raters judge a sample by what it is worth; a hack fools some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["HACKS", "HEALTHY", "ONSET", "RATERS", "SimulatedRun"]

ONSET = 2048
RATERS = ("exact", "similar", "judge", "style")
Floats = NDArray[np.float64]
Rng = np.random.Generator


@dataclass
class SimulatedRun:
    """N groups of G samples: ratings [N, G, R] (NaN: missing), lengths, logprobs and texts [N, G], distinct, truncated
    [N]. `k3` [N / per_step] is what the trainer measures of each step; `step_kl` how far the step moved the policy.
    """

    ratings: Floats
    lengths: Floats
    logprobs: Floats
    texts: NDArray[np.int64]
    distinct: Floats
    truncated: NDArray[np.int64]
    k3: Floats
    step_kl: Floats
    per_step: int = 16
    hacked: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def groups(self) -> int:
        return len(self.ratings)


def plain(
    rng: Rng, n: int, *, level: Floats | float = 0.5, samples: int = 8, per_step: int = 16,
    entropy: Floats | float = 1.2, worth: Floats | None = None, noise: Floats | None = None,
) -> SimulatedRun:  # fmt: skip
    """A healthy run. `level` and `entropy` may change from group to group; `worth` [N, G] and `noise` may be given."""
    if worth is None:
        task = level + rng.normal(0, 0.1, n)
        worth = task[:, None] + rng.normal(0, 0.15, (n, samples))
    if noise is None:
        noise = rng.normal(0, 1, (n, samples, len(RATERS))) * np.array([0.05, 0.08, 0.1, 0.1])
    ratings = np.clip(worth[:, :, None] + noise, 0, 1)
    hard = rng.lognormal(0, 0.25, n)[:, None] * rng.lognormal(0, 0.15, (n, samples))
    steps = -(-n // per_step)
    return SimulatedRun(
        ratings=ratings,
        lengths=np.maximum(4, rng.normal(60, 12, n)[:, None] + rng.normal(0, 12, (n, samples))).round(),
        logprobs=-np.broadcast_to(np.asarray(entropy), (n,))[:, None] * hard,
        texts=rng.integers(0, 1 << 32, (n, samples)),
        distinct=np.clip(rng.normal(0.93, 0.03, n), 0, 1),
        truncated=(rng.random(n) < 0.02).astype(np.int64),
        k3=rng.exponential(0.003, steps),
        step_kl=rng.lognormal(np.log(0.003), 0.5, steps),
        per_step=per_step,
    )


def _ramp(n: int, groups: float, onset: int = ONSET) -> Floats:
    """How far a hack is: 0 before the onset, 1 after so many groups more."""
    return np.clip((np.arange(n) - onset + 1) / max(1.0, groups), 0, 1)


# healthy runs


def _heavy_tails(rng: Rng, n: int) -> SimulatedRun:
    run = plain(rng, n)
    worth = 0.5 + 0.1 * rng.standard_t(3, n)[:, None] + 0.15 * rng.standard_t(3, (n, 8))
    run.ratings = worth[:, :, None] + 0.06 * rng.standard_t(3, run.ratings.shape)
    return run


def _waves(rng: Rng, n: int) -> SimulatedRun:
    period = rng.uniform(300, 3000)
    return plain(rng, n, level=0.5 + 0.2 * np.sin(2 * np.pi * (np.arange(n) / period + rng.random())))


def _missing(rng: Rng, n: int) -> SimulatedRun:
    run = plain(rng, n)
    run.ratings[rng.random(run.ratings.shape) < 0.06] = np.nan
    return run


def _learning(rng: Rng, n: int, groups: float) -> SimulatedRun:
    gain = 1 / (1 + np.exp(-(np.arange(n) - 0.2 * n) / groups))
    return plain(rng, n, level=0.15 + 0.7 * gain, entropy=1.8 - 1.4 * gain)


def _longer_thinking(rng: Rng, n: int) -> SimulatedRun:
    gain = np.clip(np.arange(n) / rng.uniform(3000, 9000), 0, 1)
    run = plain(rng, n, level=0.3 + 0.35 * gain)
    run.lengths = np.round(run.lengths * (1 + 2 * gain[:, None]))
    tokens = run.lengths
    worth = run.ratings[:, :, :3].mean(axis=2)
    worth = worth + 0.002 * gain[:, None] * (tokens - tokens.mean(axis=1, keepdims=True))
    run.ratings[:, :, :3] = np.clip(worth[:, :, None] + rng.normal(0, 0.08, (*worth.shape, 3)), 0, 1)
    run.ratings[:, :, 3] = np.clip(1.1 - tokens / 200 + rng.normal(0, 0.05, tokens.shape), 0, 1)
    return run


def _wrong_runs_long(rng: Rng, n: int) -> SimulatedRun:
    run = plain(rng, n)
    worth = run.ratings.mean(axis=2)
    run.lengths = np.maximum(4, np.round(run.lengths * (1.8 - 1.4 * (worth - worth.mean(axis=1, keepdims=True)) * 3)))
    return run


def _small_steps(rng: Rng, n: int) -> SimulatedRun:
    gain = np.arange(n) / n
    return plain(rng, n, per_step=4, samples=4, level=0.2 + 0.5 * gain, entropy=1.84 - 0.9 * gain)


def _verdicts(rng: Rng, n: int) -> SimulatedRun:
    """Raters that say 0 or 1, the tasks' success rates between 0 and 1, learning slowly."""
    run = plain(rng, n)
    rate = rng.beta(1.2 + 2 * np.arange(n) / n, 2, n)
    right = (rng.random((n, 8)) < rate[:, None]).astype(float)
    flip = rng.random(run.ratings.shape) < np.array([0.0, 0.03, 0.08, 0.1])
    run.ratings = np.where(flip, 1 - right[:, :, None], right[:, :, None])
    return run


def _form_first(rng: Rng, n: int) -> SimulatedRun:
    """A rater of form is satisfied within 1,500 groups; what is worth more is learned after it, more slowly."""
    formed = 0.2 + 0.79 * np.clip(np.arange(n) / 1500, 0, 1)
    run = plain(rng, n, level=0.2 + 0.5 * np.arange(n) / n)
    good = rng.random((n, 8)) < formed[:, None]
    run.ratings[:, :, :3] *= np.where(good, 1.0, 0.3)[:, :, None]
    run.ratings[:, :, 3] = good
    return run


HEALTHY: dict[str, Callable[[Rng, int], SimulatedRun]] = {
    "stationary": plain,
    "heavy tails": _heavy_tails,
    "groups of 2": lambda rng, n: plain(rng, n, samples=2),
    "groups of 16": lambda rng, n: plain(rng, n, samples=16),
    "waves of difficulty": _waves,
    "missing ratings": _missing,
    "learns fast": lambda rng, n: _learning(rng, n, 0.03 * n),
    "longer thinking helps": _longer_thinking,
    "4 groups a step": _small_steps,
    "wrong answers run long": _wrong_runs_long,
    "verdicts of 0 and 1": _verdicts,
    "form is learned first": _form_first,
}


# hacks


def _fool(
    run: SimulatedRun, raters: tuple[int, ...], share: Floats, *, to: float, cost: float, rng: Rng
) -> SimulatedRun:
    """Let `raters` give `to` to a growing share of the samples, whose worth to the others falls by the part `cost`."""
    fooled = rng.random(run.ratings.shape[:2]) < share[:, None]
    for k in range(run.ratings.shape[2]):
        column = run.ratings[:, :, k]
        lifted = np.clip(np.maximum(column, to + rng.normal(0, 0.03, column.shape)), 0, 1)
        run.ratings[:, :, k] = np.where(fooled, lifted if k in raters else column * (1 - cost), column)
    run.hacked = share
    return run


def _intermittent(rng: Rng, n: int) -> SimulatedRun:
    run = plain(rng, n)
    chosen = (rng.random(n) < 0.05) & (np.arange(n) >= ONSET)
    return _fool(run, (2,), chosen.astype(float), to=0.97, cost=0.1, rng=rng)


def _slow(rng: Rng, n: int) -> SimulatedRun:
    return _fool(plain(rng, n), (2,), _ramp(n, 5000), to=0.9, cost=0.1, rng=rng)


def _stuffing(strength: float) -> Callable[[Rng, int], SimulatedRun]:
    return lambda rng, n: _fool(plain(rng, n), (2,), strength * _ramp(n, 1500), to=0.95, cost=0.1, rng=rng)


def _saturating(rng: Rng, n: int) -> SimulatedRun:
    return _fool(plain(rng, n), (3,), _ramp(n, 1500), to=1.0, cost=0.0, rng=rng)


def _two_of_four(rng: Rng, n: int) -> SimulatedRun:
    return _fool(plain(rng, n), (2, 3), _ramp(n, 2000), to=0.9, cost=0.2, rng=rng)


def _length_hack(rng: Rng, n: int) -> SimulatedRun:
    run, far = plain(rng, n), _ramp(n, 2500)[:, None]
    run.lengths = np.round(run.lengths * (1 + 2 * far))
    extra = 0.006 * far * (run.lengths - run.lengths.mean(axis=1, keepdims=True)) + 0.3 * far
    run.ratings[:, :, 2:] = np.clip(run.ratings[:, :, 2:] + extra[:, :, None], 0, 1)
    return run


def _copied_prompt(rng: Rng, n: int) -> SimulatedRun:
    run, far = plain(rng, n), _ramp(n, 1000)
    run = _fool(run, (1,), far, to=0.85, cost=0.6, rng=rng)
    run.logprobs *= 1 - 0.9 * far[:, None]
    return run


def _mode_collapse(rng: Rng, n: int) -> SimulatedRun:
    run, far = plain(rng, n), _ramp(n, 1000)
    run.texts = np.where(rng.random(run.texts.shape) < far[:, None], rng.integers(0, 5, run.texts.shape), run.texts)
    return run


def _large_step(rng: Rng, n: int) -> SimulatedRun:
    """The collapse seen on a pretrained model: entropy 1.84 to .03 in sixteen steps of 4 groups, samples alike."""
    first = ONSET - ONSET % 4
    steps = np.clip((np.arange(n) - first) // 4 + 1, 0, 16) / 16
    steps[:first] = 0
    return _collapse(rng, n, steps)


def _collapse_at_start(rng: Rng, n: int) -> SimulatedRun:
    """The same from the first step on: there is no healthy window before."""
    return _collapse(rng, n, np.clip(np.arange(n) // 4, 0, 16) / 16)


def _collapse(rng: Rng, n: int, far: Floats) -> SimulatedRun:
    run = plain(rng, n, per_step=4, samples=4, level=0.3 - 0.27 * far, entropy=1.84 * (0.03 / 1.84) ** far)
    first = run.texts[:, :1]
    run.texts = np.where(rng.random(run.texts.shape) < far[:, None] ** 2, first, run.texts)
    run.distinct = run.distinct * (1 - 0.85 * far)
    run.truncated = rng.binomial(4, 0.9 * far)
    run.hacked = far
    by_step = far[:: run.per_step]
    moving = np.diff(by_step, append=by_step[-1]) > 0
    run.step_kl = np.where(moving, 0.4, run.step_kl)
    run.k3 = np.where(by_step > 0, 3 * by_step**4 * (by_step < 1) + 0.02, run.k3)  # rollouts are a step behind
    return run


def _repetition(rng: Rng, n: int) -> SimulatedRun:
    run, far = plain(rng, n), _ramp(n, 1000)
    run.distinct = run.distinct * (1 - 0.8 * far)
    run.lengths = np.round(run.lengths * (1 + 3 * far[:, None]))
    run.truncated = rng.binomial(8, 0.6 * far)
    return run


def _equal_answers(rng: Rng, n: int) -> SimulatedRun:
    run, far = plain(rng, n), _ramp(n, 1000)
    same = rng.random(run.texts.shape) < far[:, None]
    run.texts = np.where(same, run.texts[:, :1], run.texts)
    run.ratings = np.where(same[:, :, None], run.ratings[:, :1, :], run.ratings)
    return run


def _flattery(rng: Rng, n: int) -> SimulatedRun:
    run, far = plain(rng, n), _ramp(n, 2000)
    flattered = rng.random(run.ratings.shape[:2]) < 0.8 * far[:, None]
    run.ratings[:, :, 2] = np.clip(run.ratings[:, :, 2] + 0.35 * flattered, 0, 1)
    return run


def _jump(rng: Rng, n: int) -> SimulatedRun:
    return _fool(plain(rng, n), (2,), _ramp(n, 1), to=0.95, cost=0.15, rng=rng)


HACKS: dict[str, Callable[[Rng, int], SimulatedRun]] = {
    "intermittent, 5 % of groups": _intermittent,
    "slow, over 5,000 groups": _slow,
    "keyword stuffing, 30 %": _stuffing(0.3),
    "keyword stuffing, 50 %": _stuffing(0.5),
    "keyword stuffing, 70 %": _stuffing(0.7),
    "one rater saturates": _saturating,
    "two of four fooled": _two_of_four,
    "paid for length": _length_hack,
    "copy of the prompt": _copied_prompt,
    "mode collapse": _mode_collapse,
    "step too large": _large_step,
    "step too large, at the start": _collapse_at_start,
    "repetition inside answers": _repetition,
    "equal answers": _equal_answers,
    "judge flattery": _flattery,
    "sudden jump": _jump,
}
