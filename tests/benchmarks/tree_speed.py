"""Tokens and processor time of a step on branches of one prefix: as a tree, and each row by itself.

    python tests/benchmarks/tree_speed.py [--branches 4] [--prefix 512] [--branch 64]

Both ways take turns in one process, on the same weights' shapes and the same batch; the best step of each counts.
"""

import argparse
import math
import time

import numpy as np
import torch

from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import PackedBatch, pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence


def a_batch(given: argparse.Namespace) -> PackedBatch:
    """Return groups of branches; each token is trained once, those of the prefix in the last branch."""
    draw = np.random.default_rng(0)
    sequences = []
    for group in range(given.groups):
        prefix = draw.integers(5, 100, given.prefix)
        for branch in range(given.branches):
            tokens = np.concatenate([prefix, draw.integers(5, 100, given.branch)]).astype(np.int32)
            first = 1 if branch == given.branches - 1 else given.prefix
            sequences.append(
                TrainingSequence(
                    tokens=tokens,
                    loss_mask=np.arange(len(tokens)) >= first,
                    logprobs=np.full(len(tokens), -math.log(100), np.float32),
                    advantage=(-1.0) ** branch,
                    group_id=str(group),
                    index=branch,
                )
            )
    return pack(sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("groups", 2), ("branches", 4), ("prefix", 512), ("branch", 64), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    batch, ways = a_batch(given), {}
    for name, trees in (("a tree", True), ("rows", False)):
        policy = build_tiny_policy(0, width=192, layers=4, heads=4, max_length=given.prefix + given.branch)
        ways[name] = Learner(policy.model, LearnerConfig(learning_rate=1e-6, pack_trees=trees, max_step_kl=None))
    best: dict[str, tuple[float, float]] = {}
    for _ in range(given.steps + 1):
        for name, learner in ways.items():
            began_s = time.process_time()
            metrics = learner.step(batch)
            took_s = time.process_time() - began_s
            best[name] = min(best.get(name, (math.inf, 0.0)), (took_s, metrics.shared))
    for name, (seconds, shared) in best.items():
        tokens = int(batch.lengths_B.sum()) * (1 - shared)
        print(f"{name}: {tokens:.0f} tokens through the layers, {seconds:.3f} s of processor time a step")
    print(f"rows take {best['rows'][0] / best['a tree'][0]:.2f} times as long")


if __name__ == "__main__":
    main()
