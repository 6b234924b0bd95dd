"""A real OTLP receiver in this process, over gRPC or HTTP, on a free port of 127.0.0.1."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

Protocol = Literal["grpc", "http/protobuf"]


class Received:
    """What came, in OTLP's own messages; `spans` are (service name, span) pairs, `resources` by service name."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[tuple[str, Any]] = []
        self.resources: dict[str, dict[str, str]] = {}
        self.metrics: dict[tuple[str, str], Any] = {}

    def traces(self, request: Any) -> None:
        for part in request.resource_spans:
            service = _service(part.resource)
            said = {pair.key: pair.value.string_value for pair in part.resource.attributes}
            # who rebuilds another service's spans leaves out what holds of that process alone
            self.resources[service] = self.resources.get(service, {}) | said
            self.spans += [(service, span) for scope in part.scope_spans for span in scope.spans]

    def figures(self, request: Any) -> None:
        for part in request.resource_metrics:
            service = _service(part.resource)
            for scope in part.scope_metrics:
                self.metrics |= {(service, metric.name): metric for metric in scope.metrics}

    def trace(self, group: str) -> dict[str, Any]:
        """Return the spans of one trace by name."""
        return {span.name: span for _, span in self.spans if span.trace_id.hex() == group}


def _service(resource: Any) -> str:
    return str(next(pair.value.string_value for pair in resource.attributes if pair.key == "service.name"))


@contextmanager
def receiving(protocol: Protocol) -> Iterator[Received]:
    """Run a receiver while the context is open."""
    with _grpc() if protocol == "grpc" else _http() as received:
        yield received


@contextmanager
def _grpc() -> Iterator[Received]:
    received = Received()

    class Traces(TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            received.traces(request)
            return ExportTraceServiceResponse()

    class Metrics(MetricsServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            received.figures(request)
            return ExportMetricsServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Traces(), server)
    add_MetricsServiceServicer_to_server(Metrics(), server)
    received.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()


@contextmanager
def _http() -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                received.traces(ExportTraceServiceRequest.FromString(body))
            else:
                received.figures(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()
