"""How often step_change, slow_drift and length_hacking are wrong, and how soon they are right.

    python tests/benchmarks/change_checks.py

Healthy runs of simulated groups, by distribution of the scores and size of the groups: blocks of 16 groups between two
false alarms, and the share of windows of 64 groups in which length_hacking warns. Then runs in which something changes:
the median delay until an alarm, and the share of runs in which there was one. Takes about five minutes; `--blocks`
and `--runs` make it shorter. Everything is drawn from `--seed`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.health.logic.check import LADDER, Check, HealthWindow
from lachesis.pipeline.health.logic.length_hacking import LengthHacking
from lachesis.pipeline.health.logic.sequential import SlowDrift, StepChange
from lachesis.schemas.annotations import GroupScore

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int], Floats]
"""Scores [groups, samples] from a generator, the number of groups, and samples a group."""
WINDOW, BLOCK = 64, 16
SEQUENTIAL = (StepChange, SlowDrift)


def normal(rng: np.random.Generator, groups: int, samples: int) -> Floats:
    """Tasks of different difficulty: samples of one group are alike (intra-group correlation .3)."""
    return rng.normal(0.5, 0.2, (groups, 1)) + rng.normal(0.0, 0.3, (groups, samples))


def t3(rng: np.random.Generator, groups: int, samples: int) -> Floats:
    return rng.standard_t(3, (groups, 1)) + rng.standard_t(3, (groups, samples))


def lognormal(rng: np.random.Generator, groups: int, samples: int) -> Floats:
    return rng.lognormal(0.0, 1.0, (groups, 1)) * rng.lognormal(0.0, 1.0, (groups, samples))


def bernoulli(p: float, strength: float = 2.0) -> Draw:
    """Success or failure; the rate of a task is Beta with mean `p`, so samples of a group are alike."""

    def draw(rng: np.random.Generator, groups: int, samples: int) -> Floats:
        rate = rng.beta(strength * p, strength * (1 - p), (groups, 1))
        return (rng.random((groups, samples)) < rate).astype(np.float64)

    return draw


HEALTHY: dict[str, tuple[Draw, int]] = {
    "normal, groups of 2": (normal, 2),
    "normal, 8": (normal, 8),
    "normal, 16": (normal, 16),
    "t with 3 degrees, 2": (t3, 2),
    "t with 3 degrees, 16": (t3, 16),
    "lognormal, 2": (lognormal, 2),
    "lognormal, 8": (lognormal, 8),
    "success .3, 8": (bernoulli(0.3), 8),
    "success .05, 2": (bernoulli(0.05), 2),
    "success .01, 2": (bernoulli(0.01), 2),
    "success .01, 16": (bernoulli(0.01), 16),
    "success .97, 8": (bernoulli(0.97), 8),
}


def windows_of_means(means: Floats) -> Iterator[HealthWindow]:
    """Groups of one sample: these checks see a group's mean alone."""
    for start in range(0, len(means), WINDOW):
        yield HealthWindow(scores=[
            GroupScore(group="", seq=1, item="", policy_step=0, scores=[value], ratings={}, lengths=[1])
            for value in means[start : start + WINDOW].tolist()
        ])  # fmt: skip


def blocks_between_alarms(kind: type[Check], draw: Draw, samples: int, blocks: int, seed: int) -> float:
    """Blocks of runs without change, a thousand each, over their alarms; infinity without any."""
    rng, alarms = np.random.default_rng(seed), 0
    for _ in range(0, blocks, 1000):
        check = kind()
        for window in windows_of_means(draw(rng, 1000 * BLOCK, samples).mean(axis=1)):
            alarms += check.evaluate(window).severity not in {"ok", "idle"}
    return blocks / alarms if alarms else math.inf


class Change(NamedTuple):
    """What changes after `before` blocks: `added` maps blocks since then to what is added, in deviations of a block."""

    label: str
    check: type[Check]
    before: int
    added: Callable[[Floats], Floats]


def delays(
    case: Change, draw: Draw, samples: int, runs: int, *, scale: float = 1.0, limit: int = 400, seed: int = 0
) -> tuple[float | None, float]:
    """Median blocks from the change to the alarm, and the share of runs with one within `limit` blocks.

    An alarm before the change is false: the check begins again, as it does in a run.
    """
    rng = np.random.default_rng(seed)
    deviation = np.std(draw(rng, 40_000, samples).mean(axis=1)) / math.sqrt(BLOCK)
    found = []
    for _ in range(runs):
        means = draw(rng, (case.before + limit) * BLOCK, samples).mean(axis=1)
        since = np.repeat(np.arange(limit, dtype=np.float64), BLOCK)
        means[case.before * BLOCK :] += deviation * case.added(since)
        check = case.check()
        for n, window in enumerate(windows_of_means(scale * means)):
            end = (n + 1) * WINDOW / BLOCK
            if check.evaluate(window).severity not in {"ok", "idle"} and end > case.before:
                found.append(end - case.before)
                break
    return (median(found) if found else None), len(found) / runs


def print_run_lengths(blocks: int, seed: int) -> None:
    print(f"blocks of {BLOCK} groups between false alarms, over {blocks} blocks without change, in runs of 1000")
    for name, (draw, samples) in HEALTHY.items():
        lengths = [blocks_between_alarms(kind, draw, samples, blocks, seed) for kind in SEQUENTIAL]
        shown = "".join(f"{'none' if length == math.inf else f'{length:.0f}':>12}" for length in lengths)
        print(f"  {name:<26}{shown}", flush=True)


def print_delays(runs: int, seed: int) -> None:
    def step(size: float) -> Callable[[Floats], Floats]:
        return lambda since: np.full_like(since, size)

    def creep(since: Floats) -> Floats:
        return 0.02 * since

    print(f"\nblocks from a change to the alarm, median of {runs} runs (share of runs with one within 400 blocks)")
    cases = [
        Change("step_change: 1 deviation after 24 blocks", StepChange, 24, step(1.0)),
        Change("step_change: 1 deviation after 100 blocks", StepChange, 100, step(1.0)),
        Change("step_change: 2 deviations after 24 blocks", StepChange, 24, step(2.0)),
        Change("step_change: 4 deviations after 24 blocks", StepChange, 24, step(4.0)),
        Change("slow_drift: .02 deviations a block", SlowDrift, 24, creep),
    ]
    shapes = {"normal": normal, "t3": t3, "lognormal": lognormal, "success .3": bernoulli(0.3)}
    print(f"  {'groups of 8':<44}" + "".join(f"{name:>16}" for name in shapes))
    for case in cases:
        row = [delays(case, draw, 8, runs, seed=seed) for draw in shapes.values()]
        print(f"  {case.label:<44}" + "".join(f"{shown(*found):>16}" for found in row), flush=True)
    for scale in (1e-3, 1e3):
        row = [delays(case, normal, 8, runs, scale=scale, seed=seed) for case in (cases[0], cases[-1])]
        step_found, drift_found = (shown(*found) for found in row)
        print(f"  scores times {scale:g}: step of 1 deviation {step_found}, slow drift {drift_found}", flush=True)


def shown(delay: float | None, share: float) -> str:
    return f"{'-' if delay is None else f'{delay:.0f}'} ({share:.0%})"


# length


def lengths_like(rng: np.random.Generator, scores: Floats, slope: float) -> NDArray[np.int64]:
    """Heavy-tailed lengths whose logarithm moves by `slope` deviations with a deviation of the score in its group."""
    centred = scores - scores.mean(axis=1, keepdims=True)
    unit = centred / max(centred.std(), 1e-12)
    return np.maximum(1, np.exp(4.0 + 0.5 * (slope * unit + rng.normal(size=scores.shape)))).astype(np.int64)


LENGTHS: dict[str, tuple[Draw, int, float, bool]] = {
    "no relation, groups of 2": (normal, 2, 0.0, False),
    "no relation, 8": (normal, 8, 0.0, False),
    "no relation, t3, 16": (t3, 16, 0.0, False),
    "no relation, success .05, 8": (bernoulli(0.05), 8, 0.0, False),
    "no relation, answers in pairs, 8": (normal, 8, 0.0, True),
    "wrong answers run long, 2": (bernoulli(0.4), 2, -0.7, False),
    "wrong answers run long, 8": (bernoulli(0.4), 8, -0.7, False),
    "wrong answers run much longer, 8": (normal, 8, -1.5, False),
    "longer thinking helps a little, 8": (normal, 8, 0.2, False),
}


def length_windows(scores: Floats, lengths: NDArray[np.int64], window: int = WINDOW) -> Iterator[HealthWindow]:
    for start in range(0, len(scores), window):
        rows = zip(scores[start : start + window].tolist(), lengths[start : start + window].tolist(), strict=True)
        yield HealthWindow(scores=[
            GroupScore(group="", seq=1, item="", policy_step=0, scores=values, ratings={}, lengths=counts)
            for values, counts in rows
        ])  # fmt: skip


def print_length(runs: int, seed: int) -> None:
    print(f"\nlength_hacking: windows of {WINDOW} and of 16 groups that warn, in {runs} healthy runs of 1280 groups")
    for name, (draw, samples, slope, pairs) in LENGTHS.items():
        shares = []
        for window in (WINDOW, 16):
            rng, warned, judged = np.random.default_rng(seed), 0, 0
            for _ in range(runs):
                scores = draw(rng, 1280, samples // 2 if pairs else samples)
                lengths = lengths_like(rng, scores, slope)
                if pairs:
                    scores, lengths = np.repeat(scores, 2, axis=1), np.repeat(lengths, 2, axis=1)
                check = LengthHacking()
                found = [check.evaluate(part).severity for part in length_windows(scores, lengths, window)]
                warned += sum(LADDER.index(severity) > LADDER.index("ok") for severity in found)
                judged += sum(severity != "idle" for severity in found)
            shares.append(f"{warned / judged:>10.2%}" if judged else f"{'idle':>10}")
        print(f"  {name:<36}{''.join(shares)}", flush=True)
    print("  windows until a hack that begins after 10 is seen (share of runs within 10 windows)")
    hacks = [
        ("longer is paid: r about .4, 2", normal, 2, 0.0, 0.7),
        ("longer is paid: r about .4, 8", normal, 8, 0.0, 0.5),
        ("longer is paid: r about .6, 16", normal, 16, 0.0, 0.8),
        ("longer is paid, success .3, 8", bernoulli(0.3), 8, 0.0, 0.8),
        ("longer is paid where wrong ran long, 8", bernoulli(0.4), 8, -0.7, 0.8),
        ("shorter is paid: r about -.6, 8", normal, 8, 0.0, -0.8),
        ("shorter is paid where wrong ran long, 8", normal, 8, -0.4, -1.5),
    ]
    for name, draw, samples, usual, hacked in hacks:
        rng, delay = np.random.default_rng(seed), []
        for _ in range(runs):
            scores = draw(rng, 20 * WINDOW, samples)
            lengths = np.concatenate([
                lengths_like(rng, scores[: 10 * WINDOW], usual), lengths_like(rng, scores[10 * WINDOW :], hacked)
            ])  # fmt: skip
            check = LengthHacking()
            found = [check.evaluate(part).severity for part in length_windows(scores, lengths)]
            delay += [n for n, severity in enumerate(found[10:], 1) if LADDER.index(severity) > 1][:1]
        print(f"  {name:<44}{shown(median(delay) if delay else None, len(delay) / runs):>12}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64_000, help="blocks of each run without change")
    parser.add_argument("--runs", type=int, default=40, help="runs with a change, and runs of the length check")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print_run_lengths(arguments.blocks, arguments.seed)
    print_delays(arguments.runs, arguments.seed)
    print_length(arguments.runs, arguments.seed)


if __name__ == "__main__":
    main()
