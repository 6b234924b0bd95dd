"""Records what an optimizer step's numerics depend on: versions, machine, settings."""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec
import torch

from lachesis.pipeline.common.paths import code_name
from lachesis.pipeline.trainer.config import learner_on_record
from lachesis.pipeline.trainer.settings import TrainerSettings
from lachesis.schemas.ledger import Numerics

__all__ = ["microbatch_at", "numerics_of", "with_microbatch", "with_packing"]


def numerics_of(settings: TrainerSettings, device: torch.device) -> Numerics:
    """Return the numerics of a trainer with these settings on `device`.

    The threads of this process must be set already.
    """
    learner = settings.training.learner
    tokens = learner.microbatch_tokens(device.type)  # as a number: the record may be read on another device
    learner = msgspec.structs.replace(learner, max_tokens_per_microbatch=tokens)
    return Numerics(
        torch=str(torch.__version__),
        processor=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        learner=msgspec.json.encode(learner).decode(),
        shuffle_seed=settings.shuffle_seed,
        inputs=tuple(code_name(one.input) for one in settings.training.inputs),
    )


def with_microbatch(numerics: Numerics, step: int, tokens: int) -> Numerics:
    """Return numerics that say how many tokens a micro-batch had at most from `step` on."""
    if microbatch_at(numerics, step) == tokens:
        return numerics
    return msgspec.structs.replace(numerics, microbatches=(*numerics.microbatches, (step, tokens)))


def with_packing(numerics: Numerics, *, packed: bool) -> Numerics:
    """Return numerics that say whether rows were computed in one, without padding."""
    return numerics if numerics.packed == packed else msgspec.structs.replace(numerics, packed=packed)


def microbatch_at(numerics: Numerics, step: int) -> int:
    """Return how many tokens a micro-batch of the step after the first `step` had at most."""
    found = [tokens for first, tokens in numerics.microbatches if first <= step]
    return found[-1] if found else learner_on_record(numerics.learner.encode()).microbatch_tokens("cpu")


def _processor() -> str:
    """Return the model of the processor, or as much of it as the system reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()
