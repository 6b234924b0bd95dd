"""Settings of Weights & Biases."""

from typing import Annotated

import msgspec
from msgspec import Meta

from lachesis.schemas.errors import ConfigError

__all__ = ["WandbConfig"]

_NOT_IN_WANDB = "/\\#?%:"
_MAX_WANDB_CHARS = 128


class WandbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights & Biases logging; without a key set WANDB_MODE=offline."""

    project: str | None = None
    """Name of the project, or `entity/project` as wandb's own addresses have it. Default None: no wandb."""
    entity: Annotated[str, Meta(min_length=1)] | None = None
    """User or team that the project is of. Default None: that in `project`, or the key's own."""

    def __post_init__(self) -> None:
        if self.entity is not None and set(self.entity) & {"/", *_NOT_IN_WANDB}:
            raise ConfigError(f"training.wandb.entity is {self.entity!r}: name a user or a team of wandb")
        if self.project is None:
            return
        team, slash, name = self.project.rpartition("/")
        if not name or len(name) > _MAX_WANDB_CHARS or set(name) & set(_NOT_IN_WANDB) or (slash and not team):
            raise ConfigError(
                f"training.wandb.project is {self.project!r}: name it `project` or `entity/project`, without any of "
                f"{' '.join(_NOT_IN_WANDB)} and with at most {_MAX_WANDB_CHARS} characters"
            )
        if any(part != part.strip() for part in (team, name)):
            raise ConfigError(f"training.wandb.project is {self.project!r}: leave out the blanks at its ends")
        if "/" in team:
            raise ConfigError(f"training.wandb.project is {self.project!r}: it has more parts than `entity/project`")
        if team and self.entity not in (None, team):
            raise ConfigError(
                f"training.wandb.project is {self.project!r} and training.wandb.entity {self.entity!r}: leave one out"
            )

    def place(self) -> tuple[str | None, str]:
        """Return entity and project. Call it only where there is a project."""
        team, _, name = (self.project or "").rpartition("/")
        return self.entity or team or None, name
