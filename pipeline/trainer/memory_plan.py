"""Predicts how many bytes an optimizer step takes, by running it on tensors without memory.

The model is made of its configuration, and passes and AdamW run in torch's fake mode: each operation gives tensors of
the right shape and no data, and every byte that would be allocated is counted while it lives. So a plan needs no
weights, no device and little memory, and counts everything that the model's own code keeps for the backward pass.

Only torch's tensors are counted. The process, its libraries and, on a GPU, the context and the allocator's rounding
come on top.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.logit_memory import DeviceMemory
from lachesis.pipeline.model.logprobs import PassInputs, SampledLogprobs
from lachesis.pipeline.model.tensors import merged_tensors
from lachesis.pipeline.trainer.adapters import with_adapters
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.layers import decoder_layers, recompute_layers
from lachesis.pipeline.trainer.logprob_settings import logprob_settings
from lachesis.pipeline.trainer.optimizer import has_fused_adamw
from lachesis.pipeline.trainer.step_size import WeightsBeforeStep

__all__ = ["MemoryPlan", "StepShape", "plan_memory"]


class StepShape(NamedTuple):
    """The largest micro-batch of a step: `rows` sequences of `tokens` each, one of `microbatches`."""

    rows: int
    tokens: int
    microbatches: int = 2


class MemoryPlan(NamedTuple):
    """Bytes that a step takes on a device.

    `activations` is what the peak holds beside the others: what layers keep for the backward pass, logits, temporaries,
    copies of weights and moments where a step that is too large is shortened or refused, or the weights that adapters
    are merged into once the step is taken.
    """

    weights: int
    reference: int
    gradients: int
    moments: int
    activations: int
    peak: int


def plan_memory(
    model_config: Any,
    learner: LearnerConfig,
    shape: StepShape,
    memory: DeviceMemory,
    *,
    lora: LoraConfig | None = None,
    attention: str | None = None,
    recompute: bool = False,
) -> MemoryPlan:
    """Return the memory of a run's second step, when AdamW has its moments.

    `memory`: the device, whose kind and size decide on precision and slices. `recompute`: layers are computed again.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention
        ).eval()
        if lora is not None:
            model = with_adapters(model, lora, 0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]), _LiveBytes() as live:
        _take_off_meta(model)
        reference = live.now if learner.loss.kl_coef and lora is None else 0  # a second model of the same size
        recompute_layers(model, on=recompute and bool(decoder_layers(model)))
        sampled = SampledLogprobs(model, checked=False, **logprob_settings(learner, memory.kind)._asdict())
        sampled.device_memory = lambda _: memory._replace(free=memory.total - reference - live.now)
        weights = live.now
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        fused = learner.device_kernels and has_fused_adamw(memory.kind)
        optimizer = torch.optim.AdamW(trained, fused=True if fused else None)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        gradients = live.now - weights
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        moments = live.now - weights
        live.peak = live.now
        for _ in range(min(2, shape.microbatches)):
            _pass(sampled, learner, shape)
        _move(optimizer, learner)
        optimizer.zero_grad(set_to_none=True)
        if lora is not None:
            merged_tensors(model)  # servers and checkpoints get whole weights
    held = weights + gradients + moments
    return MemoryPlan(weights, reference, gradients, moments, max(0, live.peak - held), reference + live.peak)


def _take_off_meta(model: torch.nn.Module) -> None:
    """Put tensors of the CPU in the place of those of the meta device; tied ones stay tied."""
    made: dict[int, Any] = {}

    def on_cpu(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            empty: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
            made[id(tensor)] = empty
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):  # noqa: SLF001 - where torch keeps them
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = on_cpu(tensor)


def _pass(sampled: SampledLogprobs, learner: LearnerConfig, shape: StepShape) -> None:
    """Run forward and backward over a micro-batch of which every token but the first of each row is trained."""
    tokens_BT = torch.zeros(shape.rows, shape.tokens, dtype=torch.int64)
    mask_BT = torch.ones(shape.rows, shape.tokens, dtype=torch.bool)
    given = PassInputs(positions=shape.rows * (shape.tokens - 1))
    logprobs_BT, entropy_BT = sampled(tokens_BT, learner.temperature, mask_BT, given)
    (logprobs_BT + entropy_BT).sum().backward()  # type: ignore[no-untyped-call]


def _move(optimizer: torch.optim.Optimizer, learner: LearnerConfig) -> None:
    """Take AdamW's step, with the copies that shortening or refusing it takes, as `Learner` does."""
    if learner.max_step_kl is None or learner.on_large_step == "warn":
        optimizer.step()
        return
    before = WeightsBeforeStep(optimizer, moments=learner.on_large_step == "refuse")
    optimizer.step()
    if learner.on_large_step == "shorten":
        _after = [parameter.detach().clone() for parameter in before.parameters]


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that were made within it and still live, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 - its identity
        if key not in self._seen:
            self._seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
