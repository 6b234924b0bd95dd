"""The class to subclass for giving a model more than text tokens.

A subclass reads columns and attachments of single sequences. It returns arguments of the model's forward pass or the
tokens that a sampler left, or changes how the model computes during a pass.

Dimension suffixes: T tokens of a sequence, B sequences of a micro-batch, W values a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lachesis.schemas.rollout import Attachment

__all__ = ["ModelInput", "SequenceParts", "pad_rows"]


class SequenceParts(NamedTuple):
    """The parts of one sequence that an input reads.

    `tokens` int32 [T], `loss_mask` bool [T]. `columns`: those that its group has, [T] or [T, W]. `attachments`: those
    of its conversation in the order of its messages; of a group that keeps no messages, all.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    columns: Mapping[str, NDArray[Any]]
    attachments: Sequence[Attachment]


class ModelInput:
    """Gives a model more than text tokens.

    Subclass it, define `prepare` and those of the other methods that are needed, and name the class in
    `training.inputs` with the columns it reads. `model` is the `PreTrainedModel` that is trained, with its adapters if
    it has any; further arguments of `__init__` are the `params` of the configuration. Each process of the trainer has
    one object.
    """

    def __init__(self, model: Any, **params: Any) -> None:
        del model, params

    def prepare(self, parts: SequenceParts) -> Any:
        """Return the other methods' argument for a sequence, on the CPU; None: it needs nothing.

        Called once for each sequence of a batch. An error raised here costs the group alone: it is left out of the
        batch, with the text of the error as the reason.
        """
        raise NotImplementedError(f"{type(self).__name__} must define prepare()")

    def arguments(self, prepared_B: Sequence[Any], width: int, device: torch.device) -> dict[str, Any]:
        """Return keyword arguments of the pass over a micro-batch, padded on the right to `width` tokens."""
        return {}

    def allowed(self, prepared_B: Sequence[Any], width: int, device: torch.device) -> torch.Tensor | None:
        """Return int64 [B, width, W], ids of the tokens that could be sampled at each position, -1 for none.

        The policy's probabilities are then over those; a position without any is over the whole vocabulary. None: all
        are.
        """
        return None

    def during(self, prepared_B: Sequence[Any], width: int, device: torch.device) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward and backward pass, which may compute layers again."""
        return nullcontext()


def pad_rows(rows: Sequence[NDArray[Any] | None], width: int, like: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return arrays [T, ...] as int64 [B, width, ...], -1 behind their ends; `like` has their form."""
    padded = np.full((len(rows), width, *like.shape[1:]), -1, np.int64)
    for row, values in enumerate(rows):
        if values is not None:
            padded[row, : len(values)] = values
    return torch.from_numpy(padded).to(device)
