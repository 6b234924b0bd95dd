"""Sends figures, samples and alerts to Weights & Biases, or keeps them on disk for `wandb sync`."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.common.disk import disk_room, missing_bytes, unwritable_place
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.secrets import masked, without_secrets
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.extensions.wandb.config import WandbConfig
from lachesis.pipeline.extensions.wandb.files import kept_folder, run_id, stored_step
from lachesis.pipeline.health.logic.alert_changes import AlertNotification
from lachesis.pipeline.trainer.samples import ReadableSample
from lachesis.pipeline.trainer.tracking import METRICS_FILE
from lachesis.schemas.errors import DataError

__all__ = ["WandbTracker", "open_tracker"]

log = logging.getLogger("lachesis")

_CHECK_S = 10
_ROOM_BYTES = 1 << 20
"""Free on the disk before an offline run gets more: after one failed write wandb's own process writes nothing more."""
_COLUMNS = ["item", "prompt", "completion", "advantage"]


class WandbTracker:
    """A run of wandb whose step is the optimizer step; wandb takes no figure of a step twice.

    `name` is the run's id and name in wandb, `folder` where wandb keeps its files unless WANDB_DIR says it, `settings`
    what it shows as the run's configuration. Raises `StartupError` where the package is missing.
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
        entity, project = config.place()
        self._kept = kept_folder(folder)
        self._arguments: dict[str, Any] = {
            "entity": entity,
            "project": project,
            "id": run_id(name),
            "name": name,
            "resume": "allow",
            "dir": self._kept.parent,
            "config": dict(settings),
        }
        self._run: Any = None
        self._folder = folder
        self._last_step_file = self._kept / f"{self._arguments['id']}.last-step"
        self._sent_step = 0
        self._file: Path | None = None
        """What wandb writes to without a server, once it was seen there."""

    def check(self) -> str:
        """See `Tracker`."""
        mode, entity, project = os.environ.get("WANDB_MODE"), self._arguments["entity"], self._arguments["project"]
        place = f"{entity}/{project}" if entity else project
        try:
            self._wandb.Settings(entity=entity, project=project)
            if mode == "disabled":
                return f"project {place}; WANDB_MODE={mode}"
            self._refuse_folder()
            if mode in {"offline", "dryrun"}:
                return f"project {place}; WANDB_MODE={mode}, kept in {self._kept} for `wandb sync`"
            user = self._wandb.Api(timeout=_CHECK_S).viewer.username
        except (self._wandb.errors.Error, ValueError, AttributeError, OSError) as error:
            raise self._unopened(error) from error
        return f"project {place}, as {user}"

    def open(self, step: int) -> None:
        """Begin the run, or resume it under the same id.

        Without a server each life of the trainer has a folder of its own: what an earlier one has is not written again.
        """
        is_offline = os.environ.get("WANDB_MODE") in {"offline", "dryrun"}
        stored = stored_step(self._kept, self._arguments["id"]) if is_offline else None
        if stored is None and self._sent_step:
            stored = 0  # the folder of this life was deleted
        self._refuse_folder()
        try:
            self._run = self._wandb.init(**self._arguments)
        except (self._wandb.errors.Error, ValueError) as error:
            raise self._unopened(error) from error
        if is_offline:
            self._sent_step = max(self._sent_step, _last_step(self._last_step_file))
            if self._sent_step:
                log.info(
                    "wandb: another folder for run %s, from step %d on: `wandb sync` the oldest first, and the others "
                    "with --append", self._arguments["id"], self._sent_step + 1,
                )  # fmt: skip
        self._run.define_metric("train/step")
        self._run.define_metric("*", step_metric="train/step")
        self._log_lost(stored, step)

    def _log_lost(self, stored: int | None, step: int) -> None:
        """Log again what an earlier life logged and wandb had not written when it was killed, up to `step`.

        The figures stand in the run's own file of figures. `stored`: the last step that wandb's files hold, if known.
        """
        if stored is None or stored >= self._sent_step:
            return
        self._sent_step = stored
        with suppress(OSError), (self._folder / METRICS_FILE).open("rb") as rows:
            for row in rows:
                with suppress(msgspec.DecodeError, LookupError, TypeError, ValueError):
                    figures = msgspec.json.decode(row)
                    number = int(figures["train/step"])
                    if stored < number <= step:
                        self.log_figures(figures, number)

    def log_figures(self, figures: dict[str, float], step: int) -> None:
        """Log the figures of a step."""
        self._reopen_if_deleted(step)
        if step < self._sent_step or (step == self._sent_step and "train/step" in figures):
            return
        self._run.log({"train/step": step} | figures, step=step)
        if step != self._sent_step:
            self._sent_step = step
            with suppress(OSError):  # without it a later life writes some steps again
                self._last_step_file.write_text(f"{step}\n", encoding="ascii")

    def _refuse_folder(self) -> None:
        """Raise `InfrastructureError` where the folder cannot be written: wandb would keep the run in /tmp."""
        place = unwritable_place(self._kept)
        if place is not None and os.environ.get("WANDB_MODE") != "disabled":
            raise InfrastructureError(f"wandb cannot keep its files in {self._kept}: {place} is no folder to write to")

    def _reopen_if_deleted(self, step: int) -> None:
        """Begin another folder where that of an offline run was deleted or moved, and log again what it held.

        wandb's own process would go on writing to the deleted file. Raises `InfrastructureError` where this is found,
        so that it is reported, and where the disk has no room.
        """
        if self._run is None:
            self.open(step)
        if os.environ.get("WANDB_MODE") not in {"offline", "dryrun"}:
            return
        file = Path(self._run.dir).parent / f"run-{self._arguments['id']}.wandb"
        if file.exists():
            self._file = file
        elif self._file == file:
            run, self._run, self._file = self._run, None, None
            run.finish()
            raise InfrastructureError(f"{file.parent} was deleted or moved; wandb begins another folder")
        if missing_bytes(disk_room(self._kept), _ROOM_BYTES):
            raise InfrastructureError(f"the disk is full: wandb cannot write to {self._kept}")

    def _unopened(self, error: Exception) -> DataError | InfrastructureError:
        text = without_secrets((str(error).strip().splitlines() or [type(error).__name__])[0])
        if isinstance(error, (self._wandb.errors.CommError, OSError)):  # also where it only could not verify the key
            return InfrastructureError(f"wandb does not answer, or refuses the key: {text}")
        return DataError(f"{text}; correct training.wandb, `wandb login`, or set WANDB_MODE=offline")

    def log_samples(self, rows: Sequence[ReadableSample], step: int) -> None:
        """Log a table `samples`."""
        self._reopen_if_deleted(step)
        table = self._wandb.Table(columns=_COLUMNS, data=[list(row) for row in rows])
        self._run.log({"samples": table, "train/step": step}, step=step)

    def log_alert(self, alert: AlertNotification, step: int) -> None:
        """Raise an alert of wandb, which notifies people by e-mail or Slack as they have set there."""
        self._reopen_if_deleted(step)
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


def _last_step(file: Path) -> int:
    """Return the last step that an earlier life has logged, 0 if there was none."""
    try:
        text = file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def open_tracker(config: RunConfig, name: str) -> WandbTracker:
    """Return the tracker of a run, of the name `name`. Raises `StartupError` where the package is missing."""
    return WandbTracker(
        config.at("training.wandb", WandbConfig()), name, config.path, masked("", msgspec.to_builtins(config))
    )
