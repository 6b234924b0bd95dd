"""Rebuilds a batch from rollouts and rewards, and compares it with the ledger's. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from lachesis.pipeline.batcher.join import group_ref
from lachesis.pipeline.batcher.whitening import whiten_batch
from lachesis.schemas.annotations import GroupReward
from lachesis.schemas.ledger import Batch, Numerics, TrainReport
from lachesis.schemas.planning_header import Plan

__all__ = ["BatchIngredient", "difference", "numerics_after", "numerics_differences", "rebuilt"]


class BatchIngredient(NamedTuple):
    """A rollout that a batch refers to, as it is stored; `teacher` is a sequence of TEACHER."""

    seq: int
    env: str
    plan: Plan
    reward: GroupReward
    teacher: int | None


def rebuilt(batch: Batch, ingredients: Sequence[BatchIngredient], std_floor: float) -> Batch:
    """Return what the batcher makes of the rollouts that `batch` refers to.

    Raises `DataError` where nothing can be.
    """
    refs = [group_ref(*ingredient) for ingredient in ingredients]
    lengths = {seq: reward.lengths for seq, _, _, reward, _ in ingredients if reward.lengths}
    groups = sorted(whiten_batch(refs, lengths, std_floor), key=lambda ref: ref.seq)
    return msgspec.structs.replace(
        batch,
        groups=groups,
        sequences=sum(ref.sequences for ref in groups),
        tokens=sum(ref.tokens for ref in groups),
    )


def difference(recorded: Batch, found: Batch) -> str | None:
    """Return in words the first place where two batches of the same number differ; None if they do not."""
    for old, new in zip(recorded.groups, found.groups, strict=False):
        for name in old.__struct_fields__:
            one, other = getattr(old, name), getattr(new, name)
            if one != other:
                return (
                    f"batch {recorded.number}, group {old.group}: {name} is {one} in the ledger, {other} by the streams"
                )
    if recorded != found:
        return (
            f"batch {recorded.number}: {len(recorded.groups)} groups in the ledger, {len(found.groups)} by the streams"
        )
    return None


def numerics_after(reports: Sequence[TrainReport], steps: int) -> Numerics | None:
    """Return how the step after the first `steps` was computed.

    The first report that covers it says so; reports are in order.

    Beyond the last one, by that. None: it does not say, or there is none.
    """
    at = bisect_right(reports, steps, key=lambda report: report.step)
    return reports[min(at, len(reports) - 1)].numerics if reports else None


def numerics_differences(recorded: Numerics, ours: Numerics) -> list[str]:
    """Return in words in what this process computes otherwise than the one that trained.

    Settings are not in it.
    """
    return [
        f"{name} was {getattr(recorded, name)}, is {getattr(ours, name)}"
        for name in ("torch", "processor", "instructions", "threads", "ranks", "inputs")
        if getattr(recorded, name) != getattr(ours, name)
    ]
