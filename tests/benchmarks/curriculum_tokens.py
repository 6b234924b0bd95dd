"""Sampled tokens until a simulated learner reaches its goal, in four worlds, counted as a run spends them.

    python tests/benchmarks/curriculum_tokens.py --seeds 4 [--prior 1.0] [--strategies pass irt gain_per_token oracle]

A step trains 16 groups of 8 in which answers fare differently. Groups in which all fare alike teach nothing, are drawn
again, and cost their tokens. Harder tasks and wrong answers are longer. A group moves the ability of its skill by its
success variance; each time a task's content is met it teaches half as much as before (`--repeat`).
Feedback comes after `--delay` steps, and an environment draws no task twice within `--recent` draws. The goal is a mean
success of 65 % on sound tasks that are never drawn.

- clean: difficulties N(0, 2.5), every task is sound.
- unsound: 12 % of the tasks always fail, 8 % are coin flips, 8 % can be guessed (.25) and teach less.
- slump: all abilities fall by one logit at step 40, and by a little in each step.
- copies: 40 % of the tasks are in the pool under several names.

"pass" goes over all tasks once after the other, without feedback. "oracle" knows success, cost, soundness and how often
each content was met. Figures are tokens of `uniform` over tokens of the strategy on the same seed, geometric means with
their standard errors. The environments' own refill, length limits and staleness are not simulated.
"""

from __future__ import annotations

import argparse
import math
from collections import deque

import numpy as np

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool
from lachesis.pipeline.environment.task_sampler import TaskSampler

ITEMS, SKILLS, GROUPS, SAMPLES, LIMIT, GOAL, RATE, REPEAT = 1500, 4, 16, 8, 400, 0.65, 0.07, 0.5
WORLDS = ("clean", "unsound", "slump", "copies")
SETTINGS: dict[str, float] = {}
"""Of the section [curriculum], beside the strategy."""
RECENT = 64
"""Draws within which the environment draws no task twice: two times 32 groups at a time."""
MAX_REFILL = 20
"""Waves of groups after which a step is trained on fewer."""


class Learner:
    """True difficulties, lengths and abilities; `content` names what a task really is."""

    def __init__(self, world: str, rng: np.random.Generator) -> None:
        self.world = world
        self.content = np.arange(ITEMS)
        if world == "copies":
            copied = rng.random(ITEMS) < 0.4
            self.content[copied] = rng.choice(np.flatnonzero(~copied)[: ITEMS // 5], copied.sum())
        self.difficulty = rng.normal(0.0, 2.5, ITEMS)[self.content]
        self.skill = rng.integers(0, SKILLS, ITEMS)[self.content].astype(np.int32)
        self.length = 200 * np.exp(0.15 * self.difficulty + 0.3 * rng.normal(size=ITEMS)[self.content])
        kind = rng.choice(4, ITEMS, p=[0.72, 0.12, 0.08, 0.08]) if world == "unsound" else np.zeros(ITEMS, int)
        self.fails, self.flips, self.guessed = (kind == k for k in (1, 2, 3))
        self.ability = np.full(SKILLS, -1.5)
        self.met = np.zeros(ITEMS)
        self.held_out = rng.normal(0.0, 2.5, 600), rng.integers(0, SKILLS, 600)

    def success(self) -> np.ndarray:
        p = 1 / (1 + np.exp(self.difficulty - self.ability[self.skill]))
        p = np.where(self.guessed, 0.25 + 0.75 * p, p)
        return np.where(self.fails, 0.0, np.where(self.flips, 0.5, p))

    def teaches(self) -> np.ndarray:
        """What a group of each task teaches, as a share of a sound one's that was never met."""
        sound = np.where(self.fails | self.flips, 0.0, np.where(self.guessed, 0.5, 1.0))
        return sound * REPEAT ** self.met[self.content]

    def tokens(self, items: np.ndarray, success: np.ndarray) -> float:
        """Tokens that groups of these mean successes cost; a wrong answer is 1.3 times as long as a right one."""
        return float((SAMPLES * self.length[items] * (1.3 - 0.3 * success)).sum())

    def train(self, items: np.ndarray, success: np.ndarray, step: int) -> None:
        signal = success * (1 - success) * self.teaches()[items]
        self.ability += RATE * np.bincount(self.skill[items], signal, SKILLS)
        np.add.at(self.met, self.content[items], 1)
        if self.world == "slump":
            self.ability -= 0.002 + (step == 40)

    def rate(self) -> float:
        difficulty, skill = self.held_out
        return float((1 / (1 + np.exp(difficulty - self.ability[skill]))).mean())


class Passes:
    """One pass over all tasks after the other."""

    def __init__(self) -> None:
        self.left = np.empty(0, int)

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        if len(self.left) < n:
            self.left = np.concatenate([self.left, rng.permutation(ITEMS)])
        taken, self.left = self.left[:n], self.left[n:]
        return taken


class Even:
    """Any task at any time."""

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(0, ITEMS, n)


class Oracle:
    """Draws what teaches most for its tokens."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        p = self.learner.success()
        worth = (p * (1 - p) * self.learner.teaches() / (self.learner.length * (1.3 - 0.3 * p))) ** 4
        return rng.choice(ITEMS, n, p=worth / worth.sum())


class Strategy:
    """A strategy of the product, fed as the curriculum's service feeds it."""

    def __init__(self, name: str, learner: Learner, prior: float | None, rng: np.random.Generator) -> None:
        difficulty = None if prior is None else learner.difficulty + prior * rng.normal(size=ITEMS)[learner.content]
        pool = ItemPool(
            ITEMS,
            difficulty,
            learner.skill,
            tuple(f"s{k}" for k in range(SKILLS)),
            contents=learner.content.astype(np.uint64),
        )
        self.learner, self.count = learner, 0
        self.recent: deque[int] = deque(maxlen=RECENT)
        self.strategy = load_strategy(pool, CurriculumConfig(strategy=name, **SETTINGS))
        self.sampler: TaskSampler | None = None

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        if self.sampler is None:
            self.sampler = TaskSampler.from_snapshot(self.strategy.snapshot().weights)
        drawn = np.empty(n, int)
        for place in range(n):
            drawn[place] = self.sampler.sample(1, rng, recent=[*self.recent])[0].item
            self.recent.append(int(drawn[place]))
        return drawn

    def observe(self, items: np.ndarray, success: np.ndarray, step: int) -> None:
        self.sampler = None
        for item, rate in zip(items.tolist(), success.tolist(), strict=True):
            self.count += 1
            tokens = self.learner.tokens(np.array([item]), np.array([rate])) / SAMPLES
            skill = f"s{self.learner.skill[item]}"
            self.strategy.observe(
                ItemFeedback(
                    id=str(self.count),
                    env="e",
                    item=item,
                    skill=skill,
                    n=SAMPLES,
                    success=rate,
                    policy_step=step,
                    tokens=tokens,
                )
            )


def run(world: str, name: str, seed: int, *, delay: int = 2, prior: float | None = None) -> tuple[float, int, float]:
    """Return the tokens sampled until the goal, the steps (at most LIMIT), and the share of groups that were alike."""
    learner = Learner(world, np.random.default_rng([seed, WORLDS.index(world)]))
    rng = np.random.default_rng([seed, 99])
    source: Passes | Oracle | Strategy
    source = (
        Passes() if name == "pass" else Oracle(learner) if name == "oracle" else Strategy(name, learner, prior, rng)
    )
    late: list[list[tuple[np.ndarray, np.ndarray]]] = []
    tokens, flat, drawn = 0.0, 0, 0
    for step in range(LIMIT):
        if learner.rate() >= GOAL:
            return tokens, step, flat / max(1, drawn)
        p = learner.success()
        batch: list[tuple[np.ndarray, np.ndarray]] = []
        seen: list[tuple[np.ndarray, np.ndarray]] = []
        missing = GROUPS
        for _ in range(MAX_REFILL):
            items = source.draw(missing, rng)
            success = rng.binomial(SAMPLES, p[items]) / SAMPLES
            tokens += learner.tokens(items, success)
            useful = (success > 0) & (success < 1)
            flat, drawn = flat + int((~useful).sum()), drawn + len(items)
            batch.append((items[useful], success[useful]))
            seen.append((items, success))
            missing -= int(useful.sum())
            if missing <= 0:
                break
        learner.train(*(np.concatenate(column) for column in zip(*batch, strict=True)), step)
        late.append(seen)
        if len(late) > delay and isinstance(source, Strategy):
            for items, success in late.pop(0):
                source.observe(items, success, step - delay)
    return tokens, LIMIT, flat / max(1, drawn)


def main() -> None:
    global REPEAT, RECENT
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--delay", type=int, default=2, help="steps until feedback arrives (default 2)")
    parser.add_argument("--prior", type=float, help="error of the tasks' difficulties, logits; default: none are known")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--strategies", nargs="+", default=["pass", "irt", "gain_per_token", "oracle"])
    parser.add_argument("--repeat", type=float, default=REPEAT, help="what a task teaches beside the time before (0.5)")
    parser.add_argument("--repeat-worth", type=float, help="curriculum.repeat_worth; default: its own")
    parser.add_argument("--recent", type=int, default=RECENT, help=f"draws without a task twice (default {RECENT})")
    given = parser.parse_args()
    REPEAT, RECENT = given.repeat, given.recent
    if given.repeat_worth is not None:
        SETTINGS["repeat_worth"] = given.repeat_worth
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    print(f"{'':9} {'uniform':>24}  tokens of uniform over those of the strategy (steps, groups alike)")
    for world in given.worlds:
        base = [run(world, "uniform", seed, delay=given.delay) for seed in seeds]
        tokens, steps, flat = np.mean(base, axis=0)
        line = f"{world:9} {tokens / 1e6:6.2f} M {steps:4.0f} steps, {flat:.2f}"
        for name in given.strategies:
            runs = [run(world, name, seed, delay=given.delay, prior=given.prior) for seed in seeds]
            ratios = np.log([one[0] / other[0] for one, other in zip(base, runs, strict=True)])
            error = ratios.std(ddof=1) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
            mean = math.exp(ratios.mean())
            _, steps, flat = np.mean(runs, axis=0)
            line += f"   {name} {mean:.2f} +- {mean * error:.2f} ({steps:.0f}, {flat:.2f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
