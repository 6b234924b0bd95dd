"""Client of an inference server (the reference server or real vLLM), without torch.

It takes token ids or chat messages, and returns samples with token ids, logprobs and the weights of each token.
Guarantees: token ids are never made from generated text; every sample has one finite logprob for each token, and
version spans that cover it; an answer arrives whole within the time limit and within the size that its request allows.
Errors are InfrastructureError (timeout, connection, 5xx, 429, an answer that breaks these guarantees: retry), DataError
(other 4xx: do not retry) or ApiKeyError (401: the server will refuse every other request too). With a guard, nothing is
sent over a new connection before the guard has compared the server.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar

import anyio
import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.common.call_times import CallTimes
from lachesis.pipeline.common.proxies import describe_proxy, is_on_this_machine
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.common.tls import tls_context
from lachesis.pipeline.errors import (
    AccessError,
    InfrastructureError,
    PromptTooLongError,
    ServerAwayError,
    StartupError,
    UnreadableAnswerError,
)
from lachesis.pipeline.inference.answered_requests import AnsweredRequests
from lachesis.pipeline.inference.answered_sample import GeneratedSample, read_sample
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.connection_pool import ConnectionPool
from lachesis.pipeline.inference.identity import IdentityGuard, ObservedServer
from lachesis.pipeline.inference.prompt_logprobs import PromptTopLogprobs, read_prompt_logprobs
from lachesis.pipeline.inference.prompt_tree import PromptPath
from lachesis.pipeline.inference.protocol import (
    MAX_BRANCHES,
    Choice,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    LoadedWeights,
    PauseMode,
    PromptBranch,
    SamplingParams,
    TokenizeRequest,
    TokenizeResponse,
)
from lachesis.pipeline.inference.refusals import NoSuchRouteError, NotServedError, beginning_of, read_refusal
from lachesis.pipeline.inference.serving.text_tokenizer import TextTokenizer
from lachesis.pipeline.model.digest import DIGEST_LENGTH
from lachesis.pipeline.telemetry.performance import CallRecord
from lachesis.pipeline.telemetry.recorder import current_traceparent
from lachesis.schemas.control import TokenProbe
from lachesis.schemas.errors import DataError, LachesisError, SchemaError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.values import from_json

__all__ = ["Capabilities", "InferenceClient"]

T = TypeVar("T")
_MAX_ADDRESS = 300
_ANSWER_BYTES = 4 << 20
"""Bytes of an answer, beyond those for the requested tokens."""
_TOKEN_BYTES = 2048
"""Bytes of an answer for each token: id, logprob and experts that processed it."""
_LOGPROB_BYTES = 256
"""Bytes of an answer for one of the likeliest tokens."""
_NO_LOGPROBS = msgspec.Raw(b"null")
_UNKNOWN_TOKENS = 32_768
"""Tokens of a sample at most, where its request does not say."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The server's capabilities that `probe` found."""

    model: str
    """Served model name."""
    max_model_len: int
    """Prompt and completion together, tokens."""
    weight_version: str
    """Weights the probe's token came from."""
    tokenizer_hash: str | None
    """None from servers that do not report it, as a vLLM that was started by hand."""
    branches: bool = False
    """Whether it scores the branches of a prompt in one request."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: Annotated[int, msgspec.Meta(ge=1)]
    tokenizer_hash: str | None = None
    owned_by: str | None = None
    branches: bool = False


class _Models(msgspec.Struct):
    data: list[_Model]


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _ScoredPrompt(msgspec.Struct):
    """A `GenerateResponse` with prompt logprobs that are yet to be decoded."""

    choices: list[Choice]
    prompt_logprobs: list[msgspec.Raw] | None = None
    branch_logprobs: list[list[msgspec.Raw]] | None = None


class _WorkerReplies(msgspec.Struct):
    results: Annotated[list[LoadedWeights], msgspec.Meta(min_length=1)]


class InferenceClient:
    """An async context manager over one server. One instance serves any number of tasks."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        requested: Callable[[CallRecord], None] | None = None,
    ) -> None:
        """`token` goes with each request: the server's key, or the token that it requires to change its state.
        `requested` is notified of every request for tokens or logprobs once it has ended; its items are samples.
        """
        self.config = config
        self.times = CallTimes()
        """How long its requests take; a directory shares one between the clients of its servers."""
        self.guard: IdentityGuard | None = None
        self.answered = AnsweredRequests()
        """What the run's servers have answered; a directory shares one between their clients."""
        self.texts: TextTokenizer | None = None
        """The server's tokenizer, held in this process (`load_local_tokenizer`); None: the server tokenizes."""
        self._requested = requested
        self._proxy = describe_proxy(config.url)
        trust_env = not is_on_this_machine(config.url)  # a proxy leads elsewhere

        def connections(limits: httpx.Limits, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
            return httpx.AsyncClient(
                base_url=config.url,
                headers={} if token is None else {"Authorization": f"Bearer {token}"},
                timeout=httpx.Timeout(config.timeout, connect=config.connect_timeout, pool=None),
                limits=limits,
                transport=transport,
                trust_env=trust_env,
                verify=tls_context(trust_env=trust_env),
            )

        most = config.max_connections
        direct = transport is None and not self._proxy and not httpx.URL(config.url).userinfo
        self._pool = ConnectionPool(most, trust_env=trust_env) if direct else None
        self._http = connections(httpx.Limits(max_connections=most), self._pool or transport)
        self._observing = connections(httpx.Limits(max_keepalive_connections=0), transport)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        await self._observing.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._observing.__aexit__(kind, error, trace)
        await self._http.__aexit__(kind, error, trace)

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        """Sample `n` completions of one prompt. `sampling`: its `n` and `logprobs` are set here."""
        params = msgspec.structs.replace(sampling or SamplingParams(), n=n, logprobs=0, prompt_logprobs=None)
        response = await self._generate(GenerateResponse, list(prompt_ids), params, "text")
        if len(response.choices) != n:
            raise UnreadableAnswerError(f"{self.where} answered {len(response.choices)} samples, {n} were requested.")
        choices = sorted(response.choices, key=lambda choice: choice.index)
        return [self._generation(choice, params.max_tokens) for choice in choices]

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return float32 [T]: the logprob of each given token given those before it, nats, at temperature 1.

        0 at 0.
        """
        return (await self.prompt_top_logprobs(token_ids, 0)).logprobs

    async def prompt_top_logprobs(self, token_ids: Sequence[int], k: int, start: int = 0) -> PromptTopLogprobs:
        """Return the logprobs of the given tokens from `start` on, and the `k` likeliest tokens at each.

        Raises as `prompt_logprobs`.
        """
        token_ids = list(token_ids)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=k)
        response = await self._generate(_ScoredPrompt, token_ids, params, "tokens")
        found = read_prompt_logprobs(response.prompt_logprobs, token_ids, k, self.where, start)
        return found._replace(version=_first_version(response.choices))

    async def prompt_tree_logprobs(self, paths: Sequence[PromptPath], k: int) -> list[PromptTopLogprobs]:
        """Return the logprobs of the own tokens of each path, by a server that scores branches.

        Raises as `prompt_logprobs`, for all paths if one is refused.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=k)
        found = []
        for at in range(0, len(paths), 1 + MAX_BRANCHES):
            first, *others = paths[at : at + 1 + MAX_BRANCHES]
            branches = [PromptBranch(shared=path.shared, token_ids=list(path.own)) for path in others]
            response = await self._generate(_ScoredPrompt, list(first.tokens), params, "tokens", branches=branches)
            answers = response.branch_logprobs or []
            if len(answers) != len(others):
                raise UnreadableAnswerError(f"{self.where} answered about {len(answers)} branches of {len(others)}.")
            version = _first_version(response.choices)
            whole = [response.prompt_logprobs]
            whole += [[_NO_LOGPROBS] * path.shared + own for path, own in zip(others, answers, strict=True)]
            for path, entries in zip((first, *others), whole, strict=True):
                scores = read_prompt_logprobs(entries, path.tokens, k, self.where, path.shared)
                found.append(scores._replace(version=version))
        return found

    async def tokenize(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids of chat messages under the server's chat template, with these parameters of it.

        `tools`: functions that the template names to the model. Raises `DataError` where it cannot.
        """
        request = TokenizeRequest(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=dict(chat_template_kwargs) if chat_template_kwargs else None,
            tools=list(tools) if tools else None,
        )
        if self.texts is not None:
            with suppress(DataError):  # what does not fit the template is left to the server to refuse
                return await self.texts.tokens(request)
        tokens = (await self._post("/tokenize", request, TokenizeResponse)).tokens
        self._check_ids("/tokenize", tokens)
        return tokens

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ids = [int(token) for token in token_ids]
        return await self._text_of(ids) if self.texts is None else self.texts.text(ids)

    async def _text_of(self, ids: list[int], http: httpx.AsyncClient | None = None) -> str:
        return (await self._post("/detokenize", {"tokens": ids}, DetokenizeResponse, http=http)).prompt

    async def ready(self) -> bool:
        """Return whether the server answers and is healthy."""
        try:
            await self._request("GET", "/health")
        except (AccessError, InfrastructureError, DataError):
            return False
        return True

    async def max_model_len(self) -> int:
        """Return how many tokens prompt and completion may have together."""
        return (await self._model()).max_model_len

    async def observe(self, probe: TokenProbe | None, *, version: bool = False) -> ObservedServer:
        """Return the server's present report on itself, and the text that it makes of the probe's ids.

        Uses connections of its own. `version`: also sample a token, and report the weights that it comes from.

        Raises InfrastructureError also if the server refuses that, because every server of a run answers it.
        """
        try:
            return await self._observe(probe, version=version)
        except DataError as error:
            raise NotServedError(str(error)) from error

    async def _observe(self, probe: TokenProbe | None, *, version: bool) -> ObservedServer:
        model = await self._model(self._observing)
        text = None
        if probe is not None:
            size = model.max_model_len  # more at once is refused
            parts = [probe.ids[at : at + size] for at in range(0, len(probe.ids), size)]
            text = "".join([await self._text_of(part, self._observing) for part in parts])
        held = None
        if version:
            params = SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True)
            ids = probe.ids[:1] if probe is not None else [0]
            found = await self._generate(GenerateResponse, ids, params, "text", http=self._observing)
            if len(found.choices) != 1:
                raise UnreadableAnswerError(f"{self.where} answered {len(found.choices)} samples, 1 was requested.")
            spans = self._generation(found.choices[0]).weight_versions
            held = spans[-1].version if spans else None
        return ObservedServer(
            model=model.id,
            engine=model.owned_by,
            tokenizer_hash=model.tokenizer_hash,
            weight_version=held,
            text=text,
        )

    async def _model(self, http: httpx.AsyncClient | None = None) -> _Model:
        found = await self._json("GET", "/v1/models", _Models, http=http)
        if not found.data:
            raise UnreadableAnswerError(f"{self.where} lists no model.")
        return found.data[0]

    async def weight_version(self) -> str:
        """Return the name of the weights that sample the next token."""
        return (await self._json("GET", "/weight_info", _WeightInfo)).weight_version

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generation until `resume`."""
        await self._request("POST", "/pause", params={"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._request("POST", "/resume")

    async def update_weights(self, path: str, version: str) -> str | None:
        """Load a weights file that the server can reach, with generation paused meanwhile.

        Samples in flight go on under the new weights, and their spans say so. An update that has begun is completed
        even if it is cancelled. Then vLLM is queried for the digest of the weights that it computes with. Returns why
        this digest could not be compared with the version's. Returns None if it was compared, or if the server is the
        reference server, which compares the weights itself.

        Raises DataError when the server refuses the weights; it then goes on with the old ones. Generation is resumed
        except in one case: the server holds other weights than these, or the exchange broke off and it is not known
        which ones it holds (InfrastructureError). Tokens must not come from such weights under a wrong name; update
        again.
        """
        not_compared: str | None = None
        with anyio.CancelScope(shield=True):
            await self.pause("keep")
            torn = False
            try:
                await self._begin_update()
                info = {"path": path, "version": version}
                await self._request("POST", "/update_weights", json={"update_info": info})
                try:
                    await self._request("POST", "/finish_weight_update", json={"weight_version": version})
                    await self._request("POST", "/reset_prefix_cache")
                    not_compared = await self._compare_loaded(version)
                except InfrastructureError:
                    torn = True
                    raise
            finally:
                if not torn:
                    await self.resume()
        return not_compared

    async def loaded_weights(self) -> list[LoadedWeights] | None:
        """Return the report of each of vLLM's workers on the weights that it computes with.

        None: it is another server.
        """
        try:
            answer = await self._json("POST", "/collective_rpc", _WorkerReplies, json={"method": "loaded_digest"})
        except NoSuchRouteError:
            return None
        return answer.results

    async def _compare_loaded(self, version: str) -> str | None:
        expected = PolicyVersion.parse(version).digest
        try:
            loaded = await self.loaded_weights()
        except (DataError, UnreadableAnswerError) as error:
            raise InfrastructureError(f"which weights it computes with is not known: {error}") from error
        for one in loaded or []:
            if one.digest is None:
                return (
                    f"vLLM holds {len(one.unknown)} tensors in a form of its own ({', '.join(one.unknown[:3])}), so "
                    "the digest of the weights that it computes with is not compared"
                )
            right = one.rounded or expected
            if not right or not one.digest.startswith(right):
                raise InfrastructureError(
                    f"{self.where} computes with other weights than those of policy {version}, which it was given: "
                    f"their digest is {one.digest[:DIGEST_LENGTH]}, not {right[:DIGEST_LENGTH]}. It stays paused, "
                    "so that nothing is sampled from them"
                )
        return None

    async def _begin_update(self) -> None:
        """Open an update; drop one that another client began and did not finish."""
        await self._request("POST", "/init_weight_transfer_engine", json={"init_info": {}})
        try:
            await self._request("POST", "/start_weight_update")
        except InfrastructureError:
            await self._request("POST", "/finish_weight_update")  # of nothing: it ends the other's session
            await self._request("POST", "/start_weight_update")

    async def probe(self, sampling: SamplingParams | None = None) -> Capabilities:
        """Find out whether the server can serve a trainer, by generating one token.

        `sampling`: how the server is to sample. If it requests the mask of the tokens that top_p leaves, the answer
        must have one.

        Raises StartupError saying what is missing (a generic OpenAI-compatible server has no token ids),
        InfrastructureError when the server cannot be reached.
        """
        advice = (
            "Training needs token ids in and out, logprobs and weight versions: use `lachesis run inference`, or vLLM "
            "started with --enable-scale-out --logprobs-mode processed_logprobs."
        )
        try:
            model = await self._model()
            tokens = await self.tokenize([{"role": "user", "content": "a"}])
            asked = SamplingParams(max_tokens=1)
            if sampling is not None and sampling.sampling_mask and sampling.top_p < 1:
                asked = msgspec.structs.replace(asked, top_p=sampling.top_p, sampling_mask=True)
            sample = (await self.generate(tokens, 1, asked))[0]
            version = sample.weight_versions[-1].version
            await self.prompt_logprobs([*tokens, *sample.token_ids.tolist()])
        except (NotServedError, DataError, LookupError) as error:
            raise StartupError(f"{self.where} cannot serve a trainer: {error} {advice}") from error
        except UnreadableAnswerError as error:
            raise UnreadableAnswerError(f"{self.where} cannot serve a trainer: {error} {advice}") from error
        if asked.sampling_mask and sample.sampling_mask is None:
            raise StartupError(
                f"{self.where} does not say which tokens top_p leaves, so a trainer could not compare with what was "
                "sampled: set top_p = 1, or let the reference server sample"
            )
        return Capabilities(
            model=model.id,
            max_model_len=model.max_model_len,
            weight_version=version,
            tokenizer_hash=model.tokenizer_hash,
            branches=model.branches,
        )

    @property
    def where(self) -> str:
        """The server's name in messages."""
        return f"inference server {without_secrets(self.config.url)}{self._proxy}"

    async def _generate(
        self,
        kind: type[T],
        token_ids: list[int],
        params: SamplingParams,
        mode: Any,
        *,
        http: httpx.AsyncClient | None = None,
        branches: Sequence[PromptBranch] = (),
    ) -> T:
        request = GenerateRequest(
            token_ids=token_ids, sampling_params=params, output_mode=mode, branches=list(branches)
        )
        began_s, path = time.monotonic(), "/inference/v1/generate"
        payload = None
        try:
            most = _ANSWER_BYTES + _tokens_of(request) * _TOKEN_BYTES
            if params.prompt_logprobs is not None:
                prompt_tokens = len(token_ids) + sum(len(branch.token_ids) for branch in branches)
                most += prompt_tokens * (params.prompt_logprobs + 1) * _LOGPROB_BYTES
            small = SamplingParams(n=1, max_tokens=1, logprobs=0)
            smallest = msgspec.structs.replace(request, token_ids=token_ids[:1], sampling_params=small, branches=[])
            content = msgspec.json.encode(request)
            answer = await self._request_served(
                path, most=most, http=http, content=content, smallest=msgspec.json.encode(smallest)
            )
            payload = len(answer)
            found = self._decoded(path, kind, answer)
        except LachesisError:
            self._record_call(began_s, 0, payload, failed=True)
            raise
        self._record_call(began_s, params.n, payload)
        return found

    def _record_call(self, began_s: float, items: int, payload: int | None, *, failed: bool = False) -> None:
        if self._requested is not None:
            ended_s = time.monotonic()
            self._requested(CallRecord(ended_s, ended_s - began_s, items, failed, payload))

    def _check_ids(self, path: str, ids: Sequence[int]) -> None:
        """Raise `UnreadableAnswerError` where the trainer does not know an id."""
        vocabulary = None if self.guard is None else self.guard.vocabulary
        if vocabulary is not None and ids and max(ids) >= vocabulary:
            raise UnreadableAnswerError(
                f"{self.where} answered {path} with token id {max(ids)}, none of the {vocabulary} the trainer knows"
            )

    def _generation(self, choice: Choice, max_tokens: int | None = None) -> GeneratedSample:
        self._check_ids("/inference/v1/generate", choice.token_ids or ())
        return read_sample(choice, self.where, max_tokens)

    async def _post(self, path: str, body: Any, kind: type[T], **arguments: Any) -> T:
        data = msgspec.json.encode(body)
        most = _ANSWER_BYTES + 32 * len(data)
        return self._decoded(path, kind, await self._request_served(path, content=data, most=most, **arguments))

    async def _json(self, method: str, path: str, kind: type[T], **arguments: Any) -> T:
        return self._decoded(path, kind, await self._request(method, path, **arguments))

    async def _request_served(
        self, path: str, *, content: bytes, smallest: bytes | None = None, **arguments: Any
    ) -> bytes:
        """Return the answer of a route that a server of the run has.

        `smallest`: a smaller request that the server answers if it answers this one. Raises DataError if the request is
        at fault. Raises UnreadableAnswerError if the server also refuses a request that it has answered before, or no
        longer has the route: it may have it again later.
        """
        try:
            answer = await self._request("POST", path, content=content, **arguments)
        except NoSuchRouteError as error:
            raise NotServedError(str(error)) from error
        except PromptTooLongError:
            raise
        except DataError as error:
            if await self._refuses_known(path):
                raise NotServedError(f"{error} It refuses what it answered before, too.") from error
            raise
        self.answered.add(path, smallest or content)
        return answer

    async def _refuses_known(self, path: str) -> bool:
        """Return whether the server refuses a request that it has answered before."""
        known = self.answered.get(path)
        if known is None:
            return False
        try:
            await self._request("POST", path, content=known)
        except DataError:
            return True
        return False

    def _decoded(self, path: str, kind: type[T], answer: bytes) -> T:
        try:
            return from_json(f"{self.where} answered {path} with something else than expected", kind, answer)
        except SchemaError as error:
            raise UnreadableAnswerError(f"{error}. It begins {beginning_of(answer)}") from error

    async def _request(
        self,
        method: str,
        path: str,
        *,
        most: int = _ANSWER_BYTES,
        http: httpx.AsyncClient | None = None,
        **arguments: Any,
    ) -> bytes:
        """Return the body of a successful answer, of `most` bytes at most."""
        headers = {"Content-Type": "application/json"} if "content" in arguments else {}
        if (parent := current_traceparent()) is not None:
            headers["traceparent"] = parent
        guarded = http is None and self.guard is not None

        async def traced(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete" and guarded:
                await self._compare(info["return_value"])
            elif event.endswith(".send_request_headers.started"):
                scope.deadline = anyio.current_time() + self.config.timeout
                if http is None:
                    self.times.begin(scope, time.monotonic(), what=self.where, kind=path)

        scope = anyio.CancelScope()
        status, body, is_html, leads_to = 0, b"", False, None
        try:
            with scope:
                async with self._answered(
                    http, method, path, headers=headers, extensions={"trace": traced}, **arguments
                ) as response:
                    status, leads_to = response.status_code, response.headers.get("location")
                    scope.deadline = min(scope.deadline, anyio.current_time() + self.config.timeout)
                    body = await self._read(path, response, most)
                    is_html = "html" in response.headers.get("content-type", "") or body.lstrip()[:1] == b"<"
        except httpx.DecodingError as error:
            raise UnreadableAnswerError(f"{self.where}, {path}: {error}") from error
        except httpx.TransportError as error:
            # a longer answer takes longer: that the time ran out may be due to it, unless nothing was sent yet
            slow = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
            kind = InfrastructureError if slow else ServerAwayError
            raise kind(f"{self.where}, {path}: {type(error).__name__} {error}".rstrip()) from error
        finally:
            self.times.end(scope, time.monotonic(), answered=200 <= status < 300 and not scope.cancelled_caught)
        if scope.cancelled_caught:
            raise InfrastructureError(f"{self.where}, {path}: no whole answer within {self.config.timeout:g} s")
        if 300 <= status < 400 and leads_to is not None:
            raise UnreadableAnswerError(
                f"{self.where} answered {path} with {status}, which leads to {leads_to[:_MAX_ADDRESS]!r} and is not "
                "followed: give that server's own address"
            )
        if not 200 <= status < 300:
            raise read_refusal(self.where, path, status, body, is_html=is_html)
        return body

    @asynccontextmanager
    async def _answered(
        self, http: httpx.AsyncClient | None, method: str, path: str, **arguments: Any
    ) -> AsyncIterator[httpx.Response]:
        """Send a request, and yield its answer, whose body is still to come.

        By `http`, or else over the pool of connections itself: what a client of httpx adds to that, redirects, cookies
        and authentication, is not used here, and takes a fifth of the time that a request costs.
        """
        request = (http or self._http).build_request(method, path, **arguments)
        if http is None and self._pool is not None:
            answer = await self._pool.handle_async_request(request)
        else:
            answer = await (http or self._http).send(request, stream=True)
        try:
            yield answer
        finally:
            await answer.aclose()

    async def _compare(self, stream: Any) -> None:
        """Let the guard compare the server behind a new connection, which is closed if it is another one."""
        try:
            if self.guard is not None:
                await self.guard.check(self)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
            raise

    async def _read(self, path: str, response: httpx.Response, most: int) -> bytes:
        parts, size = [], 0
        async for part in response.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size > most:
                raise UnreadableAnswerError(
                    f"{self.where} answered {path} with more than {most} bytes. It begins {beginning_of(parts[0])}"
                )
        return b"".join(parts)


def _first_version(choices: Sequence[Choice]) -> str | None:
    """Return the weights that the first token of an answer comes from, None where the server does not say."""
    spans = choices[0].weight_versions if choices else None
    return spans[0].version if spans else None


def _tokens_of(request: GenerateRequest) -> int:
    """Return how many tokens the answer may be about."""
    params = request.sampling_params
    new = _UNKNOWN_TOKENS if params.max_tokens is None else params.max_tokens
    return len(request.token_ids) + params.n * (new + len(request.token_ids))
