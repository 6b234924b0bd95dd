"""The gateway's token: read from the file that is configured, else made once and kept in the run's folder."""

import os
import secrets
from pathlib import Path

from lachesis.pipeline.gateway.config import GatewayConfig
from lachesis.schemas.errors import StartupError

__all__ = ["GATEWAY_TOKEN", "GATEWAY_URL", "gateway_token", "write_private"]

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
    path = folder / GATEWAY_TOKEN if config.token_file is None else Path(config.token_file)
    if config.token_file is None and not path.exists():
        write_private(path, secrets.token_urlsafe(32))
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise StartupError(f"gateway.token_file {path}: {error.strerror}") from error
    if not token:
        raise StartupError(f"gateway.token_file {path} is empty: it would let everybody in")
    return token


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone can read, whole or not at all. Raises `StartupError`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
        partial.replace(path)
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from error
