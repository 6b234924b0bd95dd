"""Against a fake of Jaeger's v3 API, made from what is published of it: no Jaeger runs where these tests do."""

import base64
import json
import re
from datetime import UTC, datetime
from typing import Any

import httpx
import jsonschema
import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.telemetry.messages import rebuild_trace
from lachesis.pipeline.telemetry.otlp import OtlpExporter
from lachesis.pipeline.telemetry.spans import RolloutEnd
from lachesis.schemas.annotations import Stamp
from lachesis.services.observe.jaeger import Jaeger

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
"""What may be requested of trace-summaries and in which form."""
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
SUMMARIES = {
    "type": "object", "additionalProperties": False,
    "properties": {"summaries": {"type": "array", "items": SUMMARY}},
}  # fmt: skip
"""The published API's answer (jaeger-idl, query_service.proto) in proto3's JSON form."""
BEGAN_NS = 1_777_636_800_000_000_000
MS = 1_000_000


def exported(group: str, seconds: float, *, run: str = "mine", kept: str = "slow", **fields: Any) -> Any:
    """Return the trace of a rollout as OTLP has it, made by what exports it."""
    stamp = Stamp("scorer", BEGAN_NS + 10 * MS, BEGAN_NS + 30 * MS, BEGAN_NS + 50 * MS)
    end = RolloutEnd(
        group=group, run=run, env="words", seq=7, sequences=4, policy_step=3, started_ns=BEGAN_NS,
        ended_ns=BEGAN_NS + int(seconds * 1e9), kept=kept, **{"outcome": "trained", **fields},
    )  # fmt: skip
    otlp = OtlpExporter({"service.name": "lachesis-trainer"}, None, None)
    request = encode_spans([otlp._readable(span) for span in rebuild_trace(end, [stamp])])
    otlp.close()
    return request


def values(span: Any) -> dict[str, str]:
    return {one.key: one.value.string_value for one in span.attributes}


def hexed(found: Any) -> Any:
    """Return proto3's JSON with ids as OTLP's JSON has them: hexadecimal, not base64."""
    if isinstance(found, list):
        return [hexed(one) for one in found]
    if not isinstance(found, dict):
        return found
    ids = {"traceId", "spanId", "parentSpanId"}
    return {key: base64.b64decode(one).hex() if key in ids else hexed(one) for key, one in found.items()}


class FakeJaeger:
    """A fake of Jaeger's v3 API: it refuses what that does not know, searches for one span that is all that was
    requested, as Jaeger's own storage does, and says nothing that does not fit the published schema.
    """

    def __init__(self, *traces: Any) -> None:
        self.traces = {trace.resource_spans[0].scope_spans[0].spans[0].trace_id.hex(): trace for trace in traces}
        self.searches = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        base, _, route = request.url.path.partition("/api/v3/")
        if base == "/base" and route == "trace-summaries":
            return self.search(dict(request.url.params))
        trace = self.traces.get(route.removeprefix("traces/")) if base == "/base" else None
        if trace is None or request.url.params:
            return httpx.Response(404, json={"error": {"httpCode": 404, "message": "not found"}})
        return httpx.Response(200, json={"result": hexed(MessageToDict(trace))})

    def search(self, query: dict[str, str]) -> httpx.Response:
        self.searches += 1
        bad = [key for key, value in query.items() if not PARAMETERS.get(key, NEVER).fullmatch(value)]
        if bad or not {"query.startTimeMin", "query.startTimeMax"} <= query.keys():
            return httpx.Response(400, json={"error": {"httpCode": 400, "message": f"malformed parameter {bad}"}})
        found = [self.summary(name, trace) for name, trace in self.traces.items() if self.fits(trace, query)]
        answer = {"summaries": found[: int(query["query.searchDepth"])]} if found else {}
        jsonschema.validate(answer, SUMMARIES)
        return httpx.Response(200, json=answer)

    def fits(self, trace: Any, query: dict[str, str]) -> bool:
        wanted: dict[str, str] = json.loads(query.get("query.attributes", "{}"))
        return any(
            values(part.resource)["service.name"] == query["query.serviceName"]
            and span.name == query["query.operationName"]
            and span.end_time_unix_nano - span.start_time_unix_nano
            >= float(query.get("query.durationMin", "0s")[:-1]) * 1e9
            and wanted.items() <= values(span).items()
            for part in trace.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        )

    def summary(self, name: str, trace: Any) -> dict[str, Any]:
        services = sorted({values(part.resource)["service.name"] for part in trace.resource_spans})
        return {"traceId": name, "services": [{"name": service, "spanCount": 1} for service in services]}


def client(fake: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(fake))


@pytest.mark.slow
async def test_of_this_run_those_worth_a_look_are_found_each_with_its_reason() -> None:
    stale, failed, again = (f"{n:032x}" for n in range(1001, 1004))
    fake = FakeJaeger(
        *(exported(f"{n:032x}", 0.5, kept="ratio") for n in range(1, 300)),
        exported(ID, 9.5),
        exported("3" * 32, 9.5, run="another"),
        exported(stale, 0.1, kept="stale", outcome="dropped", reason="stale: 9 steps old"),
        exported(failed, 0.1, kept="failed", outcome="dead_letter", reason="it kills"),
        exported(again, 0.1, kept="redelivered"),
    )
    async with client(fake) as http:
        jaeger = Jaeger("http://jaeger/base/", http, "mine")
        found = await jaeger.find(NOON, NOON, None)
        assert found == {ID: "slow", stale: "stale", failed: "failed", again: "redelivered"}
        told = {name: await jaeger.rollout(name, why) for name, why in found.items()}
        assert await jaeger.find(NOON, NOON, 30.0) == {
            stale: "stale", failed: "failed", again: "redelivered",
        }  # fmt: skip
    slow = told[ID]
    assert slow is not None
    assert (slow.group, slow.seconds, slow.env, slow.why, slow.outcome) == (ID, 9.5, "words", "slow", "trained")
    assert (slow.longest, slow.longest_s, slow.reason) == ("lachesis-scorer process", 0.02, None)
    assert slow.url == f"http://jaeger/base/trace/{ID}"
    assert [(one.why, one.outcome, one.reason) for one in told.values() if one is not None and one is not slow] == [
        ("failed", "dead_letter", "it kills"), ("stale", "dropped", "stale: 9 steps old"),
        ("redelivered", "trained", None),
    ]  # fmt: skip


async def test_with_a_limit_the_sampled_share_is_searched_for_slow_ones_too() -> None:
    fake = FakeJaeger(
        exported("1" * 32, 0.5, kept="ratio"), exported("2" * 32, 2.5, kept="ratio"), exported(ID, 2.5, kept="stale")
    )
    async with client(fake) as http:
        found = await Jaeger("http://jaeger/base", http, "mine").find(NOON, NOON, 1.0)
    assert found == {"2" * 32: "slow", ID: "stale"}


async def test_no_rollouts_at_all_is_an_empty_answer() -> None:
    async with client(FakeJaeger()) as http:
        assert await Jaeger("http://jaeger/base", http, "mine").find(NOON, NOON, 0.25) == {}


@pytest.mark.parametrize("answer", [httpx.Response(500), httpx.Response(200, text="<html>"), None])
async def test_a_jaeger_that_does_not_answer_is_an_infrastructure_failure(answer: httpx.Response | None) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        if answer is None:
            raise httpx.ConnectError("refused", request=request)
        return answer

    async with client(broken) as http:
        with pytest.raises(InfrastructureError, match="Jaeger at http://j/api/v3/trace-summaries"):
            await Jaeger("http://j", http, "mine").find(NOON, NOON, None)
        with pytest.raises(InfrastructureError) as refused:
            await Jaeger("http://me:canary@j", http, "mine").find(NOON, NOON, None)
        assert "canary" not in str(refused.value)
