"""The rank of a trainer that a process is, by the environment that torchrun or rank 0 gave it.

It needs no torch, so that a command line can ask before it imports any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lachesis.pipeline.config.run import TrainingConfig
from lachesis.schemas.errors import ConfigError

__all__ = ["STORE_VARIABLE", "RankPlace", "check_ranks", "rank_device"]

STORE_VARIABLE = "TRAINER_RANKS_STORE"
"""File through which ranks that rank 0 started find each other."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank, its number on its machine, how many there are, and where they meet (an address for torch's rendezvous).

    `started`: somebody else (torchrun, or rank 0) started the processes.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    meets_at: str = "env://"
    started: bool = False

    @classmethod
    def of(cls, training: TrainingConfig, environ: Mapping[str, str]) -> RankPlace:
        """Return the place of this process.

        Variables as torchrun sets them count under torchrun, or where their number is that of `training.ranks`: on
        many clusters every process has them. Raises `ConfigError` where the two contradict each other.
        """
        size = int(environ.get("WORLD_SIZE", "1"))
        torchrun = "TORCHELASTIC_RUN_ID" in environ
        if torchrun and training.ranks not in {1, size}:
            raise ConfigError(f"training.ranks is {training.ranks}, but torchrun has started {size} processes")
        if "RANK" not in environ or size == 1 or not (torchrun or training.ranks == size):
            return cls(size=training.ranks)
        store = environ.get(STORE_VARIABLE)
        return cls(
            rank=int(environ["RANK"]),
            local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
            size=size,
            meets_at="env://" if store is None else f"file://{store}",
            started=True,
        )


def check_ranks(training: TrainingConfig, size: int) -> None:
    """Raise `ConfigError` for settings that do not go with so many ranks."""
    if training.sharding == "full" and size == 1:
        raise ConfigError('training.sharding is "full", but there is one rank: set training.ranks, or use torchrun')
    if training.sharding == "full" and training.lora is not None:
        raise ConfigError(
            'training.lora does not go with training.sharding = "full": adapters are small, so leave sharding at "none"'
        )
    if size > 1 and training.reads.attachments:
        raise ConfigError(
            "training.inputs reads attachments, which one rank alone can do so far: set training.ranks to 1"
        )
    if size > 1 and training.device.startswith("cuda:"):
        raise ConfigError(
            f'training.device is "{training.device}", one GPU for {size} ranks: set "cuda", and each takes its own'
        )


def rank_device(setting: str, place: RankPlace, gpus: int) -> str:
    """Return the device of a rank, for `training.device` on a machine of so many GPUs."""
    if place.size == 1 or setting == "cpu" or (setting == "auto" and not gpus):
        return setting
    return f"cuda:{place.local_rank}"
