"""Defines environments that make whole groups by themselves, with code not written for this SDK.

Given a task, access to inference and the number of samples, they return the parts of a `GroupDraft`. `collect_group`
calls `generate_group` instead of holding a conversation for each sample; leases, curriculum, evaluation and publication
are those of all environments.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from itertools import accumulate
from typing import Any

import msgspec

from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.inference_requests import InferenceRequests
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.columns import Column, row_bytes

__all__ = ["GeneratedGroup", "GroupEnvironment", "SequenceExtras"]


class SequenceExtras(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a group's sequences that sessions do not have, as in `Sequences`.

    `metadata`: entries of the group's metadata that have an item for each sample.
    """

    token_advantages: bytes | None = None
    columns: dict[str, Column] = {}
    excluded_samples: list[int] = []
    metadata: dict[str, list[Any]] = {}

    def with_samples(self, places: Sequence[int], lengths: Sequence[int]) -> "SequenceExtras":
        """Return those of the samples at `places`; `lengths`: how many tokens each sample of the group has."""
        ends = list(accumulate(lengths))

        def rows(data: bytes, width: int) -> bytes:
            return b"".join(data[(ends[one] - lengths[one]) * width : ends[one] * width] for one in places)

        return SequenceExtras(
            token_advantages=None if self.token_advantages is None else rows(self.token_advantages, 4),
            columns={
                name: msgspec.structs.replace(column, data=rows(column.data, row_bytes(column)))
                for name, column in self.columns.items()
            },
            excluded_samples=[new for new, place in enumerate(places) if place in self.excluded_samples],
            metadata={name: [values[place] for place in places] for name, values in self.metadata.items()},
        )


class GeneratedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one group: `sessions` and their `rewards` by component, in the same order.

    `task` is the task that was worked on. It may differ from the requested one, if the environment continues a task
    that it began before.
    """

    task: Task
    sessions: Sequence[Session]
    rewards: list[dict[str, float | None]]
    extras: SequenceExtras = SequenceExtras()
    metadata: dict[str, Any] = {}


class GroupEnvironment(Environment):
    """Makes groups by itself. Subclasses define `running`, `generate_group`, `__len__` and `task`."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Keep the resources of `generate_group` (for example a process) while the context lasts.

        It may be entered while they are already kept. Without it, every group starts and ends its own.
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

        Raises `GroupDeclinedError` if the environment makes no group of this task, InfrastructureError if another try
        may help, and EnvironmentCodeError for a bug of the environment.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generate_group()")
