"""The gateway's token: read from the configured file, or generated and kept in the run's folder."""

from pathlib import Path

from lachesis.pipeline.common.private_file import given_token, shared_token
from lachesis.pipeline.extensions.atropos.gateway.config import GatewayConfig

__all__ = ["GATEWAY_TOKEN", "GATEWAY_URL", "gateway_token"]

GATEWAY_TOKEN = "gateway.token"  # noqa: S105 - a file's name
"""File of the run's folder that holds the token."""
GATEWAY_URL = "gateway.url"
"""File of the run's folder that holds the gateway's URL, the token in it."""


def gateway_token(config: GatewayConfig, folder: Path) -> str | None:
    """Return the token that clients must send, made if there is none yet; None if they need none.

    Raises `StartupError` when its file cannot be read or written, or is empty.
    """
    if not config.needs_token:
        return None
    if config.token_file is None:
        return shared_token(folder / GATEWAY_TOKEN)
    return given_token(Path(config.token_file), "gateway.token_file")
