"""Configuration of the governor."""

from typing import Annotated

from msgspec import Meta, Struct

from lachesis.pipeline.common.field_types import check_field_types
from lachesis.pipeline.retention.config import RetentionConfig
from lachesis.schemas.errors import ConfigError

__all__ = ["FlowConfig"]

Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Bytes = Annotated[int, Meta(ge=0)]


class FlowConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Leases. The batch size and the staleness bound limit how many sequences they may add up to."""

    lease_s: Seconds = 20.0
    """Seconds a lease lives unless renewed. After a restart the governor grants nothing for as long. Default 20."""
    retry_s: Seconds = 0.25
    """Seconds after which a refused producer should retry. Default 0.25."""
    reserved_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Part of the capacity that is split over the environments that request leases, by their weights in batching.mix,
    or evenly without a mix. An environment below its part is served before those above theirs. Default 0.5."""
    close_at: Share = 0.8
    """Share of a stream's byte budget at which no further lease is granted. Default 0.8."""
    event_bytes_per_group: Bytes = 8192
    """Bytes of annotations in EVENTS reserved for a group. Default 8192."""
    event_bytes_per_sequence: Bytes = 1024
    """Bytes of annotations in EVENTS reserved for each of its sequences. Default 1024."""
    teacher_bytes_per_token: Bytes = 4
    """Bytes in TEACHER reserved for each token. Default 4: its logprob. With teacher.top_k = k
    it takes 6 * k + 4 more, with teacher.tokenizers = "align" 8 more."""
    retention: RetentionConfig = RetentionConfig()
    """Which history is trimmed, and when."""

    def __post_init__(self) -> None:
        check_field_types(self)
        retention = self.retention
        if not retention.trim_to <= retention.trim_at < self.close_at:
            raise ConfigError(
                f"flow.retention.trim_to is {retention.trim_to}, trim_at {retention.trim_at}, flow.close_at "
                f"{self.close_at}: each must be lower than the next, or producers stop before anything is trimmed"
            )
