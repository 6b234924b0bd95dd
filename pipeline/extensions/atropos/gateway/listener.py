"""Opens the gateway's listening socket, which outlives the gateway if a supervisor holds it.

Clients of Atropos end after three failed requests within three seconds, which is less than a gateway takes to start
again. While the supervisor holds the socket, their connections wait in its backlog instead of being refused.
"""

import os
import socket

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.extensions.atropos.gateway.config import GatewayConfig, settings_of

__all__ = ["LISTENER_FD", "open_listener", "take_listener"]

LISTENER_FD = "GATEWAY_LISTENER_FD"
"""Variable by which a supervisor names the file descriptor of the socket that it passes to the gateway."""
_BACKLOG = 1024


def open_listener(config: RunConfig) -> socket.socket:
    """Return a socket that listens where the configuration says. Raises `StartupError` if it cannot."""
    return _listen(settings_of(config))


def _listen(settings: GatewayConfig) -> socket.socket:
    try:
        return socket.create_server((settings.host, settings.port), backlog=_BACKLOG)
    except OSError as error:
        raise StartupError(
            f"gateway: cannot listen on {settings.host}:{settings.port} ({error.strerror}); choose another "
            "gateway.port, or 0 for a free one"
        ) from error


def take_listener(settings: GatewayConfig) -> socket.socket:
    """Return the socket that the supervisor passed to this process, or else a new one.

    Raises `StartupError` if it cannot listen.
    """
    passed = os.environ.pop(LISTENER_FD, None)
    if passed is None:
        return _listen(settings)
    try:
        listener = socket.socket(fileno=int(passed))
        listener.set_inheritable(False)
    except (OSError, ValueError) as error:
        raise StartupError(
            f"gateway: {LISTENER_FD} is {passed!r}, which is no socket of this process ({error}); unset it"
        ) from error
    return listener
