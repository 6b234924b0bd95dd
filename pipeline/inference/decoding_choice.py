"""Finds the fastest way of decoding by which a model gives the logits of its plain forward pass.

Families differ in caches, masks and positions, and a wrong one raises nothing: it gives other logits. So each way is
tried on the model itself, on a few short sequences that join, leave and share a prompt, before the first request.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lachesis.pipeline.inference.decoding import (
    DecodingBatch,
    PaddedBatch,
    SeparateRows,
    UnpaddedBatch,
    WholeSequences,
)
from lachesis.pipeline.inference.row_cache import keeps_states, new_cache
from lachesis.pipeline.model.tensors import vocabulary_of
from lachesis.schemas.errors import ConfigError

__all__ = ["choose_decoding", "context_length", "positions_change_at"]

log = logging.getLogger("lachesis")

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_UNBOUNDED_CONTEXT = 8192
"""Tokens of a sequence at most if neither the model nor its tokenizer has a bound (state-space models, alibi)."""
_MAX_SENSIBLE = 1 << 24
"""Longer contexts are what tokenizers say that do not know any."""

_LENGTHS = (2, 11, 23)
"""Tokens of the prompts that are tried; the last one joins later and is longer than the others by then."""
_EXACT, _ROUNDED = 2e-3, 0.15
"""Difference of logits that is still rounding, in their standard deviations: the largest in float32, else the mean."""
_FLOOR = 1e-5


def context_length(model: Any, tokenizer: Any = None) -> int:
    """Return how many tokens prompt and completion may have, by what model or tokenizer say."""
    config = model.config.get_text_config()
    found = [getattr(config, name, None) for name in _CONTEXT_NAMES]
    found.append(getattr(tokenizer, "model_max_length", None))
    known = [value for value in found if isinstance(value, int) and 0 < value < _MAX_SENSIBLE]
    return known[0] if known else _UNBOUNDED_CONTEXT


def positions_change_at(model: Any, max_model_len: int) -> int | None:
    """Return the longest sequence that has a model's first rotary positions, if it may have longer ones.

    None: its positions do not change, or not within `max_model_len` tokens. All rows of a pass have the positions of
    the longest, so sequences on both sides of that length must not share one. Raises `ConfigError` where the positions
    of a sequence depend on what was read before it.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layers = parameters.values() if all(isinstance(one, dict) for one in parameters.values()) else [parameters]
    for one in layers:
        kind = one.get("rope_type", one.get("type"))
        if kind not in {"longrope", "dynamic"}:
            continue
        first = one.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        longest = int(first or config.max_position_embeddings)
        if longest >= max_model_len:
            continue
        if kind == "dynamic":
            raise ConfigError(
                f"beyond {longest} tokens the rotary positions of {type(model).__name__} (dynamic) depend on the "
                f"sequences read before: set max_model_len of [inference.ROLE.engine] to {longest} at most"
            )
        return longest
    return None


def choose_decoding(model: Any, max_model_len: int) -> DecodingBatch:
    """Return an empty batch that decodes `model`. Raises `ConfigError` that says why there is none."""
    failures: list[str] = []
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        trial = _Trial(model)
        if positions_change_at(model, max_model_len) is None:
            try:
                trial.check_causal()
            except ConfigError:
                raise
            except Exception as error:  # models raise whatever their configuration leads them into
                text = (
                    f"{type(model).__name__} cannot be sampled: a plain pass fails by {type(error).__name__}: {error}"
                )
                raise ConfigError(text) from error
        for make in _ways(model, max_model_len):
            try:
                batch = make()
                problem = trial.problem(batch)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - models raise whatever a cache or mask of another kind runs into
                problem = f"{type(error).__name__}: {error}"
            if problem is None:
                batch.clear()
                if type(batch) is not PaddedBatch:
                    log.info("%s is decoded %s", type(model).__name__, batch.about)
                return batch
            failures.append(problem[:200])
    raise ConfigError(f"{type(model).__name__} cannot be sampled by the reference server. Tried: {'; '.join(failures)}")


def _ways(model: Any, max_model_len: int) -> Iterator[Callable[[], DecodingBatch]]:
    changing = positions_change_at(model, max_model_len)
    if changing is None:
        if not _has_states(model):  # families mask padding out of their states, but not all of them do it exactly
            yield lambda: PaddedBatch(model)
        yield lambda: UnpaddedBatch(model)
        yield lambda: SeparateRows(model)
    else:
        yield lambda: SeparateRows(model, rereads_at=changing + 1)
    yield lambda: WholeSequences(model)


def _has_states(model: Any) -> bool:
    try:
        return keeps_states(new_cache(model))
    except Exception:  # noqa: BLE001 - as in `choose_decoding`: this cache is not made here, so it is tried and fails
        return False


class _Trial:
    """Sequences, and the logits of a plain pass over each."""

    def __init__(self, model: Any) -> None:
        self._model = model
        draw = random.Random(0)
        special = {value for name, value in model.config.to_dict().items() if name.endswith("token_id")}
        ids = [token for token in range(min(vocabulary_of(model) or 1, 1000)) if token not in special] or [0]
        self._prompts = [draw.choices(ids, k=length) for length in _LENGTHS]
        self._next = draw.choices(ids, k=16)
        dtype = next(model.parameters()).dtype
        self._exact = dtype in {torch.float32, torch.float64}
        self._tolerance = _EXACT if self._exact else _ROUNDED

    def check_causal(self) -> None:
        """Raise `ConfigError` when the logits of a token depend on the tokens after it."""
        prompt = self._prompts[1]
        whole = self._model(input_ids=torch.tensor([prompt], device=self._model.device), use_cache=False).logits[0, -2]
        before = self._plain(prompt[:-1])
        if self._apart(whole.float(), before) > self._tolerance:
            raise ConfigError(
                f"{type(self._model).__name__} is not causal: logits of a token depend on the tokens after it, so "
                "nothing that it samples can be trained on; choose a causal language model"
            )

    def _apart(self, logits: torch.Tensor, right: torch.Tensor) -> float:
        apart = (logits - right).abs()
        return float((apart.max() if self._exact else apart.mean()) / (right.std() + _FLOOR))

    def _plain(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits [V] after `tokens` by a plain pass."""
        given = torch.tensor([tokens], device=self._model.device)
        logits: torch.Tensor = self._model(input_ids=given, use_cache=False).logits[0, -1].float()
        if not bool(logits.isfinite().all()):
            raise ConfigError("the model's logits are not finite; load valid weights")
        return logits

    def problem(self, batch: DecodingBatch) -> str | None:
        """Return how the logits of `batch` differ from those of a plain pass, None where they do not."""
        first, second, third = self._prompts
        rows = [list(first), list(second), list(second)]
        worst = 0.0
        batch.prefill([first, second], [1, 2])
        steps: Sequence[Callable[[], None]] = (
            lambda: self._advance(batch, rows),
            lambda: self._join(batch, rows, third),
            lambda: self._advance(batch, rows),
            lambda: self._leave(batch, rows),
            lambda: self._advance(batch, rows),
        )
        for step in steps:
            step()
            worst = max(worst, self._difference(batch, rows))
            if worst > self._tolerance:
                return f"logits are {worst:.2g} standard deviations from those of a plain pass"
        return None

    def _advance(self, batch: DecodingBatch, rows: list[list[int]]) -> None:
        tokens = [self._next[(at + len(row)) % len(self._next)] for at, row in enumerate(rows)]
        batch.append_tokens(tokens)
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)

    def _join(self, batch: DecodingBatch, rows: list[list[int]], prompt: list[int]) -> None:
        batch.prefill([prompt], [1])
        rows.append(list(prompt))

    def _leave(self, batch: DecodingBatch, rows: list[list[int]]) -> None:
        batch.select_rows([2, 0])
        rows[:] = [rows[2], rows[0]]

    def _difference(self, batch: DecodingBatch, rows: list[list[int]]) -> float:
        """Return the largest difference of a row's logits from those of a plain pass."""
        worst = 0.0
        for row, logits in zip(rows, batch.logits, strict=True):
            right = self._plain(row)
            worst = max(worst, self._apart(logits, right))
        return worst
