"""Jaeger's v3 API, as far as `lachesis trace --follow` needs it.

Which rollouts of a run are worth a look, and why.

Written against the published API (jaeger-idl, `swagger/api_v3/query_service.openapi.yaml`: `/api/v3/trace-summaries`,
`/api/v3/traces/{trace_id}`), in its JSON form: names in camel case, 64 bit numbers as text, what is zero left out.
Tested against a fake that refuses what that API does not know, since no Jaeger runs where this was written. Raises
`InfrastructureError` when Jaeger does not answer as it should.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TypeVar

import httpx
import msgspec

from lachesis.pipeline.common.bounded_http import get_within
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.telemetry.sampling import REASONS
from lachesis.schemas import subjects
from lachesis.services.observe.endings import RolloutEnding
from lachesis.services.observe.overview import trace_url

__all__ = ["Jaeger"]

_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 64 << 20
_MAX_TRACES = 200
"""Traces requested at once."""
_ROOT = {"query.serviceName": subjects.service_name(subjects.ENVIRONMENT), "query.operationName": "rollout"}
_SEARCHED = tuple(reason for reason in REASONS if reason != "ratio")

T = TypeVar("T")


class _Summary(msgspec.Struct, rename="camel"):
    trace_id: str


class _Summaries(msgspec.Struct):
    summaries: list[_Summary] = []


class _Value(msgspec.Struct, rename="camel"):
    string_value: str | None = None
    int_value: str | None = None
    double_value: float | None = None


class _Attribute(msgspec.Struct):
    key: str
    value: _Value = msgspec.field(default_factory=_Value)


class _SpanJson(msgspec.Struct, rename="camel"):
    name: str = ""
    parent_span_id: str = ""
    start_time_unix_nano: str = "0"
    end_time_unix_nano: str = "0"
    attributes: list[_Attribute] = []

    @property
    def seconds(self) -> float:
        return (int(self.end_time_unix_nano) - int(self.start_time_unix_nano)) / 1e9

    def texts(self) -> dict[str, str]:
        """Return the attributes that are texts."""
        return {one.key: one.value.string_value for one in self.attributes if one.value.string_value is not None}


class _ScopeSpans(msgspec.Struct):
    spans: list[_SpanJson] = []


class _ResourceJson(msgspec.Struct):
    attributes: list[_Attribute] = []


class _ResourceSpans(msgspec.Struct, rename="camel"):
    resource: _ResourceJson = msgspec.field(default_factory=_ResourceJson)
    scope_spans: list[_ScopeSpans] = []

    @property
    def service(self) -> str:
        names = [one.value.string_value for one in self.resource.attributes if one.key == "service.name"]
        return next(filter(None, names), "")


class _Traces(msgspec.Struct, rename="camel"):
    resource_spans: list[_ResourceSpans] = []

    def spans(self) -> Iterator[tuple[str, _SpanJson]]:
        """Yield each span with the name of its service."""
        for part in self.resource_spans:
            for scope in part.scope_spans:
                for span in scope.spans:
                    yield part.service, span


class _TraceAnswer(msgspec.Struct):
    result: _Traces


class Jaeger:
    """Jaeger at `base`, queried about one run. A trace counts as a rollout's once its root is there, which ends it."""

    def __init__(self, base: str, client: httpx.AsyncClient, run: str) -> None:
        self._base = base.rstrip("/")
        self._client = client
        self._run = run

    async def find(self, start: datetime, end: datetime, slow_s: float | None) -> dict[str, str]:
        """Return the run's rollouts between `start` and `end` that are worth a look: why, by trace id.

        Those are the ones whose traces were kept for another reason than the sampled share; and with `slow_s`, instead
        of those that the run called slow, all that took as many seconds.
        """
        found: dict[str, str] = {}
        if slow_s is not None:
            for trace in await self._search(start, end, {"query.durationMin": f"{slow_s:.9f}s"}):
                found[trace] = "slow"
        for reason in _SEARCHED:
            if reason != "slow" or slow_s is None:
                for trace in await self._search(start, end, {}, reason):
                    found[trace] = reason
        return found

    async def rollout(self, trace: str, why: str) -> RolloutEnding | None:
        """Return the rollout of a trace that `find` found; None if its root is gone."""
        answer = await self._get(f"traces/{trace}", {}, _TraceAnswer)
        spans = list(answer.result.spans())
        root = next((span for _, span in spans if not span.parent_span_id), None)
        if root is None:
            return None
        about = root.texts()
        parts = [(span.seconds, f"{service} {span.name.partition(' ')[0]}") for service, span in spans
                 if span is not root]  # fmt: skip
        longest_s, longest = max(parts, default=(None, None))
        return RolloutEnding(
            group=trace,
            env=about.get("rl.env.name", ""),
            ended_ns=int(root.end_time_unix_nano),
            outcome=about.get("rl.outcome", ""),
            why=why,
            seconds=root.seconds,
            longest=longest,
            longest_s=longest_s,
            reason=about.get("rl.outcome.reason"),
            url=trace_url(self._base, trace),
        )

    async def _search(
        self, start: datetime, end: datetime, further: Mapping[str, str], reason: str | None = None
    ) -> list[str]:
        about = {"rl.run": self._run} | ({} if reason is None else {"rl.sampling.reason": reason})
        query = {
            **_ROOT,
            "query.startTimeMin": _rfc3339(start),
            "query.startTimeMax": _rfc3339(end),
            "query.searchDepth": str(_MAX_TRACES),
            "query.attributes": msgspec.json.encode(about).decode(),
            **further,
        }
        # Jaeger looks for one span that is all of this, the root
        return [summary.trace_id for summary in (await self._get("trace-summaries", query, _Summaries)).summaries]

    async def _get(self, path: str, query: dict[str, str], kind: type[T]) -> T:
        url = f"{self._base}/api/v3/{path}"
        try:
            answer = await get_within(
                self._client, url, within_s=_TIMEOUT_S, most_bytes=_MAX_ANSWER_BYTES, params=query
            )
            return msgspec.json.decode(answer, type=kind)
        except (InfrastructureError, msgspec.MsgspecError) as error:
            raise InfrastructureError(without_secrets(f"Jaeger at {url}: {error}")) from error


def _rfc3339(time: datetime) -> str:
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")
