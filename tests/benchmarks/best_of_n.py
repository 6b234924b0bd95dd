"""Which ensemble withstands one rater that can be exploited: gold score of the sample that each rule picks out of n.

Four raters see gold + noise. The first gives some samples, which are worse than they look, far too much. The pick of
each rule is what a policy would be drawn to. Printed for raters whose ratings fill their declared bounds, and for some
that use a small part of them: only then can one rating be far outside of what the others give, and only then does it
matter in which units a rule punishes disagreement.

    .venv/bin/python tests/benchmarks/best_of_n.py --trials 100
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.scoring.config import ScoringConfig
from lachesis.pipeline.scoring.logic.aggregate import Ensemble, EnsembleMember
from lachesis.pipeline.scoring.rater import Rating

RATERS, SAMPLES = 4, 256
NOISE, EXPLOITED, HARM, GAIN = 0.5, 0.2, 1.0, 16.0
RULES = {
    "single": None,
    "mean": ScoringConfig(aggregation="mean"),
    "median": ScoringConfig(aggregation="median"),
    "borda": ScoringConfig(aggregation="borda"),
    "min": ScoringConfig(aggregation="min"),
    "uwo .5": ScoringConfig(aggregation="uwo"),
    "uwo 5": ScoringConfig(aggregation="uwo", penalty=5.0),
    "lcb .5": ScoringConfig(aggregation="lcb"),
}


def draw(rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return gold [n] and ratings [raters, n], in standard deviations of gold."""
    exploited = rng.random(SAMPLES) < EXPLOITED
    gold = rng.standard_normal(SAMPLES) - HARM * exploited
    ratings = gold + NOISE * rng.standard_normal((RATERS, SAMPLES))
    ratings[0] += GAIN * exploited * rng.random(SAMPLES)
    return gold, ratings


def pick(config: ScoringConfig | None, ratings: NDArray[np.float64], bound: float) -> int:
    if config is None:
        return int(np.argmax(ratings[0]))
    members = [
        EnsembleMember(name=f"{i}", reference="benchmark:rater", version="1", bounds=(-bound, bound))
        for i in range(RATERS)
    ]
    columns = {f"{i}": [Rating(value) for value in column] for i, column in enumerate(ratings.tolist())}
    scores = Ensemble(members, config).score(columns).scores
    return int(np.argmax([float("-inf") if score is None else score for score in scores]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    options = parser.parse_args()
    trials = options.trials
    print(f"gold score of the best of {SAMPLES}, mean of {trials} trials (best possible {best(trials):.2f})")
    for bound in (3.0, 10.0):
        print(f"bounds at {bound:g} standard deviations:")
        for name, rule in RULES.items():
            rng = np.random.default_rng(1)
            gold = []
            for _ in range(trials):
                truth, ratings = draw(rng)
                gold.append(truth[pick(rule, np.clip(ratings, -bound, bound), bound)])
            print(f"  {name:7} {np.mean(gold):5.2f} +- {np.std(gold) / np.sqrt(len(gold)):.2f}")


def best(trials: int) -> float:
    rng = np.random.default_rng(1)
    return float(np.mean([draw(rng)[0].max() for _ in range(trials)]))


if __name__ == "__main__":
    main()
