"""Plans the memory of a run's optimizer step, beside the bytes of a device, and names what helps.

Beside the step a trainer holds copies in main memory, of the weights that it publishes and of what a checkpoint is made
of, while the next step is taken. On a CPU they count as part of what the step takes.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lachesis.pipeline.config.run import THIS_MACHINE, RunConfig
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.free_memory import free_bytes
from lachesis.pipeline.model.logit_memory import DeviceMemory
from lachesis.pipeline.model.pretrained_tokenizer import find_named
from lachesis.pipeline.model.source import ModelSource, cannot_load
from lachesis.pipeline.trainer.memory_plan import MemoryPlan, StepShape, plan_memory
from lachesis.pipeline.trainer.packing import predict_packing
from lachesis.schemas.errors import ConfigError

__all__ = ["StepPlan", "copied_bytes", "plan_step", "step_shape"]

_PROCESS_BYTES = {"cpu": 500_000_000, "cuda": 1_000_000_000}
"""Memory of a trainer beyond its tensors: some 450 MB of libraries on a CPU; on a GPU its context, a guess."""
_GPU_NOTE = (
    "not measured on a GPU by this command; recorded peaks of four steps on an H100 were 8 % less to 2 % more. "
    "An inference server on the same device needs memory of its own"
)
_BY_ITSELF = " (the trainer comes to it by itself)"
"""On a CPU it does not, as a rule: Linux ends a process instead of refusing it memory."""
_KEPT_SHARE = {"cpu": 0.6, "cuda": 0.0}
"""What glibc keeps of blocks that a step has freed, of the bytes that a step takes at most: .23 to .6, as measured."""
_CPU_NOTE = (
    "kept: resident memory grew by 23 to 60 % more than the tensors of a step take, as it was measured; with "
    "MALLOC_MMAP_THRESHOLD_=65536 in the environment by what they take, within a tenth"
)
_VERSIONS_HELD = {"files": (1, 0), "nats": (2, 2), "shared_memory": (0, 0)}
"""Versions of the weights in the trainer's memory to publish them: copies (nats: the version before, too), and at most
so many times the bytes of one while it is coded."""
_DEFAULT_LENGTH = 1024


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a step takes. `available` are the bytes of the device; None: not known."""

    model: str
    device: str
    parts: dict[str, int]
    total: int
    available: int | None
    microbatch_tokens: int
    text: str
    cures: list[str]
    notes: list[str]

    @property
    def fits(self) -> bool:
        """Whether the device has as many bytes; also where it is not known how many."""
        return self.available is None or self.total <= self.available


def plan_step(config: RunConfig, *, model: str | None, device: str | None, memory: float | None) -> StepPlan:
    """Return the plan of a run's step. `memory`: of a device that is not here, in 10^9 bytes.

    Raises `ConfigError` where there is no such model or device, or the settings cannot be planned.
    """
    name = model or config.model
    if name is None:
        raise ConfigError("no model is named: give --model, or a configuration that has one")
    if config.training.sharding == "full":
        raise ConfigError('training.sharding is "full", which a plan does not know yet: plan it with "none"')
    if config.training.backend != THIS_MACHINE:
        raise ConfigError(f"training.backend is {config.training.backend}: that machine's memory is not ours to plan")
    kind, available = _device(device or config.training.device, memory)
    model_config = _model_config(name)
    shape = step_shape(config, config.training.learner.microbatch_tokens(kind))
    found = _planned(config, model_config, kind, available, shape)
    total = _total(config, kind, found)
    copies, kept = _copies(config, kind, found), _kept(kind, found)
    parts = {**found._asdict(), "kept": kept, "copies": copies, "process": _PROCESS_BYTES[kind]}
    del parts["peak"]
    fits = available is None or total <= available
    text = (
        f"a step of {name} on {kind}, with {shape.rows} sequences of {shape.tokens:,} tokens in a micro-batch, takes "
        f"{total:,} bytes; "
    )
    if available is None:
        text += "how many there are is not known: say it with --memory"
    else:
        text += f"there are {available:,}: " + ("it fits" if fits else f"{total - available:,} are missing")
    cures = [] if fits or available is None else list(_cures(config, model_config, kind, available))
    if not fits and not cures:
        cures = ["nothing that a setting does makes it fit: take a smaller model, or a device with more memory"]
    return StepPlan(
        model=name, device=kind, parts=parts, total=total, available=available,
        microbatch_tokens=shape.rows * shape.tokens, text=text, cures=cures,
        notes=[_rows_note(config, model_config), *_notes(config, kind, found)],
    )  # fmt: skip


def step_shape(config: RunConfig, max_tokens: int) -> StepShape:
    """Return the largest micro-batch of a run, of the longest sequences that its environments allow."""
    lengths = [environment.longest_tokens for environment in config.environments.values()]
    longest, sequences = max(lengths, default=_DEFAULT_LENGTH), config.batching.batch_size
    rows = min(sequences, max(1, max_tokens // longest))
    return StepShape(rows, longest, math.ceil(sequences / rows))


def _planned(
    config: RunConfig,
    model_config: Any,
    kind: str,
    available: int | None,
    shape: StepShape,
    *,
    recompute: bool = False,
    lora: LoraConfig | None = None,
) -> MemoryPlan:
    training = config.training
    return plan_memory(
        model_config,
        training.learner,
        shape,
        DeviceMemory(kind, available or 0, available or 0),
        lora=lora or training.lora,
        attention=None if training.attention == "auto" else training.attention,
        recompute=recompute or training.learner.recompute_layers is True,
    )


def _total(config: RunConfig, kind: str, found: MemoryPlan) -> int:
    """Return all bytes that a trainer takes on the device."""
    return found.peak + _kept(kind, found) + _copies(config, kind, found) + _PROCESS_BYTES[kind]


def _kept(kind: str, found: MemoryPlan) -> int:
    """Return what the C library keeps of freed blocks beside what a step takes."""
    return round(_KEPT_SHARE[kind] * found.peak)


def _copies(config: RunConfig, kind: str, found: MemoryPlan) -> int:
    """Return the bytes of copies that are on the device: they are in main memory, so a GPU has none."""
    return copied_bytes(config, found) if kind == "cpu" else 0


def copied_bytes(config: RunConfig, found: MemoryPlan) -> int:
    """Return how many bytes of copies main memory holds at most while the next step is taken."""
    version = found.weights // (2 if config.weights.dtype == "bfloat16" else 1)
    held, coded = _VERSIONS_HELD[config.weights.transport]
    return (held + coded) * version + found.weights + found.moments


def _cures(config: RunConfig, model_config: Any, kind: str, available: int) -> Iterator[str]:
    """Yield the settings that make it fit, each with what it takes then."""
    whole = step_shape(config, config.training.learner.microbatch_tokens(kind))
    for rows in _halves(whole.rows):
        shape = whole._replace(rows=rows, microbatches=2)
        took = _total(config, kind, _planned(config, model_config, kind, available, shape))
        if took <= available:
            yield (
                f"training.learner.max_tokens_per_microbatch = {rows * whole.tokens}: {took:,} bytes"
                f"{_BY_ITSELF if kind == 'cuda' else ''}"
            )
            break
    for what, ways in (
        ("training.learner.recompute_layers = true", {"recompute": True}),
        ("training.lora = {}", {"lora": LoraConfig()}),
        ("training.lora = {} with training.learner.recompute_layers = true", {"lora": LoraConfig(), "recompute": True}),
    ):
        if "lora" in ways and config.training.lora is not None:
            continue
        with suppress(ConfigError):  # it is none for this model: the rank of adapters is beyond its width, say
            took = _total(config, kind, _planned(config, model_config, kind, available, whole, **ways))
            if took <= available:
                yield f"{what}: {took:,} bytes"


def _halves(rows: int) -> Iterator[int]:
    while rows > 1:
        rows //= 2
        yield rows


def _rows_note(config: RunConfig, model_config: Any) -> str:
    """Say whether the rows of a micro-batch are computed in one, as far as the model's form shows."""
    attention = config.training.attention
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, attn_implementation=None if attention == "auto" else attention
        )
    return predict_packing(config.training.learner.packing, model, config.training.inputs)


def _notes(config: RunConfig, kind: str, found: MemoryPlan) -> list[str]:
    if kind == "cpu":
        return [_CPU_NOTE]
    copied = copied_bytes(config, found)
    return [_GPU_NOTE, f"main memory holds up to {copied:,} bytes of copies: weights to publish, and a checkpoint"]


def _device(setting: str, memory: float | None) -> tuple[str, int | None]:
    """Return the kind of a device and its bytes."""
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = ("cuda" if here else "cpu") if setting == "auto" else setting.partition(":")[0]
    if kind not in _PROCESS_BYTES:
        raise ConfigError(f"--device {setting!r} is none of cpu, cuda and cuda:N")
    if memory is not None:
        return kind, int(memory * 1e9)
    if kind == "cpu":
        return kind, free_bytes(torch.device("cpu"))
    index = int(setting.partition(":")[2] or 0)
    if index >= here:
        raise ConfigError(f"--device {setting}: torch sees {here} GPUs here; say the memory of yours with --memory 80")
    return kind, torch.cuda.get_device_properties(index).total_memory


def _model_config(name: str) -> Any:
    """Return a model's configuration; its weights need not be there."""
    folder = Path(name)
    source = ModelSource(name) if (folder / "config.json").is_file() else find_named(name, tokenizer=False)
    try:
        return AutoConfig.from_pretrained(
            source.name, trust_remote_code=False, local_files_only=source.local_files_only
        )
    except Exception as error:  # transformers raises whatever its parsing of a damaged folder runs into
        raise cannot_load(source.name, error) from error
