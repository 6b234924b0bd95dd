"""Defines the Atropos API's requests other than groups, with the fields that atroposlib 0.4 sends.

Guarantees finite numbers and names of sensible length.
"""

from typing import Annotated

from msgspec import Meta, Struct

from lachesis.schemas.values import Count, Finite

__all__ = ["EnvironmentId", "RegisterEnv", "RegisterTrainer"]

Tokens = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
"""A number of tokens or sequences."""
Steps = Annotated[int, Meta(ge=-1, le=(1 << 53) - 1)]
"""A number of optimizer steps; -1 means none to some trainers."""
Text = Annotated[str, Meta(min_length=1, max_length=256)]


class RegisterEnv(Struct, frozen=True, kw_only=True):
    """An environment that announces itself."""

    max_token_length: Tokens
    desired_name: Text
    weight: Finite
    group_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    min_batch_allocation: Annotated[float, Meta(ge=0, le=1)] | None = None


class RegisterTrainer(Struct, frozen=True, kw_only=True):
    """A trainer that announces itself. `batch_size` counts sequences."""

    wandb_group: Annotated[str, Meta(max_length=256)]
    wandb_project: Annotated[str, Meta(max_length=256)]
    batch_size: Tokens
    max_token_len: Tokens
    checkpoint_dir: Annotated[str, Meta(max_length=4096)]
    save_checkpoint_interval: Steps
    starting_step: Steps
    num_steps: Steps


class EnvironmentId(Struct, frozen=True, kw_only=True):
    """Which environment is meant."""

    env_id: Count
