"""The demo's environment, whose rollouts wait for as long as the file that `HOLD` names is there."""

import os
from pathlib import Path

import anyio

from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.environment.spelling_tasks import SpellBackward
from lachesis.pipeline.tasks.task import Task

__all__ = ["HOLD", "HeldWords"]

HOLD = "SHARED_PROCESSES_HOLD"


class HeldWords(SpellBackward):
    """The demo's words."""

    async def rollout(self, task: Task, session: Session) -> None:
        hold = anyio.Path(Path(os.environ[HOLD]))
        while await hold.exists():  # noqa: ASYNC110 - another process removes it
            await anyio.sleep(5.0)
        await super().rollout(task, session)
