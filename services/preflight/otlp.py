"""Checks that what receives traces and metrics is there and speaks the protocol that is configured."""

import socket
import ssl
from collections.abc import Iterator
from functools import partial
from urllib.parse import urlsplit

import httpx

from lachesis.pipeline.common.bounded_http import wait_for_thread
from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.telemetry.endpoints import GRPC, HTTP, OtlpEndpoint, otlp_endpoints
from lachesis.schemas.errors import ConfigError

__all__ = ["check_otlp"]

_ANSWER_S = 2.0
_BAD_REQUEST = 400
_HTTP_PORT, _GRPC_PORT = 4318, 4317
_PROTOBUF = {"content-type": "application/x-protobuf"}


def check_otlp(config: RunConfig) -> Iterator[DoctorFinding]:
    """Yield a finding for each address that traces or metrics go to.

    An empty message is sent there over HTTP.
    """
    try:
        endpoints = list(otlp_endpoints(config.telemetry))
    except ConfigError as error:
        yield fail("telemetry", str(error), "correct it, or leave it out: nothing is exported then")
        return
    seen = set()
    for endpoint in endpoints:
        tried = (endpoint.address, endpoint.protocol) if endpoint.protocol == GRPC else endpoint.url
        if tried not in seen:
            seen.add(tried)
            yield _try(endpoint)


def _try(endpoint: OtlpEndpoint) -> DoctorFinding:
    """Ask by HTTP: a receiver of gRPC breaks off, or answers what is no HTTP."""
    parts = urlsplit(endpoint.url)
    url = endpoint.url if endpoint.protocol == HTTP else f"{parts.scheme}://{parts.netloc}/v1/traces"
    try:
        status = wait_for_thread(partial(_status, url), 2 * _ANSWER_S)
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return _tls_problem(endpoint, url) or _no_http(endpoint)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        away = f"does not answer ({type(error).__name__}: {without_secrets(str(error))})"
        return _tls_problem(endpoint, url) or _away(endpoint, away)
    if status is None:
        return _away(endpoint, f"does not answer within {2 * _ANSWER_S:g} s")
    tls = _tls_problem(endpoint, url) if status == _BAD_REQUEST else None
    return tls or _answered(endpoint, without_secrets(url), status)


def _no_http(endpoint: OtlpEndpoint) -> DoctorFinding:
    shown = without_secrets(endpoint.address)
    if endpoint.protocol == GRPC:
        return ok("telemetry", f"{shown} takes connections and speaks no HTTP/1.1, as gRPC does")
    mend = f'set telemetry.protocol = "{GRPC}", or the address of its port for HTTP (usually {_HTTP_PORT})'
    return fail("telemetry", f"{shown} ({endpoint.source}) does not speak HTTP, as {HTTP} needs", mend)


def _tls_problem(endpoint: OtlpEndpoint, url: str) -> DoctorFinding | None:
    """Return a finding if a server has TLS and its address says that it has none, or the other way round."""
    found = wait_for_thread(partial(_wrong_scheme, url), 2 * _ANSWER_S)
    if found is None:
        return None
    problem, scheme = found
    text = f"{without_secrets(endpoint.address)} ({endpoint.source}) {problem}"
    return fail("telemetry", text, f"begin its address with {scheme}")


def _wrong_scheme(url: str) -> tuple[str, str] | None:
    """Return what is wrong, and the right scheme; None if nothing is, or it cannot be known."""
    parts = urlsplit(url)
    is_tls = parts.scheme.lower() == "https"
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    context.set_alpn_protocols(["h2", "http/1.1"])
    place = parts.hostname or "", parts.port or (443 if is_tls else 80)
    try:
        with socket.create_connection(place, _ANSWER_S) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=parts.hostname):
                    return None if is_tls else ("takes TLS alone", "https://")
            except ssl.SSLError as error:
                no_tls = error.reason in {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"}
                return ("offers no TLS", "http://") if is_tls and no_tls else None
    except OSError:
        return None


def _status(url: str) -> int:
    """Return the status of the answer, whose body is not read."""
    with httpx.stream("POST", url, content=b"", headers=_PROTOBUF, timeout=_ANSWER_S, trust_env=False) as answer:
        return answer.status_code


def _away(endpoint: OtlpEndpoint, problem: str) -> DoctorFinding:
    text = f"{without_secrets(endpoint.address)} ({endpoint.source}) {problem}; what it does not take is dropped"
    return warn("telemetry", text, "start the receiver, or correct the address")


def _answered(endpoint: OtlpEndpoint, url: str, status: int) -> DoctorFinding:
    if endpoint.protocol == GRPC:
        mend = f'set telemetry.protocol = "{HTTP}", or the address of its port for gRPC (usually {_GRPC_PORT})'
        return fail("telemetry", f"{without_secrets(endpoint.address)} ({endpoint.source}) speaks HTTP, not gRPC", mend)
    text = f"{url} answers {status}"
    if status in {404, 405}:
        mend = f"correct {endpoint.source}: it is the base of /v1/traces and /v1/metrics"
        return fail("telemetry", f"{text}: no receiver of OTLP is there", mend)
    if status in {401, 403}:
        return ok("telemetry", f"{text} without the headers of OTEL_EXPORTER_OTLP_HEADERS, which were not tried")
    if status >= 500:
        return _away(endpoint, f"answers {status}")
    return ok("telemetry", text)
