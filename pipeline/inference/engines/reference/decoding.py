"""Decodes a changing set of sequences: computes the next token's logits of each.

Given token sequences, it returns next-token logits [rows, V]. Rows join when they are read in (`prefill`), leave by
`select_rows`, and advance together by `append_tokens`. The logits of a row agree with those of its sequence alone up to
rounding (1e-5 in float32). There are four ways to decode, from the fastest to the one that works for every causal
model:

- `PaddedBatch`: one cache, prompts read together. Rows are aligned at their right end: padding stands on the left and
  is masked, positions are counted from each row's first real token. Attention of every kind.
- `UnpaddedBatch`: one cache, but only prompts of equal length are read together, because a state that has gone through
  padding is another one. Linear attention, convolutions and state-space models, alone or beside attention.
- `SeparateRows`: a cache for each row, made by the model, and a pass for each row and token.
- `WholeSequences`: no cache; each token costs a pass over its whole sequence.

`decoding_choice` finds the fastest way that works for a model. Nothing here knows requests or sampling.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from lachesis.pipeline.inference.engines.reference.row_cache import CachedRows, keeps_tokens, new_cache, stack_rows

__all__ = ["DecodingBatch", "PaddedBatch", "SeparateRows", "UnpaddedBatch", "WholeSequences"]

_CACHES = ("past_key_values", "cache_params", "state")
"""Names under which models take and return their cache."""


class DecodingBatch(ABC):
    """The rows being decoded. `logits` [rows, V] float32 are those after each row's last token."""

    about: str
    """How the model is decoded, for people."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._takes = inspect.signature(model.forward).parameters.keys()
        self.device = next(model.parameters()).device
        self.logits = torch.zeros(0, 0)

    @abstractmethod
    def clear(self) -> None:
        """Remove all rows."""

    @abstractmethod
    def prefill(self, sequences: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Read `sequences` and append `copies[i]` rows for the i-th of them, which share the reading."""

    @abstractmethod
    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Append one token to each row and compute the logits after it."""

    @abstractmethod
    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep the given rows, in the given order."""

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def _forward(self, tokens: torch.Tensor, **inputs: Any) -> tuple[Any, torch.Tensor]:
        """Return the output of a pass and its last logits. Inputs that the model does not know are left out."""
        given = {"logits_to_keep": 1} | inputs
        known = {name: value for name, value in given.items() if name in self._takes and value is not None}
        output = self._model(input_ids=tokens, **known)
        return output, output.logits[:, -1].float()


class PaddedBatch(DecodingBatch):
    """One cache for all rows; prompts are padded and read together."""

    about = "all rows together"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        known = [name for name in _CACHES if name in self._takes]
        if not known:
            raise TypeError(f"{type(model).__name__} takes no cache")
        self._cache_name = known[0]
        self.clear()

    def clear(self) -> None:
        """See `DecodingBatch`."""
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=self.device)  # [rows, width], 1 at real tokens
        self._lengths = torch.zeros(0, 1, dtype=torch.long, device=self.device)  # [rows, 1], real tokens
        self.logits = torch.zeros(0, 0, device=self.device)

    def prefill(self, sequences: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        self._read(sequences, copies)

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        self.logits = self._pass(self._tensor(tokens)[:, None], self._mask, self._lengths, self._cache)
        self._lengths = self._lengths + 1

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep the given rows, in the given order, and drop padding that no remaining row needs."""
        if not rows:
            self.clear()
            return
        index = self._tensor(rows)
        self._lengths, self.logits = self._lengths[index], self.logits[index]
        width = int(self._lengths.max())
        self._mask = self._mask[index, self._mask.shape[1] - width :]
        self._cache = stack_rows([CachedRows(self._cache, index)], width)

    def _read(self, sequences: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        width = max(map(len, sequences))
        tokens = self._tensor([[*[0] * (width - len(sequence)), *sequence] for sequence in sequences])
        lengths = self._tensor([[len(sequence)] for sequence in sequences])
        mask = (torch.arange(width, device=self.device)[None, :] >= width - lengths).long()
        cache = new_cache(self._model)
        logits = self._pass(tokens, mask, (mask.cumsum(1) - 1).clamp(min=0), cache)
        index = torch.arange(len(sequences), device=self.device).repeat_interleave(self._tensor(copies))
        parts = [CachedRows(cache, index)]
        if self._cache is not None:
            parts.insert(0, CachedRows(self._cache, torch.arange(len(self._mask), device=self.device)))
            logits_before, width = self.logits, max(width, self._mask.shape[1])
        else:
            logits_before = logits[:0]
            self._mask = mask[:0]
        self._cache = stack_rows(parts, width)
        self._mask = torch.cat([_widened(self._mask, width), _widened(mask, width)[index]])
        self._lengths = torch.cat([self._lengths, lengths[index]])
        self.logits = torch.cat([logits_before, logits[index]])

    def _pass(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        masked = {"attention_mask": mask} if keeps_tokens(cache) else {}  # states alone have nothing to mask
        inputs = {**masked, "position_ids": positions, "use_cache": True, self._cache_name: cache}
        return self._forward(tokens, **inputs)[1]


class UnpaddedBatch(PaddedBatch):
    """One cache for all rows; only prompts of equal length are read together."""

    about = "all rows together, prompts of each length apart"

    def prefill(self, sequences: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        before = len(self._mask)
        order: list[tuple[int, int]] = []
        for members in _by_length(sequences):
            self._read([sequences[at] for at in members], [copies[at] for at in members])
            order += [(at, copy_) for at in members for copy_ in range(copies[at])]
        if order != sorted(order):
            rows = sorted(range(len(order)), key=order.__getitem__)
            self.select_rows([*range(before), *(before + row for row in rows)])


class SeparateRows(DecodingBatch):
    """A cache of the model's own for each row.

    `rereads_at`: numbers of tokens at which a sequence is read again, because the model computes positions in another
    way from there on.
    """

    about = "row by row, each with a cache of its own: slow"

    def __init__(self, model: Any, rereads_at: int | None = None) -> None:
        super().__init__(model)
        self._rereads_at = rereads_at
        self._rows: list[tuple[list[int], dict[str, Any]]] = []  # tokens, and the cache by its name
        self.logits = torch.zeros(0, 0, device=self.device)

    def clear(self) -> None:
        """See `DecodingBatch`."""
        self._rows = []
        self.logits = torch.zeros(0, 0, device=self.device)

    def prefill(self, sequences: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        logits = [self.logits] if self._rows else []
        for sequence, count in zip(sequences, copies, strict=True):
            after, cache = self._step(list(sequence), {})
            self._rows += [(list(sequence), cache if one == 0 else copy.deepcopy(cache)) for one in range(count)]
            logits.append(after.expand(count, -1))
        self.logits = torch.cat(logits)

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        logits = []
        for at, token in enumerate(tokens):
            sequence, cache = self._rows[at]
            sequence.append(token)
            again = len(sequence) == self._rereads_at
            after, cache = self._step(sequence, {} if again else cache)
            self._rows[at] = sequence, cache
            logits.append(after)
        self.logits = torch.cat(logits)

    def select_rows(self, rows: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        self._rows = [self._rows[row] for row in rows]
        self.logits = self.logits[self._tensor(rows)]

    def _step(self, sequence: list[int], cache: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Read the tokens that are not in the cache: the last one, or all. Return the logits [1, V] after it, and the
        cache."""
        start = len(sequence) - 1 if cache else 0
        positions = torch.arange(start, len(sequence), device=self.device)[None, :]
        output, logits = self._forward(
            self._tensor([sequence[start:]]), position_ids=positions, use_cache=True, **cache
        )
        name = next((name for name in _CACHES if getattr(output, name, None) is not None), None)
        if name is None:
            raise TypeError(f"{type(self._model).__name__} returns no cache")
        return logits, {name: getattr(output, name)}


class WholeSequences(DecodingBatch):
    """No cache: the whole sequence is read for each token."""

    about = "without a cache, the whole sequence for each token: very slow"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._rows: list[list[int]] = []
        self.logits = torch.zeros(0, 0, device=self.device)

    def clear(self) -> None:
        """See `DecodingBatch`."""
        self._rows = []
        self.logits = torch.zeros(0, 0, device=self.device)

    def prefill(self, sequences: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        logits = [self.logits] if self._rows else []
        for sequence, count in zip(sequences, copies, strict=True):
            self._rows += [list(sequence) for _ in range(count)]
            logits.append(self._last(sequence).expand(count, -1))
        self.logits = torch.cat(logits)

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        for row, token in zip(self._rows, tokens, strict=True):
            row.append(token)
        self.logits = torch.cat([self._last(row) for row in self._rows])

    def select_rows(self, rows: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        self._rows = [self._rows[row] for row in rows]
        self.logits = self.logits[self._tensor(rows)]

    def _last(self, sequence: Sequence[int]) -> torch.Tensor:
        return self._forward(self._tensor([list(sequence)]), use_cache=False)[1]


def _by_length(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the indexes of the sequences of each length."""
    found: dict[int, list[int]] = defaultdict(list)
    for at, sequence in enumerate(sequences):
        found[len(sequence)].append(at)
    return list(found.values())


def _widened(mask: torch.Tensor, width: int) -> torch.Tensor:
    """Pad `mask` with zeros on the left up to `width`."""
    return torch.nn.functional.pad(mask, (width - mask.shape[1], 0))
