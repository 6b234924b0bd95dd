"""The settings of the environments' processes: all that they take of a run's configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lachesis.pipeline.common.trainability import TrainerReads
from lachesis.pipeline.environment.config import EnvironmentConfig
from lachesis.pipeline.inference.directory import RoleAccess
from lachesis.pipeline.inference.settings import TokenizerSource
from lachesis.pipeline.tasks.held_out import HeldOutRule

__all__ = ["EnvironmentSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """`environments`: the sections [environments.NAME]. `own`: those that this process runs.

    `held_out`: by environment, which tasks are not drawn. `seed`, `folder`: the run's. `policy`: how its servers are
    reached. `policy_says`: what a server of the run's own says that it is; None: the server is another's.
    """

    environments: Mapping[str, EnvironmentConfig]
    own: Sequence[str]
    held_out: Mapping[str, HeldOutRule]
    seed: int
    folder: Path
    policy: RoleAccess
    policy_says: str | None
    tokenizer: TokenizerSource | None = None
    """Where the tokenizer of the policy's servers lies; None: the servers render all conversations."""
    draws_by_epoch: bool = False
    """Whether each task is drawn once an epoch, instead of by the curriculum's weights."""
    reads: TrainerReads | None = None
    """What the run's trainer reads beside text tokens; None: another trains."""
    temperature: float | None = None
    """The temperature that the run's trainer divides logits by; None: another trains."""
