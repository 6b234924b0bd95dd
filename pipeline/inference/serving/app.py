"""Serves an engine over HTTP: an application with vLLM's routes and fields. No torch.

Guarantees: a request that can never succeed gets 4xx, a full queue 503 with Retry-After, a failed engine 503; the work
of a client that hangs up is dropped; no web page's script is answered; routes that change the server's state need a
token, and all except /health need a key if there is one; and text is tokenized in a thread of its own, no more of it
than the context can hold.

    GET  /health  /v1/models  /is_paused  /weight_info
    POST /inference/v1/generate  /v1/chat/completions  /v1/completions  /generate  /tokenize  /detokenize
    POST /pause?mode=abort|wait|keep  /resume  /reset_prefix_cache
    POST /init_weight_transfer_engine  /start_weight_update  /update_weights  /finish_weight_update
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, get_args

import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route

from lachesis.pipeline.inference.access import ServerAccess
from lachesis.pipeline.inference.prompt_tree import branch_paths
from lachesis.pipeline.inference.protocol import (
    Choice,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    LogprobEntry,
    Logprobs,
    PauseMode,
    TokenizeRequest,
    TokenizeResponse,
)
from lachesis.pipeline.inference.sampling_mask import encode_mask
from lachesis.pipeline.inference.serving.engine import SamplingEngine
from lachesis.pipeline.inference.serving.generate_backend import EngineBackend
from lachesis.pipeline.inference.serving.generate_route import answer_generate
from lachesis.pipeline.inference.serving.openai_routes import OpenAiRoutes
from lachesis.pipeline.inference.serving.replies import (
    AccessGuard,
    Handler,
    answer,
    body_of,
    completed,
    forbidden,
    generated,
)
from lachesis.pipeline.inference.serving.results import SampleResult
from lachesis.pipeline.inference.serving.text import SampleTexts
from lachesis.pipeline.inference.serving.text_tokenizer import TextTokenizer
from lachesis.pipeline.runtime.http import BrowserGuard
from lachesis.schemas.errors import DataError

__all__ = ["SAMPLING_PATHS", "TEXT_PATHS", "ReadWeights", "ServedTokens", "serving_app"]

SAMPLING_PATHS = frozenset({"/inference/v1/generate", "/v1/chat/completions", "/v1/completions", "/generate"})
"""The routes that sample."""
TEXT_PATHS = SAMPLING_PATHS - {"/inference/v1/generate"}
"""Those of them that others use than the run itself."""


ReadWeights = Callable[[str, str], Any]
"""Reads the weights at a path, under a version, for `SamplingEngine.load_weights`; in a thread. Raises `DataError`."""


class ServedTokens(NamedTuple):
    """A server's knowledge of its model's tokens."""

    tokenizer: Any
    tokenizer_hash: str
    vocabulary: int
    """Token ids that the model knows."""
    end_tokens: frozenset[int] = frozenset()
    """Those that end a sample; see `end_tokens`."""


def serving_app(
    tokens: ServedTokens,
    engine: SamplingEngine,
    *,
    model_name: str,
    read_weights: ReadWeights,
    token: str | None = None,
    key: str | None = None,
    hosts: Container[str] | None = None,
    aliases: Sequence[str] = (),
) -> Starlette:
    """Return the application over a running engine.

    `token`: needed by a request that changes the server's state, `key` by any other; None: not needed. `hosts`: see
    `BrowserGuard`. `aliases`: names that requests may use for the model beside `model_name`.
    """
    server = _Server(tokens, engine, model_name, read_weights)
    names = list(dict.fromkeys([model_name, *aliases]))
    openai = OpenAiRoutes(engine, tokens.tokenizer, server.texts.tokens, names, tokens.end_tokens)
    get: dict[str, Handler] = {
        "/health": server.health,
        "/v1/models": server.models,
        "/is_paused": server.is_paused,
        "/weight_info": server.weight_info,
    }
    post: dict[str, Handler] = {
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
        "/inference/v1/generate": server.generate,
        "/v1/chat/completions": openai.chat_completions,
        "/v1/completions": openai.completions,
        "/generate": server.generate_text,
    }
    control: dict[str, Handler] = {
        "/pause": server.pause,
        "/resume": server.resume,
        "/reset_prefix_cache": server.reset_prefix_cache,
        "/init_weight_transfer_engine": server.init_weight_transfer_engine,
        "/start_weight_update": server.start_weight_update,
        "/update_weights": server.update_weights,
        "/finish_weight_update": server.finish_weight_update,
    }
    routes = [Route(path, answer(handler), methods=["GET"]) for path, handler in get.items()]
    routes += [Route(path, answer(handler), methods=["POST"]) for path, handler in (post | control).items()]
    guards = [
        Middleware(BrowserGuard, hosts=hosts, refuse=forbidden),
        Middleware(AccessGuard, access=ServerAccess(token, key)),
    ]
    return Starlette(routes=routes, middleware=guards)


class _UpdateInfo(msgspec.Struct, frozen=True):
    path: str
    version: str


class _UpdateRequest(msgspec.Struct, frozen=True):
    update_info: _UpdateInfo


class _FinishRequest(msgspec.Struct, frozen=True):
    weight_version: str | None = None


class _Server:
    def __init__(
        self, served: ServedTokens, engine: SamplingEngine, model_name: str, read_weights: ReadWeights
    ) -> None:
        self._served = served
        self._engine = engine
        self._model_name = model_name
        self._read_weights = read_weights
        self.texts = TextTokenizer(served.tokenizer, engine.max_model_len)
        self._updating = False
        self._staged: tuple[Any, str] | None = None

    async def health(self, _: Request) -> dict[str, Any]:
        self._engine.check_alive()
        return {}

    async def models(self, _: Request) -> dict[str, Any]:
        model = {
            "id": self._model_name,
            "object": "model",
            "owned_by": "lachesis",
            "root": self._model_name,
            "max_model_len": self._engine.max_model_len,
            "tokenizer_hash": self._served.tokenizer_hash,
            "branches": self._engine.scores_branches,
        }
        return {"object": "list", "data": [model]}

    async def tokenize(self, request: Request) -> TokenizeResponse:
        tokens = await self.texts.tokens(await body_of(request, TokenizeRequest))
        return TokenizeResponse(count=len(tokens), max_model_len=self._engine.max_model_len, tokens=tokens)

    async def detokenize(self, request: Request) -> DetokenizeResponse:
        body = await body_of(request, DetokenizeRequest)
        if len(body.tokens) > self._engine.max_model_len:
            raise DataError(f"{len(body.tokens)} tokens; the context has {self._engine.max_model_len}.")
        if any(token >= self._served.vocabulary for token in body.tokens):
            raise DataError(f"tokens must lie below {self._served.vocabulary}, the model's vocabulary.")
        return DetokenizeResponse(prompt=self._served.tokenizer.decode(body.tokens))

    async def generate(self, request: Request) -> GenerateResponse:
        body = await body_of(request, GenerateRequest)
        if body.stream:
            raise DataError("stream is not supported by the reference server; leave it out.")
        if body.branches and (body.sampling_params.prompt_logprobs is None or not self._engine.scores_branches):
            raise DataError("branches: they are for prompt_logprobs, of a server that says in /v1/models it has them.")
        branches = list(branch_paths(body.token_ids, body.branches, self._engine.max_model_len))
        (result,) = await generated(request, self._engine, [body.token_ids], body.sampling_params, branches)
        return GenerateResponse(
            request_id=body.request_id or uuid.uuid4().hex,
            choices=[self._choice(index, sample, body) for index, sample in enumerate(result.samples)],
            prompt_logprobs=result.prompt_logprobs,
            output_mode=body.output_mode,
            branch_logprobs=list(result.branch_logprobs) if branches else None,
        )

    async def generate_text(self, request: Request) -> Any:
        backend = EngineBackend(
            request, self._engine, self._served.tokenizer, self.texts.tokens, self._served.end_tokens
        )
        return await answer_generate(await body_of(request, dict[str, Any]), backend)

    def _choice(self, index: int, sample: SampleResult, body: GenerateRequest) -> Choice:
        text_mode, tokenizer = body.output_mode == "text", self._served.tokenizer

        def entry(token: int, logprob: float) -> LogprobEntry:
            if text_mode:
                return LogprobEntry(logprob=logprob, token=tokenizer.decode([token]))
            return LogprobEntry(logprob=logprob, token_id=token, token=f"token_id:{token}")

        skip = body.sampling_params.skip_special_tokens
        texts = SampleTexts.of(tokenizer, self._served.end_tokens, skip_special_tokens=skip)
        content = None
        if body.sampling_params.logprobs is not None:
            content = [entry(*pair) for pair in zip(sample.token_ids, sample.logprobs, strict=True)]
            for position, top in enumerate(sample.top_logprobs if body.sampling_params.logprobs else []):
                content[position] = msgspec.structs.replace(
                    content[position], top_logprobs=[entry(*pair) for pair in top]
                )
        return Choice(
            index=index,
            token_ids=sample.token_ids,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            logprobs=None if content is None else Logprobs(content=content),
            weight_versions=sample.weight_versions,
            text=texts.text(sample.token_ids, sample.finish_reason, sample.stop_reason) if text_mode else None,
            sampling_mask=None if sample.allowed is None else encode_mask(sample.allowed),
        )

    async def pause(self, request: Request) -> dict[str, Any]:
        mode: Any = request.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise DataError(f"mode is {mode!r}; it must be one of {', '.join(get_args(PauseMode))}.")
        await completed(self._engine.pause(mode))
        return {"status": "paused"}

    async def resume(self, _: Request) -> dict[str, Any]:
        await completed(self._engine.resume())
        return {"status": "resumed"}

    async def is_paused(self, _: Request) -> dict[str, Any]:
        return {"is_paused": self._engine.is_paused}

    async def reset_prefix_cache(self, _: Request) -> dict[str, Any]:
        return {}  # nothing outlives a request here; the route exists for the flow's sake

    async def weight_info(self, _: Request) -> dict[str, Any]:
        return {"weight_version": self._engine.weight_version}

    async def init_weight_transfer_engine(self, _: Request) -> dict[str, Any]:
        self._updating, self._staged = False, None
        return {"message": "Weight transfer initialized"}

    async def start_weight_update(self, _: Request) -> dict[str, Any]:
        self._updating, self._staged = True, None
        return {"message": "Weight update started"}

    async def update_weights(self, request: Request) -> dict[str, Any]:
        info = (await body_of(request, _UpdateRequest)).update_info
        if not self._updating:
            raise DataError("no weight update was started; call /start_weight_update first.")
        self._staged = (await anyio.to_thread.run_sync(self._read_weights, info.path, info.version), info.version)
        return {"message": "Weights updated"}

    async def finish_weight_update(self, request: Request) -> dict[str, Any]:
        """Make the staged weights those of the next token, under their version."""
        body = await body_of(request, _FinishRequest)
        if self._staged is None:
            raise DataError("no weights were sent; call /start_weight_update and /update_weights first.")
        weights, version = self._staged
        if body.weight_version not in {None, version}:
            raise DataError(f"weight_version is {body.weight_version!r}, but the weights sent are {version!r}.")
        await completed(self._engine.load_weights(weights, version))
        self._updating, self._staged = False, None
        return {"message": "Weight update finished"}
