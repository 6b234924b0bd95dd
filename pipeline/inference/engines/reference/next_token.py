"""Sampling: from logits to a token and its log-probability, row by row. Pure.

The log-probability is that of the distribution sampled from ("processed" logprobs): after temperature and nucleus
filtering. At temperature 0 the likeliest token is taken and its logprob is that at temperature 1. One uniform number
in [0, 1) decides a draw, by inversion of the cumulative distribution, so a draw depends on its row alone.

`draw` has shapes that depend on those of its inputs alone and never waits for a GPU, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Draw", "RowSettings", "allowed_tokens", "draw", "read_draw", "row_settings"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
_GREEDY_ROW = torch.tensor([[0.0, 2.0, 0.0]], dtype=torch.float64)
"""Settings of a row that belongs to no request."""


class RowSettings(NamedTuple):
    """How each row is sampled, float64 [B,3]: temperature (0: greedy), top_p (2: all tokens), its uniform number.

    `has_nucleus`: whether any row leaves tokens out.
    """

    values: torch.Tensor
    has_nucleus: bool

    def padded(self, rows: int) -> RowSettings:
        """Return settings of `rows` rows; the added ones are greedy."""
        padding = _GREEDY_ROW.expand(rows - len(self.values), -1)
        return RowSettings(torch.cat([self.values, padding]), self.has_nucleus)


class Draw(NamedTuple):
    """The result of a draw: the log-probabilities float32 [B,V] that were sampled from, -inf outside the nucleus; and
    of each row, float64 [3,B], the token, its logprob, and 1 where the row's logprobs hold NaN."""

    logprobs: torch.Tensor
    drawn: torch.Tensor


def row_settings(temperature: Sequence[float], top_p: Sequence[float], uniform: Sequence[float]) -> RowSettings:
    """Return the settings of rows, on the CPU. `uniform`: one number in [0, 1) for each row."""
    warm = [t if t >= GREEDY_BELOW else 0.0 for t in temperature]
    nucleus = [p if p < 1 else 2.0 for p in top_p]
    return RowSettings(
        torch.tensor([warm, nucleus, list(uniform)], dtype=torch.float64).t().contiguous(), any(p < 1 for p in top_p)
    )


def draw(logits_BV: torch.Tensor, values_B3: torch.Tensor, *, has_nucleus: bool) -> Draw:
    """Draw one token for each row. `values_B3`: those of `RowSettings`, on the device of the logits."""
    temperature_B1, uniform_B1 = values_B3[:, :1].float(), values_B3[:, 2:]
    greedy_B1 = temperature_B1 == 0
    logprobs_BV = torch.log_softmax(logits_BV / temperature_B1.masked_fill(greedy_B1, 1.0), dim=-1)
    if has_nucleus:
        logprobs_BV = _nucleus(logprobs_BV, values_B3[:, 1:2].float())
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    # right=True: the first token whose cumulative probability exceeds the target, never one of probability 0
    drawn_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)
    token_B1 = torch.where(greedy_B1, logprobs_BV.argmax(-1, keepdim=True), drawn_B1)
    # of a row with NaN any index may come out, which `read_draw` refuses
    chosen_B1 = logprobs_BV.gather(-1, token_B1.clamp(0, logprobs_BV.shape[-1] - 1))
    broken_B1 = logprobs_BV.isnan().any(-1, keepdim=True)
    return Draw(logprobs_BV, torch.cat([token_B1.double(), chosen_B1.double(), broken_B1.double()], dim=1).t())


def read_draw(drawn_3B: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return each row's token and its logprob (nats): the one wait for a GPU that a token takes.

    Raises FloatingPointError when a row's logprobs are NaN: the weights are broken, and any token would be a lie.
    """
    tokens, logprobs, broken = drawn_3B.tolist()
    if any(broken):
        raise FloatingPointError("the model's logits hold NaN; load valid weights.")
    return [int(token) for token in tokens], logprobs


def allowed_tokens(logprobs_V: torch.Tensor, top_p: float) -> list[int]:
    """Return the ids that the nucleus left of a row of `Draw.logprobs`; none where it left all."""
    return torch.nonzero(logprobs_V > -torch.inf)[:, 0].tolist() if top_p < 1 else []


def _nucleus(logprobs_BV: torch.Tensor, top_p_B1: torch.Tensor) -> torch.Tensor:
    ordered_BV, index_BV = logprobs_BV.sort(dim=-1, descending=True)
    before_BV = ordered_BV.exp().cumsum(-1) - ordered_BV.exp()
    outside_BV = before_BV >= top_p_B1
    outside_BV[:, 0] = False
    filtered_BV = logprobs_BV.masked_fill(outside_BV.gather(-1, index_BV.argsort(-1)), -torch.inf)
    return torch.log_softmax(filtered_BV, dim=-1)
