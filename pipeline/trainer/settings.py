"""The settings of the trainer: all that it takes of a run's configuration."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lachesis.pipeline.evaluator.schedule import EvaluableSteps
from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.inference.directory import RoleAccess
from lachesis.pipeline.trainer.config import TrainingConfig
from lachesis.pipeline.trainer.tracker import Tracker
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.schemas.ledger import GroupRef

if TYPE_CHECKING:  # it takes these settings
    from lachesis.pipeline.trainer.backend import TrainerBackend

__all__ = ["OpenBackend", "TrainerSettings"]

OpenBackend = Callable[..., "AbstractAsyncContextManager[TrainerBackend]"]
"""Gets the service and the `TrainerSettings`, and holds what the back end needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """`training`, `weights`, `policy`: the sections [training], [weights] and [inference.policy].

    `run`, `revision`, `seed`, `folder`: the run's. `model`, `tokenizer`: folders or ids; None: not set.
    """

    run: str
    revision: str
    seed: int
    folder: Path
    training: TrainingConfig
    model: str | None
    tokenizer: str | None
    chat_template: str | None
    model_exceptions: Sequence[str]
    """What may be wrong with the model: see `model_exceptions` of a run."""
    weights: WeightsConfig
    weights_bytes: int
    """The byte budget of the stream of weights."""
    policy: InferenceConfig
    policy_access: RoleAccess
    drain_s: float
    """Seconds a service has to store what it still holds once it is to end."""
    max_staleness: int
    step_of: Callable[[GroupRef], int]
    """Returns the policy step from which the staleness of a group counts, see `batching.staleness_of`."""
    has_teacher: bool
    """Whether batches come with a teacher's logprobs."""
    evaluated: Sequence[str]
    """The environments that are evaluated."""
    evaluations_of: Sequence[str]
    """The environments whose evaluations are read."""
    evaluable: EvaluableSteps
    alerts_from: Literal["inform", "warn", "quarantine", "halt"]
    """The least verdict that goes to the trackers."""
    open_backend: OpenBackend
    trackers: Callable[[str], Iterable[Tracker]]
    """Opens the trackers, given the run's name in them. Raises `StartupError` where a package is missing."""
    run_file: Callable[[], str]
    """Returns the run's configuration as TOML, for the processes of other ranks."""

    @property
    def shuffle_seed(self) -> int | None:
        """The seed by which advantages are shuffled within their groups; None: they are not."""
        return self.seed if self.training.shuffle_advantages else None
