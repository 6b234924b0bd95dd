"""A replay's way through an outage: it says so in the log, and neither a full stream nor a drain makes it wait."""

import anyio
import pytest

from lachesis.pipeline.errors import InfrastructureError, StreamFullError
from lachesis.pipeline.offline.replay import outage
from lachesis.pipeline.offline.replay.outage import retrying
from lachesis.pipeline.runtime.retries import WaitLog


async def test_what_it_waits_for_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    errors = [InfrastructureError("the rater is away")] * 2

    async def flaky() -> str:
        if errors:
            raise errors.pop()
        return "scored"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outage, "_wait_log", WaitLog())
        assert await retrying("score a rollout of sums")(flaky) == "scored"
    (waited,) = caplog.messages
    assert waited.startswith("trying again: score a rollout of sums: the rater is away (tried since ")


async def test_a_full_stream_is_no_outage() -> None:
    async def full() -> None:
        raise StreamFullError("full")

    with pytest.raises(StreamFullError):
        await retrying("commit")(full)


async def test_a_drain_ends_it_with_the_last_error() -> None:
    draining, tries = anyio.Event(), 0

    async def fail() -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            draining.set()
        raise InfrastructureError(f"down {tries}")

    with anyio.fail_after(60), pytest.raises(InfrastructureError, match="down 3"):
        await retrying("commit", draining)(fail)
