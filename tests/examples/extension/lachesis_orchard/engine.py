"""An inference engine: a server of its own over HTTP, whose model says one word whatever the request.

A server has these routes: tokens in and out with logprobs and the version of the weights, and the tokenizer. The
policy's also takes new weights (`/update_weights` and what is around it, see `pipeline/inference/README.md`).
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.pipeline.inference.http_service import announce
from lachesis.pipeline.inference.settings import ServerSettings
from lachesis.pipeline.runtime.service import Service

WORD = "6"
VERSION = "0-eval-parrot"
CONTEXT = 4096


async def serve(service: Service, settings: ServerSettings, model: str) -> None:
    """Serve a role until the service drains."""
    with serving(settings.config.host, settings.config.port, model) as url:
        async with InferenceDirectory(timeout_s=120.0) as own:
            await own.use(url, settings.access.key())
            await announce(service, settings, own, url, pointer=None)


@contextmanager
def serving(host: str, port: int, model: str) -> Iterator[str]:
    """Serve in threads, and yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": model, "max_model_len": CONTEXT, "owned_by": "orchard"}]})

        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(answers[self.path](given))

        def answer(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    answers = {"/inference/v1/generate": generated, "/tokenize": tokenized, "/detokenize": detokenized}
    with ThreadingHTTPServer((host, port), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://{host}:{server.server_address[1]}"
        finally:
            server.shutdown()


def generated(given: dict[str, Any]) -> dict[str, Any]:
    """Return the samples of one prompt."""
    tokens = [ord(letter) for letter in WORD]
    sample = {
        "token_ids": tokens,
        "text": WORD,
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": token, "logprob": 0.0} for token in tokens]},
        "weight_versions": [{"version": VERSION, "start": 0, "end": len(tokens)}],
    }
    return {"choices": [{**sample, "index": index} for index in range(given["sampling_params"].get("n", 1))]}


def tokenized(given: dict[str, Any]) -> dict[str, Any]:
    """Return the token ids of messages: here, one a letter."""
    text = given.get("prompt") or "\n".join(message["content"] for message in given["messages"])
    tokens = [ord(letter) for letter in text]
    return {"count": len(tokens), "max_model_len": CONTEXT, "tokens": tokens}


def detokenized(given: dict[str, Any]) -> dict[str, Any]:
    """Return the text of token ids."""
    return {"prompt": "".join(map(chr, given["tokens"]))}
