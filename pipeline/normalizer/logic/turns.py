"""Advantages of turns, of the rewards of single turns and the advantage of the sample. Pure float64.

The turns of a sample are a chain, or a tree where its conversation was forked (`Session.fork`). Turn u has the reward
r_u and the depth d_u, the number of turns before it; k_u is how many turns continue it, g the discount
(`advantage.turn_discount`). w_u, the product of 1 / k over the turns before it, is its share of the sample:

    return      G_u = r_u + g (mean of G_v over the turns v that continue u); r_u alone if none does
    baseline    b_u = mean of G_v, weighted by w_v, over the turns v at depth d_u that other branches of the nearest
                fork before u have; 0 if there is none
    advantage   A_u = A_i + c w_u (G_u - b_u),   c = 1 for rloo, (n - 1) / n for centred and dr_grpo

The samples of a group are branches too, of the fork at its task: in a chain, b_u is the mean over the other samples
that have a turn at this depth. Turns that begin a sample side by side are branches of it in the same way.

A_i is the advantage of the sample's reward, as without rewards of turns, so that a reward which belongs to no turn
credits all turns. c is the estimator's own factor: samples of one turn get the same advantages whether a reward is that
of the sample or of its turn. Rewards of turns are not normalized: they count in units of the normalized reward.

The structure of a chain is that of MT-GRPO (arXiv:2505.11821): rewards of turns are compared at the same turn index, in
addition to the outcome. Unlike there, what is compared is the return, and the baseline leaves the sample itself out. In
a tree, a return is the mean over the branches, and siblings are its baseline, as in TreeRL (arXiv:2506.11902) and
TreeRPO (arXiv:2506.05183), where the value of a node is the mean over its leaves. Unlike there, a branch weighs 1 / k
and nothing is divided by a standard deviation or by the root of the number of leaves.

With g = 1 the gradient is that of E[R + sum of r_u along one path], times c, whatever the numbers of turns and branches
are. The mean over k branches that are sampled alike is an unbiased estimate of the return of one; 1 / k is the weight
of a branch in it, and what all of them begin with is trained once. b_u depends on other branches alone, so
E[w_u b_u grad log pi(turn u)] = 0, and each turn has one baseline, that of its own return. It holds if the number of
branches is fixed before any of them is sampled, and if no branch sees another one. If each path were trained apart, a
sample would weigh more with each branch, and what its branches share most of all; a sum of rewards that are each
centred by turn pays for or against each further turn (verl#7244). With g < 1 later rewards count less, which lowers the
variance and changes what is optimized.
"""

import math
from collections.abc import Sequence

from lachesis.schemas.errors import DataError

__all__ = ["TURN_ESTIMATORS", "turn_advantages"]

TURN_ESTIMATORS = ("centred", "dr_grpo", "rloo")
"""Estimators that rewards of turns go with; the others divide by what these are no part of, or whiten."""


def turn_advantages(
    advantages: Sequence[float | None],
    rewards: Sequence[Sequence[float]],
    parents: Sequence[Sequence[int]] = (),
    *,
    discount: float,
    estimator: str,
) -> list[list[float] | None]:
    """Return for each sample the advantage of each of its turns, None where the sample has none.

    `advantages`: of the samples' rewards; a sample without one is in no baseline. `rewards`: of each sample's turns.
    `parents`: the turn that each turn continues, which lies before it, -1 if it begins the sample; empty: in each
    sample the turn before.

    Raises `DataError` for an estimator that rewards of turns do not go with, or if they are of other samples.
    """
    if estimator not in TURN_ESTIMATORS:
        raise DataError(
            f"turn_rewards: estimator {estimator} does not go with rewards of turns; set advantage.estimator to "
            f"{', '.join(TURN_ESTIMATORS[:-1])} or {TURN_ESTIMATORS[-1]}"
        )
    if len(rewards) != len(advantages) or len(parents) not in {0, len(advantages)}:
        raise DataError(f"turn_rewards: of {len(rewards)} samples, where the group has {len(advantages)}")
    valid = [i for i, advantage in enumerate(advantages) if advantage is not None]
    chains = [range(-1, len(turns) - 1) for turns in rewards]
    group = _TurnTree([(rewards[i], parents[i] if parents else chains[i]) for i in valid], discount)
    factor = 1.0 if estimator == "rloo" else (len(valid) - 1) / max(1, len(valid))
    found: list[list[float] | None] = [None] * len(advantages)
    for i, turns in zip(valid, group.samples(), strict=True):
        own = advantages[i] or 0.0
        found[i] = [own + factor * group.weights[u] * (group.returns[u] - group.baseline(u)) for u in turns]
    return found


class _TurnTree:
    """The turns of a group as one tree: node 0 is the task, below it a node for each sample, below these their turns.

    `returns`, `weights`: G and w of each node.
    """

    def __init__(self, samples: Sequence[tuple[Sequence[float], Sequence[int]]], discount: float) -> None:
        self.returns, self.weights = [0.0], [1.0]
        self._parents, self._depths, self._children = [0], [-2], list[list[int]]([[]])
        self._turns: list[range] = []
        for rewards, parents in samples:
            root = self._add(0, 0.0)
            self._turns.append(range(root + 1, root + 1 + len(rewards)))
            for reward, parent in zip(rewards, parents, strict=True):
                self._add(root + 1 + parent, reward)
            for u in self._turns[-1]:
                before = self._parents[u]
                self.weights[u] = self.weights[before] / len(self._children[before])
        self._sums = [list[tuple[float, float]]() for _ in self.returns]
        """By node the sums of w G and of w at each depth below it and at its own, the deepest first; those of a node
        that alone continues another one are taken over by that one."""
        for u in range(len(self.returns) - 1, 0, -1):
            self._fold(u, discount)
        self._tops = [0]
        for u in range(1, len(self.returns)):
            before = self._parents[u]
            self._tops.append(u if len(self._children[before]) > 1 else self._tops[before])

    def _add(self, before: int, reward: float) -> int:
        node = len(self.returns)
        self.returns.append(reward)
        self.weights.append(1.0)
        self._parents.append(before)
        self._depths.append(self._depths[before] + 1)
        self._children.append([])
        self._children[before].append(node)
        return node

    def _fold(self, u: int, discount: float) -> None:
        """Set the return and the sums of a node of which all nodes below are done."""
        below = self._children[u]
        if below:
            self.returns[u] += discount * math.fsum(self.returns[v] for v in below) / len(below)
            sums = [self._sums[v] for v in below]
            self._sums[u] = sums[0] if len(sums) == 1 else _added(sums)
        self._sums[u].append((self.weights[u] * self.returns[u], self.weights[u]))

    def samples(self) -> list[range]:
        """Return the nodes that are the turns of each sample."""
        return self._turns

    def baseline(self, u: int) -> float:
        """Return b of a turn."""
        branch = self._tops[u]
        while branch:
            level = self._depths[u] - self._depths[branch]
            others = [self._sums[v] for v in self._children[self._parents[branch]] if v != branch]
            found = [sums[-1 - level] for sums in others if len(sums) > level]
            if found:
                return math.fsum(total for total, _ in found) / math.fsum(weight for _, weight in found)
            branch = self._tops[self._parents[branch]]
        return 0.0


def _added(sums: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the sums of several nodes of the same depth, depth by depth."""
    longest = max(map(len, sums))
    return [
        (math.fsum(one[-level][0] for one in sums if len(one) >= level),
         math.fsum(one[-level][1] for one in sums if len(one) >= level))
        for level in range(longest, 0, -1)
    ]  # fmt: skip
