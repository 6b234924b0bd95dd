"""A stand-in before an inference server that forwards all requests, and answers oddly while a test wants it.

No server that there is can be made to answer so; what it forwards is a real server's.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["MISMATCHES", "NONSENSE", "REFUSALS", "OddServer", "open_odd_server"]

_SAMPLES = "/inference/v1/generate"
_NEEDED = {_SAMPLES, "/tokenize", "/detokenize"}


def _html(_: str, body: bytes) -> bytes:
    return b"<html><body>502 Bad Gateway, says the load balancer, with status 200</body></html>"


def _truncated(_: str, body: bytes) -> bytes:
    return body[: len(body) // 2]


def _in_json(change: Callable[[str, Any], None]) -> Callable[[str, bytes], bytes]:
    def changed(path: str, body: bytes) -> bytes:
        try:
            found = json.loads(body)
        except ValueError:
            return body
        change(path, found)
        return json.dumps(found).encode()

    return changed


def _in_samples(change: Callable[[Any], None]) -> Callable[[str, bytes], bytes]:
    def each(path: str, found: Any) -> None:
        for choice in found.get("choices", []) if path == _SAMPLES else []:
            change(choice)

    return _in_json(each)


def _nan(choice: Any) -> None:
    for entry in choice["logprobs"]["content"]:
        entry["logprob"] = float("nan")


def _positive(choice: Any) -> None:
    for entry in choice["logprobs"]["content"]:
        entry["logprob"] = 3.0


def _garbage_ids(choice: Any) -> None:
    choice["token_ids"] = [1_000_000 + one for one in choice["token_ids"]]


def _too_few(choice: Any) -> None:
    choice["logprobs"]["content"] = choice["logprobs"]["content"][:-1]


def _odd_end(choice: Any) -> None:
    choice["finish_reason"] = "eos\0"


def _unknown_version(choice: Any) -> None:
    for span in choice["weight_versions"]:  # of a step that the trainer still lists, but another lineage
        span["version"] = f"{span['version'].split('-')[0]}-abcdef-0123456789ab"


def _fewer_samples(path: str, found: Any) -> None:
    if path == _SAMPLES:
        found["choices"] = found["choices"][:-1]


def _model(path: str, found: Any) -> None:
    if path == "/v1/models":
        found["data"][0]["id"] = "another"


def _engine(path: str, found: Any) -> None:
    if path == "/v1/models":
        found["data"][0]["owned_by"] = "ollama"


def _hash(path: str, found: Any) -> None:
    if path == "/v1/models":
        found["data"][0]["tokenizer_hash"] = "f" * 64


def _rotated(path: str, found: Any) -> None:
    """Read ids by a vocabulary rotated by one letter, and say nothing of a hash."""
    if path == "/v1/models":
        del found["data"][0]["tokenizer_hash"]
    elif path == "/detokenize":
        found["prompt"] = "".join(chr(ord(one) + 1) if one.isalpha() else one for one in found["prompt"])


NONSENSE: dict[str, Callable[[str, bytes], bytes]] = {
    "html": _html,
    "truncated": _truncated,
    "nan": _in_samples(_nan),
    "positive": _in_samples(_positive),
    "odd finish_reason": _in_samples(_odd_end),
    "garbage ids": _in_samples(_garbage_ids),
    "too few logprobs": _in_samples(_too_few),
    "too few samples": _in_json(_fewer_samples),
    "json of another kind": lambda _, body: b'{"status": "maintenance"}',
    "empty": lambda _, body: b"",
    "endless": lambda _, body: b'"' + b"x" * (80 << 20),
}
"""What answers may hold that no protocol has a place for, by name."""
MISMATCHES: dict[str, Callable[[str, bytes], bytes]] = {
    "version": _in_samples(_unknown_version),
    "model": _in_json(_model),
    "engine": _in_json(_engine),
    "hash": _in_json(_hash),
    "vocabulary": _in_json(_rotated),
}
"""How a server may be another one than the run's, by name."""


REFUSALS = {
    "unknown model": (404, '{"error": {"message": "The model `policy` does not exist.", "code": 404}}'),
    "invalid model": (400, '{"detail": "unknown model policy"}'),
    "no route": (404, '{"detail": "Not Found"}'),
    "key refused": (401, '{"detail": "this key is revoked"}'),
}
"""How a server may refuse what it served before, by name."""


class OddServer:
    """`mode`: a name of `NONSENSE`, `MISMATCHES` or `REFUSALS`; empty: answers are forwarded as they are."""

    def __init__(self, url: str) -> None:
        self.mode = ""
        self.changed = 0
        """Answers that were changed."""
        self._to = url
        self._client = httpx.AsyncClient(timeout=300.0, trust_env=False)

    async def answer(self, request: Request) -> Response:
        path, body = request.url.path, await request.body()
        headers = {name: value for name, value in request.headers.items() if name != "content-length"}
        try:
            found = await self._client.request(request.method, f"{self._to}{path}", content=body, headers=headers)
        except httpx.HTTPError:
            return Response("nobody there", 503)
        data = found.content
        if self.mode in REFUSALS and path in _NEEDED:
            self.changed += 1
            status, text = REFUSALS[self.mode]
            return Response(text, status, media_type="application/json")
        if self.mode not in REFUSALS and self.mode and found.is_success:
            self.changed += 1
            data = (NONSENSE | MISMATCHES)[self.mode](path, data)
        return Response(data, found.status_code, media_type=found.headers.get("content-type"))


@asynccontextmanager
async def open_odd_server(url: str, port: int) -> AsyncIterator[OddServer]:
    """Serve on `port` before the server at `url`."""
    odd = OddServer(url)
    methods = ["GET", "POST"]
    app = Starlette(routes=[Route("/{path:path}", odd.answer, methods=methods)])
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        yield odd
        server.should_exit = True
