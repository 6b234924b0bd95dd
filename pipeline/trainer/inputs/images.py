"""Gives a model attached images, through its own image processor.

The tokens of a rollout already hold the model's placeholders: an engine writes them where an image stands. So this
makes only the pixels, and checks for each sequence that their number matches the placeholders.
"""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lachesis.pipeline.model.tensors import has_adapters
from lachesis.pipeline.trainer.inputs.model_input import ModelInput, SequenceParts
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.rollout import Attachment

__all__ = ["Images"]

MAX_PIXELS = 1 << 26
"""An image of more is refused before it is decoded."""
MAX_PIXELS_TOGETHER = 1 << 28
"""Of all images of a sequence."""
_MAX_ASPECT = 200
"""How many times longer than wide, or the reverse, an image may be; processors that scale the shorter edge would make
gigabytes of longer ones."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow knows more: EPS, for one, which it has Ghostscript run."""
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
        self._body = getattr(model.get_base_model() if has_adapters(model) else model, model.base_model_prefix, model)
        self._takes_types = "mm_token_type_ids" in inspect.signature(self._body.forward).parameters
        self._tokens: dict[str, int] = {}

    def prepare(self, parts: SequenceParts) -> dict[str, torch.Tensor] | None:
        """See `ModelInput.prepare`."""
        places = torch.from_numpy(parts.tokens == self._token)
        placeholders = int(places.sum())
        if not parts.attachments:
            if placeholders:
                raise DataError(f"{placeholders} image tokens and no image")
            return None
        if len(parts.attachments) > placeholders:
            raise DataError(f"{len(parts.attachments)} images, but there are {placeholders} image tokens")
        images = _images(parts.attachments)
        try:
            made = self._processor(images=images, return_tensors="pt")
        except Exception as error:  # each model has its own, which raises whatever it runs into
            raise DataError(f"the model's image processor refuses its images: {error}") from error
        found = {name: value for name, value in made.items() if torch.is_tensor(value)}
        wanted = self._tokens_of(found)
        if wanted != placeholders:
            raise DataError(f"{len(images)} images make {wanted} image tokens, but there are {placeholders}")
        self._check_order(parts.tokens, places, found)
        return found | {_PLACES: places}

    def arguments(self, prepared_B: Sequence[Any], width: int, device: torch.device) -> dict[str, Any]:
        """See `ModelInput.arguments`."""
        there = [one for one in prepared_B if one is not None]
        if not there:
            return {}
        names = [name for name in there[0] if name != _PLACES]
        found = {name: _joined([one[name] for one in there]).to(device) for name in names}
        if self._takes_types:
            types_BT = torch.zeros(len(prepared_B), width, dtype=torch.int64)
            for row, one in enumerate(prepared_B):
                if one is not None:
                    types_BT[row, : len(one[_PLACES])] = one[_PLACES]
            found["mm_token_type_ids"] = types_BT.to(device)
        return found

    def _check_order(self, tokens: NDArray[np.int32], places: torch.Tensor, pixels: dict[str, torch.Tensor]) -> None:
        """Raise `DataError` where images do not lie as a model needs that numbers tokens by their place in an image."""
        if not self._takes_types or not hasattr(self._body, "get_rope_index"):
            return
        sizes = {name: values for name, values in pixels.items() if name.endswith("_grid_thw")}
        try:
            self._body.get_rope_index(
                torch.from_numpy(tokens.astype(np.int64))[None], mm_token_type_ids=places[None].int(), **sizes
            )
        except Exception as error:
            raise DataError(
                "its image tokens are not one unbroken run for each image, with another token between two images"
            ) from error

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


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put images one behind the other, padded with zeros where sizes differ, as a processor does with those it gets."""
    shape = [max(sizes) for sizes in zip(*(one.shape[1:] for one in values), strict=True)]
    joined = values[0].new_zeros((sum(len(one) for one in values), *shape))
    start = 0
    for one in values:
        joined[(slice(start, start + len(one)), *map(slice, one.shape[1:]))] = one
        start += len(one)
    return joined


def _images(attachments: Sequence[Attachment]) -> list[Any]:
    from PIL import Image, UnidentifiedImageError

    opened = []
    together = 0
    for number, one in enumerate(attachments):
        try:
            found = Image.open(io.BytesIO(one.data), formats=_FORMATS)
        except UnidentifiedImageError as error:
            raise _unreadable(number, one, f"it is none of {', '.join(_FORMATS)}") from error
        except Exception as error:  # whatever a decoder runs into in a damaged file
            raise _unreadable(number, one, error) from error
        size = f"attachment {number} is an image of {found.width} x {found.height} pixels"
        pixels = math.prod(found.size)
        together += pixels
        if pixels > MAX_PIXELS:
            raise DataError(f"{size}: too many")
        if together > MAX_PIXELS_TOGETHER:
            raise DataError(f"{size}, with those before it more than {MAX_PIXELS_TOGETHER}: too many")
        if max(found.size) > _MAX_ASPECT * min(found.size):
            raise DataError(f"{size}: one side is more than {_MAX_ASPECT} times the other")
        opened.append(found)
    images = []
    for number, (one, found) in enumerate(zip(attachments, opened, strict=True)):
        try:
            images.append(found.convert("RGB"))
        except Exception as error:
            raise _unreadable(number, one, error) from error
    return images


def _unreadable(number: int, attachment: Attachment, why: object) -> DataError:
    return DataError(f"attachment {number} ({attachment.mime[:40]}) is no image that can be read: {why}")
