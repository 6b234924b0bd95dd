"""Measures how far logprobs of rollouts and training are apart, by environment, in bounded size.

Pure, and without torch, so that a trainer elsewhere can sum up its own. `sums` are five of each row, group or
environment: its trainable tokens and, with w = p_train / p_rollout, the sums of -ln w, of w - 1 - ln w, of w and of
w^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from lachesis.schemas.ledger import EnvMismatch, Mismatch

__all__ = ["MAX_MISMATCH_BYTES", "bounded_mismatches", "env_figures", "mismatch_by_env", "summed_by"]

MAX_MISMATCH_BYTES = 1 << 18
"""Bytes that the figures of environments have in a report, which has to stay below 1 MiB."""


def summed_by(names: Iterable[str], sums: Iterable[Sequence[float]]) -> dict[str, list[float]]:
    """Return the sums of the rows of each name. Rows and names come in the same order."""
    found: dict[str, list[float]] = {}
    for name, row in zip(names, sums, strict=True):
        before = found.get(name)
        found[name] = list(row) if before is None else [a + b for a, b in zip(before, row, strict=True)]
    return found


def mismatch_by_env(shares: Sequence[Mapping[str, Sequence[float | None]]]) -> dict[str, EnvMismatch]:
    """Return the figures of each environment from the sums of all ranks.

    A sum that is None is not a number.
    """
    names = [env for one in shares for env in one]
    rows = [[math.nan if value is None else value for value in row] for one in shares for row in one.values()]
    totals = summed_by(names, rows)
    return {env: _mismatch(*totals[env]) for env in sorted(totals) if totals[env][0]}


def _mismatch(tokens: float, k1: float, k3: float, weight: float, squared: float) -> EnvMismatch:
    share = weight**2 / squared / tokens if squared else math.nan
    figures = (k1 / tokens, k3 / tokens, weight / tokens, share)
    return EnvMismatch(*(value if math.isfinite(value) else None for value in figures))


def env_figures(envs: Mapping[str, EnvMismatch]) -> dict[str, float]:
    """Return `logprobs/{env}/diff` and `logprobs/{env}/kl` of a step; NaN and infinity are left out."""
    figures = {f"logprobs/{env}/diff": one.k1 for env, one in envs.items()}
    figures |= {f"logprobs/{env}/kl": one.k3 for env, one in envs.items()}
    return {name: value for name, value in figures.items() if value is not None}


def bounded_mismatches(steps: Sequence[Mismatch], max_bytes: int = MAX_MISMATCH_BYTES) -> list[Mismatch]:
    """Return the steps with so many figures of environments as fit `max_bytes`.

    The worst of each environment stays first, of these the worst; then the other figures, the worst first.
    """
    all_figures = [(at, env, one) for at, step in enumerate(steps) for env, one in (step.envs or {}).items()]
    by_badness = sorted(all_figures, key=lambda figure: (-_badness(figure[2]), figure[0], figure[1]))
    worst: dict[str, tuple[int, str, EnvMismatch]] = {}
    for figure in by_badness:
        worst.setdefault(figure[1], figure)
    firsts = {(at, env) for at, env, _ in worst.values()}
    kept: list[dict[str, EnvMismatch]] = [{} for _ in steps]
    for at, env, one in [*worst.values(), *(each for each in by_badness if each[:2] not in firsts)]:
        max_bytes -= len(msgspec.msgpack.encode({env: one}))
        if max_bytes < 0:
            break
        kept[at][env] = one
    return [
        step if step.envs is None else msgspec.structs.replace(step, envs={env: envs[env] for env in sorted(envs)})
        for step, envs in zip(steps, kept, strict=True)
    ]


def _badness(mismatch: EnvMismatch) -> float:
    return math.inf if mismatch.k3 is None else mismatch.k3
