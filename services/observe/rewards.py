"""The newest rewards by environment and by rater, out of the figures of a run. Pure."""

from collections.abc import Mapping

import msgspec

__all__ = ["EnvRewards", "describe_rewards", "rewards_of"]

_LARGE_BIAS = 0.3
"""Correlation with length, at equal ratings by the other raters, from which on it is shown beside the rating."""


class EnvRewards(msgspec.Struct, frozen=True, kw_only=True):
    """Of an environment: `mean` score of its groups in the newest step; lately: `success`, the share of its samples
    that succeeded, `raters`, the mean rating of each and, as RATER/FIGURE, of what it says further, and `length_bias`,
    by rater how far it rates longer answers higher than the other raters do, -1 to 1."""

    mean: float | None = None
    success: float | None = None
    raters: dict[str, float] = {}
    length_bias: dict[str, float] = {}


def rewards_of(figures: Mapping[str, float]) -> dict[str, EnvRewards]:
    """Return the rewards by environment.

    They are in `reward/ENV/mean`, `reward/ENV/success`, `reward/ENV/rater/NAME` and `reward/ENV/length_bias/NAME`.
    """
    means: dict[str, float] = {}
    successes: dict[str, float] = {}
    raters: dict[str, dict[str, float]] = {}
    biases: dict[str, dict[str, float]] = {}
    for name, value in sorted(figures.items()):
        kind, *path = name.split("/", 3)
        if kind == "reward" and len(path) == 2 and path[1] == "mean":
            means[path[0]] = value
        elif kind == "reward" and len(path) == 2 and path[1] == "success":
            successes[path[0]] = value
        elif kind == "reward" and len(path) == 3 and path[1] == "rater":
            raters.setdefault(path[0], {})[path[2]] = value
        elif kind == "reward" and len(path) == 3 and path[1] == "length_bias":
            biases.setdefault(path[0], {})[path[2]] = value
    return {
        env: EnvRewards(
            mean=means.get(env),
            success=successes.get(env),
            raters=raters.get(env, {}),
            length_bias=biases.get(env, {}),
        )
        for env in sorted({*means, *successes, *raters, *biases})
    }


def describe_rewards(mean: float | None, rewards: Mapping[str, EnvRewards]) -> str:
    """Return the rewards in a few words, empty where none is known.

    `0.72 in the newest step; sums 0.5 (lately numeric 0.4, format 0.9); ...`. Those of raters are means of the last
    groups that were scored, so they need not make up the mean of the step.
    """
    named = len(rewards) > 1
    parts = ["" if mean is None else f"{mean:.3g} in the newest step"]
    for env, one in rewards.items():
        raters = ", ".join(f"{rater} {value:.3g}{_bias(one, rater)}" for rater, value in one.raters.items())
        own = f"{env} {'-' if one.mean is None else format(one.mean, '.3g')}" if named else ""
        parts.append(f"{own} (lately {raters})".strip() if raters else own)
    return "; ".join(filter(None, parts)) if named else " ".join(filter(None, parts))


def _bias(rewards: EnvRewards, rater: str) -> str:
    """Return how far a rater prefers longer or shorter answers, where that is much."""
    bias = rewards.length_bias.get(rater)
    return "" if bias is None or abs(bias) < _LARGE_BIAS else f" [length {bias:+.2f}]"
