"""Sends figures, samples and alerts to Weights & Biases, or keeps them on disk for `wandb sync`."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.pipeline.config.run import WandbConfig
from lachesis.pipeline.config.secrets import without_secrets
from lachesis.pipeline.health.logic.alert_changes import AlertNotification
from lachesis.pipeline.installation import install_command
from lachesis.pipeline.training.samples import ReadableSample
from lachesis.schemas.errors import InfrastructureError, StartupError

__all__ = ["WandbTracker"]

_COLUMNS = ["item", "prompt", "completion", "advantage"]


class WandbTracker:
    """A run of wandb whose step is the optimizer step; wandb takes no figure of a step twice.

    `name` is the run's id and name in wandb, `folder` where wandb keeps its files, `settings` what it shows as the
    run's configuration. Raises `StartupError` where the package is missing.
    """

    name = "wandb"

    def __init__(self, config: WandbConfig, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise StartupError(f"training.wandb.project needs the package wandb: {install_command('wandb')}") from error
        if not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") is None:
            os.environ["WANDB_MODE"] = "offline"  # without a key a run is kept on disk, to be synced later
        self._wandb = wandb
        self._arguments: dict[str, Any] = {
            "project": config.project,
            "id": re.sub(r"[^A-Za-z0-9_-]", "-", name),
            "name": name,
            "resume": "allow",
            "dir": folder,
            "config": dict(settings),
        }
        self._run: Any = None

    def open(self, step: int) -> None:
        """Begin the run, or resume it under the same id."""
        try:
            self._run = self._wandb.init(**self._arguments)
        except self._wandb.errors.CommError as error:
            said = without_secrets((str(error).splitlines() or [type(error).__name__])[0])
            raise InfrastructureError(f"wandb does not answer: {said}") from error
        self._run.define_metric("train/step")
        self._run.define_metric("*", step_metric="train/step")

    def log_figures(self, figures: dict[str, float], step: int) -> None:
        """Log the figures of a step."""
        self._run.log({"train/step": step} | figures, step=step)

    def log_samples(self, rows: Sequence[ReadableSample], step: int) -> None:
        """Log a table `samples`."""
        table = self._wandb.Table(columns=_COLUMNS, data=[list(row) for row in rows])
        self._run.log({"samples": table, "train/step": step}, step=step)

    def log_alert(self, alert: AlertNotification, step: int) -> None:
        """Raise an alert of wandb, which tells people by e-mail or Slack as they have set there."""
        stopped = alert.standing != "trained"
        firing = stopped or any(change.severity != "ok" for change in alert.changes)
        self._run.alert(
            title=f"{alert.environment}: {alert.standing}",
            text=f"step {step}\n{alert.text}",
            level="ERROR" if stopped else "WARN" if firing else "INFO",
            wait_duration=0.001,  # seconds in which wandb drops an alert of the same title; 0 means its default, 60
        )

    def close(self) -> None:
        """Send the rest and end the run."""
        if self._run is not None:
            self._run.finish()
