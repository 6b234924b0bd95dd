"""Determines whether an exception of user code means that a service it needs is unavailable.

Pure; no client is imported.

An outage says nothing about the group that was scored, so the call is retried. Anything else is a fault of the code or
of its input, which a retry would not help. The rule uses the names of an exception's classes, since the libraries that
raise them need not be installed, and the HTTP status that it carries.
"""

from __future__ import annotations

import errno
from typing import Any

from lachesis.pipeline.errors import InfrastructureError
from lachesis.schemas.errors import LachesisError

__all__ = ["EXHAUSTED", "is_outage"]

_OUTAGE_ERRORS: dict[str, frozenset[str]] = {
    "httpx": frozenset({"TimeoutException", "NetworkError", "ProxyError", "RemoteProtocolError"}),
    "httpcore": frozenset({"TimeoutException", "NetworkError", "ProxyError", "RemoteProtocolError"}),
    "requests": frozenset({"ConnectionError", "Timeout", "ChunkedEncodingError"}),
    "urllib3": frozenset(
        {"TimeoutError", "NewConnectionError", "ProtocolError", "ProxyError", "SSLError", "NameResolutionError"}
    ),
    "aiohttp": frozenset({"ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"}),
    "openai": frozenset({"APIConnectionError"}),
    "anthropic": frozenset({"APIConnectionError"}),
    "http": frozenset({"RemoteDisconnected", "IncompleteRead", "BadStatusLine"}),
    "socket": frozenset({"gaierror", "herror"}),
    "ssl": frozenset({"SSLError"}),
    "asyncio": frozenset({"IncompleteReadError"}),
    "anyio": frozenset({"ConnectionFailed"}),
}
"""By top-level package, the classes whose instances, subclasses' included, say that the other side is away."""
_OWN_WORKERS: dict[str, frozenset[str]] = {
    "anyio": frozenset({"BrokenWorkerProcess", "BrokenWorkerInterpreter"}),
    "concurrent": frozenset({"BrokenExecutor"}),
    "subprocess": frozenset({"SubprocessError"}),
}
"""Processes of the code's own that ended: what they were given may have ended them, whatever broke because of that."""
_UNREACHABLE = frozenset(
    {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETRESET, errno.EADDRNOTAVAIL}
)
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""No file, process or memory is to be had now, whatever it is for."""
_STATUS_OF: dict[str, str] = {
    "httpx": "HTTPStatusError",
    "requests": "HTTPError",
    "aiohttp": "ClientResponseError",
    "openai": "APIStatusError",
    "anthropic": "APIStatusError",
    "urllib": "HTTPError",
}
"""By top-level package, the class of its errors that carry an HTTP status."""
_BUSY = frozenset({408, 429})
_MAX_DEPTH = 16


def is_outage(error: BaseException) -> bool:
    """Return whether `error`, or what it was raised from or because of, says that a service is away.

    Connections refused or broken, time limits of a request, names that do not resolve, and the statuses 408, 429 and
    5xx do, and so does a machine that has no thread, process or open file left. A group of exceptions does if all of
    them do. An error of this package decides for itself. `raise ... from None` says that what came before does not
    matter.
    """
    return _is_outage(error, _MAX_DEPTH)


def _is_outage(error: BaseException, depth: int) -> bool:
    if isinstance(error, LachesisError):
        return isinstance(error, InfrastructureError)
    if isinstance(error, BaseExceptionGroup):
        return depth > 0 and all(_is_outage(inner, depth - 1) for inner in error.exceptions)
    verdict = _by_itself(error)
    if verdict is not None:
        return verdict
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return before is not None and depth > 0 and _is_outage(before, depth - 1)


def _by_itself(error: BaseException) -> bool | None:
    """Return what the exception alone says, None if nothing."""
    names = {(str(kind.__module__).partition(".")[0].removeprefix("_"), kind.__name__) for kind in type(error).__mro__}
    if any(name in _OWN_WORKERS.get(package, ()) for package, name in names):
        return False
    status = _status(error, names)
    if status is not None:
        return status in _BUSY or 500 <= status < 600
    if any(name in _OUTAGE_ERRORS.get(package, ()) for package, name in names):
        return True
    if ("urllib3", "MaxRetryError") in names or ("urllib", "URLError") in names:
        reason = getattr(error, "reason", None)  # "unknown url type" is a text, and no outage
        return isinstance(reason, BaseException) and bool(_by_itself(reason))
    return True if _is_broken_connection(error) or _is_exhaustion(error) else None


def _is_exhaustion(error: BaseException) -> bool:
    """Return whether the machine, or a limit of the process, has no thread, process or open file left."""
    if type(error) is RuntimeError:
        return str(error).startswith("can't start new thread")
    return isinstance(error, OSError) and error.errno in EXHAUSTED


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, BrokenPipeError):
        return False  # a child process that ended looks the same: what was written to it may have ended it
    if type(error) is OSError:
        # asyncio joins what happened at several addresses of one name into one error without a number
        return error.errno in _UNREACHABLE or str(error).startswith("Multiple exceptions: ")
    return isinstance(error, ConnectionError | TimeoutError)


def _status(error: BaseException, names: set[tuple[str, str]]) -> int | None:
    """Return the HTTP status that the exception carries, None if it is not of a kind that does."""
    if not any(_STATUS_OF.get(package) == name for package, name in names):
        return None
    found: Any = None
    for holder in (error, getattr(error, "response", None)):
        for attribute in ("status_code", "status", "code"):
            found = getattr(holder, attribute, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    return None
