"""A group of given tokens, for a teacher to score."""

import msgspec
import numpy as np

from lachesis.schemas.columns import as_bytes
from lachesis.schemas.packing import pack_mask

__all__ = ["group_of"]


def group_of(lab, rows):
    """Return a group whose samples have these tokens; all but the first of each are trained."""
    mask = [t > 0 for row in rows for t in range(len(row))]
    made = lab.group(1, samples=len(rows))
    sequences = msgspec.structs.replace(
        made.sequences,
        offsets=as_bytes(np.cumsum([0, *map(len, rows)]), "int32"),
        tokens=as_bytes([token for row in rows for token in row], "int32"),
        loss_mask=pack_mask(mask),
        logprobs=as_bytes([-1.0 * one for one in mask], "float32"),
    )
    return made.replace(sequences=sequences)
