"""Collects the faults of a model by kind, and ignores those that a setting excepts.

It is given the names of tensors that are missing, unexpected, of another shape, quantized or not finite. Guarantees
that a model with any of them is refused, with the first few names and the count of each kind, unless `model_exceptions`
names them; and that tensors which other uses of the same files need (reward heads, prediction of several tokens, vision
towers of a model that is trained on text) are no fault. No torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

__all__ = ["QUANTIZATION", "TOKENIZER", "ModelFaults", "is_spare", "some"]

log = logging.getLogger("lachesis")

QUANTIZATION, TOKENIZER = "quantization_config", "tokenizer"
"""Names by which `model_exceptions` excepts what is no tensor."""
_MAX_NAMED = 4
_BUFFERS = re.compile(
    r"(rotary_emb\.(original_)?inv_freq|(^|\.)position_ids|(attn|attention|crossattention)\.(masked_)?bias)$"
)
"""What older versions of transformers stored, and newer ones compute."""
_HEADS = re.compile(r"(^|\.)(score|classifier|v_head|value_head|reward_head|rm_head|regression_head|ranking_head)\.")
_NEXT_TOKENS = re.compile(r"(^|\.)(mtp|mtp_layers|mtp_block|nextn|nextn_predict_layers|medusa_heads?|eagle\w*)\.")
_NEXT_TOKENS_PART = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head|embed_tokens)\.")
"""Modules that only a layer for the prediction of several tokens has."""
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_TOWERS = re.compile(
    r"(^|\.)(visual|vision\w*|image_newline|multi_modal_projector|mm_projector|modality_projection|audio\w*|"
    r"embed_vision|embed_audio|speech\w*|talker|token2wav|code2wav)(\.|$)"
)
_TOWER_SETTINGS = ("vision_config", "audio_config", "speech_config", "vision_tower", "mm_vision_tower", "talker_config")


class _Fault(NamedTuple):
    name: str
    detail: str


class ModelFaults:
    """The faults of one model. `exceptions`: names of those that are meant, "*" for any characters."""

    def __init__(self, exceptions: Sequence[str] = ()) -> None:
        self._exceptions = exceptions
        self._found: dict[str, list[_Fault]] = {}
        self._excepted: list[str] = []

    def add(self, kind: str, name: str, detail: str = "") -> None:
        """Take in a fault. `kind`: what it is, as "missing tensors"; `detail`: more about it."""
        if any(fnmatchcase(name, pattern) for pattern in self._exceptions):
            self._excepted.append(f"{name} ({kind})")
        else:
            self._found.setdefault(kind, []).append(_Fault(name, detail))

    def add_names(self, kind: str, names: Iterable[str]) -> None:
        """Take in several."""
        for name in sorted(names):
            self.add(kind, name)

    def text(self, model: str) -> str | None:
        """Return what is wrong and how to mend it, None if nothing is. The log says which faults are excepted."""
        if self._excepted:
            log.warning(
                "model %r is loaded although it is incomplete or wrong, as model_exceptions says: %s",
                model,
                some(self._excepted),
            )
        if not self._found:
            return None
        kinds = "; ".join(
            f"{kind} ({len(faults)}): {some([one.name + one.detail for one in faults])}"
            for kind, faults in self._found.items()
        )
        return (
            f"{kinds}. Take its files from their source again, or correct its config.json. "
            "Where it is meant so, name them in model_exceptions (* stands for any characters)"
        )


def is_spare(name: str, config: Mapping[str, Any], *, images: bool = False) -> bool:
    """Return whether a model of text does without the tensor `name` of its files.

    `images`: whether it is one that sees. `config`: what config.json says.
    """
    if _BUFFERS.search(name) or _HEADS.search(name) or _NEXT_TOKENS.search(name):
        return True
    if not images and _TOWERS.search(name) and any(config.get(key) for key in _TOWER_SETTINGS):
        return True
    return _is_next_token_layer(name, config)


def _is_next_token_layer(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor is of a layer behind the model's last one that predicts further tokens."""
    text = config.get("text_config") or config
    layers, found = text.get("num_hidden_layers"), _LAYER.search(name)
    if found is None or not isinstance(layers, int) or int(found[2]) < layers:
        return False
    further = text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0
    return int(found[2]) < layers + further or _NEXT_TOKENS_PART.search(name) is not None


def some(items: Sequence[str]) -> str:
    """Return the first few of the items, and how many more there are."""
    more = f" and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else ""
    return ", ".join(items[:_MAX_NAMED]) + more
