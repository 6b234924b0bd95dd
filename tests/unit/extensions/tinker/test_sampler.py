"""The sampler at Tinker: a request that is refused for what it holds is the caller's fault, and no outage."""

import asyncio
from contextlib import AsyncExitStack

import anyio
import httpx
import pytest
import tinker

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.extensions.tinker.config import TinkerConfig
from lachesis.pipeline.extensions.tinker.sampler import TinkerSampler
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.errors import DataError


class FailingSampler:
    """Stands in for a sampling client whose requests end with an HTTP status."""

    def __init__(self, kind: type[tinker.APIStatusError], status: int) -> None:
        self._kind = kind
        self._status = status

    async def sample(self, **_):
        response = httpx.Response(self._status, request=httpx.Request("POST", "http://there"))
        raise self._kind("longer than the context", response=response, body=None)


@pytest.mark.parametrize(
    ("kind", "status", "right"),
    [(tinker.BadRequestError, 400, DataError), (tinker.InternalServerError, 500, InfrastructureError)],
)
async def test_only_a_failure_of_tinker_itself_is_an_outage(kind, status, right):
    async with AsyncExitStack() as sessions, anyio.create_task_group() as tasks:
        sampler = TinkerSampler(TinkerConfig(), "r", range(9), frozenset(), sessions=sessions, tasks=tasks)
        sampler.load_weights("tinker://weights", "1-a-b")
        sampler._sampler, sampler._client = FailingSampler(kind, status), object()
        with pytest.raises(right, match="longer than the context"):
            await asyncio.wrap_future(sampler.submit([1], SamplingParams(max_tokens=1)))
        assert (sampler._client is None) == (right is InfrastructureError), "its session goes on after a refusal"
