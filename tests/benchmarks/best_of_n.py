"""Which ensemble withstands one rater that can be exploited: gold score of the sample that each rule picks out of n.

Raters see gold + noise. The first gives some samples, which are worse than they look, far too much. The pick of each
rule is what a policy would be drawn to. Columns: three to five raters, with ratings that fill their declared bounds
("wide") and with ones that use a small part of them, so that no rating is cut off ("narrow"). Only then can one rating
be far outside of what the others give, and only then does it matter in which units a rule punishes disagreement.

    .venv/bin/python tests/benchmarks/best_of_n.py --trials 100
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.scorer.logic.aggregate import Ensemble, EnsembleMember
from lachesis.pipeline.scorer.rater import Rating

SAMPLES = 256
NOISE, EXPLOITED, HARM, GAIN = 0.5, 0.2, 1.0, 16.0
RULES = {
    "single": None,
    "mean": ScoringConfig(aggregation="mean"),
    "median": ScoringConfig(aggregation="median"),
    "borda": ScoringConfig(aggregation="borda"),
    "min": ScoringConfig(aggregation="min"),
    "uwo .5": ScoringConfig(aggregation="uwo"),
    "uwo 5": ScoringConfig(aggregation="uwo", penalty=5.0),
    "lcb .5": ScoringConfig(aggregation="lcb", penalty=0.5),
    "lcb 1": ScoringConfig(aggregation="lcb", penalty=1.0),
    "default": ScoringConfig(),
}


COLUMNS = [(raters, bound) for raters in (3, 4, 5) for bound in (3.0, 16.0)]


def draw(rng: np.random.Generator, raters: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return gold [n] and ratings [raters, n], in standard deviations of gold."""
    exploited = rng.random(SAMPLES) < EXPLOITED
    gold = rng.standard_normal(SAMPLES) - HARM * exploited
    ratings = gold + NOISE * rng.standard_normal((raters, SAMPLES))
    ratings[0] += GAIN * exploited * rng.random(SAMPLES)
    return gold, ratings


def pick(config: ScoringConfig | None, ratings: NDArray[np.float64], bound: float) -> int:
    """Return the sample that a rule prefers; `bound` in standard deviations of gold is a 1 or a 0."""
    if config is None:
        return int(np.argmax(ratings[0]))
    names = [f"{i}" for i in range(len(ratings))]
    members = [
        EnsembleMember(name=name, reference="benchmark:rater", version="1", bounds=(-bound, bound)) for name in names
    ]
    columns = {name: [Rating(value) for value in column] for name, column in zip(names, ratings.tolist(), strict=True)}
    scores = Ensemble(members, config).score(columns).scores
    return int(np.argmax([float("-inf") if score is None else score for score in scores]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    trials = parser.parse_args().trials
    print(f"gold score of the best of {SAMPLES}, mean of {trials} trials and its standard error")
    print(f"{'':8}" + "".join(f"  {raters} {'wide' if bound < 5 else 'narrow':<10}" for raters, bound in COLUMNS))
    print(f"{'possible':8}" + "".join(f"  {best(trials, raters):5.2f}       " for raters, _ in COLUMNS))
    for name, rule in RULES.items():
        line = f"{name:8}"
        for raters, bound in COLUMNS:
            rng = np.random.default_rng(1)
            gold = []
            for _ in range(trials):
                truth, ratings = draw(rng, raters)
                gold.append(truth[pick(rule, np.clip(ratings, -bound, bound), bound)])
            line += f"  {np.mean(gold):5.2f} +-{np.std(gold) / np.sqrt(trials):.2f}"
        print(line, flush=True)


def best(trials: int, raters: int) -> float:
    """Return the gold score of the best sample, on average."""
    rng = np.random.default_rng(1)
    return float(np.mean([draw(rng, raters)[0].max() for _ in range(trials)]))


if __name__ == "__main__":
    main()
