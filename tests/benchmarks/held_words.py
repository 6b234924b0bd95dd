"""The demo's environment, whose rollouts wait for as long as the file that `HOLD` names is there."""

import os
from pathlib import Path

from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.environment.spelling_tasks import SpellBackward
from lachesis.pipeline.tasks.task import Task

__all__ = ["HOLD", "HeldWords"]

HOLD = "SHARED_PROCESSES_HOLD"


class HeldWords(SpellBackward):
    """The demo's words."""

    async def rollout(self, task: Task, session: Session) -> None:
        hold = Path(os.environ[HOLD])
        while hold.exists():  # noqa: ASYNC240 - a look takes microseconds, and a thread for it more than all else
            await sleep_until_tick(5.0)  # together: what a run costs that stands still is measured
        await super().rollout(task, session)
