"""Figures, samples and alerts as event files of TensorBoard."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extension import Extension, Setting, TrackerSpec

__all__ = ["EXTENSION", "place_of"]


def _is_wanted(config: RunConfig) -> bool:
    return config.at("training.tensorboard", False)


def place_of(config: RunConfig) -> str:
    """Return where the run's figures are: the folder of its event files."""
    return str(config.path / "tensorboard")


EXTENSION = Extension(
    name="tensorboard",
    about="figures, samples and alerts as event files of TensorBoard",
    settings={
        "training.tensorboard": Setting(
            bool,
            False,
            "Whether figures, samples and alerts are written for TensorBoard too (the extra `tensorboard`), to "
            "tensorboard/ in the run's folder. Default false.",
        ),
    },
    folder_entries=("tensorboard",),
    trackers={
        "training.tensorboard": TrackerSpec(
            open="lachesis.pipeline.extensions.tensorboard.tracker:open_tracker",
            place="lachesis.pipeline.extensions.tensorboard:place_of",
            is_wanted=_is_wanted,
            extra="tensorboard",
        ),
    },
)
