"""How fast a replay may go. None of it changes what comes out, so it is no part of a revision."""

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["Pace"]


class Pace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replay may take of the machine and of the services behind its raters."""

    max_rate: Annotated[float, Meta(gt=0)] | None = None
    """Groups a second. Default None: as fast as it goes."""
    max_inflight: Annotated[int, Meta(ge=1)] = 32
    """Groups that are read and not yet folded. Default 32."""
