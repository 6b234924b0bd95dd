"""Computes logprob and entropy of one token a row of logits, without a softmax of all rows at once.

It takes logits [N,V] as the output head gives them, and a token for each row. Only the logits stay in memory; the
backward pass computes everything else from them again: on a CPU a few rows at a time, that fit into its caches; on a
GPU in one kernel that reads each logit once. Both give the same bits twice.

Dimension suffixes: N positions, V vocabulary, n some of the positions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["has_kernel", "pick_logprobs"]

log = logging.getLogger("lachesis")

_BLOCK_BYTES = 1 << 20
"""Float32 logits of the rows that a CPU computes at a time."""
_PLANNED_BLOCKS = 3
"""Blocks of which a plan counts the memory; parts of one live until the next is computed."""


def pick_logprobs(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs [N] of the targets, with gradient, and the entropies [N], without; float32 nats.

    `logits_NV`: float32 or bfloat16. A gradient has the dtype of the logits.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _Picked.apply(logits_NV, targets_N, temperature)  # type: ignore[no-untyped-call]
    return found


def has_kernel(device: torch.device) -> bool:
    """Return whether a GPU's kernel is there; the first call for a GPU tries it.

    torch's CUDA builds bring Triton, which makes it with a C compiler.
    """
    if device.type == "cuda":
        return _is_made(device)
    return os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


@cache
def _is_made(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    logits_NV, targets_N = torch.zeros(1, 64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    try:
        from lachesis.pipeline.model.picked_kernels import backward, forward

        logprobs_N, _, normalizer_N = forward(logits_NV, targets_N, 1.0)
        backward(logits_NV, targets_N, normalizer_N, logprobs_N, 1.0)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        log.warning(
            "logprobs are computed by a softmax, which takes more memory and time: Triton cannot make the kernel for "
            "them (%s: %s). It needs a C compiler, Python's headers and a folder for its cache (TRITON_CACHE_DIR)",
            type(error).__name__,
            error,
        )
        return False
    return True


_log_softmax_backward = torch.ops.aten._log_softmax_backward_data  # noqa: SLF001 - the one that autograd takes


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.temperature = temperature
        if has_kernel(logits_NV.device):
            from lachesis.pipeline.model.picked_kernels import forward  # with Triton

            logits_NV = logits_NV.contiguous()
            logprobs_N, entropy_N, normalizer_N = forward(logits_NV, targets_N, temperature)
        else:
            logprobs_N = torch.empty(targets_N.shape, dtype=torch.float32, device=logits_NV.device)
            entropy_N, normalizer_N = torch.empty_like(logprobs_N), None
            for at in _blocks(logits_NV):
                all_nV = _log_softmax(logits_NV[at], temperature)
                logprobs_N[at] = all_nV.gather(-1, targets_N[at, None]).squeeze(-1)
                entropy_N[at] = torch.special.entr(all_nV.exp_()).sum(-1)
        ctx.save_for_backward(logits_NV, targets_N, normalizer_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_NV, targets_N, normalizer_N = ctx.saved_tensors
        gradient_N = gradients[0]
        if normalizer_N is not None:
            from lachesis.pipeline.model.picked_kernels import backward

            return backward(logits_NV, targets_N, normalizer_N, gradient_N, ctx.temperature), None, None
        found_NV = torch.empty_like(logits_NV)
        for at in _blocks(logits_NV):
            given_n1 = gradient_N[at, None]
            all_nV = _log_softmax(logits_NV[at], ctx.temperature)
            picked_nV = torch.zeros_like(all_nV).scatter_(-1, targets_N[at, None], given_n1)
            moved_nV = _log_softmax_backward(picked_nV, all_nV, -1, torch.float32)
            found_NV[at] = moved_nV.div_(ctx.temperature)
        return found_NV, None, None


def _log_softmax(logits_nV: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax(logits_nV.float() / temperature, dim=-1)


def _blocks(logits_NV: torch.Tensor) -> Iterator[slice]:
    positions, vocabulary = logits_NV.shape
    rows = max(1, _BLOCK_BYTES // (4 * vocabulary))
    starts = range(0, positions, rows)
    if isinstance(logits_NV, FakeTensor):  # without values: a plan of memory, and all blocks take what the first do
        starts = starts[:_PLANNED_BLOCKS]
    for start in starts:
        yield slice(start, start + rows)
