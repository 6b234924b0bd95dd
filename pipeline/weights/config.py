"""Configuration of how weights travel from the trainer to the inference servers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["WeightsConfig"]


class WeightsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights travel from the trainer to the inference servers."""

    transport: Literal["files", "nats", "shared_memory"] = "files"
    """files: through the run's folder, which trainer and inference servers share. nats: through the stream WEIGHTS of
    the run's own server, so that an inference machine needs no shared folder; streams.weights_bytes is its budget.
    shared_memory: trainer and the policy's server share memory, on one machine, in float32: vLLM computes with one and
    the same copy, the reference server takes a copy at each version. It pauses while the optimizer changes the weights.
    Default files."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which weights travel. bfloat16: the trainer rounds them, for half the bytes, which loses nothing if
    the engine computes in bfloat16; the digest of a policy version is that of the rounded weights. float32: unchanged.
    Default float32."""
    full_every: Annotated[int, Meta(ge=1, le=1000)] = 20
    """With transport nats: of this many versions, the first is stored whole, and each of the others as its difference
    to the one before it, without loss. A server that starts again fetches the newest whole version and all differences
    since. 1: no differences. Default 20."""
