"""Jaeger's v3 API, as far as `lachesis trace --follow` needs it: which traces of rollouts there are.

Written against the published API (jaeger-idl, `swagger/api_v3/query_service.openapi.yaml`: `/api/v3/services`,
`/api/v3/trace-summaries`), in its JSON form: names in camel case, 64 bit numbers as text, what is zero left out. Tested
against a fake that refuses what that API does not know, since no Jaeger runs where this was written. Raises
`InfrastructureError` when Jaeger does not answer as it should.
"""

from datetime import UTC, datetime
from typing import TypeVar

import httpx
import msgspec

from lachesis.schemas.errors import InfrastructureError
from lachesis.services.live.endings import Ended
from lachesis.services.live.overview import trace_url

__all__ = ["Jaeger"]

_TIMEOUT_S = 10.0
_MOST = 200
"""Traces asked for at once."""
_ROOT = "rollout "
_SERVICE = "environment-"
_WITH_ERROR = {"query.attributes": '{"error":"true"}'}
"""What Jaeger has of a span whose OpenTelemetry status is an error."""

T = TypeVar("T")


class _Summary(msgspec.Struct, rename="camel"):
    trace_id: str
    root_service_name: str = ""
    root_operation_name: str = ""
    min_start_time_unix_nano: str = "0"
    max_end_time_unix_nano: str = "0"
    error_span_count: int = 0


class _Summaries(msgspec.Struct):
    summaries: list[_Summary] = []


class _Services(msgspec.Struct):
    services: list[str] = []


class Jaeger:
    """Jaeger at `base`. A trace counts as a rollout's once its root is there, which ends it."""

    def __init__(self, base: str, client: httpx.AsyncClient) -> None:
        self._base = base.rstrip("/")
        self._client = client

    async def rollouts(self, start: datetime, end: datetime, slow_s: float | None) -> list[Ended]:
        """Return the rollouts that began between `start` and `end` and whose traces are whole, oldest first.

        With `slow_s` only those that took as long, and those with an error.
        """
        found: dict[str, Ended] = {}
        services = (await self._get("services", {}, _Services)).services
        for env in (name.removeprefix(_SERVICE) for name in services if name.startswith(_SERVICE)):
            query = {
                "query.serviceName": f"{_SERVICE}{env}",
                "query.operationName": f"{_ROOT}{env}",
                "query.startTimeMin": _rfc3339(start),
                "query.startTimeMax": _rfc3339(end),
                "query.searchDepth": str(_MOST),
            }
            # Jaeger looks at spans one by one, the root among them, and returns so many traces and no more
            narrowed = [{}] if slow_s is None else [{"query.durationMin": f"{slow_s:.9f}s"}, _WITH_ERROR]
            for further in narrowed:
                for summary in (await self._get("trace-summaries", query | further, _Summaries)).summaries:
                    ended = self._ended(summary)
                    if ended is not None and (slow_s is None or ended.seconds >= slow_s or ended.why == "failed"):
                        found[ended.group] = ended
        return sorted(found.values(), key=lambda ended: ended.ended_ns)

    def _ended(self, summary: _Summary) -> Ended | None:
        if not summary.root_operation_name.startswith(_ROOT):
            return None
        start_ns, end_ns = int(summary.min_start_time_unix_nano), int(summary.max_end_time_unix_nano)
        return Ended(
            group=summary.trace_id,
            env=summary.root_operation_name.removeprefix(_ROOT),
            ended_ns=end_ns,
            outcome="error" if summary.error_span_count else "ended",
            why="failed" if summary.error_span_count else "kept",
            seconds=(end_ns - start_ns) / 1e9,
            url=trace_url(self._base, summary.trace_id),
        )

    async def _get(self, path: str, query: dict[str, str], kind: type[T]) -> T:
        url = f"{self._base}/api/v3/{path}"
        try:
            answer = await self._client.get(url, params=query, timeout=_TIMEOUT_S)
            answer.raise_for_status()
            return msgspec.json.decode(answer.content, type=kind)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise InfrastructureError(f"Jaeger at {url}: {error}") from error


def _rfc3339(time: datetime) -> str:
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")
