"""The learner: takes one optimizer step for a batch and returns a record of the step.

Guarantees: a step changes the weights completely or not at all (a batch without trainable tokens, or with a gradient
that is not finite, raises DataError before the optimizer moves anything); the result does not depend on the micro-batch
size, nor on the number of ranks, beyond rounding; on CPU with one thread the same weights and batches give the same
bits. With several ranks each has its share of the batch; all take the same step or raise the same error. If a pass runs
out of memory, the step begins again from the same weights in smaller micro-batches, and later steps keep the smaller
size. Between the first pass and the optimizer the processor never waits for a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import torch

from lachesis.pipeline.common.machine_memory import give_back_memory
from lachesis.pipeline.errors import OutOfMemoryError
from lachesis.pipeline.model.logprobs import PassInputs, SampledLogprobs
from lachesis.pipeline.model.tensors import has_adapters, vocabulary_of
from lachesis.pipeline.telemetry.recorder import traced
from lachesis.pipeline.trainer.collectives import ALONE, Ranks
from lachesis.pipeline.trainer.compile_watch import CompileWatch
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.gradient import BatchGradient, BatchPasses
from lachesis.pipeline.trainer.inputs.model_inputs import ModelInputs
from lachesis.pipeline.trainer.layers import compile_layers, decoder_layers, recompute_layers
from lachesis.pipeline.trainer.logprob_settings import logprob_settings
from lachesis.pipeline.trainer.loss import LossMetrics, LossOutput, LossSums, loss_denominator, policy_loss
from lachesis.pipeline.trainer.memory import (
    RandomState,
    allocator_retries,
    how_to_save_memory,
    is_out_of_memory,
    raise_out_of_memory,
    release_memory,
    shortage_of,
)
from lachesis.pipeline.trainer.mismatch_by_env import summed_by
from lachesis.pipeline.trainer.mismatch_sums import MISMATCH_SUMS, mismatch_sums
from lachesis.pipeline.trainer.optimizer import has_fused_adamw, place_step_counters
from lachesis.pipeline.trainer.packed_batch import PackedBatch, move_tensor
from lachesis.pipeline.trainer.packing import COMPARED_TOKENS, PackingChoice, choose_packing, choose_trees, in_float32
from lachesis.pipeline.trainer.sharded_policy import ShardedPolicy, whole
from lachesis.pipeline.trainer.step_memory_fit import FailedPass, FitWish, StepFit, describe_fit
from lachesis.pipeline.trainer.step_metrics import StepMetrics
from lachesis.pipeline.trainer.step_size import (
    StepProbe,
    StepSize,
    WeightsBeforeStep,
    describe_large_step,
    is_measured,
    probe_tokens,
    shorten_step,
)
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["Learner", "NonFiniteError"]


class NonFiniteError(DataError):
    """Raised when a batch's loss or gradient is not finite; `Learner.non_finite_groups` says whose fault it is."""


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
        """The model's inputs other than text tokens; `load_inputs` makes them for the model that is trained."""
        self.gathered: dict[str, dict[str, torch.Tensor]] | None = None
        """AdamW's state, made whole on rank 0 by `gather_optimizer` for a checkpoint; None: it was not."""
        self.device = next(self.trained.parameters()).device
        trainable = [parameter for parameter in self.trained.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable)
        self.changing: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context in which the weights change: others may compute with them outside of it."""
        self.config, self.fit = config, self._fit_of(config)
        self._next_fit: StepFit | None = None
        self.spares_memory = True
        """Whether steps are divided by the memory that those before left; recorded ones are taken as they were."""
        self.passed: tuple[int, int, int] | None = None
        """Of the step under way: the sequences that are through, those with the ones that are computed now, and all.

        None: no step is under way. Other threads read it.
        """
        self._last_size: StepSize | None = None
        self._compiling = CompileWatch()
        self.packing: PackingChoice | None = None
        """Whether rows are computed in one, without padding; None: no step has needed to know yet."""
        self._trees: bool | None = None
        """Whether rows of a group may share the tokens with which they begin; None: no step has needed to know yet."""
        self._sampled = SampledLogprobs(model) if sharded is None else sharded
        self.configure(config)

    def configure(self, config: LearnerConfig) -> None:
        """Take later steps with `config`; AdamW's moments stay.

        The division that fitted into memory stays too, if the settings that determine it are the same.
        """
        if self._fit_of(config) != self._fit_of(self.config):
            self.fit, self._next_fit = self._fit_of(config), None
        if config.packing != self.config.packing:
            self.packing = None
        self.config = config
        trained = sum(parameter.numel() for group in self.optimizer.param_groups for parameter in group["params"])
        self.peak_rate = config.peak_rate(trained)
        settings = logprob_settings(config, self.device.type)
        if self._sampled.settings != settings:
            self._sampled = SampledLogprobs(self.model, **settings._asdict())
        if config.loss.kl_coef and self.reference is None and not has_adapters(self.model):
            raise ConfigError("training.learner.loss.kl_coef is set, but the learner has no reference model")
        recompute_layers(self.trained, on=self.fit.recomputes)
        compile_layers(self.trained, on=config.compile, device=self.device.type)
        for group in self.optimizer.param_groups:
            group.update(
                betas=(config.beta1, config.beta2),
                weight_decay=config.weight_decay,
                fused=True if config.device_kernels and has_fused_adamw(self.device.type) else None,
            )

    def _fit_of(self, config: LearnerConfig) -> StepFit:
        tokens, recompute = config.microbatch_tokens(self.device.type), config.recompute_layers
        return StepFit.of(tokens, recompute, can_recompute=bool(decoder_layers(self.trained)))

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        return self.peak_rate * self.config.rate_factor(self.steps)

    def step(self, batch: PackedBatch) -> StepMetrics:
        """Train on `batch` once.

        Raises DataError, with weights, optimizer and torch's random state untouched, when no token is trainable, a
        token id lies outside the vocabulary, or the step is too large and such steps are refused, and `NonFiniteError`
        when loss or gradient are not finite. `OutOfMemoryError` where the step does not fit into memory, however it is
        divided: the process has to end then, since AdamW may have moved some weights already.
        """
        if not self.config.compile:
            return self._step(batch)
        self._compiling.begin()
        try:
            return self._step(batch)
        finally:
            self._compiling.end()

    def _step(self, batch: PackedBatch) -> StepMetrics:
        started = time.perf_counter()
        self.fit, self._next_fit = self._next_fit or self.fit, None
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
            with traced("optimizer.step"), self.changing(), self._raise_out_of_memory("an optimizer step"):
                size = self._move(rate, gradient.probe)
            self._last_size = size or self._last_size
        finally:
            self.passed = None
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cpu":
                give_back_memory()  # another thread, with blocks of its own, may take the next step
        self.steps += 1
        seconds = time.perf_counter() - started
        return self._metrics(batch, gradient, size, rate=rate, seconds=seconds)

    def _move(self, rate: float, probe: StepProbe | None) -> StepSize | None:
        """Take the optimizer step, as far as it may go. Returns how large it was, None where that is not measured."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        place_step_counters(self.optimizer)
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
        given = self.inputs.of(batch)._replace(rows=batch.in_one_row)
        with self.inputs.during(batch):
            return self._sampled(batch.tokens_BT, self.config.temperature, batch.mask_BT, given)[0]

    def _packs(self) -> bool:
        """Return whether rows are computed in one; the first call decides it, and is a collective."""
        if self.packing is None:
            models = (self.trained, self.reference)
            # what is compared takes a few tokens: compiled layers would be made for their sizes
            with in_float32(self._sampled), torch.compiler.set_stance("force_eager"):
                self.packing = choose_packing(
                    self.config.packing, models, self._logprobs, needs=self.inputs.needs_padding, ranks=self.ranks
                )
        return self.packing.packs

    def _form(self) -> dict[str, bool]:
        """Return the form in which the model sees rows, for `PackedBatch.on`."""
        packs = self._packs()
        if self._trees is None and packs and self.config.pack_trees:
            self._trees = choose_trees(self.trained, has_inputs=bool(self.inputs))
        return {"in_one_row": packs, "always": self.config.compile, "trees": bool(self._trees)}

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
            settings = self._sampled.settings
            sampled = SampledLogprobs(self.reference, settings.precision, float32_head=settings.float32_head)
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

    def _gradient(self, batch: PackedBatch, denominator: int) -> BatchGradient:
        """Add the gradient of the batch of all ranks to the model's parameters, clipped."""
        passes = self._fitting_passes(batch, denominator)
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.sharded is None:
            with self._raise_out_of_memory("the sum of the ranks' gradients"):
                self.ranks.sum_gradients(trained)
        norm = whole(torch.nn.utils.clip_grad_norm_(trained, self.config.grad_clip))
        # the one time that the processor waits for the device
        summed = torch.stack([norm.double(), passes.loss, *passes.totals])
        grad_norm, loss, *totals = torch.cat([summed, passes.mismatches_BS.flatten()]).tolist()
        totals, mismatches = totals[: len(passes.totals)], totals[len(passes.totals) :]
        counted = (loss, passes.padded, batch.sequences, int(batch.lengths_B.sum()), batch.trainable_tokens)
        loss, computed, sequences, tokens, trainable, *sums = self.ranks.sum([*counted, *totals])
        probe = None
        if is_measured(self.config, self.steps, self._last_size):
            on = probe_tokens(self.config, padded=int(computed))
            probe = StepProbe.of(batch, passes.before_BT, self.device, self.ranks, tokens=on, **self._form())
        return BatchGradient(
            loss,
            grad_norm,
            LossSums(*(torch.tensor(value, dtype=torch.float64) for value in sums)),
            [mismatches[first : first + MISMATCH_SUMS] for first in range(0, len(mismatches), MISMATCH_SUMS)],
            probe,
            max(0.0, 1 - tokens / computed),
            max(0.0, 1 - computed / tokens),
            sequences=int(sequences),
            tokens=int(tokens),
            trainable_tokens=int(trainable),
        )

    def _fitting_passes(self, batch: PackedBatch, denominator: int) -> BatchPasses:
        """Run the passes, in smaller micro-batches or with layers computed again until they fit on all ranks.

        Raises `OutOfMemoryError` where they never do.
        """
        random_state = RandomState.now(self.device)
        while True:
            retries = allocator_retries(self.device)
            passes, failed = self._passes(batch, denominator)
            wish = self.fit.wish_after(failed, self._memory_help())
            if passes is not None and self.spares_memory and allocator_retries(self.device) > retries:
                wish = msgspec.structs.replace(wish, is_tight=True)
            wishes = [msgspec.json.decode(one, type=FitWish) for one in self.ranks.gather(msgspec.json.encode(wish))]
            if passes is not None and all(one.is_content for one in wishes):
                longest = self.ranks.largest(batch.tokens_BT.shape[1])
                if self.spares_memory:
                    self._next_fit = self.fit.after_step(wishes, longest, may_grow=self.sharded is None)
                return passes
            passes = None
            self.optimizer.zero_grad(set_to_none=True)
            release_memory(self.device)
            random_state.restore()
            self.fit = self.fit.after(wishes)
            recompute_layers(self.trained, on=self.fit.recomputes)

    def _passes(self, batch: PackedBatch, denominator: int) -> tuple[BatchPasses | None, FailedPass | None]:
        """Run forward and backward passes; return their results, or the pass that ran out of memory."""
        rows, tokens = 1, COMPARED_TOKENS
        try:
            form = self._form()
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            totals = torch.zeros(len(LossSums._fields), dtype=torch.float64, device=self.device)
            mismatches_BS = torch.zeros(batch.sequences, MISMATCH_SUMS, dtype=torch.float64, device=self.device)
            before_BT, padded = torch.zeros(batch.tokens_BT.shape, device=self.device), 0
            passed = 0
            for rows_b, part in self._microbatches(batch):
                rows, width = part.tokens_BT.shape
                self.passed = passed, passed + len(rows_b), batch.sequences
                micro = part.on(self.device, **form)
                tokens = micro.computed_tokens
                padded += tokens
                passed += len(rows_b)
                output, logprobs_BT = self._pass(micro, part.trainable_tokens, denominator)
                if len(rows_b):
                    on_device_b = move_tensor(rows_b, self.device)
                    before_BT[on_device_b, :width] = logprobs_BT
                    mismatches_BS[on_device_b] = mismatch_sums(logprobs_BT, micro)
                loss += output.loss.detach()
                totals += torch.stack(output.sums)
            return BatchPasses(loss, totals, mismatches_BS, before_BT, padded), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            found = shortage_of(error, self.device)
        if self.sharded is not None:  # others wait in a collective of this pass, and cannot begin again
            raise OutOfMemoryError(
                f"a micro-batch of {tokens:,} tokens does not fit into memory: {found}. What helps: "
                f"training.learner.max_tokens_per_microbatch = {max(1, tokens // 2)}; or {self._memory_help()}"
            )
        return None, FailedPass(rows=rows, tokens=tokens, shortage=str(found))

    def _pass(self, micro: PackedBatch, trainable: int, denominator: int) -> tuple[LossOutput, torch.Tensor]:
        """Add the gradient of a micro-batch; return its loss and statistics, and its logprobs [B,T]."""
        given = self.inputs.of(micro)._replace(positions=trainable, rows=micro.in_one_row)
        reference_BT = self._reference_logprobs(micro, given)
        with self.inputs.during(micro):
            logprobs_BT, entropy_BT, others_BTC = self._policy_logprobs(micro, given)
            output = policy_loss(
                logprobs_BT,
                entropy_BT,
                micro,
                self.config.loss,
                denominator=denominator,
                reference_BT=reference_BT,
                others_BTC=others_BTC,
            )
            # a sharded model divides the gradient by the number of ranks, where a sum is due
            (output.loss * (1 if self.sharded is None else self.ranks.size)).backward()  # type: ignore[no-untyped-call]
        return output, logprobs_BT.detach()

    def _raise_out_of_memory(self, what: str) -> AbstractContextManager[None]:
        return raise_out_of_memory(self.device, what, self._memory_help())

    def _memory_help(self) -> str:
        sharded, adapters = self.sharded is not None, has_adapters(self.model)
        return how_to_save_memory(recomputes=self.fit.recomputes, adapters=adapters, sharded=sharded)

    def _microbatches(self, batch: PackedBatch) -> Iterator[tuple[torch.Tensor, PackedBatch]]:
        """Yield the micro-batches, and idle ones until each rank has had as many: a sharded pass needs all ranks."""
        tokens, form = self.fit.tokens, self._form()
        parts = batch.microbatches(tokens)
        if form["in_one_row"]:
            parts = batch.microbatches_of_tokens(tokens, by_group=form["trees"])
        if self.sharded is None:
            yield from parts
            return
        own = list(parts)
        idle = self.ranks.largest(len(own)) - len(own)  # before the first pass, which is a collective too
        yield from own
        for _ in range(idle):
            yield torch.empty(0, dtype=torch.int64), PackedBatch.idle()

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
        self, batch: PackedBatch, gradient: BatchGradient, size: StepSize | None, *, rate: float, seconds: float
    ) -> StepMetrics:
        metrics = LossMetrics.from_sums(gradient.sums)._asdict()
        return StepMetrics(
            step=self.steps,
            loss=gradient.loss,
            grad_norm=gradient.norm,
            padding=gradient.padding,
            shared=gradient.shared,
            learning_rate=rate,
            step_kl=None if size is None else size.kl,
            step_share=1.0 if size is None else size.share,
            large_step=None if size is None else describe_large_step(size, self.config, rate),
            sequences=gradient.sequences,
            tokens=gradient.tokens,
            trainable_tokens=gradient.trainable_tokens,
            seconds=seconds,
            microbatch_tokens=self.fit.tokens,
            packed=self._packs(),
            memory=describe_fit(self.fit, self.config.recompute_layers),
            mismatches=summed_by(batch.group_ids, gradient.mismatches),
            **metrics,
        )
