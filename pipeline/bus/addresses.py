"""Reads the addresses of NATS servers: what is wrong with one, and the credentials in it. Pure.

Credentials in an address are percent-encoded where they hold characters that end a part of it, as in every other URL.
"""

import ipaddress
import re
from contextlib import suppress
from urllib.parse import ParseResult, unquote, urlparse

from lachesis.schemas.errors import ConfigError

__all__ = [
    "check_addresses",
    "decoded_credentials",
    "host_and_port",
    "is_websocket",
    "parse_address",
    "split_addresses",
    "url_host",
]

_TCP, _WEBSOCKET = ("nats", "tls"), ("ws", "wss")
_PORT = 4222
_DEFAULT_PORTS = {**dict.fromkeys(_TCP, _PORT), "ws": 80, "wss": 443}
_ENCODE = "a user or password in it with / ? # , % or @ is written percent-encoded (%2F %3F %23 %2C %25 %40)"


def split_addresses(text: str) -> list[str]:
    """Return the addresses of a text that names one or several, separated by commas."""
    return [part.strip() for part in text.split(",")]


def is_websocket(address: str) -> bool:
    return address.startswith(tuple(f"{scheme}://" for scheme in _WEBSOCKET))


def check_addresses(text: str, setting: str = "nats.url") -> None:
    """Raise `ConfigError` where no client could connect to one of the addresses. It never quotes them."""
    addresses = split_addresses(text)
    for number, address in enumerate(addresses, 1):
        problem = _problem(address)
        if problem is not None:
            which = setting if len(addresses) == 1 else f"{setting}, address {number} of {len(addresses)}"
            raise ConfigError(f"{which}: {problem}")
    if len({is_websocket(address) for address in addresses}) > 1:
        raise ConfigError(f"{setting}: names servers by ws:// or wss:// and by nats:// or tls://: use one kind")


def _problem(address: str) -> str | None:
    scheme, separator, rest = address.partition("://")
    if not separator:
        scheme, rest = "nats", address
    if scheme not in (*_TCP, *_WEBSOCKET):
        return f"{scheme!r} is no way to a NATS server: use nats://, tls://, ws:// or wss://"
    parsed = urlparse(f"{scheme}://{rest}")
    try:
        host, _ = parsed.hostname, parsed.port
    except ValueError:
        return _unreadable(rest)
    if not host:
        return f"it names no host; {_ENCODE}" if rest else "it is empty"
    if (parsed.path not in {"", "/"} and scheme in _TCP) or parsed.query or parsed.fragment:
        return f"something follows host and port; {_ENCODE}"
    return None


def _unreadable(rest: str) -> str:
    bare = rest.rpartition("@")[2].rstrip("/")
    for candidate in (bare, bare.rpartition(":")[0]):
        with suppress(ValueError):
            ipaddress.IPv6Address(candidate.partition("%")[0])
            return "an IPv6 address stands in brackets: nats://[::1]:4222"
    return f"its port is no number from 0 to 65535; {_ENCODE}"


def parse_address(address: str) -> ParseResult:
    """Return a checked address as the client reads it, with the scheme and port that it leaves out.

    A websocket's is left without a port, as the client leaves it.
    """
    server = urlparse(address if "://" in address else f"nats://{address}")
    if server.port is not None or server.scheme not in _TCP:
        return server
    return server._replace(netloc=f"{server.netloc.rstrip(':')}:{_PORT}")


def host_and_port(server: ParseResult) -> tuple[str, int]:
    """Return where a server is reached; an address without a port means that of its scheme."""
    return server.hostname or "", server.port or _DEFAULT_PORTS.get(server.scheme, _PORT)


def decoded_credentials(server: ParseResult) -> dict[str, str]:
    """Return the fields of the client's first message that the credentials in an address are, decoded."""
    if server.username is None:
        return {}
    if server.password is None:
        return {"auth_token": _decoded(server.username)}
    return {"user": _decoded(server.username), "pass": _decoded(server.password)}


def _decoded(text: str) -> str:
    """Return the text decoded, as it stands where it is not encoded: a password of before may hold a % alone."""
    return unquote(text) if re.search(r"%(?![0-9A-Fa-f]{2})", text) is None else text


def url_host(host: str) -> str:
    """Return a host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
