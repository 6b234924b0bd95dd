"""Writes figures, samples and alerts as event files, which TensorBoard reads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lachesis.pipeline.common.disk import unwritable_place
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.health.logic.alert_changes import AlertNotification
from lachesis.pipeline.trainer.samples import ReadableSample

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardTracker", "open_tracker"]


class TensorBoardTracker:
    """Event files in `folder`. Raises `StartupError` where the package is missing."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401 - imported for its error
        except ModuleNotFoundError as error:
            raise StartupError(
                f"training.tensorboard needs the package tensorboard: {install_command('tensorboard')}"
            ) from error
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def check(self) -> str:
        """See `Tracker`."""
        place = unwritable_place(self._folder)
        if place is not None:
            raise InfrastructureError(f"tensorboard cannot write to {self._folder}: {place} is no folder to write to")
        return f"event files in {self._folder}"

    def open(self, step: int) -> None:
        """Begin a file; TensorBoard purges what older files hold of the steps after `step`."""
        self._write(lambda _: None, purge_step=step + 1)

    def log_figures(self, figures: dict[str, float], step: int) -> None:
        """Write a scalar for each figure."""

        def write(writer: "SummaryWriter") -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, step)

        self._write(write)

    def log_samples(self, rows: Sequence[ReadableSample], step: int) -> None:
        """Write a text for each sample; TensorBoard shows texts as Markdown, so they are indented as code."""

        def write(writer: "SummaryWriter") -> None:
            for number, row in enumerate(rows):
                parts = (f"item {row.item}, advantage {row.advantage}", row.prompt, row.completion)
                writer.add_text(f"samples/{number}", "\n\n---\n\n".join(map(_as_code, parts)), step)

        self._write(write)

    def log_alert(self, alert: AlertNotification, step: int) -> None:
        """Write a text `alerts/ENV`."""
        self._write(lambda writer: writer.add_text(f"alerts/{alert.environment}", _as_code(alert.text), step))

    def close(self) -> None:
        """Write the rest."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, write: Callable[["SummaryWriter"], None], purge_step: int | None = None) -> None:
        """Write and flush. After an error of the disk the next call begins a new file: the old writer is dead."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            if self._writer is None:
                self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)
            write(self._writer)
            self._writer.flush()
        except OSError as error:
            self._writer = None
            raise InfrastructureError(f"{self._folder} cannot be written: {error.strerror or error}") from error


def _as_code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def open_tracker(config: RunConfig, name: str) -> TensorBoardTracker:
    """Return the tracker of a run, of the name `name`. Raises `StartupError` where the package is missing."""
    return TensorBoardTracker(config.path / "tensorboard" / name)
