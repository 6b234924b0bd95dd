"""Splits the groups of a batch among ranks. Pure.

Guarantees that every group goes to exactly one rank, whole; that the same manifest gives the same shares everywhere;
and that no two ranks differ by more tokens than the largest group has.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lachesis.schemas.ledger import Batch, GroupRef

__all__ = ["share_of", "split_groups"]


def split_groups(groups: Sequence[GroupRef], ranks: int) -> list[list[GroupRef]]:
    """Return the groups of each rank, in the order of the batch.

    The largest group comes first, and each goes to the rank that has the fewest tokens so far (longest processing time
    first). A batch of fewer groups than ranks leaves some ranks without any.
    """
    tokens = [0] * ranks
    owners: dict[int, int] = {}
    for at in sorted(range(len(groups)), key=lambda at: (-groups[at].tokens, at)):
        owner = min(range(ranks), key=lambda rank: (tokens[rank], rank))
        tokens[owner] += groups[at].tokens
        owners[at] = owner
    return [[group for at, group in enumerate(groups) if owners[at] == rank] for rank in range(ranks)]


def share_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return the manifest of what `rank` fetches and trains of the batch."""
    if ranks == 1:
        return batch
    groups = split_groups(batch.groups, ranks)[rank]
    return msgspec.structs.replace(
        batch,
        groups=groups,
        sequences=sum(group.sequences for group in groups),
        tokens=sum(group.tokens for group in groups),
    )
