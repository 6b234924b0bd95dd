"""Kernels of `picked_logprobs` for a GPU, by Triton; a program reads each logit of a row once.

Sums run over blocks of fixed size in their order, so that the same logits give the same bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl

__all__ = ["backward", "forward"]

_MAX_BLOCK_LOGITS = 8192
_WARPS = 8


def forward(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logprobs, entropies and the logarithms of the softmax's denominators, float32 [N]."""
    positions, vocabulary = logits_NV.shape
    logprobs_N = torch.empty(positions, dtype=torch.float32, device=logits_NV.device)
    entropy_N, normalizer_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
    if positions:
        given = (logits_NV, targets_N.contiguous(), logprobs_N, entropy_N, normalizer_N, temperature)
        with _device_of(logits_NV):
            _forward[(positions,)](*given, VOCABULARY=vocabulary, BLOCK=_block(vocabulary), num_warps=_WARPS)
    return logprobs_N, entropy_N, normalizer_N


def backward(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    normalizer_N: torch.Tensor,
    gradient_N: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient [N,V] of the logits, in their dtype, given that of the logprobs."""
    positions, vocabulary = logits_NV.shape
    found_NV = torch.empty_like(logits_NV)
    if positions:
        given = (logits_NV, targets_N.contiguous(), normalizer_N, gradient_N.contiguous(), found_NV)
        block = _block(vocabulary)
        grid = (positions, triton.cdiv(vocabulary, block))
        with _device_of(logits_NV):
            _backward[grid](*given, temperature, VOCABULARY=vocabulary, BLOCK=block, num_warps=_WARPS)
    return found_NV


def _device_of(logits_NV: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which the logits' GPU is the thread's own, on which Triton starts kernels."""
    return torch.cuda.device_of(logits_NV)  # type: ignore[no-untyped-call]


def _block(vocabulary: int) -> int:
    return min(_MAX_BLOCK_LOGITS, int(triton.next_power_of_2(vocabulary)))


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a kernel's arguments have their places
    logits, targets, logprobs, entropies, normalizers, temperature, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * VOCABULARY
    highest = -float("inf")
    total = 0.0  # of exp(logit - highest)
    weighted = 0.0  # of exp(logit - highest) * (logit - highest)
    for start in range(0, VOCABULARY, BLOCK):
        at = start + tl.arange(0, BLOCK)
        given = tl.load(first + at, mask=at < VOCABULARY, other=-float("inf")).to(tl.float32) / temperature
        before = highest
        highest = tl.maximum(before, tl.max(given, 0))
        above = tl.where(highest == -float("inf"), 0.0, highest)
        moved = tl.where(before == -float("inf"), 0.0, before - above)
        below = given - above
        parts = tl.exp(below)
        weighted = tl.exp(moved) * (weighted + moved * total) + tl.sum(tl.where(parts == 0.0, 0.0, parts * below), 0)
        total = tl.exp(moved) * total + tl.sum(parts, 0)
    target = tl.load(first + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, target - highest - tl.log(total))
    tl.store(entropies + row, tl.log(total) - weighted / total)
    tl.store(normalizers + row, highest + tl.log(total))


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    logits, targets, normalizers, gradients, found, temperature, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(logits + row * VOCABULARY + at, mask=at < VOCABULARY, other=-float("inf")).to(tl.float32)
    share = tl.exp(given / temperature - tl.load(normalizers + row))
    gradient = tl.load(gradients + row)
    is_target = (at == tl.load(targets + row)).to(tl.float32)
    moved = gradient * (is_target - share) / temperature
    tl.store(found + row * VOCABULARY + at, moved.to(found.dtype.element_ty), mask=at < VOCABULARY)
