"""Serves the page of a run until cancelled."""

import secrets
import socket
from collections.abc import Callable, Container
from ipaddress import ip_address

from lachesis.pipeline.bus.addresses import url_host
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.loopback import LOOPBACK
from lachesis.pipeline.common.private_file import shared_token
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.runtime.http import HttpServer
from lachesis.services.web.api import RunApi
from lachesis.services.web.app import build_app
from lachesis.services.web.shared_history import SharedHistory

__all__ = ["WEB_TOKEN", "accepted_hosts", "serve_page"]

WEB_TOKEN = "web.token"  # noqa: S105 - a file's name
"""File of the run's folder that holds the token of the page."""
_MAX_CONNECTIONS = 128


async def serve_page(config: RunConfig, host: str, port: int, show: Callable[[str], None]) -> None:
    """Serve until cancelled; `show` is called with the page's address once it is served.

    Raises `StartupError` where nothing can listen there.
    """
    with _listen(host, port) as listener:
        port = listener.getsockname()[1]
        token = _token(config)  # on loopback, too: others may have accounts on this machine
        history = SharedHistory(config)
        app = build_app(RunApi(config, history), hosts=accepted_hosts(host), token=token, cookie=f"lachesis-web-{port}")
        server = HttpServer.over(app, grace_s=1, max_connections=_MAX_CONNECTIONS, keep_alive_s=5)
        async with background() as tasks:
            tasks.start_soon(history.serve)
            show(_url(host, port, token))
            await server.serve_until_cancelled([listener])


def accepted_hosts(host: str) -> Container[str]:
    """Return the names and addresses, beside those of loopback, that a request to `host` may be for."""
    if host in LOOPBACK:
        return ()
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - set by the user, who then needs the token
        return _AnyAddress()
    return (host.lower(),)


class _AnyAddress(Container[str]):
    """Addresses, and the names of this machine: no page of a stranger has such a name."""

    def __init__(self) -> None:
        self._names = {socket.gethostname().lower(), socket.getfqdn().lower()}

    def __contains__(self, host: object) -> bool:
        try:
            ip_address(str(host))
        except ValueError:
            return host in self._names
        return True


def _token(config: RunConfig) -> str:
    """Return the token: the one in the run's folder, or, where that is not on this machine, a new one."""
    return shared_token(config.path / WEB_TOKEN) if config.path.is_dir() else secrets.token_urlsafe(32)


def _url(host: str, port: int, token: str) -> str:
    named = socket.gethostname() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - it is only compared
    return f"http://{url_host(named)}:{port}/?token={token}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError, TypeError) as error:  # TypeError: a name that no encoding fits
        why = getattr(error, "strerror", None) or error
        raise StartupError(
            f"cannot listen on {host[:100]}:{port} ({why}); choose another --port, or 0 for a free one"
        ) from error
