"""A group of given tokens, for a teacher to score."""

import msgspec
import numpy as np

from lachesis.schemas.columns import as_bytes
from lachesis.schemas.packing import pack_mask

__all__ = ["group_of"]


def group_of(lab, rows, masks=None):
    """Return a group whose samples have these tokens, trained by `masks`; None: all but the first of each."""
    masks = masks or [[t > 0 for t in range(len(row))] for row in rows]
    mask = [one for own in masks for one in own]
    made = lab.group(1, samples=len(rows))
    sequences = msgspec.structs.replace(
        made.sequences,
        offsets=as_bytes(np.cumsum([0, *map(len, rows)]), "int32"),
        tokens=as_bytes([token for row in rows for token in row], "int32"),
        loss_mask=pack_mask(mask),
        logprobs=as_bytes([-1.0 * one for one in mask], "float32"),
    )
    return made.replace(sequences=sequences)
