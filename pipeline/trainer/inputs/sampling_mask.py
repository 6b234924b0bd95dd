"""Computes logprobs over the tokens that a sampler left: the column `sampling_mask`.

With top-p or top-k an engine samples from fewer tokens than the model knows, and its logprobs are over those. The
policy's logprobs must be over the same tokens. Otherwise the ratio is wrong at every token, and tokens that could never
be sampled are trained on ("keep sampling mask", DeepSeek-V3.2, arXiv:2512.02556).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lachesis.pipeline.model.tensors import vocabulary_of
from lachesis.pipeline.trainer.inputs.model_input import ModelInput, SequenceParts, pad_rows
from lachesis.schemas.errors import DataError

__all__ = ["SamplingMask"]


class SamplingMask(ModelInput):
    """Reads `sampling_mask`, integers [T, W]: row t has the ids among which token t was sampled, then -1.

    A row of -1 alone says that nothing was excluded.
    """

    NAME = "sampling_mask"

    def __init__(self, model: Any) -> None:
        self._vocabulary = vocabulary_of(model)

    def prepare(self, parts: SequenceParts) -> NDArray[Any] | None:
        """See `ModelInput.prepare`."""
        ids_TW = parts.columns.get(self.NAME)
        if ids_TW is None:
            return None
        if ids_TW.dtype.kind != "i":
            raise DataError(f"token ids of type {ids_TW.dtype}, where integers with -1 for none are needed")
        ids_TW = ids_TW.reshape(len(parts.tokens), -1)
        ids_TW = ids_TW[:, (ids_TW >= 0).any(axis=0)]  # the widest row of a micro-batch sets what all its rows take
        if self._vocabulary is not None and ids_TW.shape[1] > self._vocabulary:
            raise DataError(f"{ids_TW.shape[1]} token ids in a row, where the model knows {self._vocabulary}")
        if self._vocabulary is not None and ids_TW.max(initial=-1) >= self._vocabulary:
            raise DataError(f"token id {ids_TW.max()}, where the model knows {self._vocabulary}")
        masked_T = parts.loss_mask & (ids_TW >= 0).any(axis=1)
        lacking = np.flatnonzero(masked_T & ~(ids_TW == parts.tokens[:, None]).any(axis=1))
        if len(lacking):
            at = int(lacking[0])
            raise DataError(f"token {at} is {parts.tokens[at]}, which its mask excludes")
        return ids_TW

    def allowed(
        self, prepared_B: Sequence[NDArray[Any] | None], width: int, device: torch.device
    ) -> torch.Tensor | None:
        """See `ModelInput.allowed`."""
        masked = [ids for ids in prepared_B if ids is not None]
        if not masked:
            return None
        widest = max(masked, key=lambda ids_TW: ids_TW.shape[1])
        wide = [
            ids if ids is None else np.pad(ids, ((0, 0), (0, widest.shape[1] - ids.shape[1])), constant_values=-1)
            for ids in prepared_B
        ]
        return pad_rows(wide, width, widest, device)
