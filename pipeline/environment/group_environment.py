"""An environment that makes whole groups by itself, by code that is not written for this SDK.

In: a task, access to inference, the number of samples. Out: what a `GroupDraft` is made of. `collect_group` calls
`generate_group` instead of holding a conversation for each sample; leases, curriculum, evaluation and publication are
those of all environments.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import msgspec

from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.inference import InferenceRequests
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.columns import Column

__all__ = ["GeneratedGroup", "GroupEnvironment", "SequenceExtras", "running_environment"]


class SequenceExtras(msgspec.Struct, frozen=True, kw_only=True):
    """What the sequences of a group hold besides what sessions do, as in `Sequences`."""

    token_advantages: bytes | None = None
    columns: dict[str, Column] = {}
    excluded_samples: list[int] = []


class GeneratedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one group: `sessions` and their `rewards` by component, in the same order.

    `task` is the task that was worked on; it may be another one than was asked for, where the environment goes on with
    one that it began before.
    """

    task: Task
    sessions: Sequence[Session]
    rewards: list[dict[str, float | None]]
    extras: SequenceExtras = SequenceExtras()
    metadata: dict[str, Any] = {}


class GroupEnvironment(Environment):
    """Makes groups by itself. Subclasses define `running` and `generate_group` besides `__len__` and `task`."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Hold what `generate_group` needs (a process, say) for as long as the context lasts.

        It may be entered while it is held already. Without it every group starts and ends what it needs.
        """
        raise NotImplementedError(f"{type(self).__name__} must define running()")

    async def check_setup(self) -> None:
        """Set up what `running` holds, and let it go again. Raises ConfigError when that fails."""
        async with self.running():
            return

    async def generate_group(
        self, task: Task, requests: InferenceRequests, n: int, sampling: SamplingParams
    ) -> GeneratedGroup:
        """Return a group of `n` samples.

        Raises `GroupDeclinedError` when the environment makes none of this task, InfrastructureError where another try
        may help, and EnvironmentCodeError for a bug of the environment.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generate_group()")


def running_environment(env: Environment) -> AbstractAsyncContextManager[None]:
    """Hold what the environment needs to make groups: nothing, unless it makes whole groups by itself."""
    return env.running() if isinstance(env, GroupEnvironment) else nullcontext()
