"""Against a fake of Jaeger's v3 API, made from what is published of it: no Jaeger runs where these tests do."""

import json
import re
from datetime import UTC, datetime
from typing import Any

import httpx
import jsonschema
import pytest

from lachesis.schemas.errors import InfrastructureError
from lachesis.services.live.jaeger import Jaeger

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
NEVER = re.compile("(?!)")
ID = "01a1fede291c7745b37553d3738721bb"


DURATION = re.compile(r"-?(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,9})?s")
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
PARAMETERS = {
    **dict.fromkeys(("query.startTimeMin", "query.startTimeMax"), DATE),
    **dict.fromkeys(("query.durationMin", "query.durationMax"), DURATION),
    **dict.fromkeys(("query.serviceName", "query.operationName"), re.compile(".+")),
    "query.attributes": re.compile(r"\{.*\}"),
    "query.searchDepth": re.compile("[1-9][0-9]*"),
    "query.rawTraces": re.compile("true|false"),
}
"""What may be asked of trace-summaries and in which form."""
UINT64 = {"type": "string", "pattern": "^[0-9]{1,20}$"}
COUNT = {"type": "integer", "minimum": 1}  # 0 is left out
SERVICE = {
    "type": "object", "required": ["name"], "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "spanCount": COUNT, "errorSpanCount": COUNT},
}  # fmt: skip
SUMMARY = {
    "type": "object", "required": ["traceId"], "additionalProperties": False,
    "properties": {
        "traceId": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
        "rootServiceName": {"type": "string"}, "rootOperationName": {"type": "string"},
        "minStartTimeUnixNano": UINT64, "maxEndTimeUnixNano": UINT64,
        "spanCount": COUNT, "errorSpanCount": COUNT, "orphanSpanCount": COUNT,
        "services": {"type": "array", "items": SERVICE},
    },
}  # fmt: skip
ANSWERS = {
    "services": {
        "type": "object", "required": ["services"], "additionalProperties": False,
        "properties": {"services": {"type": "array", "items": {"type": "string"}}},
    },
    "trace-summaries": {
        "type": "object", "additionalProperties": False,
        "properties": {"summaries": {"type": "array", "items": SUMMARY}},
    },
}  # fmt: skip
"""The published API's answers (jaeger-idl, query_service.proto) in proto3's JSON form."""


def summary(trace: str, seconds: float, *, root: str = "rollout words", errors: int = 0) -> dict[str, Any]:
    start = 1_777_636_800_000_000_000
    found = {
        "traceId": trace, "rootServiceName": "environment-words", "rootOperationName": root, "spanCount": 9,
        "minStartTimeUnixNano": str(start), "maxEndTimeUnixNano": str(start + int(seconds * 1e9)),
        "services": [{"name": "scorer", "spanCount": 2}],
    }  # fmt: skip
    return found | ({"errorSpanCount": errors} if errors else {})


class FakeJaeger:
    """A fake of Jaeger's v3 API: it refuses what that does not know, looks at root spans, and says
    nothing that does not fit the published schema.
    """

    def __init__(self, *summaries: dict[str, Any]) -> None:
        self.summaries = summaries

    def __call__(self, request: httpx.Request) -> httpx.Response:
        base, _, route = request.url.path.partition("/api/v3/")
        if base != "/base" or route not in ANSWERS:
            return httpx.Response(404, json={"error": {"httpCode": 404, "message": "not found"}})
        answer: dict[str, Any] = {"services": ["scorer", "environment-words"]}
        if route == "trace-summaries":
            query = dict(request.url.params)
            bad = [key for key, value in query.items() if not PARAMETERS.get(key, NEVER).fullmatch(value)]
            if bad or not {"query.startTimeMin", "query.startTimeMax"} <= query.keys():
                return httpx.Response(400, json={"error": {"httpCode": 400, "message": f"malformed parameter {bad}"}})
            found = [one for one in self.summaries if self.fits(one, query)][: int(query["query.searchDepth"])]
            answer = {"summaries": found} if found else {}
        jsonschema.validate(answer, ANSWERS[route])
        return httpx.Response(200, json=answer)

    def fits(self, one: dict[str, Any], query: dict[str, str]) -> bool:
        took_s = (int(one["maxEndTimeUnixNano"]) - int(one["minStartTimeUnixNano"])) / 1e9
        error = str("errorSpanCount" in one).lower()
        return (
            query["query.serviceName"] == one["rootServiceName"]
            and query["query.operationName"] == one["rootOperationName"]
            and took_s >= float(query.get("query.durationMin", "0s")[:-1])
            and json.loads(query.get("query.attributes", "{}")).get("error", error) == error
        )


def client(fake: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(fake))


async def test_rollouts_that_were_slow_or_failed_are_found() -> None:
    fake = FakeJaeger(
        *(summary(f"{n:032x}", 0.5) for n in range(300)),  # more than are asked for at once
        summary(ID, 9.5), summary("3" * 32, 0.1, errors=1), summary("4" * 32, 99.0, root="process rl.rollout.r.words"),
    )  # fmt: skip
    async with client(fake) as http:
        slow, failed = sorted(
            await Jaeger("http://jaeger/base/", http).rollouts(NOON, NOON, 1.0), key=lambda ended: ended.group
        )
        assert len(await Jaeger("http://jaeger/base", http).rollouts(NOON, NOON, None)) == 200
    assert (slow.group, slow.seconds, slow.env, slow.why) == (ID, 9.5, "words", "kept")
    assert slow.url == f"http://jaeger/base/trace/{ID}"
    assert (failed.group, failed.why) == ("3" * 32, "failed")


async def test_no_rollouts_at_all_is_an_empty_answer() -> None:
    async with client(FakeJaeger()) as http:
        assert await Jaeger("http://jaeger/base", http).rollouts(NOON, NOON, 0.25) == []


@pytest.mark.parametrize("answer", [httpx.Response(500), httpx.Response(200, text="<html>"), None])
async def test_a_jaeger_that_does_not_answer_is_an_infrastructure_failure(answer: httpx.Response | None) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        if answer is None:
            raise httpx.ConnectError("refused", request=request)
        return answer

    async with client(broken) as http:
        with pytest.raises(InfrastructureError, match="Jaeger at http://j/api/v3/services"):
            await Jaeger("http://j", http).rollouts(NOON, NOON, None)
