"""HTTP: every route of the reference inference server, and the client against a server that answers anything.

A request is a line `METHOD path?query` and a body. Any answer but 2xx and 4xx is a crash, and so is an engine that died
of it. What the client takes from an answer must make a group that readers accept.
"""

import asyncio
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import torch
from fuzz.mutate import mutate_bytes, mutate_json, mutate_text
from fuzz.oracle import Target

from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig, EngineConfig
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.prompt_tree import PromptPath
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.weight_files import write_weights
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import DataError

__all__ = ["targets"]

_SAMPLING = {
    "n": 2, "temperature": 0.7, "top_p": 0.9, "max_tokens": 3, "seed": 7, "stop_token_ids": [2], "ignore_eos": True,
    "logprobs": 3, "prompt_logprobs": 2,
}  # fmt: skip
_GENERATED = {
    "choices": [
        {
            "index": 0, "token_ids": [5, 6], "finish_reason": "stop", "text": "ab", "stop_reason": 2,
            "logprobs": {"content": [{"logprob": -0.5, "token": "a"}, {"logprob": -0.5, "token": "b"}]},
            "weight_versions": [{"version": "0-a-b", "start": 0, "end": 2}],
        }
    ],
    "prompt_logprobs": [None, {"5": {"logprob": -1.0, "rank": 1}}],
    "branch_logprobs": [[{"6": {"logprob": -1.0, "rank": 1}}]],
}  # fmt: skip
_PROBED = {**_GENERATED, "prompt_logprobs": [None, *({str(t): {"logprob": -1.0}} for t in (5, 5, 6))]}
_GOOD = {
    "generate": msgspec.json.encode(_GENERATED),
    "probe": msgspec.json.encode(_PROBED),
    "tokens": msgspec.json.encode({"count": 2, "max_model_len": 64, "tokens": [4, 5]}),
    "models": msgspec.json.encode({"data": [{"id": "m", "max_model_len": 64, "tokenizer_hash": "t"}]}),
}


def targets(things: ExitStack) -> list[Target]:
    """Return the targets; server and engine live as long as `things`."""
    folder = Path(things.enter_context(tempfile.TemporaryDirectory()))
    runner = things.enter_context(asyncio.Runner())
    server = _Server(folder, runner, things)
    return [
        Target("http.server", server.seeds(), _mutate_request, server.feed, (), weight=3),
        *(
            Target(
                f"http.client.{name}",
                [_GOOD[name]],
                mutate_json,
                lambda data, name=name: runner.run(_take(name, data)),
                (DataError, InfrastructureError, StartupError),
            )
            for name in ("generate", "tokens", "models")
        ),
    ]


class _Server:
    def __init__(self, folder: Path, runner: asyncio.Runner, things: ExitStack) -> None:
        policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=64)
        torch.set_num_threads(1)
        tensors = policy_tensors(policy.model)
        self.version = policy_version(1, "fuzz", tensors)
        self.weights = write_weights(tensors, folder, self.version)
        config = EngineConfig(max_running_sequences=8, max_waiting_requests=8)
        eos = policy.tokenizer.eos_token_id
        self.engine = things.enter_context(
            Engine(policy.model, eos_token_id=eos, weight_version=str(self.version), config=config)
        )
        self.app = build_app(policy, self.engine, model_name="policy", weights_folder=folder)
        self.runner = runner

    def seeds(self) -> list[bytes]:
        """Return a good request of every route."""
        update = {"update_info": {"path": str(self.weights), "version": str(self.version)}}
        posts = [
            ("/inference/v1/generate", {"token_ids": [1, 9, 9], "sampling_params": _SAMPLING, "output_mode": "text"}),
            ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 2}, "request_id": "r"}),
            (
                "/inference/v1/generate",
                {
                    "token_ids": [1, 9, 9],
                    "branches": [{"shared": 2, "token_ids": [7, 8]}, {"shared": 3, "token_ids": [5]}],
                    "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2},
                },
            ),
            ("/tokenize", {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]}),
            ("/tokenize", {"prompt": "hello", "add_special_tokens": False, "model": "m"}),
            ("/detokenize", {"tokens": [5, 6, 7], "model": "m"}),
            ("/start_weight_update", {}),
            ("/update_weights", update),
            ("/finish_weight_update", {"weight_version": str(self.version)}),
            ("/pause?mode=keep", {}),
            ("/resume", {}),
            ("/reset_prefix_cache", {}),
        ]
        gets = [f"GET {path}\n".encode() for path in ("/health", "/v1/models", "/is_paused", "/weight_info")]
        return gets + [f"POST {path}\n".encode() + msgspec.json.encode(body) for path, body in posts]

    def feed(self, data: bytes) -> str:
        """Ask, and see that the server lives on."""
        return self.runner.run(self._ask(data))

    async def _ask(self, data: bytes) -> str:
        line, _, body = data.partition(b"\n")
        method, _, target = line.partition(b" ")
        path, _, query = target.partition(b"?")
        scope = {
            "type": "http", "http_version": "1.1", "method": method.decode("latin-1"), "path": path.decode("latin-1"),
            "raw_path": path, "query_string": query, "headers": [(b"content-type", b"application/json")],
            "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "scheme": "http",
        }  # fmt: skip
        sent: list[dict[str, object]] = []
        parts = [body[: len(body) // 2], body[len(body) // 2 :]]

        async def receive() -> dict[str, object]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        status = sent[0]["status"]
        assert isinstance(status, int)
        assert 200 <= status < 500, f"{status}: {sent[1:]}"
        if status == 200:
            msgspec.json.decode(b"".join(part["body"] for part in sent[1:] if isinstance(part["body"], bytes)))
        self.engine.check_alive()
        if self.engine.is_paused:
            await asyncio.wrap_future(self.engine.resume())
        return str(status)


def _mutate_request(rng: random.Random, good: bytes) -> bytes:
    line, _, body = good.partition(b"\n")
    if rng.random() < 0.1:
        line = mutate_text(rng, line).replace(b"\n", b"")
    if not body:
        return line + b"\n" + rng.choice([b"", b"{}", b"\xff"])
    return line + b"\n" + (mutate_json(rng, body) if rng.random() < 0.9 else mutate_bytes(rng, body))


async def _take(name: str, answer: bytes) -> None:
    """Ask a server that gives this answer, and use what came."""

    def respond(request: httpx.Request) -> httpx.Response:
        if name == "models" and request.url.path != "/v1/models":  # what a probe asks after
            return httpx.Response(200, content=_GOOD["tokens" if request.url.path == "/tokenize" else "probe"])
        return httpx.Response(200, content=answer)

    async with InferenceClient(ClientConfig(url="http://s"), transport=httpx.MockTransport(respond)) as client:
        if name == "tokens":
            as_bytes(await client.tokenize([{"role": "user", "content": "q"}]), "int32")
        elif name == "models":
            await client.probe()
        else:
            for sample in await client.generate([4], 1, SamplingParams()):
                assert len(sample.token_ids) == len(sample.logprobs)
                assert (sample.token_ids >= 0).all()
            logprobs = await client.prompt_logprobs([4, 5])
            assert len(logprobs) == 2
            tree = await client.prompt_tree_logprobs([PromptPath((4, 5)), PromptPath((4, 6), 1)], 2)
            assert [one.ids.shape for one in tree] == [(2, 2), (1, 2)]
