"""The retry loop: what it repeats, when it stops, and what it reports before each pause."""

from datetime import UTC, datetime, timedelta

import anyio
import pytest

from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.runtime.retries import RetryWait, WaitLog, retry_outages
from lachesis.schemas.errors import DataError

QUICK = RetryPolicy(first_s=0.001)


class Failing:
    """Fails with the errors given, one after the other, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


async def test_each_pause_is_reported_with_what_since_and_why() -> None:
    waits: list[RetryWait] = []
    began = datetime.now(UTC)
    call = Failing(InfrastructureError("down"), InfrastructureError("still down"))
    assert await retry_outages("the thing", waits.append, policy=QUICK)(call) == "answer"
    assert [(wait.what, str(wait.error), wait.failures) for wait in waits] == [
        ("the thing", "down", 1), ("the thing", "still down", 2),
    ]  # fmt: skip
    assert all(began - timedelta(seconds=1) <= wait.since <= datetime.now(UTC) for wait in waits)
    assert str(waits[0]) == f"the thing: down (tried since {waits[0].since:%H:%M:%S} UTC)"


async def test_the_last_error_is_raised_once_the_policy_gives_up_and_no_pause_follows() -> None:
    waits: list[RetryWait] = []
    call = Failing(*[InfrastructureError(f"down {i}") for i in range(1, 9)])
    with pytest.raises(InfrastructureError, match="down 3"):
        await retry_outages("it", waits.append, policy=RetryPolicy(first_s=0.001, attempts=3))(call)
    assert len(waits) == 2


async def test_other_errors_are_raised_at_once() -> None:
    waits: list[RetryWait] = []
    with pytest.raises(DataError):
        await retry_outages("it", waits.append, policy=QUICK)(Failing(DataError("bad")))
    assert not waits


async def test_a_drain_ends_a_pause_and_the_retries() -> None:
    draining = anyio.Event()
    call = Failing(*[InfrastructureError(f"down {i}") for i in range(1, 9)])
    hours = RetryPolicy(first_s=3600.0)
    with anyio.fail_after(60), pytest.raises(InfrastructureError, match="down 2"):
        await retry_outages("it", lambda _: draining.set(), policy=hours, draining=draining)(call)


def test_a_wait_log_says_each_thing_at_once_and_then_rarely(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    log = WaitLog(lambda: now_s[0])

    def wait(what: str) -> None:
        log(RetryWait(what, InfrastructureError("down"), 1, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)))

    for at_s, what in [(0.0, "a"), (1.0, "a"), (1.0, "b"), (29.0, "a"), (30.0, "a"), (59.0, "a")]:
        now_s[0] = at_s
        wait(what)
    a, b = (f"trying again: {what}: down (tried since 03:04:05 UTC)" for what in "ab")
    assert caplog.messages == [a, b, a]


async def test_a_call_that_succeeds_at_once_needs_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a loop was made for a call that did not fail")

    monkeypatch.setattr("tenacity.AsyncRetrying", refuse)
    assert await retry_outages("it", lambda _: None)(Failing()) == "answer"
    with pytest.raises(AssertionError, match="a loop was made"):
        await retry_outages("it", lambda _: None)(Failing(InfrastructureError("down")))
