"""`lachesis dev` names the call of a user's code that it waits for, and no line of a library of its own."""

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import lachesis
from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.runtime.retries import retry_outages
from lachesis.services.dev.tracebacks import awaited_calls

STAGE = """
async def wait_for_retry(retries):
    async for attempt in retries:
        with attempt:
            raise outage("away")

async def call(function):
    await function()
"""


@pytest.fixture
def stage() -> dict[str, Any]:
    """Functions that lie where a stage does."""
    place = str(Path(lachesis.__file__).parent / "pipeline" / "environment" / "made_by_a_test.py")
    names: dict[str, Any] = {"outage": InfrastructureError}
    exec(compile(STAGE, place, "exec"), names)  # noqa: S102 - of this test
    return names


async def test_a_pause_between_attempts_is_no_call_of_a_users_code(stage: dict[str, Any]) -> None:
    paused = anyio.Event()
    policy = RetryPolicy(first_s=1000.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage["wait_for_retry"], retry_outages("it", lambda _: paused.set(), policy=policy))
        await paused.wait()
        await anyio.lowlevel.checkpoint()
        assert awaited_calls() == []
        tasks.cancel_scope.cancel()


async def users_tool() -> None:
    await anyio.sleep_forever()


async def test_a_users_call_is_named(stage: dict[str, Any]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage["call"], users_tool)
        await anyio.wait_all_tasks_blocked()
        (stack,) = awaited_calls()
        assert "in users_tool" in stack
        tasks.cancel_scope.cancel()
