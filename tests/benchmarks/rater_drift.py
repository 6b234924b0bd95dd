"""How often the health check `rater_drift` names raters that do not change, and how soon it names those that do.

    python tests/benchmarks/rater_drift.py --seeds 20

Each run has 10,000 groups of eight samples, and 32 fixed ones, as a scorer makes them by default; raters change after
2,048 groups.
"""

import argparse
import random
import resource
from collections.abc import Callable, Iterator

from lachesis.pipeline.health.logic.check import CheckResult, HealthWindow
from lachesis.pipeline.health.logic.rater_drift import RaterDrift
from lachesis.schemas.annotations import FixedRating, GroupScore

GROUPS, ONSET, WINDOW, SAMPLES, ONE_IN, GROUPS_PER_STEP = 10_000, 2_048, 64, 32, 16, 16

Rate = Callable[[random.Random, float, int, bool], float]
"""Returns what a rater gives a sample of this quality and number; the last argument: whether it has changed."""


def clipped(value: float) -> float:
    return min(1.0, max(0.0, value))


def other(number: int) -> float:
    """Return the sample's place in an order of its own."""
    return number * 7 % SAMPLES / SAMPLES


HONEST: dict[str, Rate] = {
    "exact": lambda rng, good, number, changed: good,
    "verdicts": lambda rng, good, number, changed: float(good > 0.5),
    "noise .1": lambda rng, good, number, changed: clipped(good + 0.1 * rng.gauss(0, 1)),
    "noise .3": lambda rng, good, number, changed: clipped(good + 0.3 * rng.gauss(0, 1)),
    "one verdict in ten flips": lambda rng, good, number, changed: float((good > 0.5) != (rng.random() < 0.1)),
    "one in fifty flips, few are right": lambda rng, good, number, changed: float(
        (good > 0.9) != (rng.random() < 0.02)
    ),
    "scale of five": lambda rng, good, number, changed: round(clipped(good + 0.15 * rng.gauss(0, 1)) * 4) / 4,
    "unsure of a quarter": lambda rng, good, number, changed: clipped(
        good + (0.01 if number % 4 else 0.4) * rng.gauss(0, 1)
    ),
    "one rating in twenty is random": lambda rng, good, number, changed: good if rng.random() < 0.95 else rng.random(),
    "noise alone": lambda rng, good, number, changed: rng.random(),
}
CHANGED: dict[str, Rate] = {
    "exact, .2 milder": lambda rng, good, number, changed: 0.8 * good + 0.2 * changed,
    "noise .1, .2 milder": lambda rng, good, number, changed: 0.7 * good + 0.1 * rng.gauss(0, 1) + 0.2 * changed,
    "noise .3, .2 milder": lambda rng, good, number, changed: 0.7 * good + 0.3 * rng.gauss(0, 1) + 0.2 * changed,
    "scale of five, a step milder": lambda rng, good, number, changed: (
        round(clipped(good + 0.15 * rng.gauss(0, 1) + 0.25 * changed) * 4) / 4
    ),
    "verdicts, a quarter more": lambda rng, good, number, changed: float(good > (0.25 if changed else 0.5)),
    "noise .1, half another order": lambda rng, good, number, changed: clipped(
        (0.5 * good + 0.5 * other(number) if changed else good) + 0.1 * rng.gauss(0, 1)
    ),
    "noise .1, another order": lambda rng, good, number, changed: clipped(
        (other(number) if changed else good) + 0.1 * rng.gauss(0, 1)
    ),
    "noise .1, all alike": lambda rng, good, number, changed: clipped(
        (0.5 if changed else good) + 0.1 * rng.gauss(0, 1)
    ),
}


def scores(rate: Rate, seed: int, onset: int) -> Iterator[GroupScore]:
    """Yield the scores of a run, of one sample each: the others do not matter here."""
    rng = random.Random(seed)
    good = [rng.random() for _ in range(SAMPLES)]
    for group in range(GROUPS):
        fixed, own = None, 0.5
        if group < SAMPLES or rng.random() < 1 / ONE_IN:
            number = group if group < SAMPLES else rng.randrange(SAMPLES)
            given = [rate(rng, good[number], number, group >= onset) for _ in range(4 if group < SAMPLES else 1)]
            own, again = (given[0], given[1:]) if group < SAMPLES else (0.5, given)
            fixed = FixedRating(group=f"{number:032x}", sample=0, ratings={"judge": again}, raters={"judge": "x"})
        yield GroupScore(
            group=f"{group:032x}", seq=group + 1, item="a", policy_step=group // GROUPS_PER_STEP, scores=[own],
            ratings={"judge": [own]}, lengths=[9], fixed=fixed,
        )  # fmt: skip


def results(rate: Rate, seed: int, onset: int = GROUPS) -> list[CheckResult]:
    """Return the check's results of a run, window by window."""
    check, window, found = RaterDrift(), HealthWindow(), []
    for score in scores(rate, seed, onset):
        window.scores.append(score)
        if len(window.scores) == WINDOW:
            found.append(check.evaluate(window))
            window = HealthWindow()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    for name, rate in HONEST.items():
        runs = [results(rate, seed) for seed in seeds]
        warned = sum(any(one.severity == "warn" for one in run) for run in runs)
        print(f"honest   {name:36} {warned} of {len(runs)} runs warned of")
    for name, rate in CHANGED.items():
        runs = [results(rate, seed, ONSET) for seed in seeds]
        firsts = [next((i for i, one in enumerate(run) if one.severity == "warn"), None) for run in runs]
        after = sorted((first + 1) * WINDOW - ONSET for first in firsts if first is not None)
        median = after[len(after) // 2] if after else None
        order = sum(any(one.grows for one in run) for run in runs)
        print(
            f"changed  {name:36} {len(after)} of {len(runs)} warned of, median {median} groups after, "
            f"{order} for their order"
        )
    cpu_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    windows = len(seeds) * (len(HONEST) + len(CHANGED)) * GROUPS
    print(f"{cpu_s / windows * 1e3:.3f} ms of processor time a group of one rater, making it up included")


if __name__ == "__main__":
    main()
