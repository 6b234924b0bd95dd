"""Says what each token is credited with: the advantage of its sample or turn, or its own. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.rollout import RolloutGroup, Sequences

__all__ = ["credit_by_turn", "token_credit"]


def token_credit(ref: GroupRef, group: RolloutGroup) -> list[float | NDArray[np.float32] | None]:
    """Return for each sequence one advantage, or one a token float32 [T]; None: its sample has none.

    Values per token hold under the loss mask alone. Raises `DataError` if the advantages are those of other samples or
    turns.
    """
    sequences = group.sequences
    if len(ref.advantages) != sequences.n_samples:
        raise DataError(f"{len(ref.advantages)} advantages for {sequences.n_samples} samples")
    if sequences.turn_rewards is not None:
        return credit_by_turn(ref.turn_advantages, sequences)
    samples = sequences.sample_index or range(len(sequences))
    found: list[float | NDArray[np.float32] | None] = []
    for sequence, sample in zip(sequences, samples, strict=True):
        advantage = ref.advantages[sample]
        own = sequence.token_advantages
        found.append(advantage if advantage is None or own is None else own)
    return found


def credit_by_turn(
    advantages: Sequence[Sequence[float] | None], sequences: Sequences
) -> list[float | NDArray[np.float32] | None]:
    """Return for each sequence the advantages of its tokens float32 [T], by those of each sample's turns.

    As `token_credit`.
    """
    cuts = sequences.cuts()
    if len(advantages) != sequences.n_samples:
        raise DataError("it has rewards of turns, but its batch has no advantages of them: an older service made it")
    turns = sequences.turns()
    found: list[float | NDArray[np.float32] | None] = []
    for i, sample in enumerate(sequences.sample_index or range(len(sequences))):
        own, of_tokens = advantages[sample], turns[cuts[i] : cuts[i + 1]]
        if own is None:
            found.append(None)
            continue
        if of_tokens.max() >= len(own):
            raise DataError(f"sample {sample} has advantages of {len(own)} turns, and more turns than that")
        found.append(np.asarray([*own, 0.0], np.float32)[of_tokens])  # -1, off the mask, takes the 0
    return found
