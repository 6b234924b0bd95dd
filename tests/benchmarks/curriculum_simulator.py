"""Steps until a simulated learner passes 70 % of the sound items, for every curriculum strategy.

    python tests/benchmarks/curriculum_simulator.py [--seeds 3] [--prior 1.0]

The learner: per skill an ability in logits; sound items pass with sigmoid(ability - difficulty). A group moves the
ability of its skill by its success variance y(1-y) (advantages r - mu) or by its square root (advantages / std), and a
skill that is not practised falls back. 8 % of the items always fail and 7 % are coin flips, whatever the ability.
Feedback arrives 16 steps late. `--prior` is the noise, in logits, of the difficulties the strategy is told.
"""

import argparse

import numpy as np

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.registry import STRATEGIES, load_strategy
from lachesis.pipeline.curriculum.logic.strategy import Feedback, Items

ITEMS, SKILLS, GROUPS, SAMPLES, DELAY, LIMIT, TARGET = 3000, 6, 32, 8, 16, 2500, 0.70


def run(strategy, seed, std, prior_noise):
    """Return steps to the target (at most LIMIT), and the shares of zero-variance groups and of unsound items."""
    rng = np.random.default_rng(seed)
    difficulty = rng.normal(0.0, 2.0, ITEMS)
    skill = rng.integers(0, SKILLS, ITEMS).astype(np.int32)
    kind = rng.choice(3, ITEMS, p=[0.85, 0.08, 0.07])  # sound, always fails, coin flip
    ability = np.full(SKILLS, -3.0)
    prior = None if prior_noise is None else difficulty + rng.normal(0, prior_noise, ITEMS)
    names = tuple(f"s{k}" for k in range(SKILLS))
    curriculum = load_strategy(Items(ITEMS, prior, skill, names), CurriculumConfig(strategy=strategy, total_steps=800))
    late, flat, unsound = [], 0, 0
    for step in range(LIMIT):
        p = 1 / (1 + np.exp(difficulty - ability[skill]))
        if p[kind == 0].mean() >= TARGET:
            break
        p = np.where(kind == 1, 0.0, np.where(kind == 2, 0.5, p))
        gain = np.zeros(SKILLS)
        for draw in curriculum.sample(GROUPS, rng):
            i = draw.item
            y = rng.binomial(SAMPLES, p[i]) / SAMPLES
            signal = y * (1 - y)
            flat += signal == 0
            unsound += kind[i] > 0
            if kind[i] == 0:  # noise teaches nothing
                gain[skill[i]] += np.sqrt(signal) / 2 if std else signal
            late.append((step, len(late), i, y))
        ability += 0.012 * gain - 0.0015
        while late and late[0][0] <= step - DELAY:
            at, n, i, y = late.pop(0)
            curriculum.observe(
                Feedback(
                    id=f"{at}-{n}-{i}", env="e", item=i, skill=names[skill[i]], n=SAMPLES, success=y, policy_step=at
                )
            )
    drawn = max(1, step * GROUPS)
    return step, flat / drawn, unsound / drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs averaged (default 3)")
    parser.add_argument("--prior", type=float, default=None, help="noise of the difficulty prior; default: no prior")
    options = parser.parse_args()
    print(f"{'strategy':12} {'no std':>8} {'std':>8} {'zero var.':>10} {'unsound':>8}")
    for strategy in STRATEGIES:
        figures = {
            std: np.mean([run(strategy, seed, std, options.prior) for seed in range(options.seeds)], axis=0)
            for std in (False, True)
        }
        plain, scaled = figures[False], figures[True]
        print(f"{strategy:12} {plain[0]:8.0f} {scaled[0]:8.0f} {plain[1]:10.2f} {plain[2]:8.2f}")


if __name__ == "__main__":
    main()
