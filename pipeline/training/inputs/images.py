"""Attached images, through the model's own image processor.

The tokens of a rollout hold the model's placeholders already: an engine writes them where an image stands. So only the
pixels are made here, and whether they are as many as the placeholders is checked for each sequence.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Sequence
from typing import Any

import torch

from lachesis.pipeline.training.inputs.model_input import ModelInput, SequenceParts
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["Images"]

MAX_PIXELS = 1 << 26
"""An image of more is refused before it is decoded."""
_MAX_SIZES = 4096
"""Sizes of images whose tokens are remembered."""
_PLACES = "is_image"
"""Where a sequence's image tokens are, beside what the processor made."""


class Images(ModelInput):
    """Reads attachments, each an image. Needs a model with an image token, and Pillow."""

    NAME = "images"

    def __init__(self, model: Any, processor: Any) -> None:
        self._token = getattr(model.config, "image_token_id", None)
        if processor is None or self._token is None or not hasattr(model, "get_image_features"):
            raise ConfigError(
                f"training.inputs has images, but {type(model).__name__} takes none: leave it out, or take a model "
                "that sees"
            )
        self._model, self._processor = model, processor
        body = getattr(model, model.base_model_prefix, model)
        self._takes_types = "mm_token_type_ids" in inspect.signature(body.forward).parameters
        self._tokens: dict[str, int] = {}

    def prepare(self, parts: SequenceParts) -> dict[str, torch.Tensor] | None:
        """See `ModelInput.prepare`."""
        placeholders = int((parts.tokens == self._token).sum())
        if not parts.attachments:
            if placeholders:
                raise DataError(f"{placeholders} image tokens and no image")
            return None
        images = [_image(number, one.mime, one.data) for number, one in enumerate(parts.attachments)]
        try:
            made = self._processor(images=images, return_tensors="pt")
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"the model's image processor refuses its images: {error}") from error
        found = {name: value for name, value in made.items() if torch.is_tensor(value)}
        wanted = self._tokens_of(found)
        if wanted != placeholders:
            raise DataError(f"{len(images)} images make {wanted} image tokens, but there are {placeholders}")
        return found | {_PLACES: torch.from_numpy(parts.tokens == self._token)}

    def arguments(self, prepared_B: Sequence[Any], width: int, device: torch.device) -> dict[str, Any]:
        """See `ModelInput.arguments`."""
        there = [one for one in prepared_B if one is not None]
        if not there:
            return {}
        names = [name for name in there[0] if name != _PLACES]
        found = {name: torch.cat([one[name] for one in there]).to(device) for name in names}
        if self._takes_types:
            types_BT = torch.zeros(len(prepared_B), width, dtype=torch.int64)
            for row, one in enumerate(prepared_B):
                if one is not None:
                    types_BT[row, : len(one[_PLACES])] = one[_PLACES]
            found["mm_token_type_ids"] = types_BT.to(device)
        return found

    def _tokens_of(self, pixels: dict[str, torch.Tensor]) -> int:
        """Return how many tokens the images are, which follows from their sizes: computed once for each."""
        sizes = {
            name: values.tolist() if values.dtype == torch.int64 else values.shape for name, values in pixels.items()
        }
        key = repr(sizes)
        if key not in self._tokens:
            device = next(self._model.parameters()).device
            given = {name: values.to(device) for name, values in pixels.items()}
            with torch.no_grad():
                features = self._model.get_image_features(**given, return_dict=True).pooler_output
            if len(self._tokens) >= _MAX_SIZES:
                self._tokens.clear()
            self._tokens[key] = len(torch.cat(tuple(features)))
        return self._tokens[key]


def _image(number: int, mime: str, data: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        found = Image.open(io.BytesIO(data))
        if found.width * found.height > MAX_PIXELS:
            raise DataError(f"attachment {number} is an image of {found.width} x {found.height} pixels: too many")
        return found.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"attachment {number} ({mime[:40]}) is no image that can be read: {error}") from error
