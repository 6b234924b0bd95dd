"""Sends weights from the trainer, over the transport that the configuration chooses.

A receiver needs no such choice: a policy record says where its weights are (`download.WeightsReceiver`).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio.to_thread
import torch

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.model.tensors import policy_version
from lachesis.pipeline.model.weight_files import prune_weights, write_new_weights
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.pipeline.weights.upload import WeightsUploader
from lachesis.schemas.ids import PolicyVersion

__all__ = ["WeightsSender", "weights_sender"]


class WeightsSender(Protocol):
    """Stores each version of the weights in a place where inference servers find it."""

    async def send(self, step: int, lineage: str, tensors: Mapping[str, torch.Tensor]) -> tuple[PolicyVersion, str]:
        """Store the weights after optimizer step `step`, in the dtype that they travel in.

        Return their version, and their location for the policy record. The tensors must not change before the next
        weights are sent.

        Raises `InfrastructureError` if the caller may retry, `FencedError` if another trainer has taken over.
        """

    def forget(self) -> None:
        """Send the next version without a base: the versions sent before may be damaged."""
        ...

    async def expire(self) -> None:
        """Delete versions that are too old, once a newer one is published."""


def weights_sender(bus: Bus, run: str, config: WeightsConfig, *, folder: Path, budget: int, kept: int) -> WeightsSender:
    """Return the sender for the run's weights that `config.transport` chooses.

    `folder`: the run's; `budget`: bytes that the stream WEIGHTS holds; `kept`: newest versions that are kept.
    """
    if config.transport == "nats":
        return _ThroughServer(WeightsUploader(bus, run, config, budget=budget, kept=kept))
    return _ThroughFolder(folder / "weights", config.dtype, kept)


class _ThroughServer:
    def __init__(self, uploader: WeightsUploader) -> None:
        self._uploader = uploader

    async def send(self, step: int, lineage: str, tensors: Mapping[str, torch.Tensor]) -> tuple[PolicyVersion, str]:
        version = await anyio.to_thread.run_sync(policy_version, step, lineage, tensors)
        return version, (await self._uploader.send(version, tensors)).location

    def forget(self) -> None:
        self._uploader.forget()

    async def expire(self) -> None:
        await self._uploader.expire()


class _ThroughFolder:
    def __init__(self, folder: Path, dtype: str, kept: int) -> None:
        self._folder = folder
        self._dtype = dtype
        self._kept = kept

    async def send(self, step: int, lineage: str, tensors: Mapping[str, torch.Tensor]) -> tuple[PolicyVersion, str]:
        version, path = await write_when_room(
            self._folder,
            partial(write_new_weights, tensors, self._folder, step, lineage, self._dtype),
            needed_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        )
        return version, str(path)

    def forget(self) -> None:
        """Do nothing: no file builds on another."""

    async def expire(self) -> None:
        await anyio.to_thread.run_sync(partial(prune_weights, self._folder, keep=self._kept))
