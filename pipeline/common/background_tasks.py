"""Runs background tasks of one context.

They end with it, and a single error is raised as itself instead of in an exception group.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from lachesis.pipeline.errors import leaves

__all__ = ["background"]


@asynccontextmanager
async def background() -> AsyncIterator[TaskGroup]:
    """Open a task group that is cancelled when the body is done.

    A task that fails cancels the body. Where the body or a task failed alone, its error is raised bare, so that
    `except FencedError` around a `with` block means what it says; several errors stay a group.
    """
    alone: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        errors = leaves(group)
        if len(errors) > 1:
            raise
        alone = errors[0]
    if alone is not None:
        raise alone
