"""Exports the reference server's part of a trace.

It has spans for a request, its wait for a place in the batch, and its generation.

The request's span lies below the client's, which the `traceparent` header names, as with real vLLM. Requests without
that header, or of groups that are not sampled, are not traced.
"""

from collections.abc import Container, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lachesis.pipeline.inference.serving.results import GenerationResult
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.clock import Clock
from lachesis.pipeline.telemetry.spans import Attributes, Span, SpanLink, Times, sampled_parent, span_id

__all__ = ["TracedRequests"]

_REQUEST = "llm_request"
"""The name of vLLM's span for the same."""


def _request_spans(
    service: str,
    parent: SpanLink,
    times: Times,
    attributes: Attributes,
    *,
    result: GenerationResult | None,
    clock: Clock,
    error: str | None = None,
) -> list[Span]:
    """Return the spans of one request.

    `times` are Unix ns; `result` is None where there was none: then `error` says why.
    """
    request = span_id(parent.trace, parent.span, _REQUEST, times[0])
    spans = [
        Span(
            service=service, name=_REQUEST, trace=parent.trace, id=request, parent=parent.span, kind="server",
            start_ns=times[0], end_ns=times[1], attributes=attributes, error=error,
        )
    ]  # fmt: skip
    if result is not None:
        parts = {"queue": (result.queued_ns, result.joined_ns or result.ended_ns)}
        if result.joined_ns is not None:
            parts["generation"] = (result.joined_ns, result.ended_ns)
        for name, (start_ns, end_ns) in parts.items():
            id_ = span_id(parent.trace, request, name)
            spans.append(
                Span(
                    service=service, name=name, trace=parent.trace, id=id_, parent=request, kind="internal",
                    start_ns=clock.at_ns(start_ns), end_ns=clock.at_ns(end_ns),
                )
            )  # fmt: skip
    return spans


class TracedRequests:
    """An ASGI application whose sampled requests for one of `paths` are exported once they are answered.

    The application leaves its `GenerationResult` in `request.state.generation`, the prompt's length in
    `request.state.input_tokens`.
    """

    def __init__(self, app: ASGIApp, service: Service, model: str, paths: Container[str]) -> None:
        self._app = app
        self._service = service
        self._model = model
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parent = None
        if scope["type"] == "http" and scope["path"] in self._paths:
            parent = sampled_parent(_header(scope["headers"], b"traceparent"))
        if parent is None:
            await self._app(scope, receive, send)
            return
        start_ns, status = self._service.now_ns(), 500
        state = scope.setdefault("state", {})

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            result: GenerationResult | None = state.get("generation")
            about: dict[str, str | int | list[str]] = {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": self._model,
                "http.response.status_code": status,
            }
            if result is not None:
                versions = [part.version for sample in result.samples for part in sample.weight_versions]
                about |= {
                    "gen_ai.usage.input_tokens": state["input_tokens"],
                    "gen_ai.usage.output_tokens": sum(len(sample.token_ids) for sample in result.samples),
                    "rl.policy.versions": sorted(set(versions)),
                }
            spans = _request_spans(
                self._service.name, parent, (start_ns, self._service.now_ns()), about,
                result=result, clock=self._service.tracing.clock,
                error=f"answered with {status}" if status >= 400 else None,
            )  # fmt: skip
            self._service.tracing.emit(spans)


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in headers if key == name), "")
