"""Recognises that memory ran out, and says how much is missing and which setting helps.

torch reports it by the text of an error: `OutOfMemoryError` on a GPU, a plain `RuntimeError` on a CPU.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lachesis.pipeline.errors import OutOfMemoryError
from lachesis.pipeline.model.free_memory import free_bytes

__all__ = [
    "MemoryShortage",
    "RandomState",
    "allocator_retries",
    "how_to_save_memory",
    "is_out_of_memory",
    "raise_out_of_memory",
    "release_memory",
    "shortage_of",
]

_SIGNS = (
    "out of memory",  # CUDA's allocator and runtime, and HIP's
    "not enough memory",  # the CPU's allocator on Windows
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_UNITS = {"bytes": 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (\w+)")
_FREE = re.compile(r"of which ([\d.]+) (\w+) is free")


class MemoryShortage(NamedTuple):
    """The figures of a failed allocation, in bytes; None: not reported.

    `text` is the first line of the error.
    """

    requested: int | None
    free: int | None
    text: str

    def __str__(self) -> str:
        if self.requested is None:
            return self.text
        asked = f"{self.requested:,} bytes were requested"
        if self.free is None:
            return f"{asked}, which there were not"
        if self.free >= self.requested:
            return f"{asked}, which could not be had in one piece or are beyond a limit, though {self.free:,} are free"
        return f"{asked} and {self.free:,} are free: at least {self.requested - self.free:,} bytes are missing"


@dataclass(frozen=True, slots=True)
class RandomState:
    """torch's random state on the CPU and, where that is another, on the device of a step."""

    cpu: torch.Tensor
    gpu: torch.Tensor | None
    device: torch.device

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the present one."""
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), gpu, device)

    def restore(self) -> None:
        """Make it the present one again."""
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)


def allocator_retries(device: torch.device) -> int:
    """Return how often torch gave back all its free memory on a GPU to get some of another size.

    0 on a CPU. Each time waits for the GPU. A step that does it every time takes up to half as long again.
    """
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0


def release_memory(device: torch.device) -> None:
    """Release a failed pass's memory: its tensors are garbage, and on a GPU torch keeps freed blocks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def raise_out_of_memory(device: torch.device, what: str, advice: str) -> Iterator[None]:
    """Raise `OutOfMemoryError` where torch finds no memory.

    It says `what` did not fit, and gives the `advice`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        found = shortage_of(error, device)
    else:
        return
    raise OutOfMemoryError(f"{what} does not fit into memory: {found}. What helps: {advice}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error that torch raised, or Python, means that an allocation failed."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def shortage_of(error: BaseException, device: torch.device) -> MemoryShortage:
    """Return what `error` says of the memory of `device`, completed by what is free there now."""
    text = str(error)
    free = _bytes_in(_FREE, text)
    first = text.splitlines()[0] if text else type(error).__name__
    return MemoryShortage(_bytes_in(_REQUESTED, text), free_bytes(device) if free is None else free, first)


def how_to_save_memory(*, recomputes: bool, adapters: bool, sharded: bool) -> str:
    """Name the settings that lower what a step needs and are not in force yet, the cheapest first."""
    ways = []
    if not recomputes:
        ways.append('training.learner.recompute_layers = true or "auto" (activations of one layer instead of all)')
    ways.append("shorter sequences (environments.NAME.longest_tokens and max_new_tokens)")
    if not adapters and not sharded:
        ways.append("training.lora = {} (gradients and AdamW's moments of the adapters alone)")
    if not sharded and not adapters:
        ways.append('training.ranks with training.sharding = "full" (weights spread over several GPUs)')
    return "; or ".join(ways)


def _bytes_in(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    if found is None or found[2] not in _UNITS:
        return None
    return int(float(found[1]) * (1 << _UNITS[found[2]]))
