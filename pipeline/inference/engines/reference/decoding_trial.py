"""Compares a way of decoding a model with its plain pass, across every boundary of its layers.

Layers read tokens in pieces: kernels of convolutions, chunks of linear attention and state-space models, windows of
attention. A model takes one path below such a length and another above it, and so may a cache. Guarantees that rows of
unequal lengths which join, leave and share a prompt were compared on both sides of each length, as far as the model's
size allows; `left_out` names the lengths that were not compared.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lachesis.pipeline.inference.engines.reference.decoding import DecodingBatch, WholeSequences
from lachesis.pipeline.model.tensors import vocabulary_of
from lachesis.schemas.errors import ConfigError

__all__ = ["DecodingTrial", "boundaries"]

_BOUNDARY = re.compile(
    r"chunk_size|chunk_len|window|block_size|conv_kernel|conv_size|kernel_size|kernel_dim|d_conv|conv_l_cache"
    r"|index_topk|index_block|local_attention|compress_r|original_max_position",
    re.IGNORECASE,
)
"""Parts of the names of settings that are lengths at which a layer computes in another way."""
_DELTA_CHUNK = 64
"""Tokens that transformers' delta rule reads at once, which no configuration says."""
_DELTA_KINDS = {"linear_attention", "kda", "gated_delta", "deltanet"}
_MAX_DOUBLED = 512
"""Boundary of chunks up to which a second one is crossed as well."""
_MAX_BOUNDARY = 8192

_LENGTHS = (2, 11, 23)
"""Tokens of the prompts that are tried; the last one joins later and is longer than the others by then."""
_STEPS = 5
"""Tokens at most that a trial appends to a row."""
_OPERATIONS = {"cpu": 4e12}
"""Multiplications and additions that a trial may take: some ten seconds."""
_OPERATIONS_OF_DEVICES = 4e15

_EXACT, _EXACT_OF_DEVICES, _ROUNDED = 1e-3, 2e-3, 0.15
"""Difference of logits that is still rounding, in their standard deviations: the largest in float32, else the mean."""
_FLOOR = 1e-5

_Seen = list[tuple[tuple[int, ...], torch.Tensor]]
"""Tokens of a row, and the logits [V] after them."""


def boundaries(config: Any) -> dict[int, str]:
    """Return the lengths at which layers compute in another way, each with its setting."""
    found: dict[int, str] = {}
    text = config.get_text_config()
    _add_boundaries(text.to_dict(), found)
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    if kinds & _DELTA_KINDS:
        found.setdefault(_DELTA_CHUNK, "the chunks of its linear attention")
    return found


def _add_boundaries(settings: Mapping[Any, Any], found: dict[int, str]) -> None:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            _add_boundaries(value, found)
        elif _BOUNDARY.search(str(name)):
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, int) and not isinstance(one, bool) and one > 1:
                    found.setdefault(one, str(name))


class DecodingTrial:
    """Sequences of one model, and the logits of a plain pass over each.

    `by_prefix`: the logits of a token depend on how long the pass is, so each is computed by a pass of its own.
    """

    def __init__(self, model: Any, max_model_len: int, *, by_prefix: bool = False) -> None:
        self._model = model
        self._by_prefix = by_prefix
        self._takes = inspect.signature(model.forward).parameters.keys()
        self._draw = random.Random(0)
        special = {value for name, value in model.config.to_dict().items() if name.endswith("token_id")}
        self._ids = [token for token in range(min(vocabulary_of(model) or 1, 1000)) if token not in special] or [0]
        self._room = max(1, max_model_len - _STEPS)
        self._prompts = [self._sequence(min(length, self._room)) for length in _LENGTHS]
        self._next = self._sequence(16)
        parameter = next(model.parameters())
        self._exact = parameter.dtype in {torch.float32, torch.float64}
        on_cpu = parameter.device.type == "cpu"
        self._tolerance = _ROUNDED if not self._exact else _EXACT if on_cpu else _EXACT_OF_DEVICES
        self.left_out: str | None = None
        """What was not compared, for people; None: nothing."""
        self._long_prompts = self._choose_long_prompts(parameter.device.type)

    def check_causal(self) -> None:
        """Raise `ConfigError` when the logits of a token depend on the tokens after it."""
        for prompt in (self._prompts[1], *self._long_prompts[:1]):
            before = prompt[: -min(4, len(prompt) - 1)]
            whole = self._logits(prompt, len(prompt) - len(before) + 1)[0]
            if self._apart(whole, self._logits(before, 1)[0]) > self._tolerance:
                raise ConfigError(
                    f"{type(self._model).__name__} is not causal: in a sequence of {len(prompt)} tokens the logits of "
                    "a token depend on those after it, so nothing that it samples can be trained on; choose a causal "
                    "language model, or a shorter max_model_len if it chooses among more tokens than it attends to"
                )

    def problem(self, batch: DecodingBatch) -> str | None:
        """Return how the logits of `batch` differ from those of a plain pass, None where they do not."""
        worst = self._worst(self._decoded(batch, self._prompts[:2], self._prompts[2]))
        if worst <= self._tolerance and self._long_prompts and type(batch) is not WholeSequences:
            batch.clear()
            worst = self._worst(self._decoded(batch, self._long_prompts, self._prompts[1]))
        if worst <= self._tolerance:
            return None
        return f"logits are {worst:.2g} standard deviations from those of a plain pass"

    def _decoded(self, batch: DecodingBatch, prompts: Sequence[list[int]], joining: list[int]) -> _Seen:
        """Return what `batch` gives for rows that join, leave and advance; the last of `prompts` has two."""
        rows = [list(prompt) for prompt in [*prompts, prompts[-1]]]
        seen: _Seen = []

        def advance() -> None:
            tokens = [self._next[(at + len(row)) % len(self._next)] for at, row in enumerate(rows)]
            batch.append_tokens(tokens)
            for row, token in zip(rows, tokens, strict=True):
                row.append(token)

        def join() -> None:
            batch.prefill([joining], [1])
            rows.append(list(joining))

        def leave() -> None:
            kept = [*range(len(rows) - 1, 1, -1), 0]
            batch.select_rows(kept)
            rows[:] = [rows[at] for at in kept]

        steps: Sequence[Callable[[], None]] = (advance, join, advance, advance, leave, advance)
        batch.prefill(prompts, [*[1] * (len(prompts) - 1), 2])
        for step in (lambda: None, *steps):
            step()
            seen += [(tuple(row), logits) for row, logits in zip(rows, batch.logits, strict=True)]
        return seen

    def _worst(self, seen: _Seen) -> float:
        """Return the largest difference from the logits of plain passes."""
        worst = 0.0
        right: dict[tuple[int, ...], torch.Tensor] = {}
        for tokens, logits in sorted(seen, key=lambda one: -len(one[0])):
            if tokens not in right:
                count = 1 if self._by_prefix else min(_STEPS + 1, len(tokens))
                for before, row in enumerate(reversed(self._logits(list(tokens), count))):
                    right.setdefault(tokens[: len(tokens) - before], row)
            worst = max(worst, self._apart(logits, right[tokens]))
        return worst

    def _apart(self, logits: torch.Tensor, right: torch.Tensor) -> float:
        apart = (logits - right).abs()
        return float((apart.max() if self._exact else apart.mean()) / (right.std() + _FLOOR))

    def _logits(self, tokens: list[int], count: int) -> torch.Tensor:
        """Return the logits [count, V] after the last `count` prefixes of `tokens`, by a plain pass."""
        given = torch.tensor([tokens], device=self._model.device)
        logits: torch.Tensor = self._model(input_ids=given, use_cache=False, **self._last_logits(count)).logits
        logits = logits[0, -count:].float()
        if not bool(logits.isfinite().all()):
            raise ConfigError("the model's logits are not finite; load valid weights")
        return logits

    def _last_logits(self, count: int) -> dict[str, int]:
        """Return the argument that makes the last `count` logits alone, if the model takes one."""
        return {"logits_to_keep": count} if "logits_to_keep" in self._takes else {}

    def _sequence(self, length: int) -> list[int]:
        return self._draw.choices(self._ids, k=length)

    def _choose_long_prompts(self, device: str) -> list[list[int]]:
        """Return prompts that end before a boundary, so that their rows cross it, and others that are beyond it."""
        size = sum(parameter.numel() for parameter in self._model.parameters())
        tokens = int(_OPERATIONS.get(device, _OPERATIONS_OF_DEVICES) / (8 * size))  # each is read twice, in two passes
        lengths: set[int] = set()
        for boundary, name in sorted(boundaries(self._model.config).items()):
            if boundary >= self._room:
                continue
            wanted = {boundary - 1, min(self._room, 2 * boundary + 3 if boundary <= _MAX_DOUBLED else boundary + 3)}
            if boundary > _MAX_BOUNDARY or sum(lengths | wanted) > tokens:
                self.left_out = f"sequences beyond {name} ({boundary} tokens) were not compared with plain passes"
                break
            lengths |= wanted
        lengths -= {len(prompt) for prompt in self._prompts[:2]}
        return [self._sequence(length) for length in sorted(lengths, reverse=True)]
