"""Decides whether sequences are computed in one row, without padding.

Guarantees that this happens only if it gives the same results as padded rows. Two conditions must hold: in the model's
form only attention mixes the tokens of a row, and a comparison on a few short rows finds the same logprobs and
gradients. One condition is not enough: a comparison does not show a part that starts at zero, and the form does not
show how the model is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.errors import UnsupportedError
from lachesis.pipeline.model.device import lacks_deterministic_form
from lachesis.pipeline.model.packed_attention import install_packed_attention
from lachesis.pipeline.model.packed_form import why_no_trees, why_padded_by_form
from lachesis.pipeline.model.tensors import vocabulary_of
from lachesis.pipeline.trainer.collectives import ALONE, Ranks
from lachesis.pipeline.trainer.config import INPUTS_FOR_ONE_ROW, ModelInputConfig
from lachesis.pipeline.trainer.memory import is_out_of_memory
from lachesis.pipeline.trainer.packed_batch import PackedBatch
from lachesis.schemas.errors import ConfigError

__all__ = [
    "COMPARED_TOKENS",
    "PackingChoice",
    "choose_packing",
    "choose_trees",
    "describe_packing",
    "in_float32",
    "predict_packing",
]

log = logging.getLogger("lachesis")

_LENGTHS = (4, 6, 3)
COMPARED_TOKENS = sum(_LENGTHS)
"""Tokens of the rows that are compared."""
_DRAWS = 3
"""A router of experts that is near a tie may pick others for a rounding's sake: then other tokens are taken."""
_SAMPLED_VALUES = 64
_TOLERANCE = 1e-3
"""Part of the spread of logprobs, and of a gradient's size, that counts as rounding in float32."""
_LOGPROB_ROUNDING = 3e-6
"""The same, as a part of the logprobs themselves."""


class PackingChoice(NamedTuple):
    """Whether rows are packed, and the reason where they are not; None: the setting says so."""

    packs: bool
    why_padded: str | None = None


def describe_packing(choice: PackingChoice) -> str:
    """Say how rows are computed."""
    if choice.packs:
        return "the rows of a micro-batch are computed as one, without padding"
    reason = choice.why_padded or "training.learner.packing is false"
    return f"the rows of a micro-batch are padded: {reason}"


def choose_trees(model: Any, *, has_inputs: bool) -> bool:
    """Decide whether packed rows of the model share the tokens with which they begin alike, and log it."""
    reason = "training.inputs has one for each row" if has_inputs else why_no_trees(model)
    if reason is None:
        log.info("rows of a group compute the tokens with which they begin alike once")
    else:
        log.info("each row computes all its tokens, also those with which others begin: %s", reason)
    return reason is None


def predict_packing(setting: bool | Literal["auto"], model: Any, inputs: Sequence[ModelInputConfig]) -> str:
    """Say how a trainer will compute rows, as far as the settings and the model's form determine it."""
    padding = next((one.input for one in inputs if one.input not in INPUTS_FOR_ONE_ROW), None)
    reason = why_padded_by_form(model) if padding is None else needs_padded_rows(padding)
    if setting is False or reason is not None:
        return describe_packing(PackingChoice(packs=False, why_padded=None if setting is False else reason))
    return f"{describe_packing(PackingChoice(packs=True))}, if a comparison at the trainer's start finds no difference"


def needs_padded_rows(name: str) -> str:
    """Return the reason that an input of `training.inputs` gives."""
    return f"{name} of training.inputs takes padded rows"


def choose_packing(
    setting: bool | Literal["auto"],
    models: tuple[Any, Any],
    logprobs: Callable[[PackedBatch], torch.Tensor],
    *,
    needs: str | None,
    ranks: Ranks = ALONE,
) -> PackingChoice:
    """Decide for the model that is trained and its reference, if any, and make them fit.

    A collective. `logprobs`: from a batch to those of its tokens, with gradient, in float32. `needs`: the input of
    `training.inputs` that needs padded rows. Raises `ConfigError` where the setting demands what the model cannot.
    """
    trained, reference = models
    reason = None
    if setting is not False:
        reason = why_padded_by_form(trained) if needs is None else needs_padded_rows(needs)
        reason = reason or _difference(trained, logprobs, ranks)
    choice = PackingChoice(packs=setting is not False and reason is None, why_padded=reason)
    for model in (trained, reference):
        if model is not None:
            install_packed_attention(model, on=choice.packs)
    if setting is True and not choice.packs:
        raise ConfigError(f'training.learner.packing is true, but {reason}; set "auto" or false')
    log.info("%s", describe_packing(choice))
    return choice


@contextmanager
def in_float32(sampled: Any) -> Iterator[None]:
    """Let logprobs be computed in float32."""
    precision, sampled.precision = sampled.precision, torch.float32
    try:
        yield
    finally:
        sampled.precision = precision


def _difference(model: Any, logprobs: Callable[[PackedBatch], torch.Tensor], ranks: Ranks) -> str | None:
    """Return how a pass in one row differs from one over padded rows; None: it does not.

    Raises what means that memory ran out, on all ranks where it does on one.
    """
    found = None
    for seed in range(_DRAWS):
        memory: Exception | None = None
        try:
            with _own_gradients(model):
                found = _compare(model, logprobs, _drawn(model, seed))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            memory = error
        of_ranks = [msgspec.json.decode(one) for one in ranks.gather(msgspec.json.encode((found, memory is not None)))]
        if any(ran_out for _, ran_out in of_ranks):
            raise memory or MemoryError("another rank has no memory for a comparison of rows in one with padded ones")
        found = next((one for one, _ in of_ranks if one), None)
        if found is None:
            return None
    return f"{type(model).__name__} {found}"


def _compare(model: Any, logprobs: Callable[[PackedBatch], torch.Tensor], batch: PackedBatch) -> str | None:
    padded = _Fingerprint.of(model, logprobs, batch)
    try:
        install_packed_attention(model, on=True)
        packed = _Fingerprint.of(model, logprobs, batch.on(batch.tokens_BT.device, in_one_row=True))
    except UnsupportedError as error:
        return f"cannot: {error}"
    except Exception as error:  # the model's own code, with rows that it was not made for
        if is_out_of_memory(error) or lacks_deterministic_form(error):
            raise
        return f"fails with rows in one: {error_text(error)}"[:300]
    difference = padded.difference(packed)
    return None if difference is None else f"computes something else with rows in one: {difference}"


def _drawn(model: Any, seed: int) -> PackedBatch:
    """Return a few short rows of random tokens, every one but the first trained."""
    draw = torch.Generator().manual_seed(seed)
    rows, width = len(_LENGTHS), max(_LENGTHS)
    at_T, lengths_B = torch.arange(width), torch.tensor(_LENGTHS)
    idle = PackedBatch.idle()
    there_BT = at_T < lengths_B[:, None]
    tokens_BT = torch.randint(0, min(vocabulary_of(model) or 8, 1 << 30), (rows, width), generator=draw)
    batch = replace(
        idle,
        tokens_BT=tokens_BT * there_BT,
        mask_BT=there_BT & (at_T > 0),
        advantages_BT=torch.randn(rows, width, generator=draw),
        lengths_B=lengths_B,
        sample_tokens_B=lengths_B - 1,
        sample_sequences_B=torch.ones_like(lengths_B),
        group_ids=("",) * rows,
        samples=tuple(range(rows)),
    )
    return batch.to(next(model.parameters()).device)


@contextmanager
def _own_gradients(model: Any) -> Iterator[None]:
    """Leave the gradients of the model as they were."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


class _Fingerprint(NamedTuple):
    """What a pass gave: logprobs under the mask, and of each weight's gradient the norm and some values."""

    logprobs_N: torch.Tensor
    gradients: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, model: Any, logprobs: Callable[[PackedBatch], torch.Tensor], batch: PackedBatch) -> _Fingerprint:
        for parameter in model.parameters():
            parameter.grad = None
        found_BT = logprobs(batch)
        (found_BT * batch.advantages_BT)[batch.mask_BT].sum().backward()  # type: ignore[no-untyped-call]
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            values = local.flatten()
            if len(values):
                some = values[:: -(-len(values) // _SAMPLED_VALUES)].clone()
                gradients[name] = (torch.linalg.vector_norm(values), some)
            parameter.grad = None
        return cls(found_BT.detach()[batch.mask_BT], gradients)

    def difference(self, other: _Fingerprint) -> str | None:
        """Return by what another differs beyond rounding; None: it does not."""
        apart = (self.logprobs_N - other.logprobs_N).abs().max()
        allowed = _TOLERANCE * self.logprobs_N.std() + _LOGPROB_ROUNDING * self.logprobs_N.abs().max()
        if not apart <= allowed:
            return f"logprobs are up to {float(apart):.2g} nats apart"
        total = torch.stack([norm for norm, _ in self.gradients.values()]).norm()
        for name, (norm, some) in self.gradients.items():
            theirs = other.gradients.get(name)
            if theirs is None or not (norm - theirs[0]).abs() <= _TOLERANCE * norm + _TOLERANCE**2 * total:
                return f"the gradient of {name} is another"
            if not (some - theirs[1]).abs().max() <= _TOLERANCE * norm + _TOLERANCE**2 * total:
                return f"the gradient of {name} is another"
        return None
