"""Steps until a simulated learner passes 70 % of the sound items, for every curriculum strategy.

    python tests/benchmarks/curriculum_simulator.py [--seeds 20] [--prior 1.0] [--pool] [--draws]

3000 items in 6 skills, of which 8 % always fail and 7 % are coin flips, whatever the ability; 32 groups of 8 a step;
feedback 16 steps late. A group moves the ability of its skill, in logits, by its success variance y(1-y) ("r - mu",
advantages without std) or by its root ("with std"); all abilities fall a little each step. No learner was fitted to a
strategy, and none is the model that a strategy holds of it:

- wide: item difficulties N(0, 3), ability -2 at first: half of the items are far out of reach or done.
- narrow: N(0, 2) and -3: most items are worth something for most of the time, so there is less to gain.
- misspecified: difficulties uniform in [-5, 5]; item curves differ in slope; 30 % of the items can be guessed (.2);
  four topics within each skill learn by themselves twice as fast as from each other, unknown to the strategy; 20 %
  of the items have the wrong skill.

`--items 100000 --repeat 0.5` is a data set as people have them: an item is met once to three times, and each time
teaches half as much as before. "epoch" goes over all items once after the other.

"oracle" draws by the true success and knows the unsound items; no strategy can. `--draws` times a draw at 1e6 items.

These learners learn by skill, so which items teach them does not matter, and a strategy may draw ever the same few.
`--pool` looks at that alone: 256 items met many times, N(0, 2), in one skill whose ability moves by itself, whatever is
drawn; 250 steps of 16 groups of 8. "starved" is the share of the sound items with a true success in [.3, .7] that have
less than a tenth of an even share of the weight: on average from step 50 on, and in the end.
"""

import argparse
import time

import numpy as np

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.known_strategies import STRATEGIES
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool
from lachesis.pipeline.environment.task_sampler import DrawnItem, TaskSampler

ITEMS, SKILLS, TOPICS, GROUPS, SAMPLES, LIMIT, TARGET, RATE = 3000, 6, 24, 32, 8, 2500, 0.70, 0.012
SPEED = 1.0  # times that learners learn and forget as fast
SOUND, FAILS, FLIPS = range(3)


class Learner:
    """True difficulties, and abilities that move with what is practised."""

    def __init__(self, rng, spread, start, forgets):
        self.difficulty = rng.normal(0.0, spread, ITEMS)
        self.skill = self.told = rng.integers(0, SKILLS, ITEMS).astype(np.int32)
        self.kind = rng.choice(3, ITEMS, p=[0.85, 0.08, 0.07])
        self.ability = np.full(SKILLS, start)
        self.forgets = forgets * SPEED

    def ability_for(self):
        return self.ability[self.skill] - self.difficulty

    def success(self):
        """Probability of success of every item, as if all were sound."""
        return 1 / (1 + np.exp(-self.ability_for()))

    def practise(self, items, signal):
        """Learn from the groups of one step."""
        self.ability += RATE * SPEED * np.bincount(self.skill[items], signal, SKILLS) - self.forgets


class Misspecified(Learner):
    """What no strategy assumes: topics, slopes, guessing, wrong labels."""

    def __init__(self, rng, forgets):
        super().__init__(rng, 1.0, -3.0, forgets)
        self.difficulty = rng.uniform(-5.0, 5.0, ITEMS)
        self.slope = rng.lognormal(0.0, 0.4, ITEMS)
        self.guess = np.where(rng.random(ITEMS) < 0.3, 0.2, 0.0)
        self.topic = rng.integers(0, TOPICS, ITEMS)
        self.skill = (self.topic % SKILLS).astype(np.int32)
        wrong = rng.random(ITEMS) < 0.2
        self.told = np.where(wrong, rng.integers(0, SKILLS, ITEMS), self.skill).astype(np.int32)
        self.ability = np.full(TOPICS, -3.0)

    def ability_for(self):
        return self.slope * (self.ability[self.topic] - self.difficulty)

    def success(self):
        return self.guess + (1 - self.guess) * super().success()

    def practise(self, items, signal):
        topics = np.bincount(self.topic[items], signal, TOPICS)
        skills = np.tile(np.bincount(self.skill[items], signal, SKILLS), TOPICS // SKILLS)
        self.ability += RATE * SPEED * (topics + skills) * 0.8 - self.forgets  # in all as much as where skills are one


LEARNERS = {
    "wide": lambda rng: Learner(rng, 3.0, -2.0, 0.0024),
    "narrow": lambda rng: Learner(rng, 2.0, -3.0, 0.0015),
    "misspecified": lambda rng: Misspecified(rng, 0.0015),
}


class Passes:
    """What environments do with the strategy epoch: one pass over all items after the other; sees no feedback."""

    def __init__(self):
        self.left = np.empty(0, int)

    def sample(self, n, rng):
        if len(self.left) < n:
            self.left = np.concatenate([self.left, rng.permutation(ITEMS)])
        taken, self.left = self.left[:n], self.left[n:]
        return [DrawnItem(item, 1 / ITEMS) for item in taken.tolist()]

    def observe(self, feedback):
        pass


class Oracle:
    """Draws by the learner's true state; sees no feedback."""

    def __init__(self, learner):
        self.learner = learner

    def sample(self, n, rng):
        p = self.learner.success()
        weight = np.where(self.learner.kind == SOUND, (4 * p * (1 - p)) ** 4, 0.0)
        return TaskSampler.from_snapshot(weight).sample(n, rng)

    def observe(self, feedback):
        pass


def features_of(difficulty, explained, count=6):
    """Return features that explain this share of the difficulties' variance together, none of them alone."""
    if explained is None:
        return None
    rng = np.random.default_rng(7)
    features = rng.normal(size=(len(difficulty), count))
    known = (difficulty - difficulty.mean()) / difficulty.std()
    features[:, 0] = np.sqrt(explained) * known + np.sqrt(1 - explained) * features[:, 0]
    return (features @ np.linalg.qr(rng.normal(size=(count, count)))[0]).astype(np.float32)


def run(make, strategy, seed, *, std, delay, prior_noise, repeat=1.0, settings=None, explained=None):
    """Return steps to the target (at most LIMIT), and the shares of zero-variance groups and of unsound items."""
    rng = np.random.default_rng(seed)
    learner = make(rng)
    prior = None if prior_noise is None else learner.difficulty + rng.normal(0, prior_noise, ITEMS)
    names = tuple(f"s{k}" for k in range(SKILLS))
    if strategy in ("oracle", "epoch"):
        curriculum = Oracle(learner) if strategy == "oracle" else Passes()
    else:
        pool = ItemPool(ITEMS, prior, learner.told, names, features=features_of(learner.difficulty, explained))
        curriculum = load_strategy(pool, CurriculumConfig(strategy=strategy, total_steps=800, **(settings or {})))
    late, flat, unsound, met = [], 0, 0, np.zeros(ITEMS)
    for step in range(LIMIT):
        p = learner.success()
        if p[learner.kind == SOUND].mean() >= TARGET:
            break
        p = np.choose(learner.kind, [p, 0.0, 0.5])
        items = np.array([draw.item for draw in curriculum.sample(GROUPS, rng)])
        y = rng.binomial(SAMPLES, p[items]) / SAMPLES
        signal = np.sqrt(y * (1 - y)) / 2 if std else y * (1 - y)
        flat += int((signal == 0).sum())
        unsound += int((learner.kind[items] != SOUND).sum())
        learner.practise(items, signal * repeat ** met[items] * (learner.kind[items] == SOUND))  # noise teaches nothing
        met[items] += 1
        late.append(list(zip(items.tolist(), y.tolist(), strict=True)))
        if step >= delay:
            for n, (item, success) in enumerate(late.pop(0)):
                skill, at = names[learner.told[item]], step - delay
                curriculum.observe(
                    ItemFeedback(
                        id=f"{at}-{n}", env="e", item=item, skill=skill, n=SAMPLES, success=success, policy_step=at
                    )
                )
    drawn = max(1, step * GROUPS)
    return step, flat / drawn, unsound / drawn


ABILITIES = {
    "rises from -1 to 1": lambda t: 2 * t - 1,
    "from -2 to 2, slumps by 1.5 halfway": lambda t: 4 * t - 2 - 1.5 * (0.5 < t < 0.7),
    "falls from 1 to -1": lambda t: 1 - 2 * t,
}


def run_pool(ability, strategy, seed, *, items=256, steps=250, groups=16, begin=50):
    """Return the share of starved items on average and in the end, the effective number of items, and the shares of
    zero-variance groups and of unsound items; `ability` is a function of the share of steps taken.
    """
    rng = np.random.default_rng(seed)
    difficulty, kind = rng.normal(0.0, 2.0, items), rng.choice(3, items, p=[0.85, 0.08, 0.07])
    curriculum = load_strategy(ItemPool(items), CurriculumConfig(strategy=strategy, total_steps=steps))
    starved, effective, flat, unsound = [], [], 0, 0
    for step in range(steps):
        p = 1 / (1 + np.exp(difficulty - ability(step / steps)))
        drawn = np.array([draw.item for draw in curriculum.sample(groups, rng)])
        y = rng.binomial(SAMPLES, np.choose(kind, [p, 0.0, 0.5])[drawn]) / SAMPLES
        for n, (item, success) in enumerate(zip(drawn.tolist(), y.tolist(), strict=True)):
            curriculum.observe(
                ItemFeedback(
                    id=f"{step}-{n}", env="e", item=item, skill=None, n=SAMPLES, success=success, policy_step=step
                )
            )
        if step < begin:
            continue
        weights = curriculum.weights()
        useful = (kind == SOUND) & (p >= 0.3) & (p <= 0.7)
        starved.append((weights[useful] < 0.1 * weights.mean()).mean())
        effective.append(weights.sum() ** 2 / (weights**2).sum())
        flat += int(((y == 0) | (y == 1)).sum())
        unsound += int((kind[drawn] != SOUND).sum())
    all_drawn = (steps - begin) * groups
    return np.mean(starved), starved[-1], np.mean(effective), flat / all_drawn, unsound / all_drawn


def print_pools(strategies, seeds):
    """Print what every strategy does to a small pool."""
    for name, ability in ABILITIES.items():
        print(f"{name}\n{'':13} {'starved':>8} {'in the end':>11} {'effective':>10} {'zero var.':>10} {'unsound':>8}")
        for strategy in strategies:
            starved, end, effective, flat, unsound = np.mean([run_pool(ability, strategy, s) for s in seeds], axis=0)
            print(
                f"  {strategy:11} {starved:8.3f} {end:11.3f} {effective:10.0f} {flat:10.3f} {unsound:8.3f}", flush=True
            )


def time_draws(items=1_000_000, draws=2000):
    """Print what a draw costs, and a snapshot: building one, and getting ready to draw by it."""
    strategy = load_strategy(ItemPool(items), CurriculumConfig())
    rng = np.random.default_rng(0)
    for n, item in enumerate(rng.integers(0, items, 10_000).tolist()):
        strategy.observe(
            ItemFeedback(id=f"{n}", env="e", item=item, skill=None, n=8, success=(n % 9) / 8, policy_step=0)
        )
    begun = time.perf_counter()
    snapshot = strategy.snapshot()
    made = time.perf_counter()
    sampler = TaskSampler.from_snapshot(snapshot.weights, snapshot.id)
    ready = time.perf_counter()
    for _ in range(draws):
        sampler.sample(1, rng)
    spent = time.perf_counter() - ready
    print(f"{items} items: snapshot {1e3 * (made - begun):.0f} ms, sampler {1e3 * (ready - made):.0f} ms, ", end="")
    print(f"draw {1e6 * spent / draws:.1f} us")


def main():
    global ITEMS, SPEED
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs averaged (default 3)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the runs (default 0)")
    parser.add_argument("--delay", type=int, default=16, help="steps until feedback arrives (default 16)")
    parser.add_argument("--prior", type=float, default=None, help="noise of the difficulty prior; default: no prior")
    parser.add_argument("--learners", nargs="+", choices=LEARNERS, default=list(LEARNERS))
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES, "oracle"])
    parser.add_argument("--draws", action="store_true", help="time draws at 1e6 items instead")
    parser.add_argument("--pool", action="store_true", help="what becomes of the items of a small pool instead")
    parser.add_argument("--items", type=int, default=ITEMS, help=f"items of the pool (default {ITEMS})")
    parser.add_argument("--repeat", type=float, default=1.0, help="what an item teaches beside the time before (1)")
    parser.add_argument("--first-pass", type=float, default=None, help="curriculum.first_pass; default: its own")
    parser.add_argument("--repeat-worth", type=float, default=None, help="curriculum.repeat_worth; default: its own")
    parser.add_argument(
        "--features", type=float, default=None, help="share of the difficulties' variance that items' features explain"
    )
    parser.add_argument("--speed", type=float, default=1.0, help="times that learners learn and forget as fast (1)")
    options = parser.parse_args()
    ITEMS, SPEED = options.items, options.speed
    if options.draws:
        time_draws()
        return
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.pool:
        print_pools([name for name in options.strategies if name != "oracle"], seeds)
        return
    given = {"first_pass": options.first_pass, "repeat_worth": options.repeat_worth}
    settings = {name: value for name, value in given.items() if value is not None}
    for name in options.learners:
        print(f"{name:13} {'r - mu':>13} {'x':>6} {'with std':>13} {'x':>6} {'zero var.':>10} {'unsound':>8}")
        base = {}
        for strategy in options.strategies:
            line = f"  {strategy:11}"
            shares = []
            for std in (False, True):
                runs = [
                    run(
                        LEARNERS[name],
                        strategy,
                        seed,
                        std=std,
                        delay=options.delay,
                        prior_noise=options.prior,
                        repeat=options.repeat,
                        explained=options.features,
                        settings=settings,
                    )
                    for seed in seeds
                ]
                steps, flat, unsound = np.array(runs, float).T
                base.setdefault(std, steps.mean())
                shares.append((flat.mean(), unsound.mean()))
                error = steps.std() / np.sqrt(len(steps))
                line += f" {steps.mean():7.0f} +-{error:3.0f} {base[std] / steps.mean():6.2f}"
            flat, unsound = np.max(shares, axis=0)
            print(f"{line} {flat:10.2f} {unsound:8.2f}", flush=True)


if __name__ == "__main__":
    main()
