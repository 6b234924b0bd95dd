"""Sends figures, samples and alerts to MLflow: a tracking server, or another store it has a URI for."""

import os
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.extensions.mlflow.config import MlflowConfig
from lachesis.pipeline.health.logic.alert_changes import AlertNotification
from lachesis.pipeline.trainer.samples import ReadableSample
from lachesis.schemas.errors import DataError

__all__ = ["MlflowTracker", "open_tracker"]

_RUN_TAG = "lachesis.run"
_MAX_METRICS = 1000
"""Metrics that one request of MLflow may hold."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_\-. :/]")
_NOT_IN_FILES = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME_CHARS = 200
"""MLflow refuses names of more than 250 characters, and with one all figures of the request."""
_TIMEOUT_S = "30"
_REFUSED = frozenset({"BAD_REQUEST", "INVALID_PARAMETER_VALUE"})


class MlflowTracker:
    """A run of an MLflow experiment, found again by its tag `lachesis.run`. Raises `StartupError` without the package.

    Figures of a step that MLflow already has are not sent again, so a trainer that repeats steps adds no second point.
    """

    name = "mlflow"

    def __init__(self, config: MlflowConfig, name: str) -> None:
        # the client's own retries, two minutes by default, would say nothing while they last
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", _TIMEOUT_S)
        try:
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError as error:
            raise StartupError(f"training.mlflow needs the package mlflow: {install_command('mlflow')}") from error
        self._error = MlflowException
        self._make_client = partial[Any](MlflowClient, tracking_uri=config.uri)
        self._client: Any = None
        self._uri = config.uri
        self._experiment = config.experiment
        self._name = name
        self._run_id = ""
        self._sent_step = 0

    def check(self) -> str:
        """See `Tracker`."""
        try:
            client = self._make_client()
            found = client.get_experiment_by_name(self._experiment)
        except self._error as error:
            raise self._unopened(error) from error
        made = "is there" if found else "will be made"
        return f"{without_secrets(client.tracking_uri)}, where the experiment {self._experiment} {made}"

    def open(self, step: int) -> int:
        """Find the run, or make it. Return the last step that it has."""
        try:
            if self._client is None:
                self._client = self._make_client()
            run = self._find_run()
        except self._error as error:
            raise self._unopened(error) from error
        self._run_id = run.info.run_id
        self._sent_step = int(run.data.metrics.get("train/step", 0))
        return self._sent_step

    def log_figures(self, figures: dict[str, float], step: int) -> None:
        """Log the figures of a step, `train/step` last of all: it says that the step is complete."""
        from mlflow.entities import Metric

        if step < self._sent_step or (step == self._sent_step and "train/step" in figures):
            return
        now_ms = time.time_ns() // 1_000_000
        last = ["train/step"] if "train/step" in figures else []
        metrics = [
            Metric(_metric_name(name), figures[name], now_ms, step)
            for name in [*(name for name in figures if name not in last), *last]
        ]
        try:
            for first in range(0, len(metrics), _MAX_METRICS):
                self._client.log_batch(self._run_id, metrics=metrics[first : first + _MAX_METRICS])
        except self._error as error:
            raise _error_of(error) from error
        self._sent_step = max(self._sent_step, step)

    def log_samples(self, rows: Sequence[ReadableSample], step: int) -> None:
        """Store the samples as an artifact, `samples/step-N.json`."""
        table = [row._asdict() for row in rows]
        self._log_text(msgspec.json.format(msgspec.json.encode(table)).decode(), f"samples/step-{step:08}.json")

    def log_alert(self, alert: AlertNotification, step: int) -> None:
        """Store the alert as an artifact, and the environment's standing as a tag."""
        environment = _NOT_IN_FILES.sub("_", alert.environment)[:_MAX_NAME_CHARS]
        self._log_text(f"step {step}\n{alert.text}\n", f"alerts/{alert.seq:012}-{environment}.txt")
        try:
            self._client.set_tag(self._run_id, f"lachesis.standing.{environment}", alert.standing)
        except self._error as error:
            raise _error_of(error) from error

    def close(self) -> None:
        """Mark the run as finished, unless MLflow is away: a later life resumes it in any case."""
        if self._run_id:
            try:
                self._client.set_terminated(self._run_id)
            except self._error as error:
                raise _error_of(error) from error

    def _unopened(self, error: Exception) -> DataError | InfrastructureError:
        """Return what keeps MLflow from being opened, and the way out."""
        meant = _error_of(error)
        if isinstance(meant, InfrastructureError):
            return meant
        named = self._uri or os.environ.get("MLFLOW_TRACKING_URI")
        way = (
            "name a tracking server by training.mlflow.uri or MLFLOW_TRACKING_URI, http://localhost:5000 say"
            if not named
            else f"training.mlflow.uri or MLFLOW_TRACKING_URI is {without_secrets(named)!r}; a server's begins with http://"
        )
        return DataError(f"{way} (MLflow: {meant})")

    def _find_run(self) -> Any:
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        found = self._client.search_runs([number], f"tags.`{_RUN_TAG}` = '{self._name}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            return found[0]
        return self._client.create_run(number, run_name=self._name, tags={_RUN_TAG: self._name})

    def _log_text(self, text: str, file: str) -> None:
        try:
            self._client.log_text(self._run_id, text, file)
        except (self._error, OSError) as error:
            raise _error_of(error) from error


def _metric_name(name: str) -> str:
    """Return the name as MLflow takes it: a path without empty parts and without `.` and `..`."""
    parts = _NOT_IN_NAMES.sub("_", name)[:_MAX_NAME_CHARS].split("/")
    return "/".join("_" * max(1, len(part)) if not part.strip(".") else part for part in parts)


def _error_of(error: Exception) -> DataError | InfrastructureError:
    """Return what an error of MLflow means: it refuses what it was sent, or it is away."""
    text = without_secrets((str(error).strip().splitlines() or [type(error).__name__])[0])[:300]
    if getattr(error, "error_code", None) in _REFUSED:
        return DataError(text)
    return InfrastructureError(f"MLflow does not answer: {text}")


def open_tracker(config: RunConfig, name: str) -> MlflowTracker:
    """Return the tracker of a run, of the name `name`. Raises `StartupError` where the package is missing."""
    return MlflowTracker(config.at("training.mlflow", MlflowConfig()), name)
