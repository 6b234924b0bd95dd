"""Reads a model's context length, and where its positions change, from its config. No torch.

The engine, the trainer and the checks before a start share this rule, so that all use the same length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.schemas.errors import ConfigError

__all__ = [
    "check_positions",
    "context_length",
    "context_of_model",
    "positions_change_at",
    "untrainable_positions",
]

_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "context_length",
    "n_ctx",
    "model_max_length",
    "max_target_positions",
)
"""Settings that say how long a sequence may be; the first that is there counts."""
_UNBOUNDED = 8192
"""Tokens of a sequence at most if a model has no bound (state-space models, alibi)."""
_MAX_SENSIBLE = 1 << 24
"""Longer contexts are what configurations say that do not know any."""


def context_length(config: Any) -> int:
    """Return how many tokens prompt and completion may have together, by a model's configuration.

    YaRN makes a context longer by its factor, which some configurations have in `max_position_embeddings` already.
    """
    text = config.get_text_config()
    stated = (getattr(text, name, None) for name in _NAMES)
    known: int | None = next((value for value in stated if _is_length(value)), None)
    if known is None:
        return _UNBOUNDED
    for rope in _rotary(text):
        factor, first = rope.get("factor"), rope.get("original_max_position_embeddings") or known
        if _kind(rope) == "yarn" and isinstance(factor, int | float) and _is_length(first):
            known = max(known, round(first * factor))
    return known


def positions_change_at(config: Any, max_model_len: int) -> int | None:
    """Return the longest sequence that has a model's first rotary positions, if it may have longer ones.

    None: its positions do not change, or not within `max_model_len` tokens. All rows of a pass have the positions of
    the longest, so sequences on both sides of that length must not share one. Raises `ConfigError` where the positions
    of a sequence depend on what was read before it.
    """
    text = config.get_text_config()
    for rope in _rotary(text):
        kind = _kind(rope)
        if kind not in {"longrope", "dynamic"}:
            continue
        first = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        longest = int(first or text.max_position_embeddings)
        if longest >= max_model_len:
            continue
        if kind == "dynamic":
            raise ConfigError(
                f"beyond {longest} tokens the rotary positions of {text.model_type} (dynamic) depend on the "
                f"sequences read before: set max_model_len of [inference.ROLE.engine] to {longest} at most"
            )
        return longest
    return None


def untrainable_positions(context: int | None, config: Any) -> str | None:
    """Return why a run cannot train a model on all that it may sample, None where it can.

    `context`: tokens of the policy's context, None where only its server knows; `config`: the model's. Tokens that are
    sampled before positions change are trained in a pass that has those after it.
    """
    longest = context or context_length(config)
    try:
        change = positions_change_at(config, longest)
    except ConfigError as error:
        return str(error)
    if change is None:
        return None
    return (
        f"sequences of {config.get_text_config().model_type} beyond {change} tokens have other rotary positions "
        "(longrope), also for the tokens before, so what was sampled up to there would be trained with other "
        f"logprobs: set inference.policy.engine.max_model_len to {change} at most (an "
        "engine that does not read it: its own option for that among inference.policy.args)"
    )


def check_positions(context: int | None, config: Any) -> None:
    """Raise `ConfigError` for what `untrainable_positions` finds."""
    if (problem := untrainable_positions(context, config)) is not None:
        raise ConfigError(f"model: {problem}")


def context_of_model(name: str | None) -> int | None:
    """Return the context of a model that is not loaded, None where its configuration cannot be read."""
    from transformers import AutoConfig

    if name is None:
        return None
    try:
        return context_length(AutoConfig.from_pretrained(name, trust_remote_code=False))
    except (OSError, ValueError, KeyError):
        return None  # what is wrong with a model has findings of its own


def _rotary(text: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of rotary positions: one, or one for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    yield from parameters.values() if all(isinstance(one, dict) for one in parameters.values()) else [parameters]


def _kind(rope: Mapping[str, Any]) -> str | None:
    found: str | None = rope.get("rope_type", rope.get("type"))
    return found


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_SENSIBLE
