"""Decoding a changing set of sequences with one key-value cache.

In: token sequences. Out: next-token logits [rows, V] after each of them. Rows join by being read in (`prefill`),
leave by `keep`, advance together by `advance`. Rows of different lengths are aligned at their right end: padding stands
on the left and is masked, positions are counted from each row's first real token, so that logits agree with those of
the sequence alone up to rounding (1e-5 in float32).

For decoder-only models with full attention and rotary or learned positions. Nothing here knows requests or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

__all__ = ["DecodingBatch"]


class DecodingBatch:
    """The rows being decoded. `logits` [rows, V] float32 are those after each row's last token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values [rows, heads, width, depth]
        self._mask = torch.zeros(0, 0, dtype=torch.long)  # [rows, width], 1 at real tokens
        self.logits = torch.zeros(0, 0)

    def __len__(self) -> int:
        return len(self._mask)

    def clear(self) -> None:
        """Remove all rows."""
        self.__init__(self._model)  # type: ignore[misc]

    def prefill(self, sequences: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Read `sequences` in one pass and append `copies[i]` rows for the i-th of them.

        Its samples share the pass.
        """
        width = max(map(len, sequences))
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)
        mask = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens[row, width - len(sequence) :] = torch.tensor(sequence)
            mask[row, width - len(sequence) :] = 1
        cache = DynamicCache()
        logits = self._forward(tokens, mask, (mask.cumsum(1) - 1).clamp(min=0), cache)
        repeats = torch.tensor(copies)
        self._append(
            [tuple(part.repeat_interleave(repeats, dim=0) for part in _parts(layer)) for layer in cache.layers],
            mask.repeat_interleave(repeats, dim=0),
            logits.repeat_interleave(repeats, dim=0),
        )

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Append one token to each row and compute the logits after it."""
        ones = torch.ones(len(self), 1, dtype=torch.long)
        positions = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, ones], dim=1)
        cache = DynamicCache()
        for index, (keys, values) in enumerate(self._layers):
            cache.update(keys, values, index)
        self.logits = self._forward(torch.tensor(tokens)[:, None], self._mask, positions, cache)
        self._layers = [_parts(layer) for layer in cache.layers]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep the given rows, in the given order, and drop padding that no remaining row needs."""
        if not rows:
            self.clear()
            return
        index = torch.tensor(rows)
        mask = self._mask[index]
        start = int(mask.argmax(dim=1).min())  # argmax: first real token of each row
        self._mask = mask[:, start:]
        self.logits = self.logits[index]
        self._layers = [(keys[index, :, start:], values[index, :, start:]) for keys, values in self._layers]

    def _forward(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache) -> Any:
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def _append(self, layers: list[Any], mask: torch.Tensor, logits: torch.Tensor) -> None:
        if not len(self):
            self._layers, self._mask, self.logits = layers, mask, logits
            return
        width = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([_widen(self._mask, width, 1), _widen(mask, width, 1)])
        self.logits = torch.cat([self.logits, logits])
        self._layers = [
            (
                torch.cat([_widen(old[0], width, 2), _widen(new[0], width, 2)]),
                torch.cat([_widen(old[1], width, 2), _widen(new[1], width, 2)]),
            )
            for old, new in zip(self._layers, layers, strict=True)
        ]


def _parts(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values


def _widen(tensor: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """Pad `tensor` with zeros on the left of `dim` up to `width`."""
    missing = width - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim=dim)
