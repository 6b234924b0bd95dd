"""Trains with the experts that a rollout was sampled with: the column `routed_experts`.

Engine and trainer round differently, so a router near a tie picks other experts, and the token's probability jumps.
With the engine's choices replayed, both compute the same function (rollout routing replay, arXiv:2510.11370); the
router's weights of the chosen experts are the trainer's own, with their gradient.

A router picks by `torch.topk` over its experts, whatever the model; within a mixture-of-experts block that call returns
the recorded experts. So this works for any model of transformers whose blocks have a router; dense models are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from lachesis.pipeline.trainer.inputs.model_input import ModelInput, SequenceParts, pad_rows
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["RoutedExperts"]

_ROUTER = re.compile(r"(Router|Gate)$")
"""How classes of routers are called in transformers."""
_TOPK = (torch.topk, torch.Tensor.topk)


class RoutedExperts(ModelInput):
    """Reads `routed_experts`, integers [T, layers * k]: the k experts of each layer that processed token t.

    Layer after layer. -1 where they are not known, as of the last token, which no engine processes: the router then
    picks by itself.
    """

    NAME = "routed_experts"

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._k = int(getattr(config, "num_experts_per_tok", 0) or getattr(config, "moe_top_k", 0))
        blocks = list(_blocks(model))
        if not blocks or not self._k:
            raise ConfigError(
                f"training.inputs has routed_experts, but {type(model).__name__} has no router of experts: leave it out"
            )
        self._layers, self._experts = len(blocks), blocks[0][1]
        self._recorded: torch.Tensor | None = None
        self._replayed: set[int] = set()
        for layer, (block, experts) in enumerate(blocks):
            _TopKReplay(self, layer, experts, self._k).watch(block)

    def prepare(self, parts: SequenceParts) -> NDArray[Any] | None:
        """See `ModelInput.prepare`."""
        experts_TW = parts.columns.get(self.NAME)
        if experts_TW is None:
            return None
        width, wanted = (experts_TW.shape[1] if experts_TW.ndim == 2 else 1), self._layers * self._k
        if width != wanted:
            raise DataError(
                f"{width} experts a token, where the model has {self._layers} layers with {self._k}: {wanted}"
            )
        if experts_TW.dtype.kind not in "iu":
            raise DataError(f"experts of type {experts_TW.dtype}, where integers with -1 for none are needed")
        if (highest := int(experts_TW.max())) >= self._experts:
            raise DataError(f"expert {highest}, where a layer has {self._experts}")
        if (lowest := int(experts_TW.min())) < -1:
            raise DataError(f"expert {lowest}")
        experts_TLK = experts_TW.reshape(len(parts.tokens), self._layers, self._k)
        sorted_TLK = np.sort(experts_TLK, axis=2)
        twice_TL = ((sorted_TLK[..., 1:] == sorted_TLK[..., :-1]) & (sorted_TLK[..., 1:] >= 0)).any(2)
        unfit_TL = twice_TL | ((sorted_TLK[..., 0] < 0) & (sorted_TLK[..., -1] >= 0))
        if unfit_TL.any():
            token, layer = np.argwhere(unfit_TL)[0]
            named = experts_TLK[token, layer].tolist()
            raise DataError(
                f"experts {named} of token {token} in layer {layer}, where {self._k} different ones, or -1 alone, are "
                "needed"
            )
        return experts_TLK

    @contextmanager
    def during(self, prepared_B: Sequence[NDArray[Any] | None], width: int, device: torch.device) -> Iterator[None]:
        """See `ModelInput.during`."""
        like = np.empty((1, self._layers, self._k))
        self._recorded = pad_rows(prepared_B, width, like, device) if prepared_B else None
        self._replayed.clear()
        try:
            yield
        finally:
            recorded, self._recorded = self._recorded, None
        if recorded is not None and len(self._replayed) != self._layers:
            missed = sorted(set(range(self._layers)) - self._replayed)
            raise ConfigError(
                f"routed_experts: the routers of layers {missed[:8]} do not pick their experts by torch.topk, so they "
                "cannot be made to use given ones; leave routed_experts out of training.inputs"
            )

    def in_one_row(self, prepared_B: Sequence[NDArray[Any] | None], lengths: Sequence[int]) -> NDArray[Any]:
        """Return what `prepare` made of several sequences as that of one, which has their tokens in a row."""
        unknown = np.full((max(lengths), self._layers, self._k), -1)
        pairs = zip(prepared_B, lengths, strict=True)
        return np.concatenate([unknown[:length] if one is None else one for one, length in pairs])

    def recorded(self, layer: int, tokens: int) -> torch.Tensor | None:
        """Return one layer's experts, int64 [tokens, k], in a pass over so many; None: none are replayed."""
        if self._recorded is None:
            return None
        found = self._recorded[:, :, layer].flatten(0, 1)
        if len(found) != tokens:
            raise DataError(f"a router of layer {layer} sees {tokens} tokens in a pass over {len(found)}")
        self._replayed.add(layer)
        return found


class _TopKReplay(TorchFunctionMode):
    """Within one mixture-of-experts block, lets `torch.topk` over its experts pick the recorded ones."""

    def __init__(self, source: RoutedExperts, layer: int, experts: int, k: int) -> None:
        super().__init__()
        self._source, self._layer, self._experts, self._k = source, layer, experts, k
        self._entered = 0

    def watch(self, block: torch.nn.Module) -> None:
        def begin(*_: Any) -> None:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._entered += 1

        def end(*_: Any) -> None:
            if self._entered:  # not where an earlier hook of the block has raised: another's mode would be left
                self._entered -= 1
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end, always_call=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        picked = func(*args, **(kwargs or {}))
        if func not in _TOPK or args[0].shape[-1] != self._experts or picked.indices.shape[-1] != self._k:
            return picked
        scores, own = args[0], picked.indices
        recorded = self._source.recorded(self._layer, own.shape[:-1].numel())
        if recorded is None:
            return picked
        recorded = recorded.view(own.shape)
        experts = torch.where(recorded >= 0, recorded, own)
        return torch.return_types.topk((scores.gather(-1, experts), experts))


def _blocks(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, int]]:
    """Yield the modules that hold a router, in the order of layers, and how many experts each has."""
    for module in model.modules():
        for child in module.children():
            weight = getattr(child, "weight", None)
            if weight is not None and weight.dim() == 2 and _ROUTER.search(type(child).__name__):
                yield module, weight.shape[0]
