"""Imported by every Python process of a run before anything else: one service, named in a file, works slowly.

SLOWED names the file, which says "service seconds". It is read again with each piece of work, so a test slows one stage
after the other while the run goes on: a group of an environment, the scorer or the teacher, a commit of the normalizer,
a step of the trainer takes so many seconds more.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def slow(service: str, owner: Any, name: str) -> None:
    """Let `owner.name`, a function or a coroutine function, begin later while the file names `service`."""
    import anyio

    work: Callable[..., Any] = getattr(owner, name)

    def delay_s() -> float:
        slowed, _, seconds = Path(os.environ["SLOWED"]).read_text().partition(" ")
        return float(seconds) if slowed == service else 0.0

    @functools.wraps(work)
    async def later(*args: Any, **kwargs: Any) -> Any:
        await anyio.sleep(delay_s())
        return await work(*args, **kwargs)

    @functools.wraps(work)
    def later_in_a_thread(*args: Any, **kwargs: Any) -> Any:
        time.sleep(delay_s())
        return work(*args, **kwargs)

    setattr(owner, name, later_in_a_thread if service == "trainer" else later)


def install(service: str) -> None:
    """Make this process, which runs `service`, one that can be slowed."""
    match service:
        case "environment":
            from lachesis.pipeline.environment import stage as environments

            slow(service, environments, "collect_group")
        case "scorer":
            from lachesis.pipeline.scorer.stage import EnvironmentScorer

            slow(service, EnvironmentScorer, "score")
        case "teacher":
            from lachesis.pipeline.teacher import stage as teacher

            slow(service, teacher._TeacherStage, "handle")
        case "normalizer":
            from lachesis.pipeline.normalizer.stage import RewardWriter

            slow(service, RewardWriter, "_write")
        case "trainer":
            from lachesis.pipeline.trainer.learner import Learner

            slow(service, Learner, "step")


_command = sys.orig_argv[sys.orig_argv.index("lachesis") + 1 :] if "lachesis" in sys.orig_argv else []
if _command[:1] == ["run"]:
    install(_command[1])
elif _command[:1] == ["train"]:
    install("trainer")
