"""Against a fake of Jaeger's v3 API: no Jaeger runs where these tests do."""

from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from lachesis.schemas.errors import InfrastructureError
from lachesis.services.live.jaeger import Jaeger

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
ID = "01a1fede291c7745b37553d3738721bb"


def summary(trace: str, seconds: float, *, root: str = "rollout words", errors: int = 0) -> dict[str, Any]:
    start = 1_777_636_800_000_000_000
    return {
        "traceId": trace, "rootServiceName": "environment-words", "rootOperationName": root, "spanCount": 9,
        "minStartTimeUnixNano": str(start), "maxEndTimeUnixNano": str(start + int(seconds * 1e9)),
        "errorSpanCount": errors, "orphanSpanCount": 0, "services": [{"name": "scorer", "spanCount": 2}],
    }  # fmt: skip


class FakeJaeger:
    """Answers as the documented routes do."""

    def __init__(self, *summaries: dict[str, Any]) -> None:
        self.summaries = summaries
        self.asked: list[httpx.URL] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url)
        match request.url.path:
            case "/base/api/v3/services":
                return httpx.Response(200, json={"services": ["scorer", "environment-words"]})
            case "/base/api/v3/trace-summaries":
                return httpx.Response(200, json={"summaries": list(self.summaries)})
        return httpx.Response(404)


def client(fake: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(fake))


async def test_rollouts_that_were_slow_or_failed_are_found() -> None:
    fake = FakeJaeger(
        summary(ID, 9.5), summary("2" * 32, 0.5), summary("3" * 32, 0.1, errors=1),
        summary("4" * 32, 99.0, root="process rl.rollout.r.words"),
    )  # fmt: skip
    async with client(fake) as http:
        slow, failed = sorted(
            await Jaeger("http://jaeger/base/", http).rollouts(NOON, NOON, 1.0), key=lambda ended: ended.group
        )
        assert len(await Jaeger("http://jaeger/base", http).rollouts(NOON, NOON, None)) == 3
    assert (slow.group, slow.seconds, slow.env) == (ID, 9.5, "words")
    assert slow.url == f"http://jaeger/base/trace/{ID}"
    assert (failed.group, failed.why) == ("3" * 32, "failed")
    query = dict(fake.asked[1].params)
    assert query["query.serviceName"] == "environment-words"
    assert query["query.startTimeMin"] == query["query.startTimeMax"] == "2026-05-01T12:00:00Z"


@pytest.mark.parametrize("answer", [httpx.Response(500), httpx.Response(200, text="<html>"), None])
async def test_a_jaeger_that_does_not_answer_is_an_infrastructure_failure(answer: httpx.Response | None) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        if answer is None:
            raise httpx.ConnectError("refused", request=request)
        return answer

    async with client(broken) as http:
        with pytest.raises(InfrastructureError, match="Jaeger at http://j/api/v3/services"):
            await Jaeger("http://j", http).rollouts(NOON, NOON, None)
