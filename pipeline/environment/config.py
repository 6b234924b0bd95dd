"""Configuration of rollout collection."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

__all__ = ["CollectConfig"]

PositiveInt = Annotated[int, Meta(gt=0)]
Positive = Annotated[float, Meta(gt=0)]


class CollectConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a group is collected, for any environment."""

    request_timeout_s: Positive = 120.0
    """Seconds one request to the inference server may take before it counts as failed. Default 120."""
    attempts: PositiveInt = 4
    """Tries of a request, and continuations of an aborted sample, before the group is abandoned. Default 4."""
    backoff_s: Positive = 0.5
    """Seconds before the second try, doubled before each further one, up to 30; each pause is shortened at random by up
    to half. Default 0.5."""
    lost_samples: Literal["refill", "drop", "abandon"] = "refill"
    """What to do with a group that lost samples because their inference server went away: see
    environments.NAME.lost_samples. Default refill."""
    fewest_samples: PositiveInt = 2
    """Samples that a group needs to go on without lost ones. Default 2."""
    max_context: PositiveInt | None = None
    """Tokens prompt and completion of a sequence may have together. Default None: what the server accepts."""
    chat_template_kwargs: dict[str, Any] = {}
    """Parameters of the model's chat template. Default none."""
    model: str = "policy"
    """Name of the model in traces. Default policy."""
