"""Computes logprobs and entropy of sampled tokens, a slice of the logits at a time.

Given a causal language model and tokens [B,T], it returns logprobs and entropy [B,T], and the logprobs of other tokens
if they are given. The logits of a whole micro-batch are never in memory at once: 16,384 tokens of a vocabulary of
150,000 would take 10 GB, and their softmax and gradients as much again each. The model's body runs once; its output
head runs on the trained positions alone, a slice of logits at a time, and once more in the backward pass (activation
checkpointing, arXiv:1604.06174), unless they fit into memory until then. `logit_memory` decides both.

A head that does more than multiply (soft caps, scales) is found by comparing both ways on a few tokens; such a model's
logits are taken whole.

Dimension suffixes: B sequences, T tokens, N trained positions, H hidden width, V vocabulary, K given tokens, C = K + 1
with all others as one, W tokens that a sampler left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from lachesis.pipeline.model.logit_memory import DeviceMemory, keeps_logits, slice_bytes
from lachesis.pipeline.model.packed_attention import packed_pass
from lachesis.pipeline.model.packed_rows import PackedRows
from lachesis.pipeline.model.picked_logprobs import has_kernel, pick_logprobs

__all__ = ["NOTHING_FURTHER", "LogprobSettings", "PassInputs", "SampledLogprobs", "token_logprobs"]

log = logging.getLogger("lachesis")

_PROBE = (0, 1, 2, 3)
_ROUNDING_TOLERANCE = 1e-4
"""Largest difference of logits, relative to their largest, that counts as rounding."""

_Picked = tuple[torch.Tensor, ...]
"""Logprobs [N] and entropies [N], and the logprobs [N,C] of given tokens if there are any."""
Slice = Callable[..., _Picked]
_EXCLUDED = -1e4
"""Logprob of a token that is left out of a sum: finite, so that its gradient is 0 and not undefined."""


class PassInputs(NamedTuple):
    """Inputs of a pass other than tokens.

    `arguments`: further ones of the model's forward pass. `allowed`: int64 [B,T,W], ids of the tokens that could be
    sampled at each position, -1 for none; a position without any is over the whole vocabulary, and with None all are.
    `positions`: how many tokens the mask has, where that is known: a GPU need not be waited for then. `rows`: how the
    tokens lie in one row without padding, for a model whose attention is made for that; None: rows are padded.
    """

    arguments: dict[str, Any] = {}
    allowed: torch.Tensor | None = None
    positions: int | None = None
    rows: PackedRows | None = None


NOTHING_FURTHER: Final = PassInputs()
"""Tokens alone."""


class LogprobSettings(NamedTuple):
    """How logprobs are computed.

    `precision`: of matrix products; weights, softmax and what is returned stay in float32. `float32_head`: those of the
    output head are in float32 all the same. `entropy_gradient`: whether the entropy has a gradient too. `by_device`:
    slices are as large as the device allows, and kept for the backward pass where they fit; else they are a CPU's, and
    computed twice.
    """

    precision: torch.dtype = torch.float32
    float32_head: bool = False
    entropy_gradient: bool = False
    by_device: bool = False


class SampledLogprobs:
    """How one model's logprobs are computed: the precision of its passes and the way to its logits.

    The arguments are those of `LogprobSettings`. `checked`: what is sliced is compared with the whole once; a model
    without values cannot be.
    """

    def __init__(
        self,
        model: Any,
        precision: torch.dtype = torch.float32,
        *,
        float32_head: bool = False,
        entropy_gradient: bool = False,
        by_device: bool = False,
        checked: bool = True,
    ) -> None:
        self._model = model
        self.by_device = by_device
        self.device_memory: Callable[[torch.device], DeviceMemory] = DeviceMemory.now
        self.precision = precision
        self.float32_head = float32_head
        self.entropy_gradient = entropy_gradient
        self._body = None
        self._head = None
        found = _body_and_head(model)
        if found is None:
            return
        self._body, self._head = found
        if checked and not self._gives_the_same():
            log.info("%s does more than multiply for its logits: they are computed whole", type(model).__name__)
            self._body = self._head = None

    @property
    def settings(self) -> LogprobSettings:
        """How logprobs are computed."""
        return LogprobSettings(self.precision, self.float32_head, self.entropy_gradient, self.by_device)

    @property
    def is_sliced(self) -> bool:
        """Whether logits are computed a slice at a time."""
        return self._body is not None

    def __call__(
        self,
        tokens_BT: torch.Tensor,
        temperature: float,
        mask_BT: torch.Tensor | None = None,
        given: PassInputs = NOTHING_FURTHER,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs [B,T] of each token given those before it, with gradient, and the policy's entropies [B,T].

        Float32 nats, at `temperature`; 0 in both at position 0 and where `mask_BT` is false. Rows are padded on the
        right, so causal attention alone keeps padding out of every real position, and no attention mask is needed;
        with `given.rows` padding is not computed at all.
        """
        logprobs_BT, entropy_BT, _ = self._compute(tokens_BT, temperature, mask_BT, None, given)
        return logprobs_BT, entropy_BT

    def with_alternatives(
        self,
        tokens_BT: torch.Tensor,
        temperature: float,
        mask_BT: torch.Tensor,
        ids_BTK: torch.Tensor,
        given: PassInputs = NOTHING_FURTHER,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logprobs and entropies as a call does, and the logprobs of the tokens `ids_BTK`.

        Those are [B,T,K+1], with gradient; the last of them is the logprob of all other tokens together.
        """
        logprobs_BT, entropy_BT, others_BTC = self._compute(tokens_BT, temperature, mask_BT, ids_BTK, given)
        assert others_BTC is not None  # noqa: S101 - ids were given
        return logprobs_BT, entropy_BT, others_BTC

    def _compute(
        self,
        tokens_BT: torch.Tensor,
        temperature: float,
        mask_BT: torch.Tensor | None,
        ids_BTK: torch.Tensor | None,
        given: PassInputs,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        hidden_BTH, rows = self.hidden_states(tokens_BT, given), given.rows
        wanted_BT = torch.ones_like(tokens_BT[:, 1:], dtype=torch.bool) if mask_BT is None else mask_BT[:, 1:]
        at_N = _true_places(wanted_BT.flatten(), given.positions)
        columns = {"targets_N": tokens_BT, "ids_NK": ids_BTK, "allowed_NW": given.allowed}
        inputs = {
            name: values_BT[:, 1:].flatten(0, 1).index_select(0, at_N)
            for name, values_BT in columns.items()
            if values_BT is not None
        }

        def of_slice(
            hidden_NH: torch.Tensor,
            targets_N: torch.Tensor,
            ids_NK: torch.Tensor | None = None,
            allowed_NW: torch.Tensor | None = None,
        ) -> _Picked:
            logits_NV = self.logits(hidden_NH)
            if ids_NK is None and allowed_NW is None and self._picks_by_row(logits_NV.device):
                return pick_logprobs(logits_NV, targets_N, temperature)
            logits_NV = logits_NV.float() / temperature
            if allowed_NW is not None:
                logits_NV = _among(logits_NV, allowed_NW)
            return _pick(logits_NV, targets_N, ids_NK, entropy_gradient=self.entropy_gradient)

        if rows is None:
            hidden_NH = hidden_BTH[:, :-1].flatten(0, 1).index_select(0, at_N)
        else:
            hidden_NH = hidden_BTH[0].index_select(0, rows.packed_places(at_N))
        logprobs_N, entropy_N, *others_NC = self._in_slices(of_slice, hidden_NH=hidden_NH, **inputs)
        shape = tokens_BT[:, 1:].shape
        others_BTC = _spread_rows(others_NC[0], at_N, shape) if others_NC else None
        return _spread(logprobs_N, at_N, shape), _spread(entropy_N, at_N, shape), others_BTC

    def hidden_states(self, tokens_BT: torch.Tensor, given: PassInputs = NOTHING_FURTHER) -> torch.Tensor:
        """Return the hidden states [B,T,H] after each token, with `given.rows` [1,N,H]; see `logits`."""
        arguments, rows = {"input_ids": tokens_BT, "use_cache": False, **given.arguments}, given.rows
        if rows is not None:
            arguments |= {"input_ids": rows.packed(tokens_BT), "position_ids": rows.positions_1N}
        with self._autocast(tokens_BT.device.type), packed_pass(rows):
            if self._body is None:
                return self._model(**arguments).logits  # type: ignore[no-any-return]
            return self._body(**arguments).last_hidden_state  # type: ignore[no-any-return]

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits [N,V]; where there is no head apart, the hidden states are logits already."""
        if self._head is None:
            return hidden_NH
        if self.float32_head:
            hidden_NH = hidden_NH.float()
        with self._autocast(hidden_NH.device.type, enabled=not self.float32_head):
            return self._head(hidden_NH)  # type: ignore[no-any-return]

    def _picks_by_row(self, device: torch.device) -> bool:
        """Return whether a row's logprob and entropy are computed without a softmax of all rows at once."""
        return not self.entropy_gradient and (device.type == "cpu" or (self.by_device and has_kernel(device)))

    def _in_slices(self, of_slice: Slice, **inputs: torch.Tensor) -> _Picked:
        positions = rows = len(inputs["targets_N"])
        memory = self.device_memory(inputs["targets_N"].device) if self.by_device else DeviceMemory("cpu")
        if self._head is not None:
            rows = max(1, slice_bytes(memory) // self._row_bytes(memory.kind, inputs))
        if positions <= rows:
            return of_slice(**inputs)
        slices = [
            dict(zip(inputs, one, strict=True))
            for one in zip(*(torch.split(values, rows) for values in inputs.values()), strict=True)
        ]
        if self.by_device and self._keeps_logits(memory, rows, inputs):
            parts = [of_slice(**one) for one in slices]
        else:
            again = partial(checkpoint, of_slice, use_reentrant=False, preserve_rng_state=False)
            parts = [again(**one) for one in slices]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _keeps_logits(self, memory: DeviceMemory, rows: int, inputs: Mapping[str, torch.Tensor]) -> bool:
        """Return whether logits stay for the backward pass; those of more than one kind a token never do."""
        if self._head is None or self.entropy_gradient or inputs.keys() != {"hidden_NH", "targets_N"}:
            return False
        gradients = sum(
            parameter.nbytes
            for parameter in self._model.parameters()
            if parameter.requires_grad and parameter.grad is None
        )
        a_row = self._row_bytes(memory.kind, inputs)
        return keeps_logits(memory, a_row * len(inputs["targets_N"]), a_row * rows, gradients)

    def _row_bytes(self, kind: str, inputs: Mapping[str, torch.Tensor]) -> int:
        """Return the bytes of a row of logits on a device of this kind: float32, or as a GPU's kernel takes them."""
        assert self._head is not None  # noqa: S101 - who asks has one
        targets_only = inputs.keys() == {"hidden_NH", "targets_N"}
        by_kernel = kind == "cuda" and targets_only and self._picks_by_row(inputs["targets_N"].device)
        in_bfloat16 = by_kernel and self.precision is torch.bfloat16 and not self.float32_head
        return self._head.weight.shape[0] * (2 if in_bfloat16 else 4)  # type: ignore[no-any-return]

    def _gives_the_same(self) -> bool:
        """Return whether body and head give what the model gives, on a few tokens."""
        if self._body is None or self._head is None:
            return False
        device = self._head.weight.device
        tokens_1T = torch.tensor([_PROBE], device=device) % self._head.weight.shape[0]
        with torch.no_grad():
            whole = self._model(input_ids=tokens_1T, use_cache=False).logits.float()
            ours = self._head(self._body(input_ids=tokens_1T, use_cache=False).last_hidden_state).float()
        return bool((whole - ours).abs().max() <= _ROUNDING_TOLERANCE * whole.abs().max().clamp(min=1e-6))

    def _autocast(self, device: str, *, enabled: bool = True) -> AbstractContextManager[None]:
        enabled = enabled and self.precision is torch.bfloat16
        return torch.autocast(device, dtype=torch.bfloat16, enabled=enabled)


def token_logprobs(model: Any, tokens_BT: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and entropy [B,T] of all tokens, in float32; see `SampledLogprobs`."""
    return SampledLogprobs(model)(tokens_BT, temperature)


def _body_and_head(model: Any) -> tuple[Any, Any] | None:
    """Return the modules that give hidden states and make logits of them; None if the model does not say."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # that of a model with adapters
    body = getattr(inner, getattr(inner, "base_model_prefix", "") or "-", None)
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    return None if body is None or body is inner or not hasattr(head, "weight") else (body, head)


def _true_places(wanted: torch.Tensor, count: int | None) -> torch.Tensor:
    """Return the indexes of true values, int64 in ascending order; `count`: how many they are, if known."""
    if count is None:
        return wanted.nonzero().squeeze(1)
    return torch.nonzero_static(wanted, size=count).squeeze(1)


def _pick(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, ids_NK: torch.Tensor | None = None, *, entropy_gradient: bool
) -> _Picked:
    """Return the logprobs [N] of the targets, the entropy [N], and the logprobs [N,C] of `ids_NK` and all others."""
    all_NV = torch.log_softmax(logits_NV, dim=-1)
    if entropy_gradient:  # by the logprobs, whose gradient is 0 and not undefined where a probability is 0
        entropy_N = -(all_NV.exp() * all_NV).sum(-1)
    else:
        with torch.no_grad():
            entropy_N = torch.special.entr(all_NV.exp()).sum(-1)
    targets = all_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    if ids_NK is None:
        return targets, entropy_N
    tail_N1 = all_NV.scatter(-1, ids_NK, _EXCLUDED).logsumexp(-1, keepdim=True)
    return targets, entropy_N, torch.cat([all_NV.gather(-1, ids_NK), tail_N1], dim=-1)


def _among(logits_NV: torch.Tensor, allowed_NW: torch.Tensor) -> torch.Tensor:
    """Return the logits with those of tokens that are not allowed so low that they count for nothing."""
    vocabulary = logits_NV.shape[1]
    kept_NV = torch.zeros(len(logits_NV), vocabulary + 1, dtype=torch.bool, device=logits_NV.device)
    kept_NV.scatter_(1, torch.where(allowed_NW < 0, vocabulary, allowed_NW), value=True)
    kept_NV = kept_NV[:, :vocabulary] | (allowed_NW < 0).all(1, keepdim=True)
    return torch.where(kept_NV, logits_NV, _EXCLUDED)


def _spread(values_N: torch.Tensor, at_N: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Put values at their positions of a [B,T-1] grid and a 0 before each row."""
    flat = values_N.new_zeros(shape.numel()).index_copy(0, at_N, values_N)
    return torch.nn.functional.pad(flat.view(shape), (1, 0))


def _spread_rows(values_NC: torch.Tensor, at_N: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """As `_spread`, for C values at each position."""
    width = values_NC.shape[1]
    flat = values_NC.new_zeros((shape.numel(), width)).index_copy(0, at_N, values_NC)
    return torch.nn.functional.pad(flat.view(*shape, width), (0, 0, 1, 0))
