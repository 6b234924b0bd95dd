"""Computes prompt logprobs: the model's logprobs of given tokens, at temperature 1.

Pure except for the model's pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lachesis.pipeline.inference.protocol import PromptLogprob, PromptLogprobs
from lachesis.pipeline.model.tensors import vocabulary_of

__all__ = ["score_prompts", "top_logprobs"]

SCORING_ELEMENTS = 2**26
"""Logits of one pass at most, unless a single prompt has more: 256 MiB in float32."""


def score_prompts(
    model: Any, prompts: Sequence[list[int]], top_k: Sequence[int], *, apart: bool = False
) -> Iterator[PromptLogprobs]:
    """Yield for each prompt the logprobs of its own tokens and of the `top_k` likeliest at each position.

    `apart`: no two prompts may share a pass.
    """
    vocabulary = vocabulary_of(model) or 1
    start = 0
    while start < len(prompts):
        width = max(map(len, prompts[start:]))
        rows = 1 if apart else max(1, SCORING_ELEMENTS // (width * vocabulary))
        now = prompts[start : start + rows]
        logits_BTV = _logits(model, now)
        for row, prompt in enumerate(now):
            yield _prompt_logprobs(prompt, logits_BTV[row], top_k[start + row])
        start += rows


def top_logprobs(logprobs_V: torch.Tensor, k: int) -> list[tuple[int, float]]:
    """Return the k likeliest tokens with their logprobs, likeliest first.

    Those of probability 0 are left out.
    """
    values, tokens = logprobs_V.topk(min(k, len(logprobs_V)))
    return [(t, v) for t, v in zip(tokens.tolist(), values.tolist(), strict=True) if v != -float("inf")]


def _logits(model: Any, prompts: Sequence[list[int]]) -> torch.Tensor:
    """Logits [B,T,V] float32 after each token. Padding stands on the right, where causal attention never looks."""
    width = max(map(len, prompts))
    tokens_BT = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=model.device)
    logits: torch.Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits.float()


def _prompt_logprobs(prompt: list[int], logits_TV: torch.Tensor, top_k: int) -> PromptLogprobs:
    logprobs_TV = torch.log_softmax(logits_TV[: len(prompt) - 1], dim=-1)
    given_T1 = logprobs_TV.gather(1, torch.tensor(prompt[1:], dtype=torch.long, device=logits_TV.device)[:, None])
    ranks = ((logprobs_TV > given_T1).sum(1) + 1).tolist()
    scores: PromptLogprobs = [None]
    for position, (token, logprob) in enumerate(zip(prompt[1:], given_T1[:, 0].tolist(), strict=True)):
        top = top_logprobs(logprobs_TV[position], top_k) if top_k else []
        entry = {str(other): PromptLogprob(logprob=value, rank=rank) for rank, (other, value) in enumerate(top, 1)}
        entry.setdefault(str(token), PromptLogprob(logprob=logprob, rank=ranks[position]))
        scores.append(entry)
    return scores
