"""What `doctor` and `up` say of the address that traces and metrics go to."""

import select
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
import trustme

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.endpoints import GRPC, HTTP, otlp_endpoints
from lachesis.schemas.errors import ConfigError
from lachesis.services.preflight import otlp
from lachesis.services.preflight.otlp import check_otlp


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200 if self.path in {"/v1/traces", "/v1/metrics"} else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "PROTOCOL", "TRACES_ENDPOINT", "METRICS_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


@pytest.fixture
def http_receiver() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def grpc_receiver() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop(0).wait()


def levels(endpoint: str, protocol: str) -> list[tuple[str, str]]:
    config = RunConfig(telemetry=TelemetryConfig(endpoint=endpoint, protocol=protocol))
    return [(one.level, f"{one.text} {one.mend or ''}") for one in check_otlp(config)]


@pytest.mark.outside
def test_a_receiver_is_asked_in_its_protocol(http_receiver: str, grpc_receiver: str) -> None:
    assert [level for level, _ in levels(http_receiver, HTTP)] == ["OK", "OK"]
    assert [level for level, _ in levels(grpc_receiver, GRPC)] == ["OK"]
    ((level, text),) = levels(http_receiver, GRPC)
    assert level == "FAIL"
    assert 'speaks HTTP, not gRPC set telemetry.protocol = "http/protobuf"' in text
    level, text = levels(grpc_receiver, HTTP)[0]
    assert level == "FAIL"
    assert 'set telemetry.protocol = "grpc"' in text
    level, text = levels(f"{http_receiver}/otlp", HTTP)[0]
    assert level == "FAIL"
    assert "answers 404: no receiver of OTLP is there" in text


@pytest.mark.outside
def test_a_receiver_that_is_away_stops_nothing() -> None:
    ((level, text),) = levels("http://127.0.0.1:9", GRPC)
    assert level == "WARN"
    assert "does not answer" in text


@pytest.mark.outside
def test_an_answer_that_trickles_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        trickling = pool.submit(trickle, server)
        ((level, text),) = levels(f"http://127.0.0.1:{server.getsockname()[1]}", GRPC)
        assert not trickling.done()
        server.shutdown(socket.SHUT_RDWR)
    assert level == "WARN"
    assert "does not answer within 0.4 s" in text


def trickle(server: socket.socket) -> None:
    """Answer with headers without end, until somebody has shut the server down."""
    client, _ = server.accept()
    with client, suppress(OSError):
        client.recv(1 << 16)
        client.sendall(b"HTTP/1.1 200 OK\r\n")
        while server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            client.sendall(b"x: y\r\n")
            select.select([client], [], [], 0.05)


@pytest.mark.parametrize(("status", "level"), [(200, "OK"), (400, "OK"), (500, "WARN"), (503, "WARN")])
def test_a_receiver_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, status: int, level: str) -> None:
    monkeypatch.setattr(otlp, "_status", lambda _: status)
    assert [one for one, _ in levels("http://host:4318", HTTP)] == [level, level]


@pytest.mark.parametrize("endpoint", ["http://me:hunter2@host:port", "me:hunter2@host:4317", "http://me:hunter2@"])
def test_an_address_that_is_refused_is_quoted_without_its_password(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(otlp_endpoints(TelemetryConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}))
    assert "hunter2" not in str(caught.value)
    assert "***@" in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("localhost:4317", "http://localhost:4317"),
        ("grpc://host:4317", "http://host:4317"),
        ("http://host:4318/v1/traces", "so set it to http://host:4318"),
        ("http://host:4318/api/v1/metrics/", "so set it to http://host:4318/api"),
        ("http://", "it names no host"),
        ("http://host:port", "port"),
    ],
)
@pytest.mark.parametrize("variable", [True, False])
def test_an_address_that_cannot_be_right_is_refused(endpoint: str, said: str, variable: bool) -> None:
    config = TelemetryConfig(endpoint=None if variable else endpoint)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} if variable else {}
    with pytest.raises(
        ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT" if variable else "telemetry.endpoint"
    ) as caught:
        list(otlp_endpoints(config, environ))
    assert said in str(caught.value)


def test_the_path_of_a_signal_is_added_to_a_base_alone() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4318/v1/traces",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:4318/",
        "OTEL_EXPORTER_OTLP_PROTOCOL": HTTP,
    }
    found = list(otlp_endpoints(TelemetryConfig(endpoint="http://c:4317"), environ))
    assert [one.url for one in found] == ["http://a:4318/v1/traces", "http://b:4318/v1/metrics"]


def test_nothing_is_wanted_where_the_standard_variable_switches_exports_off(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TelemetryConfig(endpoint="http://c:4317")
    assert config.wanted()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    assert not config.wanted(), "so that its packages are not asked for either"
    assert not list(otlp_endpoints(config))


@pytest.mark.outside
@pytest.mark.parametrize("protocol", [GRPC, HTTP])
def test_tls_that_an_address_promises_or_leaves_out_is_named(
    http_receiver: str, grpc_receiver: str, protocol: str
) -> None:
    for plain in (http_receiver, grpc_receiver):
        level, text = levels(plain.replace("http://", "https://"), protocol)[0]
        assert (level, "offers no TLS begin its address with http://" in text) == ("FAIL", True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("localhost").configure_cert(context)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        level, text = levels(f"http://127.0.0.1:{server.server_port}", protocol)[0]
        server.shutdown()
    assert (level, "takes TLS alone begin its address with https://" in text) == ("FAIL", True)
