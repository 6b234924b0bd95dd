"""The learner: one batch in, one optimizer step, one record of it out.

Guarantees: a step changes the weights completely or not at all (a batch without trainable tokens, or with a gradient
that is not finite, raises DataError before the optimizer moves anything); the result does not depend on the
micro-batch size, nor on the number of ranks, beyond rounding; on CPU with one thread the same weights and batches give
the same bits. Of several ranks each has its share of the batch; all take the same step or raise the same error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from lachesis.pipeline.model.logprobs import PassInputs, SampledLogprobs
from lachesis.pipeline.model.tensors import has_adapters, vocabulary_of
from lachesis.pipeline.telemetry.recorder import traced
from lachesis.pipeline.training.batch import PackedBatch, pack
from lachesis.pipeline.training.config import LearnerConfig
from lachesis.pipeline.training.inputs.model_inputs import ModelInputs
from lachesis.pipeline.training.loss import LossMetrics, LossSums, loss_denominator, policy_loss
from lachesis.pipeline.training.ranks.collectives import ALONE, Ranks
from lachesis.pipeline.training.ranks.sharded import ShardedPolicy, whole
from lachesis.pipeline.training.sequences import TrainableBatch
from lachesis.pipeline.training.step_size import (
    StepProbe,
    StepSize,
    WeightsBeforeStep,
    describe_large_step,
    shorten_step,
)
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["Learner", "NonFiniteError", "StepMetrics", "train_soundly"]


class NonFiniteError(DataError):
    """Raised when a batch's loss or gradient is not finite; `Learner.non_finite_groups` says whose fault it is."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step did. Names follow `train/*` of the logs; see `LossMetrics` for the formulas."""

    step: int
    """Optimizer steps taken so far, this one included."""
    loss: float
    grad_norm: float
    """L2 norm of the batch's gradient before clipping."""
    learning_rate: float
    """That of this step, warm-up and schedule counted in."""
    step_kl: float | None
    """KL(before || after) of the step as it was taken, nats a token; None: not measured."""
    step_share: float
    """Share of the step that was taken: below 1 where it was shortened."""
    large_step: str | None
    """What to say of a step beyond `max_step_kl`, else None."""
    entropy: float
    kl: float
    kl_k1: float
    clip_fraction: float
    masked_fraction: float
    ratio_mean: float
    effective_sample_size: float
    teacher_kl_k1: float | None
    teacher_kl_topk: float | None
    reference_kl: float | None
    sequences: int
    tokens: int
    """All tokens, padding left out."""
    trainable_tokens: int
    padding: float
    """Share of the tokens computed that were padding, 0 to 1."""
    seconds: float
    """Wall time of the step."""


class _Gradient(NamedTuple):
    """What one backward pass gave: `norm` before clipping; `probe` is what the step is to be measured on; `padding` the
    share of the tokens computed that were none. All but the probe are over all ranks."""

    loss: float
    norm: float
    sums: LossSums
    probe: StepProbe | None
    padding: float
    sequences: int
    tokens: int
    trainable_tokens: int

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Learner:
    """Owns a model and its AdamW state. `steps` counts optimizer steps taken over the whole run.

    `reference` is the model that `loss.kl_coef` keeps the policy near to; it is never changed. A model with adapters
    needs none. `sharded` is what is trained where weights are spread over the `ranks`; `gather_weights` then makes
    `model` whole on rank 0.
    """

    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        *,
        steps: int = 0,
        reference: Any = None,
        ranks: Ranks = ALONE,
        sharded: ShardedPolicy | None = None,
    ) -> None:
        self.model = model
        self.reference = reference
        self.steps = steps
        self.ranks = ranks
        self.sharded = sharded
        self.trained = model if sharded is None else sharded.model
        self.inputs = ModelInputs()
        """What the model is given besides text tokens; `load_inputs` makes it for the model that is trained."""
        self.gathered: dict[str, dict[str, torch.Tensor]] | None = None
        """AdamW's state, made whole on rank 0 by `gather_optimizer` for a checkpoint; None: it was not."""
        self.device = next(self.trained.parameters()).device
        trainable = [parameter for parameter in self.trained.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable)
        self.changing: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context in which the weights change: others may compute with them outside of it."""
        self._sampled = SampledLogprobs(model) if sharded is None else sharded
        self.configure(config)

    def configure(self, config: LearnerConfig) -> None:
        """Take the steps to come with `config`; AdamW's moments stay."""
        self.config = config
        trained = sum(parameter.numel() for group in self.optimizer.param_groups for parameter in group["params"])
        self.peak_rate = config.peak_rate(trained)
        precision = torch.bfloat16 if config.uses_bfloat16(self.device.type) else torch.float32
        entropy_gradient = config.loss.entropy_coef > 0
        if (self._sampled.precision, self._sampled.entropy_gradient) != (precision, entropy_gradient):
            self._sampled = SampledLogprobs(self.model, precision, entropy_gradient=entropy_gradient)
        if config.loss.kl_coef and self.reference is None and not has_adapters(self.model):
            raise ConfigError("training.learner.loss.kl_coef is set, but the learner has no reference model")
        recompute_layers(self.trained, on=config.recompute_layers)
        for group in self.optimizer.param_groups:
            group.update(betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        return self.peak_rate * self.config.rate_factor(self.steps)

    def step(self, batch: PackedBatch) -> StepMetrics:
        """Train on `batch` once.

        Raises DataError, with weights, optimizer and torch's random state untouched, when no token is trainable, a
        token id lies outside the vocabulary, or the step is too large and such steps are refused, and `NonFiniteError`
        when loss or gradient are not finite.
        """
        started = time.perf_counter()
        self._check(batch)
        rate = self.learning_rate
        random_state = torch.get_rng_state()
        try:
            with traced("forward_backward"):
                gradient = self._gradient(batch, loss_denominator(batch, self.config.loss, self.ranks))
            if not gradient.is_finite:
                torch.set_rng_state(random_state)
                raise NonFiniteError(
                    f"loss {gradient.loss} and norm {gradient.norm} of a batch of {gradient.sequences} sequences "
                    "are not finite; the weights were left as they were. Look at the batch's logprobs and advantages."
                )
            with traced("optimizer.step"), self.changing():
                size = self._move(rate, gradient.probe)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        seconds = time.perf_counter() - started
        return self._metrics(gradient, size, rate=rate, seconds=seconds)

    def _move(self, rate: float, probe: StepProbe | None) -> StepSize | None:
        """Take the optimizer step, as far as it may go. Returns how large it was, None where that is not measured."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if probe is None or config.max_step_kl is None:
            self.optimizer.step()
            return None
        before = None
        if config.on_large_step != "warn":
            before = WeightsBeforeStep(self.optimizer, moments=config.on_large_step == "refuse")
        self.optimizer.step()
        kl = probe.kl(self._logprobs)
        size = StepSize(kl, kl)
        if before is None or kl <= config.max_step_kl:
            return size
        if config.on_large_step == "shorten":
            return shorten_step(before, probe, self._logprobs, kl, config.max_step_kl)
        before.restore()
        raise DataError(describe_large_step(size, config, rate) or "the step was too large")

    def _logprobs(self, batch: PackedBatch) -> torch.Tensor:
        with self.inputs.during(batch):
            return self._sampled(batch.tokens_BT, self.config.temperature, batch.mask_BT, self.inputs.of(batch))[0]

    def _policy_logprobs(
        self, micro: PackedBatch, given: PassInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return logprobs, entropies and, where the loss needs them, those of the teacher's likeliest tokens."""
        config, ids_BTK = self.config, micro.teacher_ids_BTK
        if config.loss.teacher_kl == "sampled" or ids_BTK is None:
            return *self._sampled(micro.tokens_BT, config.temperature, micro.mask_BT, given), None
        return self._sampled.with_alternatives(micro.tokens_BT, config.temperature, micro.mask_BT, ids_BTK, given)

    def _reference_logprobs(self, micro: PackedBatch, given: PassInputs) -> torch.Tensor | None:
        """Return those of the reference model, which routes its own way; None: the loss needs none."""
        if not self.config.loss.kl_coef:
            return None
        with torch.no_grad():
            if self.reference is None:
                with self.model.disable_adapter():
                    return self._sampled(micro.tokens_BT, self.config.temperature, micro.mask_BT, given)[0]
            sampled = SampledLogprobs(self.reference, self._sampled.precision)
            return sampled(micro.tokens_BT, self.config.temperature, micro.mask_BT, given)[0]

    def non_finite_groups(self, batch: PackedBatch) -> list[str]:
        """Return the groups of all ranks whose loss or gradient is not finite by itself, in their order.

        One forward and backward pass for each; weights, optimizer and torch's random state stay as they are.
        """
        found, denominator = [], loss_denominator(batch, self.config.loss, self.ranks)
        random_state = torch.get_rng_state()
        groups = self.ranks.gather(msgspec.json.encode(batch.group_ids))
        for group in dict.fromkeys(name for names in groups for name in msgspec.json.decode(names, type=list[str])):
            try:
                gradient = self._gradient(batch.of_group(group), denominator)
            finally:
                self.optimizer.zero_grad(set_to_none=True)
                torch.set_rng_state(random_state)
            if not gradient.is_finite:
                found.append(group)
        return found

    def _gradient(self, batch: PackedBatch, denominator: int) -> _Gradient:
        """Add the gradient of the batch of all ranks to the model's parameters, clipped."""
        loss, padded, before_BT = 0.0, 0, torch.zeros(batch.tokens_BT.shape)
        totals = torch.zeros(len(LossSums._fields), dtype=torch.float64, device=self.device)
        for rows_b, part in self._microbatches(batch):
            micro = part.to(self.device)
            padded += micro.tokens_BT.numel()
            given = self.inputs.of(micro)
            reference_BT = self._reference_logprobs(micro, given)
            with self.inputs.during(micro):
                logprobs_BT, entropy_BT, others_BTC = self._policy_logprobs(micro, given)
                if len(rows_b):
                    before_BT[rows_b, : micro.tokens_BT.shape[1]] = logprobs_BT.detach().cpu()
                output = policy_loss(
                    logprobs_BT,
                    entropy_BT,
                    micro,
                    self.config.loss,
                    denominator=denominator,
                    reference_BT=reference_BT,
                    others_BTC=others_BTC,
                )
                self._backward(output.loss)
            loss += output.loss.item()
            totals += torch.stack(output.sums)
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.sharded is None:
            self.ranks.sum_gradients(trained)
        grad_norm = whole(torch.nn.utils.clip_grad_norm_(trained, self.config.grad_clip)).item()
        counted = (loss, padded, batch.sequences, int(batch.lengths_B.sum()), batch.trainable_tokens)
        loss, computed, sequences, tokens, trainable, *sums = self.ranks.sum([*counted, *totals.tolist()])
        probe = None if self.config.max_step_kl is None else StepProbe.of(batch, before_BT, self.device, self.ranks)
        return _Gradient(
            loss,
            grad_norm,
            LossSums(*(torch.tensor(value, dtype=torch.float64) for value in sums)),
            probe,
            1 - tokens / computed,
            sequences=int(sequences),
            tokens=int(tokens),
            trainable_tokens=int(trainable),
        )

    def _microbatches(self, batch: PackedBatch) -> Iterator[tuple[torch.Tensor, PackedBatch]]:
        """Yield the micro-batches, and idle ones until each rank has had as many: a sharded pass needs all ranks."""
        parts = batch.microbatches(self.config.max_tokens_per_microbatch)
        if self.sharded is None:
            yield from parts
            return
        own = list(parts)
        idle = self.ranks.largest(len(own)) - len(own)  # before the first pass, which is a collective too
        yield from own
        for _ in range(idle):
            yield torch.empty(0, dtype=torch.int64), PackedBatch.idle()

    def _backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch; a sharded model divides it by the number of ranks, where a sum is due."""
        scaled = loss if self.sharded is None else loss * self.ranks.size
        scaled.backward()  # type: ignore[no-untyped-call]

    def _check(self, batch: PackedBatch) -> None:
        sequences, trainable = self.ranks.sum([batch.sequences, batch.trainable_tokens])
        if not trainable:
            raise DataError(f"a batch of {sequences:g} sequences has no trainable token.")
        vocabulary, highest = vocabulary_of(self.model), self.ranks.largest(int(batch.tokens_BT.max()))
        if vocabulary is not None and highest >= vocabulary:
            raise DataError(
                f"the batch holds token id {highest}, the model knows {vocabulary}; "
                "rollouts and trainer must use the same tokenizer."
            )

    def _metrics(
        self,
        gradient: _Gradient,
        size: StepSize | None,
        *,
        rate: float,
        seconds: float,
    ) -> StepMetrics:
        metrics = LossMetrics.from_sums(gradient.sums)._asdict()
        return StepMetrics(
            step=self.steps,
            loss=gradient.loss,
            grad_norm=gradient.norm,
            padding=gradient.padding,
            learning_rate=rate,
            step_kl=None if size is None else size.kl,
            step_share=1.0 if size is None else size.share,
            large_step=None if size is None else describe_large_step(size, self.config, rate),
            sequences=gradient.sequences,
            tokens=gradient.tokens,
            trainable_tokens=gradient.trainable_tokens,
            seconds=seconds,
            **metrics,
        )


def train_soundly(
    learner: Learner, selected: TrainableBatch, pad_id: int
) -> tuple[TrainableBatch, StepMetrics, PackedBatch]:
    """Take the optimizer step on what was selected, without groups whose own gradient is not finite.

    Return what was trained, the step's metrics and the tensors. Raises `DataError` where nothing can be trained.
    Of several ranks each has the sequences of its share, and the `refs` of all.
    """
    packed = _packed(learner, selected, pad_id)
    try:
        return selected, learner.step(packed), packed
    except NonFiniteError:
        unsound = learner.non_finite_groups(packed)
        if not unsound or len(unsound) == len(selected.refs):
            raise
    selected = selected.without(dict.fromkeys(unsound, "its loss or gradient by itself is not finite"))
    packed = _packed(learner, selected, pad_id)
    return selected, learner.step(packed), packed


def _packed(learner: Learner, selected: TrainableBatch, pad_id: int) -> PackedBatch:
    if not selected.sequences and learner.ranks.size > 1:
        return PackedBatch.idle()
    return pack(selected.sequences, pad_id=pad_id)


def recompute_layers(model: Any, *, on: bool) -> None:
    """Recompute layers in the backward pass, so that only their inputs stay in memory.

    Raises `ConfigError` when the model has no layers that can. Dropout stays off: of its modules only the layers
    themselves, which have none of their own, count as training.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if on and not layers:
        raise ConfigError(
            f"training.learner.recompute_layers: {type(model).__name__} has no layers that can be computed again"
        )
    for layer in layers:
        layer.training = layer.gradient_checkpointing = on
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer._gradient_checkpointing_func = again  # noqa: SLF001 - what its documentation asks for
