"""Configuration of how weights travel from the trainer to the inference servers."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

__all__ = ["WeightsConfig"]


class WeightsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights travel from the trainer to the inference servers."""

    transport: Literal["files", "shared_memory"] = "files"
    """files: through the run's folder, which trainer and inference servers share. shared_memory: trainer and the
    policy's server compute with one and the same copy in memory, on one machine, on the CPU, in float32; the server
    must be vLLM, and it pauses while the optimizer changes the weights. Default files."""
