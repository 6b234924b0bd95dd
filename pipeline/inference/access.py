"""Who may call an inference server: a key opens the routes that sample, a token those that change its state.

Pure, on the standard library alone: vLLM's own process imports it, too. Guarantees that both are compared in constant
time and are in no sentence that is returned.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

__all__ = ["CONTROL_PATHS", "ServerAccess"]

CONTROL_PATHS = frozenset(
    {
        "/pause",
        "/resume",
        "/reset_prefix_cache",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    }
)
"""What changes a server's state, and so takes a token."""
_OPEN_PATHS = frozenset({"/health"})
"""What everybody may ask: whoever watches over a process has neither key nor token."""

_NEEDS_TOKEN = "this changes the server's state, which processes of its run alone may do"  # noqa: S105 - a sentence
_NEEDS_KEY = (
    "this server answers nobody without its key; send it as `Authorization: Bearer KEY` (OpenAI's clients: api_key). "
    "It is in the file that inference.ROLE.key_file names, else in inference/ROLE.key of the run's folder"
)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """What requests must bear. The token opens what the key opens."""

    token: str | None = None
    """For what changes the server's state. None: nothing."""
    key: str | None = None
    """For all else but /health. None: nothing."""

    def refusal(self, path: str, authorization: str) -> str | None:
        """Return why a request with this header `Authorization` is refused; None if it is not."""
        if path in CONTROL_PATHS:
            allowed = self.token is None or _bears(authorization, self.token)
            return None if allowed else _NEEDS_TOKEN
        if self.key is None or path in _OPEN_PATHS or _bears(authorization, self.key):
            return None
        allowed = self.token is not None and _bears(authorization, self.token)
        return None if allowed else _NEEDS_KEY


def _bears(authorization: str, secret: str) -> bool:
    kind, _, value = authorization.partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(value.strip().encode(), secret.encode())
