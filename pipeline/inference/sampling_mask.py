"""The mask of a sample on the wire: for each of its tokens the ids among which it was sampled.

Encodes rows of token ids as text, and decodes them; a row is empty if no token was excluded. Guarantees that a decoded
mask has a row for each token and that each token is in its row. No torch.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["MaskRows", "decode_mask", "encode_mask"]

MaskRows = list[NDArray[np.int32]]
"""For each token int32 [W], the ids among which it was sampled; [0]: nothing was excluded."""


def encode_mask(rows: Sequence[Sequence[int]]) -> str:
    """Return base64 of little-endian int32: the lengths of the rows, then their ids."""
    ids = [len(row) for row in rows] + [token for row in rows for token in row]
    return base64.b64encode(np.asarray(ids, "<i4").tobytes()).decode()


def decode_mask(text: str, tokens: NDArray[np.int32]) -> MaskRows:
    """Return the rows of `tokens` [N]. Raises `ValueError` where they cannot be theirs."""
    values = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    lengths, ids = values[: len(tokens)].astype(np.int64), values[len(tokens) :]
    if len(lengths) != len(tokens) or lengths.min(initial=0) < 0 or lengths.sum() != len(ids):
        raise ValueError(f"{len(values)} numbers are no rows of {len(tokens)} tokens")
    if ids.min(initial=0) < 0:
        raise ValueError("a token id is below 0")
    rows = np.split(ids, np.cumsum(lengths)[:-1]) if len(tokens) else []
    for at, (token, row) in enumerate(zip(tokens.tolist(), rows, strict=True)):
        if len(row) and token not in row:
            raise ValueError(f"token {at} is {token}, which its row excludes")
    return [row.astype(np.int32) for row in rows]
