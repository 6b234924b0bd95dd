"""Figures, samples and alerts in MLflow."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extension import Extension, Setting, TrackerSpec
from lachesis.pipeline.extensions.mlflow.config import MlflowConfig

__all__ = ["EXTENSION", "place_of"]

_NONE: MlflowConfig | None = None


def _is_wanted(config: RunConfig) -> bool:
    return config.at("training.mlflow", _NONE) is not None


def place_of(config: RunConfig) -> str:
    """Return where the run's figures are: experiment and run."""
    settings = config.at("training.mlflow", MlflowConfig())
    return f"{settings.experiment}/{config.run}"


EXTENSION = Extension(
    name="mlflow",
    about="figures, samples and alerts in MLflow",
    settings={
        "training.mlflow": Setting(
            MlflowConfig | None, None, "Figures, samples and alerts in MLflow. Default None: no MLflow."
        ),
    },
    trackers={
        "training.mlflow": TrackerSpec(
            open="lachesis.pipeline.extensions.mlflow.tracker:open_tracker",
            place="lachesis.pipeline.extensions.mlflow:place_of",
            is_wanted=_is_wanted,
            extra="mlflow",
        ),
    },
)
