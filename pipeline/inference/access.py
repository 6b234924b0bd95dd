"""Checks access to an inference server: sampling needs a key, changing its state a token.

Pure, and on the standard library alone, because vLLM's own process imports it too. Guarantees that key and token are
compared in constant time and that no returned sentence contains them.
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
"""Paths that change a server's state for a run; they need the token."""
_OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key: a supervisor of the process has neither key nor token."""
_NEEDS_TOKEN = "this may change the server's state, which processes of its run alone may do"  # noqa: S105 - a sentence
_NEEDS_KEY = (
    "this server answers nothing without its key; send it as `Authorization: Bearer KEY` (OpenAI's clients: api_key). "
    "It is in the file that inference.ROLE.key_file (lachesis serve: --key-file) names, else in inference/ROLE.key "
    "of the run's folder"
)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The credentials that requests must carry. The token also opens every path that the key opens."""

    token: str | None = None
    """Needed to change the server's state. None: no token is needed."""
    key: str | None = None
    """Needed for everything else except /health. None: no key is needed."""
    callers: frozenset[str] | None = None
    """The paths that do not take the token. None: all but `CONTROL_PATHS`."""

    def refusal(self, path: str, authorization: str) -> str | None:
        """Return why a request with this header `Authorization` is refused; None if it is not."""
        if path in _OPEN_PATHS or (self.token is not None and _bears(authorization, self.token)):
            return None
        if path in CONTROL_PATHS if self.callers is None else path not in self.callers:
            return None if self.token is None else _NEEDS_TOKEN
        return None if self.key is None or _bears(authorization, self.key) else _NEEDS_KEY


def _bears(authorization: str, secret: str) -> bool:
    kind, _, value = authorization.partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(value.strip().encode(), secret.encode())
