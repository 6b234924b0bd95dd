"""Client of an inference server (the reference server or real vLLM), without torch.

In: token ids or chat messages. Out: samples with token ids, logprobs and the weights each token came from. Guarantees:
token ids are never made from text that was generated; every sample has one finite logprob for each token, and version
spans that cover it; errors are sorted into InfrastructureError (timeout, connection, 5xx, 429: retry) and DataError
(other 4xx, or an answer that breaks these guarantees: do not retry); 401 is AccessError: nothing else will be answered.
"""

from __future__ import annotations

import base64
import io
import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import anyio
import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.config.secrets import without_secrets
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.protocol import (
    Choice,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    LoadedWeights,
    PauseMode,
    SamplingParams,
    TokenizeRequest,
    TokenizeResponse,
    WeightVersionSpan,
)
from lachesis.pipeline.inference.sampling_mask import MaskRows, decode_mask
from lachesis.pipeline.model.digest import DIGEST_LENGTH
from lachesis.pipeline.telemetry.performance import CallRecord
from lachesis.pipeline.telemetry.recorder import current_traceparent
from lachesis.schemas.errors import (
    AccessError,
    DataError,
    InfrastructureError,
    LachesisError,
    PromptTooLongError,
    ServerAwayError,
    StartupError,
)
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.values import from_json

__all__ = ["Capabilities", "GeneratedSample", "InferenceClient", "PromptTopLogprobs", "is_on_this_machine"]

T = TypeVar("T")
MAX_QUOTED = 1000
_ID_DIGITS = 9
"""Digits of a token id at most; ids are int32."""
_BEYOND_CONTEXT = re.compile(r"maximum context length|a context of \d+ tokens holds")
"""How vLLM and the reference server refuse a prompt that is too long."""
_MAX_EXPERT = 32767
"""Highest number of an expert that a column holds."""
_BUSY = frozenset({429, 502, 503, 504})
"""Statuses of a server, or of what stands before it, that has not looked at the request; a 500 may be its fault."""


class GeneratedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample."""

    token_ids: NDArray[np.int32]
    """int32 [N], the stop token included."""
    logprobs: NDArray[np.float32]
    """float32 [N], nats, at the sampling temperature, of the weights that sampled the token."""
    text: str
    """Without special tokens."""
    finish_reason: str
    """stop, length or abort."""
    weight_versions: list[WeightVersionSpan]
    """Contiguous from 0 to N. Empty for an empty sample."""
    routed_experts: NDArray[np.int16] | None = None
    """int16 [rows, layers * k]: experts that processed the first tokens of prompt and sample; None: not recorded."""
    sampling_mask: MaskRows | None = None
    """The ids among which each token was sampled; None: not asked for, or not known to the server."""


class PromptTopLogprobs(NamedTuple):
    """What a model thinks of given tokens, nats, at temperature 1.

    `logprobs` float32 [T]: of each token given those before it, 0 at 0. `ids` int32 [T, k] and `top` float32 [T, k]:
    the likeliest tokens, -1 and -inf where there are fewer, as at 0.
    """

    logprobs: NDArray[np.float32]
    ids: NDArray[np.int32]
    top: NDArray[np.float32]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What `probe` found."""

    model: str
    """Served model name."""
    max_model_len: int
    """Prompt and completion together, tokens."""
    weight_version: str
    """Weights the probe's token came from."""
    tokenizer_hash: str | None
    """None from servers that do not report it, as a vLLM that was started by hand."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: Annotated[int, msgspec.Meta(ge=1)]
    tokenizer_hash: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _WorkerReplies(msgspec.Struct):
    results: Annotated[list[LoadedWeights], msgspec.Meta(min_length=1)]


class _NoSuchRouteError(DataError):
    """Raised when a server does not have what was asked for."""


def is_on_this_machine(url: str) -> bool:
    """Return whether a URL leads to loopback, where no proxy may stand in between."""
    host = httpx.URL(url).host
    return host in {"localhost", "::1"} or host.startswith("127.")


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
        """`token` is what requests bear: the server's key, or what it wants of who changes its state. `requested` is
        told of every request for tokens or logprobs once it has ended; its items are samples.
        """
        self.config = config
        self._requested = requested
        self._http = httpx.AsyncClient(
            base_url=config.url,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(config.timeout, connect=config.connect_timeout, pool=None),
            limits=httpx.Limits(max_connections=config.max_connections),
            transport=transport,
            trust_env=not is_on_this_machine(config.url),  # a proxy leads elsewhere
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        """Sample `n` completions of one prompt. `sampling`: its `n` and `logprobs` are set here."""
        params = msgspec.structs.replace(sampling or SamplingParams(), n=n, logprobs=0, prompt_logprobs=None)
        response = await self._generate(list(prompt_ids), params, "text")
        if len(response.choices) != n:
            raise DataError(f"{self._where} answered {len(response.choices)} samples where {n} were asked for.")
        return [self._generation(choice) for choice in sorted(response.choices, key=lambda choice: choice.index)]

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return float32 [T]: the logprob of each given token given those before it, nats, at temperature 1.

        0 at 0.
        """
        return (await self.prompt_top_logprobs(token_ids, 0)).logprobs

    async def prompt_top_logprobs(self, token_ids: Sequence[int], k: int) -> PromptTopLogprobs:
        """Return the logprobs of the given tokens, and at each position the `k` likeliest tokens.

        Raises as `prompt_logprobs`.
        """
        token_ids = list(token_ids)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=k)
        response = await self._generate(token_ids, params, "tokens")
        entries = response.prompt_logprobs
        if entries is None or len(entries) != len(token_ids):
            raise DataError(f"{self._where} sent no prompt logprobs, or not one for each of {len(token_ids)} tokens.")
        logprobs = np.zeros(len(token_ids), np.float32)
        ids, top = np.full((len(token_ids), k), -1, np.int32), np.full((len(token_ids), k), -np.inf, np.float32)
        for position, (token, entry) in enumerate(zip(token_ids[1:], entries[1:], strict=True), 1):
            if entry is None or str(token) not in entry:
                raise DataError(f"{self._where} sent no prompt logprob for token {token} at position {position}.")
            logprobs[position] = entry[str(token)].logprob
            if k:  # there are k, or k and the given token
                if not all(other.isdecimal() and len(other) <= _ID_DIGITS for other in entry):
                    raise DataError(f"{self._where} sent prompt logprobs of something that is no token id.")
                likeliest = sorted((-about.logprob, int(other)) for other, about in entry.items())[:k]
                ids[position, : len(likeliest)] = [other for _, other in likeliest]
                top[position, : len(likeliest)] = [-value for value, _ in likeliest]
        return PromptTopLogprobs(logprobs, ids, top)

    async def tokenize(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of chat messages under the server's chat template, with these parameters of it."""
        request = TokenizeRequest(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=dict(chat_template_kwargs) if chat_template_kwargs else None,
        )
        return (await self._post("/tokenize", request, TokenizeResponse)).tokens

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return (await self._post("/detokenize", {"tokens": [int(t) for t in token_ids]}, DetokenizeResponse)).prompt

    async def ready(self) -> bool:
        """Return whether the server answers and is healthy."""
        try:
            await self._request("GET", "/health")
        except (AccessError, InfrastructureError, DataError):
            return False
        return True

    async def max_model_len(self) -> int:
        """Return how many tokens prompt and completion may have together."""
        found = await self._json("GET", "/v1/models", _Models)
        if not found.data:
            raise DataError(f"{self._where} lists no model.")
        return found.data[0].max_model_len

    async def weight_version(self) -> str:
        """Return the name of the weights that sample the next token."""
        return (await self._json("GET", "/weight_info", dict[str, str]))["weight_version"]

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generation until `resume`."""
        await self._request("POST", "/pause", params={"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._request("POST", "/resume")

    async def update_weights(self, path: str, version: str) -> str | None:
        """Load a weights file that the server can reach, with generation paused meanwhile.

        Samples in flight go on under the new weights, their spans saying so. Once begun it is done to its end, a
        cancellation notwithstanding. Then vLLM is asked for the digest of the weights that it computes with. Returns
        why it could not be compared with the version's; None: it was, or the server is the reference server, which
        computes with what it has compared itself.

        Raises DataError when the weights are refused: the old ones go on. Generation is resumed but for one case: the
        server holds other weights than these, or an exchange that broke off leaves open which (InfrastructureError).
        Tokens must not come from them under a wrong name; update again.
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
        """Return what each of vLLM's workers says of the weights that it computes with.

        None: it is another server.
        """
        try:
            answer = await self._json("POST", "/collective_rpc", _WorkerReplies, json={"method": "loaded_digest"})
        except _NoSuchRouteError:
            return None
        return answer.results

    async def _compare_loaded(self, version: str) -> str | None:
        expected = PolicyVersion.parse(version).digest
        try:
            loaded = await self.loaded_weights()
        except DataError as error:
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
                    f"{self._where} computes with other weights than those of policy {version}, which it was given: "
                    f"their digest is {one.digest[:DIGEST_LENGTH]}, not {right[:DIGEST_LENGTH]}. It stays paused, "
                    "so that nothing is sampled from them"
                )
        return None

    async def _begin_update(self) -> None:
        """Open an update, dropping one that somebody else began and did not finish."""
        await self._request("POST", "/init_weight_transfer_engine", json={"init_info": {}})
        try:
            await self._request("POST", "/start_weight_update")
        except InfrastructureError:
            await self._request("POST", "/finish_weight_update")  # of nothing: it ends the other's session
            await self._request("POST", "/start_weight_update")

    async def probe(self, sampling: SamplingParams | None = None) -> Capabilities:
        """Find out whether the server can serve a trainer, by generating one token.

        `sampling`: how it is to sample; the mask of what top_p leaves must come if it is asked for.

        Raises StartupError saying what is missing (a generic OpenAI-compatible server has no token ids),
        InfrastructureError when the server cannot be reached.
        """
        advice = (
            "Training needs token ids in and out, logprobs and weight versions: use `lachesis run inference`, or vLLM "
            "started with --enable-scale-out --logprobs-mode processed_logprobs."
        )
        try:
            model = (await self._json("GET", "/v1/models", _Models)).data[0]
            tokens = await self.tokenize([{"role": "user", "content": "a"}])
            asked = SamplingParams(max_tokens=1)
            if sampling is not None and sampling.sampling_mask and sampling.top_p < 1:
                asked = msgspec.structs.replace(asked, top_p=sampling.top_p, sampling_mask=True)
            sample = (await self.generate(tokens, 1, asked))[0]
            version = sample.weight_versions[-1].version
            await self.prompt_logprobs([*tokens, *sample.token_ids.tolist()])
        except (DataError, LookupError) as error:
            raise StartupError(f"{self._where} cannot serve a trainer: {error} {advice}") from error
        if asked.sampling_mask and sample.sampling_mask is None:
            raise StartupError(
                f"{self._where} does not say which tokens top_p leaves, so a trainer could not compare with what was "
                "sampled: set top_p = 1, or let the reference server sample"
            )
        return Capabilities(
            model=model.id,
            max_model_len=model.max_model_len,
            weight_version=version,
            tokenizer_hash=model.tokenizer_hash,
        )

    @property
    def _where(self) -> str:
        return f"inference server {without_secrets(self.config.url)}"

    async def _generate(self, token_ids: list[int], params: SamplingParams, mode: Any) -> GenerateResponse:
        request = GenerateRequest(token_ids=token_ids, sampling_params=params, output_mode=mode)
        began_s, path = time.monotonic(), "/inference/v1/generate"
        payload = None
        try:
            response = await self._request("POST", path, content=msgspec.json.encode(request))
            payload = len(response.content)
            found = self._decoded(path, GenerateResponse, response)
        except LachesisError:
            self._record_call(began_s, 0, payload, failed=True)
            raise
        self._record_call(began_s, params.n, payload)
        return found

    def _record_call(self, began_s: float, items: int, payload: int | None, *, failed: bool = False) -> None:
        if self._requested is not None:
            ended_s = time.monotonic()
            self._requested(CallRecord(ended_s, ended_s - began_s, items, failed, payload))

    def _generation(self, choice: Choice) -> GeneratedSample:
        tokens, content = choice.token_ids, choice.logprobs.content if choice.logprobs else None
        if tokens is None or content is None or choice.text is None:
            raise DataError(f"{self._where} left out token ids, logprobs or text of a sample.")
        logprobs = np.array([entry.logprob for entry in content], np.float32)
        if len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
            raise DataError(f"{self._where} sent {len(logprobs)} logprobs, finite or not, for {len(tokens)} tokens.")
        spans = choice.weight_versions or []
        edges = [0, *(span.end for span in spans)]
        if edges[-1] != len(tokens) or [span.start for span in spans] != edges[:-1]:
            raise DataError(
                f"{self._where} sent weight versions that do not cover the {len(tokens)} tokens of a sample."
            )
        token_ids = np.array(tokens, np.int32)
        return GeneratedSample(
            token_ids=token_ids,
            logprobs=logprobs,
            text=choice.text,
            finish_reason=choice.finish_reason or "stop",
            weight_versions=spans,
            routed_experts=None if choice.routed_experts is None else self._experts(choice.routed_experts),
            sampling_mask=None if choice.sampling_mask is None else self._mask(choice.sampling_mask, token_ids),
        )

    def _mask(self, encoded: str, token_ids: NDArray[np.int32]) -> MaskRows:
        try:
            return decode_mask(encoded, token_ids)
        except ValueError as error:
            raise DataError(f"{self._where} sent a sampling_mask that cannot be read: {error}") from error

    def _experts(self, encoded: str) -> NDArray[np.int16]:
        try:
            found = _integers(encoded)
        except ValueError as error:
            raise DataError(f"{self._where} sent routed_experts that cannot be read: {error}") from error
        if not 0 <= found.min(initial=0) <= found.max(initial=0) <= _MAX_EXPERT:
            raise DataError(f"{self._where} sent an expert that is none of 0 to {_MAX_EXPERT}.")
        experts: NDArray[np.int16] = found.reshape(len(found), found.shape[1] * found.shape[2]).astype(np.int16)
        return experts

    async def _post(self, path: str, body: Any, kind: type[T]) -> T:
        return await self._json("POST", path, kind, content=msgspec.json.encode(body))

    async def _json(self, method: str, path: str, kind: type[T], **arguments: Any) -> T:
        return self._decoded(path, kind, await self._request(method, path, **arguments))

    def _decoded(self, path: str, kind: type[T], response: httpx.Response) -> T:
        return from_json(f"{self._where} answered {path} with something else than expected", kind, response.content)

    async def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json"} if "content" in arguments else {}
        if (parent := current_traceparent()) is not None:
            headers["traceparent"] = parent
        try:
            response = await self._http.request(method, path, headers=headers, **arguments)
        except httpx.TransportError as error:
            # a longer answer takes longer: that the time ran out may be due to it, unless nothing was sent yet
            slow = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
            kind = InfrastructureError if slow else ServerAwayError
            raise kind(f"{self._where}, {path}: {type(error).__name__} {error}".rstrip()) from error
        if response.is_success:
            return response
        text = f"{self._where} answered {path} with {response.status_code}: {response.text[:MAX_QUOTED]}"
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise AccessError(text)
        if response.status_code == httpx.codes.NOT_FOUND:
            raise _NoSuchRouteError(text)
        if response.status_code in _BUSY:
            raise ServerAwayError(text)
        if response.status_code >= 500 or response.status_code == httpx.codes.REQUEST_TIMEOUT:
            raise InfrastructureError(text)
        raise (PromptTooLongError if _BEYOND_CONTEXT.search(response.text) else DataError)(text)


def _integers(encoded: str) -> NDArray[Any]:
    """Return the integers [rows, layers, k] of a numpy file in base64, without a copy. Raises ValueError."""
    file = io.BytesIO(base64.b64decode(encoded, validate=True))
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("its format is not version 1.0")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
    if len(shape) != 3 or dtype.kind not in "iu":
        raise ValueError(f"shape {shape} and type {dtype}, where integers by token, layer and place are needed")
    return np.frombuffer(file.getbuffer()[file.tell() :], dtype).reshape(shape, order="F" if by_column else "C")
