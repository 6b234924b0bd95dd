"""Configuration of the governor."""

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["FlowConfig"]

Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Bytes = Annotated[int, Meta(ge=0)]


class FlowConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Leases. How many sequences they may add up to follows from the batch size and the staleness bound."""

    lease_s: Seconds = 20.0
    """Seconds a lease lives unless renewed. After a restart the governor grants nothing for as long. Default 20."""
    retry_s: Seconds = 0.25
    """Seconds a refused producer is asked to wait. Default 0.25."""
    reserved_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Part of the capacity that is split evenly over the environments that ask; one below its part goes before those
    above theirs. Default 0.5."""
    close_at: Share = 0.8
    """Share of a stream's byte budget at which no further lease is granted. Default 0.8."""
    event_bytes_per_group: Bytes = 8192
    """Bytes of annotations in EVENTS reserved for a group. Default 8192."""
    event_bytes_per_sequence: Bytes = 1024
    """Bytes of annotations in EVENTS reserved for each of its sequences. Default 1024."""
    teacher_bytes_per_token: Bytes = 4
    """Bytes in TEACHER reserved for each token. Default 4: its logprob; 6 * k + 2 more for k alternatives."""
