"""Settings of the model that a run trains."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["LoraConfig"]


class LoraConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters (arXiv:2106.09685) instead of all weights, by peft. An empty table is the preset: every linear
    layer at rank 32, and a learning rate some ten times that of all weights, since it follows from what is trained."""

    rank: Annotated[int, Meta(gt=0)] = 32
    """Rank of each adapter. Default 32."""
    alpha: Annotated[float, Meta(gt=0)] | None = None
    """Adapters count alpha / rank times. Default None: as rank, once."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get an adapter, such as ["q_proj", "v_proj"]; all-linear: every linear layer but the
    output head. Default all-linear."""
