"""Advantage estimators: pure float64 functions of one complete group.

In: the rewards of a group, None where a sample is unscorable. Out: one advantage a sample (None where the reward is
None), the statistics behind it and a verdict. Unscorable samples enter no statistic. All sums are exactly rounded
(math.fsum), so the result does not depend on the order of the samples to the bit. Inside a complete group every
estimator has a bound, which is checked on every call: anything beyond it is a fault of the program.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from lachesis.pipeline.rewards.config.advantage import AdvantageConfig, Estimator
from lachesis.schemas.errors import DataError

__all__ = ["GroupAdvantage", "Verdict", "group_advantage"]

Verdict = Literal["trainable", "zero_variance", "unscorable"]

NOISE = 1e-6
"""Rewards that differ by less than this, relative to the largest (or to 1), do not differ: dividing such a difference
by its own standard deviation would turn float noise into full-strength advantages."""


LIMIT = 1e100
"""Largest reward whose square is still a number."""


class GroupAdvantage(msgspec.Struct, frozen=True):
    """`advantages`: one a sample, None where its reward is missing, all 0 unless the verdict is trainable.

    `mean`, `std` (n-1 in the divisor; 0 for one sample), `range` are of the `n_valid` rewards, None without any.
    Verdict unscorable: fewer than two rewards, so nothing to compare. zero_variance: the rewards, or under pass@k the
    two best of them, do not differ.
    """

    advantages: tuple[float | None, ...]
    mean: float | None
    std: float | None
    range: float | None
    n_valid: int
    verdict: Verdict


def group_advantage(
    rewards: Sequence[float | None],
    config: AdvantageConfig,
    lengths: Sequence[int] | None = None,
    components: Mapping[str, Sequence[float | None]] | None = None,
) -> GroupAdvantage:
    """Return the advantages of one group. `lengths` are generated tokens a sample, for estimator opo; `components` are
    the rewards of each kind, for estimator gdpo.

    Raises DataError on NaN or infinity, on lengths or components that do not fit, and on a negative reward under maxrl.
    """
    if config.estimator == "gdpo":
        return _gdpo(rewards, config, components or {})
    valid = [i for i, reward in enumerate(rewards) if reward is not None]
    r = [float(reward) for reward in rewards if reward is not None]
    for i, reward in zip(valid, r, strict=True):
        if not abs(reward) <= LIMIT:
            raise DataError(f"reward {i} is {reward}; rewards are finite and at most 1e100, a missing one is None.")
    if not r:
        return GroupAdvantage((None,) * len(rewards), None, None, None, 0, "unscorable")
    group = _Group(r, _valid_lengths(rewards, lengths, valid, config), config.std_floor)
    best, second = (sorted(r, reverse=True) + r)[:2]
    verdict: Verdict = "trainable"
    if len(r) < 2:
        verdict = "unscorable"
    elif (best - second if config.estimator == "pass@k" else group.range) <= NOISE * max(1.0, *map(abs, r)):
        verdict = "zero_variance"
    values = [0.0] * len(r)
    if verdict == "trainable":
        estimate, bound = _ESTIMATORS[config.estimator]
        values = estimate(group)
        limit = bound(group)
        if not max(map(abs, values)) <= limit * (1 + 1e-9):
            raise AssertionError(f"{config.estimator} advantages {values} of rewards {r} exceed their bound {limit}")
    advantages: list[float | None] = [None] * len(rewards)
    for i, value in zip(valid, values, strict=True):
        advantages[i] = value
    return GroupAdvantage(tuple(advantages), group.mean, group.std, group.range, len(r), verdict)


class _Group:
    """Valid rewards with their statistics, in two passes."""

    def __init__(self, r: list[float], lengths: list[int], std_floor: float) -> None:
        self.r = r
        self.n = len(r)
        self.lengths = lengths
        self.range = max(r) - min(r)
        self.mean = math.fsum(r) / self.n
        self.centred = [x - self.mean for x in r]
        # A product is correctly rounded on every machine, a power is as good as its C library
        squares = math.fsum(c * c for c in self.centred)
        self.std = math.sqrt(squares / (self.n - 1)) if self.n > 1 else 0.0
        self.divisor = max(self.std, std_floor)


def _gdpo(
    rewards: Sequence[float | None], config: AdvantageConfig, components: Mapping[str, Sequence[float | None]]
) -> GroupAdvantage:
    """Weighted sum of the grpo advantages of the components (arXiv:2601.05242); the batcher whitens it.

    A sample without a reward or one of the components is unscorable and enters no statistic. The group has zero
    variance when every component has.
    """
    weights = dict(sorted((config.weights or dict.fromkeys(components, 1.0)).items()))
    absent = [name for name in weights if len(components.get(name, ())) != len(rewards)]
    if absent or not weights:
        raise DataError(
            f"estimator gdpo needs ratings of {sorted(absent) or 'one rater at least'} for each of {len(rewards)} "
            f"samples; there are those of {sorted(components)}."
        )
    scored = [None not in sample for sample in zip(rewards, *(components[name] for name in weights), strict=True)]

    def judge(column: Sequence[float | None], estimator: Estimator) -> GroupAdvantage:
        valid = [value if ok else None for value, ok in zip(column, scored, strict=True)]
        return group_advantage(valid, AdvantageConfig(estimator=estimator, std_floor=config.std_floor))

    whole = judge(rewards, "centred")
    if whole.verdict == "unscorable":
        return whole
    parts = [(weight, judge(components[name], "grpo")) for name, weight in weights.items()]
    constant = all(part.verdict == "zero_variance" for _, part in parts)
    columns = [[weight * (value or 0.0) for value in part.advantages] for weight, part in parts]
    advantages = [math.fsum(values) if ok else None for ok, *values in zip(scored, *columns, strict=True)]
    return msgspec.structs.replace(
        whole, advantages=tuple(advantages), verdict="zero_variance" if constant else "trainable"
    )


def _valid_lengths(
    rewards: Sequence[float | None], lengths: Sequence[int] | None, valid: list[int], config: AdvantageConfig
) -> list[int]:
    if config.estimator != "opo":
        return []
    if lengths is None or len(lengths) != len(rewards):
        raise DataError(f"estimator opo needs the length of each of {len(rewards)} samples, has {lengths}.")
    kept = [lengths[i] for i in valid]
    if any(length < 0 for length in kept) or not sum(kept):
        raise DataError(f"estimator opo needs lengths of at least 0, not all 0; has {kept}.")
    return kept


def _centred(g: _Group) -> list[float]:
    return g.centred


def _grpo(g: _Group) -> list[float]:
    """DeepSeekMath (arXiv:2402.03300)."""
    return [c / g.divisor for c in g.centred]


def _rloo(g: _Group) -> list[float]:
    """Reward minus the mean of the others (arXiv:2402.14740)."""
    return [c * g.n / (g.n - 1) for c in g.centred]


def _maxrl(g: _Group) -> list[float]:
    """Normalised by the mean: a rare success counts for more."""
    if min(g.r) < 0:
        raise DataError(f"estimator maxrl needs rewards of at least 0, has {min(g.r)}; choose another or shift them.")
    return [c / g.mean if g.mean > 0 else 0.0 for c in g.centred]


def _opo(g: _Group) -> list[float]:
    """Minus the length-weighted mean, the baseline of least variance (arXiv:2505.23585)."""
    baseline = math.fsum(x * length for x, length in zip(g.r, g.lengths, strict=True)) / sum(g.lengths)
    return [x - baseline for x in g.r]


def _pass_at_k(g: _Group) -> list[float]:
    second, best = sorted(g.r)[-2:]
    return [(best - second) / g.divisor if x == best else 0.0 for x in g.r]


def _range(g: _Group) -> float:
    return g.range


_ESTIMATORS: dict[str, tuple[Callable[[_Group], list[float]], Callable[[_Group], float]]] = {
    "centred": (_centred, _range),
    "dr_grpo": (_centred, _range),
    "reinforce++-baseline": (_centred, _range),
    "rloo": (_rloo, _range),
    "opo": (_opo, _range),
    "grpo": (_grpo, lambda g: (g.n - 1) / math.sqrt(g.n)),
    "maxrl": (_maxrl, lambda g: float(g.n - 1)),
    "pass@k": (_pass_at_k, lambda g: math.sqrt(g.n)),
}
