"""Figures, samples and alerts in Weights & Biases."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extension import Extension, Setting, TrackerSpec
from lachesis.pipeline.extensions.wandb.config import WandbConfig
from lachesis.pipeline.extensions.wandb.files import kept_folder, offline_folders, run_id

__all__ = ["EXTENSION", "place_of"]


def _is_wanted(config: RunConfig) -> bool:
    return config.at("training.wandb", WandbConfig()).project is not None


def place_of(config: RunConfig) -> str:
    """Return where the run's figures are: the folder of an offline one, else project and name."""
    settings = config.at("training.wandb", WandbConfig())
    offline = offline_folders(kept_folder(config.path), run_id(config.run))
    return str(offline[-1]) if offline else f"{settings.project}/{config.run}"


EXTENSION = Extension(
    name="wandb",
    about="figures, samples and alerts in Weights & Biases",
    settings={
        "training.wandb": Setting(WandbConfig, WandbConfig(), "Figures, samples and alerts in Weights & Biases."),
    },
    folder_entries=("wandb",),
    trackers={
        "training.wandb": TrackerSpec(
            open="lachesis.pipeline.extensions.wandb.tracker:open_tracker",
            place="lachesis.pipeline.extensions.wandb:place_of",
            is_wanted=_is_wanted,
            extra="wandb",
        ),
    },
    doctor="lachesis.pipeline.extensions.wandb.doctor:check_key",
)
