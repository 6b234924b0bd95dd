"""The newest rewards by environment and by rater, out of the figures of a run. Pure."""

from collections.abc import Mapping

import msgspec

__all__ = ["EnvRewards", "describe_rewards", "rewards_of"]


class EnvRewards(msgspec.Struct, frozen=True, kw_only=True):
    """Of an environment: `mean` score of its groups in the newest step; lately: `success`, the share of its samples
    that succeeded, and `raters`, the mean rating of each."""

    mean: float | None = None
    success: float | None = None
    raters: dict[str, float] = {}


def rewards_of(figures: Mapping[str, float]) -> dict[str, EnvRewards]:
    """Return the rewards by environment.

    They are in `reward/ENV/mean`, `reward/ENV/success` and `reward/ENV/rater/NAME`.
    """
    means: dict[str, float] = {}
    successes: dict[str, float] = {}
    raters: dict[str, dict[str, float]] = {}
    for name, value in sorted(figures.items()):
        kind, *path = name.split("/", 3)
        if kind == "reward" and len(path) == 2 and path[1] == "mean":
            means[path[0]] = value
        elif kind == "reward" and len(path) == 2 and path[1] == "success":
            successes[path[0]] = value
        elif kind == "reward" and len(path) == 3 and path[1] == "rater":
            raters.setdefault(path[0], {})[path[2]] = value
    return {
        env: EnvRewards(mean=means.get(env), success=successes.get(env), raters=raters.get(env, {}))
        for env in sorted({*means, *successes, *raters})
    }


def describe_rewards(mean: float | None, rewards: Mapping[str, EnvRewards]) -> str:
    """Return the rewards in a few words, empty where none is known.

    `0.72; sums 0.5 (numeric 0.4, format 0.9); ...`.
    """
    named = len(rewards) > 1
    parts = ["" if mean is None else f"{mean:.3g}"]
    for env, one in rewards.items():
        raters = ", ".join(f"{rater} {value:.3g}" for rater, value in one.raters.items())
        own = f"{env} {'-' if one.mean is None else format(one.mean, '.3g')}" if named else ""
        parts.append(f"{own} ({raters})".strip() if raters else own)
    return "; ".join(filter(None, parts)) if named else " ".join(filter(None, parts))
