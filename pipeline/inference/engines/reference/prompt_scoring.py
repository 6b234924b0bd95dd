"""Computes prompt logprobs: the model's logprobs of given tokens, at temperature 1.

Prompts are the paths of a tree. Where the model allows it, the tokens that a path shares with the one before it are
computed once, in one pass without padding; else each path is a row of its own. Pure except for the model's pass.

Dimension suffixes: B paths, T tokens of the longest, X hidden states of a pass, H their width, N scored tokens, V
vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lachesis.pipeline.inference.prompt_tree import PromptPath
from lachesis.pipeline.inference.protocol import PromptLogprob, PromptLogprobs
from lachesis.pipeline.model.logprobs import PassInputs, SampledLogprobs
from lachesis.pipeline.model.packed_attention import install_packed_attention
from lachesis.pipeline.model.packed_form import why_no_trees, why_padded_by_form
from lachesis.pipeline.model.packed_rows import PackedRows, SharedStart
from lachesis.pipeline.model.tensors import vocabulary_of

__all__ = ["PathScores", "PromptScorer", "top_logprobs"]

log = logging.getLogger("lachesis")

SCORING_ELEMENTS = 2**26
"""Logits in memory at once, at most: 256 MiB in float32. Of a model without a head of its own, those of one path."""
_EXACT, _ROUNDED = 1e-3, 0.15
"""Difference of logits that is still rounding, in their standard deviations: the largest in float32, else the mean."""
_MAX_COPIES = 8
"""How many times the tokens of a pass attention may see, since each path has a copy of what it shares."""
_TRIAL = ((9, 0), (12, 5), (7, 5))
"""Tokens of the paths that are compared, and how many each shares with the one before it."""


class PathScores(NamedTuple):
    """`logprobs`: of a path's own tokens, and of the likeliest at each. `next_logits` [V]: after its last token."""

    logprobs: PromptLogprobs
    next_logits: torch.Tensor


class PromptScorer:
    """Scores prompts with one model, in the thread that computes with it."""

    def __init__(self, model: Any, *, max_tokens: int, apart: bool = False) -> None:
        """`max_tokens`: of a pass that has several paths. `apart`: no two prompts may share a pass."""
        self._model = model
        self._sampled = SampledLogprobs(model)
        self._apart = apart
        self._slice = max(1, SCORING_ELEMENTS // (vocabulary_of(model) or 1))
        self._max_tokens = max_tokens if self._sampled.is_sliced else min(max_tokens, self._slice)
        self._shares = False
        reason = self._why_no_sharing()
        self._shares = reason is None
        if reason is not None:
            log.info("what prompts begin with alike is computed for each of them: %s", reason)

    def score(self, paths: Sequence[PromptPath], top_k: Sequence[int]) -> list[PathScores]:
        """Return the scores of each path; its shared tokens are those of the path before it."""
        return [scores for part in self._passes(paths) for scores in self._score_pass(paths[part], top_k[part])]

    def _passes(self, paths: Sequence[PromptPath]) -> Iterator[slice]:
        """Yield the paths of each pass, which begins with a whole path."""
        start = 0
        while start < len(paths):
            end = start + 1
            while end < len(paths) and self._fits(paths[start : end + 1]):
                end += 1
            yield slice(start, end)
            start = end

    def _fits(self, paths: Sequence[PromptPath]) -> bool:
        lengths = [len(path.tokens) for path in paths]
        if not self._shares:
            return not self._apart and max(lengths) * len(paths) <= self._max_tokens
        computed = lengths[0] + sum(len(path.own) for path in paths[1:])
        return computed <= self._max_tokens and sum(lengths) <= _MAX_COPIES * self._max_tokens

    def _score_pass(self, paths: Sequence[PromptPath], top_k: Sequence[int]) -> Iterator[PathScores]:
        hidden_XH, place_BT = self._hidden_states(paths)
        firsts = [max(path.shared, 1) for path in paths]
        before_N = torch.cat(
            [
                row_T[first - 1 : len(path.tokens) - 1]
                for row_T, first, path in zip(place_BT, firsts, paths, strict=True)
            ]
        )
        targets_N = torch.tensor(
            [token for first, path in zip(firsts, paths, strict=True) for token in path.tokens[first:]],
            dtype=torch.long,
            device=hidden_XH.device,
        )
        entries = self._entries(hidden_XH, before_N, targets_N, max(top_k))
        last_B = torch.stack([row_T[len(path.tokens) - 1] for row_T, path in zip(place_BT, paths, strict=True)])
        next_BV = self._sampled.logits(hidden_XH.index_select(0, last_B)).float()
        for path, first, k, next_V in zip(paths, firsts, top_k, next_BV, strict=True):
            scores: PromptLogprobs = [] if path.shared else [None]
            for token in path.tokens[first:]:
                logprob, rank, likeliest = next(entries)
                entry = {
                    str(other): PromptLogprob(logprob=value, rank=place)
                    for place, (other, value) in enumerate(likeliest[:k], 1)
                }
                entry.setdefault(str(token), PromptLogprob(logprob=logprob, rank=rank))
                scores.append(entry)
            yield PathScores(scores, next_V)

    def _entries(
        self, hidden_XH: torch.Tensor, before_N: torch.Tensor, targets_N: torch.Tensor, k: int
    ) -> Iterator[tuple[float, int, list[tuple[int, float]]]]:
        """Yield for each target its logprob, its rank and the `k` likeliest tokens with their logprobs."""
        for before_n, targets_n in zip(
            torch.split(before_N, self._slice), torch.split(targets_N, self._slice), strict=True
        ):
            logits_nV = self._sampled.logits(hidden_XH.index_select(0, before_n)).float()
            logprobs_nV = torch.log_softmax(logits_nV, dim=-1)
            given_n1 = logprobs_nV.gather(1, targets_n[:, None])
            ranks = ((logprobs_nV > given_n1).sum(1) + 1).tolist()
            yield from zip(given_n1[:, 0].tolist(), ranks, top_logprobs(logprobs_nV, k), strict=True)

    def _hidden_states(self, paths: Sequence[PromptPath]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states [X,H] and for each path [B,T] which of them is after each of its tokens."""
        lengths = [len(path.tokens) for path in paths]
        width, device = max(lengths), self._model.device
        # padding stands on the right, where causal attention never looks
        tokens_BT = torch.tensor([[*path.tokens, *[0] * (width - len(path.tokens))] for path in paths], device=device)
        if not self._shares or len(paths) == 1:
            hidden_XH = self._sampled.hidden_states(tokens_BT).flatten(0, 1)
            return hidden_XH, torch.arange(len(hidden_XH), device=device).view(tokens_BT.shape)
        starts = [SharedStart(), *(SharedStart(row, path.shared) for row, path in enumerate(paths[1:]))]
        rows = PackedRows.of(lengths, width, lambda values: values.to(device), starts)
        install_packed_attention(self._model, on=True)
        try:
            hidden_1XH = self._sampled.hidden_states(tokens_BT, PassInputs(rows=rows))
        finally:
            install_packed_attention(self._model, on=False)
        return hidden_1XH[0], rows.place_P.view(tokens_BT.shape)

    def _why_no_sharing(self) -> str | None:
        """Return why each path is a row of its own; None: tokens that paths share are computed once."""
        name = type(self._model).__name__
        if self._apart:
            return f"the positions of {name} depend on the longest row of a pass"
        if not self._sampled.is_sliced:
            return f"{name} does more than multiply for its logits"
        if (reason := why_padded_by_form(self._model) or why_no_trees(self._model)) is not None:
            return reason
        vocabulary = vocabulary_of(self._model) or 1
        paths = [
            PromptPath(tuple((place + 1 + 7 * row * (place >= shared)) % vocabulary for place in range(count)), shared)
            for row, (count, shared) in enumerate(_TRIAL)
        ]
        found = []
        for self._shares in (False, True):
            try:
                hidden_XH, place_BT = self._hidden_states(paths)
            except Exception as error:  # noqa: BLE001 - models raise whatever rows in one lead them into
                return f"{name} cannot compute them once: {type(error).__name__}: {error}"[:300]
            places = [row_T[: len(path.tokens)] for row_T, path in zip(place_BT, paths, strict=True)]
            found.append(self._sampled.logits(hidden_XH.index_select(0, torch.cat(places))).float())
        apart = (found[0] - found[1]).abs() / found[0].std().clamp(min=1e-5)
        exact = next(self._model.parameters()).dtype in {torch.float32, torch.float64}
        if (apart.max() <= _EXACT) if exact else (apart.mean() <= _ROUNDED):
            return None
        return f"{name} computes something else with rows in one"


def top_logprobs(logprobs_BV: torch.Tensor, k: int) -> list[list[tuple[int, float]]]:
    """Return for each row the k likeliest tokens with their logprobs, likeliest first.

    Those of probability 0 are left out.
    """
    values_BK, tokens_BK = logprobs_BV.topk(min(k, logprobs_BV.shape[1]), dim=1)
    return [
        [(token, value) for token, value in zip(tokens, values, strict=True) if value != -float("inf")]
        for tokens, values in zip(tokens_BK.tolist(), values_BK.tolist(), strict=True)
    ]
