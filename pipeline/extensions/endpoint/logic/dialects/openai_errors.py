"""Errors as OpenAI's servers write them. Pure."""

from typing import Any

__all__ = ["openai_error"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def openai_error(status: int, text: str, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _KINDS.get(status, "server_error")
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}
