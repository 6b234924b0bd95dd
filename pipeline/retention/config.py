"""Configuration of retention."""

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["RetentionConfig"]

Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class RetentionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Retention of history: unneeded history stays as long as there is room, and the oldest is deleted first."""

    trim_at: Share = 0.6
    """Share of a stream's byte budget, stored or promised, at which trimming begins; below flow.close_at. Default
    0.6."""
    trim_to: Share = 0.5
    """Share down to which the stream is then trimmed. Default 0.5."""
    min_age_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds for which history is kept even if producers have to wait for room. Default 0."""
    calls_after_s: Seconds = 3600.0
    """Seconds without a further call after which a conversation that was left behind is given up, and its calls are
    deleted; earlier if the stream CALLS is full. Default 3600."""
    orphans_after_s: Seconds = 900.0
    """Seconds after which the chunks of a large group are deleted if its head was never stored; a producer that is
    still storing it sends them again. Default 900."""
