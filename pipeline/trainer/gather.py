"""Gathers on rank 0 the weights and AdamW's state of a sharded learner.

If the learner is not sharded, everything is whole already, and nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.sharded_policy import whole

__all__ = ["gather_optimizer", "gather_weights", "optimizer_state"]


def gather_weights(learner: Learner) -> None:
    """Make the weights of `learner.model` those that are trained, on rank 0. A collective."""
    if learner.sharded is None:
        return
    targets = dict(learner.model.named_parameters()) if learner.ranks.rank == 0 else {}
    with torch.no_grad():
        for name, parameter in learner.trained.named_parameters():
            values = whole(parameter.detach())
            if name in targets:
                targets[name].copy_(values)


def gather_optimizer(learner: Learner) -> None:
    """Collect copies of AdamW's state, whole, in `learner.gathered`, on rank 0. A collective."""
    if learner.sharded is None:
        return
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, entries in _entries(learner):
        values = {entry: _copy_whole(value) for entry, value in entries.items()}
        if learner.ranks.rank == 0:
            found[name] = values
    learner.gathered = found


def _copy_whole(value: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, which no later step changes: counters of steps are spread over no ranks."""
    found = whole(value)
    return found.to("cpu", copy=found is value)


def optimizer_state(learner: Learner) -> dict[str, dict[str, torch.Tensor]]:
    """Return AdamW's state by parameter and entry; of a sharded learner what was gathered last."""
    if learner.sharded is None:
        return dict(_entries(learner))
    if learner.gathered is None:
        raise ValueError("the optimizer's state is spread over the ranks: gather_optimizer comes first.")
    return learner.gathered


def _entries(learner: Learner) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    for name, parameter in learner.trained.named_parameters():
        if parameter in learner.optimizer.state:
            yield name, learner.optimizer.state[parameter]
