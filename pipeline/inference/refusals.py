"""Tells by an unsuccessful answer of an inference server which error it means. Pure."""

import re

import httpx

from lachesis.pipeline.errors import (
    ApiKeyError,
    InfrastructureError,
    PromptTooLongError,
    ServerAwayError,
    UnreadableAnswerError,
)
from lachesis.schemas.errors import DataError, LachesisError

__all__ = ["NoSuchRouteError", "NotServedError", "beginning_of", "read_refusal"]

_MAX_QUOTED = 1000
_MAX_SHOWN_CHARS = 100
"""Characters of an unreadable answer that an error repeats."""
_BEYOND_CONTEXT = re.compile(r"maximum context length|a context of \d+ tokens holds")
"""How vLLM and the reference server refuse a prompt that is too long."""
_UNKNOWN_MODEL = re.compile(
    r"unknown model|model_not_found|\bmodel\b.{0,200}\b(?:does not exist|not found|is unknown)", re.IGNORECASE
)
"""How servers refuse requests while they serve another model."""
_BUSY = frozenset({429, 502, 503, 504})
"""Statuses of a server, or of what stands before it, that has not looked at the request; a 500 may be its fault."""


class NoSuchRouteError(DataError):
    """Raised when a server does not have the requested object."""


class NotServedError(UnreadableAnswerError):
    """Raised when a server cannot serve what every sample needs: it is another server, or has another model."""


def read_refusal(where: str, path: str, status: int, body: bytes, *, is_html: bool) -> LachesisError:
    """Return the error that an unsuccessful answer of `where` to a request of `path` means."""
    said = body.decode(errors="replace")
    text = f"{where} answered {path} with {status}: {said[:_MAX_QUOTED]}"
    if status in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN} and not is_html:
        return ApiKeyError(text)
    if status in _BUSY:
        return ServerAwayError(text)
    if status >= 500 or status == httpx.codes.REQUEST_TIMEOUT:
        return InfrastructureError(text)
    if status < 400 or is_html:  # of something that stands before it
        return UnreadableAnswerError(f"{where} answered {path} with {status}. It begins {beginning_of(body)}")
    if status == httpx.codes.NOT_FOUND or _UNKNOWN_MODEL.search(said):
        return NoSuchRouteError(text)
    return (PromptTooLongError if _BEYOND_CONTEXT.search(said) else DataError)(text)


def beginning_of(answer: bytes) -> str:
    """Return the beginning of an unreadable answer."""
    return repr(answer[: 4 * _MAX_SHOWN_CHARS].decode(errors="replace")[:_MAX_SHOWN_CHARS])
