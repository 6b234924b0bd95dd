"""Stands between this project, which speaks vLLM 0.32, and vLLM 0.26.0: a GPU's torch may take no newer one.

    python -m gpu.vllm_026 -m ENTRY ARGUMENT...    as `lachesis.pipeline.inference.engines.vllm.process` starts vLLM

It becomes the server of 0.26.0 with the arguments that it knows. What it does not know of weights, `WeightNames` adds:
their version, by /weight_info and in what /inference/v1/generate answers. For figures alone: a run needs 0.32. Where
`collect.py` has left FlashAttention out, a package of its name is written: attention of every kind imports it.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

__all__ = ["WeightNames", "arguments_of_026", "name_flash_attention"]

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_ENTRY = "vllm.entrypoints.openai.api_server"
_UNKNOWN = "--enable-scale-out"
"""What it opens is there without."""
_WORKER = "lachesis.pipeline.inference.engines.vllm.worker.WorkerExtension"
_OWN_WORKER = "gpu.vllm_026_worker.WorkerExtension"
_FINAL_ONLY = 2
"""Of vLLM's `RequestOutputKind`."""
_FLASH_ATTENTION = """from vllm.vllm_flash_attn.flash_attn_interface import (
    compile_flash_attn_varlen_func_from_specs,
    fa_version_unsupported_reason,
    flash_attn_varlen_func,
    get_scheduler_metadata,
    is_fa_version_supported,
)
"""
_OWN_MIDDLEWARE = ["--middleware", "gpu.vllm_026.WeightNames"]
"""The first that is named is the innermost: this project's own stands before it."""


def arguments_of_026(words: list[str]) -> list[str]:
    """Return the arguments for Python that start 0.26.0, from those that start 0.32."""
    known = [_OWN_WORKER if word == _WORKER else word for word in words[2:] if word != _UNKNOWN]
    return ["-m", _ENTRY, *_OWN_MIDDLEWARE, *known]


def name_flash_attention(package: Path) -> None:
    """Let vLLM, whose folder this is, import FlashAttention where its kernels are missing; it cannot be called."""
    init = package / "vllm_flash_attn" / "__init__.py"
    if not init.exists():
        init.write_text(_FLASH_ATTENTION)


class WeightNames:
    """ASGI middleware: keeps the version that /finish_weight_update names, and says it where 0.32 does."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._version = "as it started"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        route = (scope.get("method"), scope.get("path"))
        if route == ("GET", "/weight_info"):
            await _answer(send, 200, {"weight_version": self._version})
        elif route == ("POST", "/finish_weight_update"):
            await self._finish(scope, receive, send)
        elif route == ("POST", "/inference/v1/generate"):
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _finish(self, scope: Message, receive: Receive, send: Send) -> None:
        asked = await _body(receive)
        status, answer = await self._call(scope, asked, receive)
        named = (json.loads(asked or b"{}") or {}).get("weight_version")
        if status == 200 and named is not None:
            self._version = named
        await _answer(send, status, json.loads(answer or b"{}"))

    async def _generate(self, scope: Message, receive: Receive, send: Send) -> None:
        version = self._version
        status, answer = await self._call(scope, _for_whole_samples(await _body(receive)), receive)
        found = json.loads(answer or b"{}")
        if status == 200 and self._version == version:  # else which token is of which is not known, and nothing is said
            for choice in found["choices"]:
                choice["weight_versions"] = _spans(len(choice["token_ids"]), version)
                choice["text"] = ""  # no part here reads it
        await _answer(send, status, found)

    async def _call(self, scope: Message, body: bytes, receive: Receive) -> tuple[int, bytes]:
        """Return what 0.26.0 answers to this body."""
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        answered: list[Message] = []

        async def again() -> Message:
            return unread.pop() if unread else await receive()

        async def keep(message: Message) -> None:
            answered.append(message)

        await self._app(scope, again, keep)
        status = answered[0]["status"] if answered else 499  # nothing is answered to one who has hung up
        return status, b"".join(message.get("body", b"") for message in answered[1:])


def _for_whole_samples(body: bytes) -> bytes:
    """Ask for all samples at their end: of more than one, 0.26.0 answers those that ended last alone."""
    asked = json.loads(body)
    asked["sampling_params"]["output_kind"] = _FINAL_ONLY
    return json.dumps(asked).encode()


def _spans(tokens: int, version: str) -> list[dict[str, Any]]:
    return [{"start": 0, "end": tokens, "version": version}] if tokens else []


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _answer(send: Send, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    found = importlib.util.find_spec("vllm")
    if found is not None and found.origin is not None:
        name_flash_attention(Path(found.origin).parent)
    os.execv(sys.executable, [sys.executable, *arguments_of_026(sys.argv[1:])])  # noqa: S606 - in its place


if __name__ == "__main__":
    main()
