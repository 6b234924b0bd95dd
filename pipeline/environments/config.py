"""Configuration of rollout collection."""

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["CollectConfig"]

PositiveInt = Annotated[int, Meta(gt=0)]
Positive = Annotated[float, Meta(gt=0)]


class CollectConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a group is collected, whatever the environment."""

    request_timeout_s: Positive = 120.0
    """Seconds one request to the inference server may take before it counts as failed. Default 120."""
    attempts: PositiveInt = 4
    """Tries of a request, and continuations of an aborted sample, before the group is abandoned. Default 4."""
    backoff_s: Positive = 0.5
    """Seconds before the second try; doubled before each further one. Default 0.5."""
    max_context: PositiveInt | None = None
    """Tokens prompt and completion of a sequence may have together. Default None: what the server accepts."""
    model: str = "policy"
    """Name of the model in traces. Default policy."""
