"""Configuration of the reference inference server and of its client."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["ClientConfig", "EngineConfig"]

PositiveInt = Annotated[int, Meta(gt=0)]
Positive = Annotated[float, Meta(gt=0)]


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the engine."""

    max_model_len: PositiveInt | None = None
    """Longest prompt and completion together, tokens. Default None: the model's own context length."""
    max_running_sequences: PositiveInt = 256
    """Samples decoded together. Default 256."""
    max_prefill_tokens: PositiveInt = 8192
    """Prompt tokens (padded) read in one pass, unless a single prompt is longer. Default 8192."""
    max_waiting_requests: PositiveInt = 256
    """Requests that may wait for a place; one more is refused with 503 and Retry-After. Default 256."""


class ClientConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a client reaches an inference server."""

    url: str
    """Base URL, for example http://127.0.0.1:8000."""
    timeout: Positive = 120.0
    """Seconds until an answer must be complete. Default 120."""
    connect_timeout: Positive = 5.0
    """Seconds until a connection must stand. Default 5."""
    max_connections: PositiveInt = 128
    """Requests in flight at once; more wait. Default 128."""
