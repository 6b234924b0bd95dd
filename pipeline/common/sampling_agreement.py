"""Compares how tokens were sampled with the distribution that a trainer computes.

An engine's logprobs are those of what it samples from: logits divided by a temperature, changed by penalties and cut
off by top-p, top-k or min-p. The trainer divides by its own temperature and knows a cut only by its mask. Where the two
differ, the importance ratio is wrong at every token (top_p 0.9 makes it 0.9), in silence. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["MASK_COLUMN", "sampling_difference"]

MASK_COLUMN: Final = "sampling_mask"
"""The column that says which tokens a cut left, and the input of `training.inputs` that reads it."""

_CUTS: dict[str, float] = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "typical_p": 1,
    "top_a": 0,
    "epsilon_cutoff": 0,
    "tfs": 1,
}
"""What leaves out tokens, and the value that leaves out none. top_k is off at -1, too."""
_CHANGES: dict[str, float] = {
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "dry_multiplier": 0,
}
"""What changes logits, and the value that changes none."""
_BIASES = (
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "bad_words_ids",
    "min_tokens",
    "min_new_tokens",
    "guided_json",
    "structured_outputs",
)


def sampling_difference(generation: Mapping[str, Any], temperature: float, *, masked: bool) -> str | None:
    """Return what of `generation` a trainer does not compute, and how to mend it; None if it computes all.

    `generation`: parameters by name; one that is not there is not known, and not compared. `temperature`: that of the
    trainer. `masked`: whether the trainer is given the mask of what a cut left.
    """
    sampled = _number(generation, "temperature")
    if sampled is not None and abs(sampled - temperature) > 1e-6:
        return (
            f"sampled at temperature {sampled:g}, where training.learner.temperature is {temperature:g}: the trainer "
            "divides logits by its own, so give both the same"
        )
    for name, neutral in _CUTS.items():
        value = _number(generation, name)
        if value is not None and value != neutral and not (name == "top_k" and value < 0) and not masked:
            return (
                f"sampled with {name} {value:g}, which leaves out tokens that the trainer counts: leave it out, or let "
                f'the reference server record the mask with training.inputs = [{{ input = "{MASK_COLUMN}" }}]'
            )
    for name, neutral in _CHANGES.items():
        value = _number(generation, name)
        if value is not None and value != neutral:
            return f"sampled with {name} {value:g}, which the trainer does not compute: leave it out"
    for name in _BIASES:
        if generation.get(name):
            return f"sampled with {name}, which the trainer does not compute: leave it out"
    return None


def _number(generation: Mapping[str, Any], name: str) -> float | None:
    value = generation.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
