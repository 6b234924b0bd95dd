"""Reads which rank a process is from the environment that torchrun or rank 0 gave it.

It needs no torch, so that a command line can call it before it imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lachesis.pipeline.trainer.config import TrainingConfig
from lachesis.schemas.errors import ConfigError

__all__ = ["STORE_VARIABLE", "RankPlace", "check_ranks", "rank_device"]

STORE_VARIABLE = "TRAINER_RANKS_STORE"
"""File through which ranks that rank 0 started find each other."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank, its number on its machine, how many there are, and where they meet (an address for torch's rendezvous).

    `started`: torchrun or rank 0 started the processes. `on_machine`: how many of the ranks are on this machine; None:
    not known, unless all were started here.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    meets_at: str = "env://"
    started: bool = False
    on_machine: int | None = None

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
            on_machine=int(environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in environ else None,
        )


def check_ranks(training: TrainingConfig, size: int) -> None:
    """Raise `ConfigError` for settings that do not go with so many ranks."""
    if training.sharding == "full" and size == 1:
        raise ConfigError('training.sharding is "full", but there is one rank: set training.ranks, or use torchrun')
    if training.sharding == "full" and training.lora is not None:
        raise ConfigError(
            'training.lora does not go with training.sharding = "full": adapters are small, so leave sharding at "none"'
        )
    if training.sharding == "full" and training.collectives == "gloo" and training.device != "cpu":
        raise ConfigError(
            'training.sharding is "full", which gathers weights in ways that gloo has for CPUs alone: leave '
            'training.collectives at "auto", or set training.device = "cpu"'
        )
    if size > 1 and training.reads.attachments:
        raise ConfigError(
            "training.inputs reads attachments, which one rank alone can do so far: set training.ranks to 1"
        )
    if size > 1 and training.device.startswith("cuda:"):
        raise ConfigError(
            f'training.device is "{training.device}", one GPU for {size} ranks: set "cuda", and each takes its own'
        )


def rank_device(training: TrainingConfig, place: RankPlace, gpus: int) -> str:
    """Return the device of a rank on a machine of so many GPUs.

    Raises `ConfigError` where more ranks than GPUs are on the machine, unless they exchange over gloo: NCCL refuses two
    ranks on one GPU, only later and in words that do not say so.
    """
    setting = training.device
    if place.size == 1 or setting == "cpu" or (setting == "auto" and not gpus):
        return setting
    unknown = place.local_rank + 1 if place.started else place.size
    ranks = unknown if place.on_machine is None else place.on_machine
    if gpus and training.collectives == "gloo":
        return f"cuda:{place.local_rank % gpus}"
    if gpus and ranks > gpus:
        raise ConfigError(
            f"{ranks} ranks of the trainer on this machine would share {gpus} GPU{'s' * (gpus != 1)}, and NCCL refuses "
            f'two ranks on one GPU: set training.ranks to {gpus}, or training.collectives = "gloo", over '
            'which ranks may share a GPU, or training.device = "cpu"'
        )
    return f"cuda:{place.local_rank}"
