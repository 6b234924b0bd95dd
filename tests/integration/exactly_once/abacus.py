"""A back end of the trainer that counts: its weights are one number, which depends on each batch and on their order.

It writes down each batch that it takes. `STOP_IN` names one in which it waits for ever, its weights changed already.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.extension import Extension, TrainerSpec
from lachesis.pipeline.ledger.checkpoint_state import TrainerState
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.backend import SavedStep, TrainedStep, TrainerBackend
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch
from lachesis.pipeline.trainer.settings import TrainerSettings
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import Mismatch

MODULUS = (1 << 31) - 1
WEIGHTS = "abacus.json"

EXTENSION = Extension(
    name="abacus",
    about="training by counting",
    trainers={
        "abacus": TrainerSpec(
            open="abacus:open_abacus", serving="abacus:serve", extra="", model="abacus:model", port=""
        )
    },
)


@asynccontextmanager
async def open_abacus(_: Service, settings: TrainerSettings, __: Any) -> AsyncIterator[TrainerBackend]:
    yield Abacus(settings.folder)


class Abacus:
    name = "the abacus"
    feed: BatchFeed
    lineage: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = 0

    async def restore(self, feed: BatchFeed, lineage: str, checkpoint: tuple[Path, TrainerState] | None) -> None:
        self.feed, self.lineage = feed, lineage
        self.weights = 0 if checkpoint is None else json.loads((checkpoint[0] / WEIGHTS).read_text())

    async def step(self, batch: LedgerBatch) -> TrainedStep:
        number, selected = batch.batch.number, batch.select(TrainerLimits())
        for sequence in selected.sequences:
            self.weights = (7 * self.weights + int(sequence.tokens.sum()) + 1) % MODULUS
        with (self.folder / "taken").open("a") as file:
            file.write(f"{number} {self.weights}\n")
        if str(number) == os.environ.get("STOP_IN"):
            (self.folder / "inside").touch()
            await anyio.sleep_forever()
        return TrainedStep(batch, selected, {"train/loss": float(self.weights)}, Mismatch(None, None, None, None))

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        yield

    async def publish(self, step: int) -> None:
        await self.feed.publish_weights(self.version(step), f"abacus://{self.weights}", "", None)

    async def finish(self) -> None:
        pass

    async def save(self, step: int) -> SavedStep:
        version, text = self.version(step), json.dumps(self.weights)
        return SavedStep(len(text), lambda: version, lambda folder: (folder / WEIGHTS).write_text(text))

    async def clean_up(self) -> None:
        pass

    def version(self, step: int) -> PolicyVersion:
        return PolicyVersion(step, self.lineage, f"{self.weights:012x}")
