"""Finds where spans and figures go over OTLP, and what is wrong with an address.

The standard variables override the settings. An address for all signals is the base of theirs: over HTTP /v1/traces
and /v1/metrics are added to it, and not to one that a variable gives for a single signal.
"""

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from lachesis.pipeline.telemetry.config import TelemetryConfig, is_disabled
from lachesis.schemas.errors import ConfigError

__all__ = ["GRPC", "HTTP", "OtlpEndpoint", "otlp_endpoints"]

GRPC, HTTP = "grpc", "http/protobuf"
_PATHS = {"TRACES": "/v1/traces", "METRICS": "/v1/metrics"}
_ALL_PATHS = (*_PATHS.values(), "/v1/logs")


class OtlpEndpoint(NamedTuple):
    """Where a signal goes: the setting or variable that says so, the address, the protocol, and the URL over HTTP."""

    signal: str
    source: str
    address: str
    protocol: str
    url: str


def otlp_endpoints(config: TelemetryConfig, environ: Mapping[str, str] = os.environ) -> Iterator[OtlpEndpoint]:
    """Yield the endpoint of each signal that is exported.

    Raises `ConfigError` on an exporter or a protocol that is not known, and on what is no address.
    """
    if is_disabled(environ):
        return
    for signal, path in _PATHS.items():
        exporter = environ.get(f"OTEL_{signal}_EXPORTER", "otlp")
        if exporter not in {"otlp", "none"}:
            raise ConfigError(f"OTEL_{signal}_EXPORTER is {exporter!r}; use otlp or none")
        own, shared = f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
        found = {own: environ.get(own), shared: environ.get(shared), "telemetry.endpoint": config.endpoint}
        source, address = next(((name, value) for name, value in found.items() if value), ("", None))
        if exporter == "none" or address is None:
            continue
        protocol = environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        protocol = protocol or config.protocol
        if protocol not in {GRPC, HTTP}:
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; use grpc or http/protobuf")
        _check(source, address, protocol, is_base=source != own)
        yield OtlpEndpoint(signal, source, address, protocol, address if source == own else address.rstrip("/") + path)


def _check(source: str, address: str, protocol: str, *, is_base: bool) -> None:
    scheme, shown = address.partition("://")[0].lower(), _without_credentials(address)
    if "://" not in address or scheme not in {"http", "https"}:
        written = shown.rpartition("://")[2].strip()
        raise ConfigError(
            f"{source} is {shown!r}: it begins with http:// or https:// (http://{written}), also for grpc"
        )
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{source} is {shown!r}: its host or port cannot be read") from error
    if not host:
        raise ConfigError(f"{source} is {shown!r}: it names no host")
    path = parts.path.rstrip("/")
    if is_base and path.endswith(_ALL_PATHS):
        base = shown.partition("?")[0].rstrip("/").removesuffix(next(one for one in _ALL_PATHS if path.endswith(one)))
        way = f"set it to {base}" if protocol == HTTP else f'set it to {base}, with protocol "{HTTP}" if that is meant'
        raise ConfigError(f"{source} is {shown!r}: the signal's own path is added to it, so {way}")


def _without_credentials(address: str) -> str:
    scheme, separator, rest = address.rpartition("://") if "://" not in address else address.partition("://")
    _, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{'***' if at else ''}{at}{place}"
