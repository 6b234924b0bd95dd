"""Sampling: from logits to a token and its log-probability, row by row. Pure.

The log-probability is that of the distribution sampled from ("processed" logprobs): after temperature and nucleus
filtering. At temperature 0 the likeliest token is taken and its logprob is that at temperature 1. One uniform number
in [0, 1) decides a draw, by inversion of the cumulative distribution, so a draw depends on its row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["allowed_tokens", "processed_logprobs", "sample"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


def processed_logprobs(logits_BV: torch.Tensor, temperature: Sequence[float], top_p: Sequence[float]) -> torch.Tensor:
    """Return the log-probabilities float32 [B,V] that are sampled from; -inf outside the nucleus."""
    device = logits_BV.device
    divisor_B1 = torch.tensor([t if t >= GREEDY_BELOW else 1.0 for t in temperature], device=device)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV / divisor_B1, dim=-1)
    if all(p >= 1 for p in top_p):
        return logprobs_BV
    ordered_BV, index_BV = logprobs_BV.sort(dim=-1, descending=True)
    before_BV = ordered_BV.exp().cumsum(-1) - ordered_BV.exp()
    outside_BV = before_BV >= torch.tensor([p if p < 1 else 2.0 for p in top_p], device=device)[:, None]
    outside_BV[:, 0] = False
    filtered_BV = logprobs_BV.masked_fill(outside_BV.gather(-1, index_BV.argsort(-1)), -torch.inf)
    return torch.log_softmax(filtered_BV, dim=-1)


def allowed_tokens(logprobs_V: torch.Tensor, top_p: float) -> list[int]:
    """Return the ids that the nucleus of `processed_logprobs` left; none where it left all."""
    return torch.nonzero(logprobs_V > -torch.inf)[:, 0].tolist() if top_p < 1 else []


def sample(
    logprobs_BV: torch.Tensor, temperature: Sequence[float], uniform: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Return one token for each row and its logprob (nats). `uniform`: one number in [0, 1) for each row.

    Raises FloatingPointError when a row's logprobs are NaN: the weights are broken, and any token would be a lie.
    """
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    target_B1 = torch.tensor(uniform, dtype=torch.float64, device=logprobs_BV.device)[:, None] * cumulative_BV[:, -1:]
    # right=True: the first token whose cumulative probability exceeds the target, never one of probability 0
    drawn_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    greedy_B1 = torch.tensor([t < GREEDY_BELOW for t in temperature], device=logprobs_BV.device)[:, None]
    token_B1 = torch.where(greedy_B1, logprobs_BV.argmax(-1, keepdim=True), drawn_B1)
    if bool(logprobs_BV.isnan().any()):
        raise FloatingPointError("the model's logits hold NaN; load valid weights.")
    chosen_B1 = logprobs_BV.gather(-1, token_B1)
    return token_B1[:, 0].tolist(), chosen_B1[:, 0].tolist()
