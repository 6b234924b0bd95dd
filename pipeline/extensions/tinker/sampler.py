"""Samples at Tinker behind the routes of an inference server.

Guarantees that all tokens of a sample are of one version of the weights, which its span names; that a pause holds back
requests that have not begun; that after a failure the next request gets a session of its own; and that a request which
Tinker refuses for what it holds is refused here, too, and not sent again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.from_thread
import tinker
from anyio.abc import TaskGroup

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.extensions.tinker.client import TinkerClient, is_refusal, open_client, own_errors
from lachesis.pipeline.extensions.tinker.config import TinkerConfig
from lachesis.pipeline.inference.prompt_tree import PromptPath
from lachesis.pipeline.inference.protocol import (
    FinishReason,
    PauseMode,
    PromptLogprob,
    PromptLogprobs,
    SamplingParams,
    WeightVersionSpan,
)
from lachesis.pipeline.inference.serving.engine import EngineFullError
from lachesis.pipeline.inference.serving.results import GenerationResult, SampledToken, SampleResult, TokenListener
from lachesis.schemas.errors import DataError

__all__ = ["TinkerSampler", "open_sampler"]

_MAX_REQUESTS = 1024
"""Requests in work at once; one more is refused."""
_SCHEME = "tinker://"


@asynccontextmanager
async def open_sampler(
    settings: TinkerConfig, run: str, tokenizer: Any, end_tokens: frozenset[int]
) -> AsyncIterator[TinkerSampler]:
    """Yield a sampler that has no weights yet. Raises `StartupError` without a key."""
    async with AsyncExitStack() as sessions, anyio.create_task_group() as tasks:
        yield TinkerSampler(settings, run, tokenizer, end_tokens, sessions=sessions, tasks=tasks)
        tasks.cancel_scope.cancel()


class TinkerSampler:
    """A `SamplingEngine`. Use `open_sampler`; all but `read_weights` belongs to the event loop."""

    def __init__(
        self,
        settings: TinkerConfig,
        run: str,
        tokenizer: Any,
        end_tokens: frozenset[int],
        *,
        sessions: AsyncExitStack,
        tasks: TaskGroup,
    ) -> None:
        self.max_model_len = settings.context_length
        self.scores_branches = False
        self._settings = settings
        self._run = run
        self._tokenizer = tokenizer
        self._end_tokens = sorted(end_tokens)
        self._sessions = sessions
        self._tasks = tasks
        self._client: TinkerClient | None = None
        self._sampler: tinker.SamplingClient | None = None
        self._opening = anyio.Lock()
        self._path: str | None = None
        self._version = "0-none-none"
        self._running: set[anyio.CancelScope] = set()
        self._resumed = anyio.Event()
        self._resumed.set()

    @property
    def weight_version(self) -> str:
        """See `SamplingEngine`."""
        return self._version

    @property
    def is_paused(self) -> bool:
        """See `SamplingEngine`."""
        return not self._resumed.is_set()

    @property
    def running(self) -> int:
        """Requests in work."""
        return len(self._running)

    def check_alive(self) -> None:
        """See `SamplingEngine`."""

    def read_weights(self, path: str, version: str) -> str:
        """Return the path of weights at Tinker. Raises `DataError` where it is none."""
        if not path.startswith(_SCHEME):
            raise DataError(f"the weights of {version} are not at Tinker: their place is {path[:200]!r}")
        return path

    def load_weights(self, tensors: str, weight_version: str) -> Future[None]:
        """See `SamplingEngine`. The new sampling client is made for the next request."""
        self._path, self._version, self._sampler = tensors, weight_version, None
        self._resumed.set()
        return _done(None)

    def pause(self, mode: PauseMode) -> Future[None]:
        """See `SamplingEngine`. With wait and keep, what Tinker samples already is finished."""
        if self._resumed.is_set():
            self._resumed = anyio.Event()
        if mode == "abort":
            for scope in list(self._running):
                scope.cancel()
        return _done(None)

    def resume(self) -> Future[None]:
        """See `SamplingEngine`."""
        self._resumed.set()
        return _done(None)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        listener: TokenListener | None = None,
        branches: Sequence[PromptPath] = (),
    ) -> Future[GenerationResult]:
        """See `SamplingEngine`. Tinker answers a request whole, so `listener` gets all tokens at once."""
        if branches:
            raise DataError("branches: Tinker scores one prompt a request.")
        self._check(prompt, params)
        if len(self._running) >= _MAX_REQUESTS:
            raise EngineFullError(f"{len(self._running)} requests are at Tinker already; try again a little later.")
        future: Future[GenerationResult] = Future()
        scope = anyio.CancelScope()
        self._running.add(scope)
        future.add_done_callback(lambda _: scope.cancel())
        self._tasks.start_soon(self._answer, future, scope, prompt, params, listener)
        return future

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise DataError("token_ids is empty; a prompt has at least one token.")
        if not 0 <= min(prompt) <= max(prompt) < len(self._tokenizer):
            raise DataError(f"token_ids must lie in 0..{len(self._tokenizer) - 1}, the tokenizer's vocabulary.")
        if len(prompt) + (params.max_tokens or 1) > self.max_model_len:
            raise DataError(
                f"{len(prompt)} prompt tokens and max_tokens {params.max_tokens or 1} exceed the context of "
                f"{self.max_model_len} tokens."
            )
        if params.stop and params.stop_token_ids:
            raise DataError("stop and stop_token_ids: Tinker takes one of them; leave the other out.")
        if params.prompt_logprobs:
            raise DataError("prompt_logprobs: Tinker's own logprob of each token is served alone; give 0.")

    async def _answer(
        self,
        future: Future[GenerationResult],
        scope: anyio.CancelScope,
        prompt: list[int],
        params: SamplingParams,
        listener: TokenListener | None,
    ) -> None:
        queued_ns = time.perf_counter_ns()
        result: GenerationResult | None = None
        error: InfrastructureError | DataError | None = None
        try:
            with scope:
                await self._resumed.wait()
                version, sampler = await self._current()
                joined_ns = time.perf_counter_ns()
                answer = await self._sample(sampler, prompt, params)
                samples = [self._result(one, params, version) for one in answer.sequences]
                scores = _prompt_logprobs(prompt, answer) if params.prompt_logprobs is not None else None
                result = GenerationResult(samples, scores, queued_ns, joined_ns, time.perf_counter_ns())
        except InfrastructureError as failure:
            self._sampler = self._client = None
            error = failure
        except DataError as refusal:
            error = refusal
        finally:
            self._running.discard(scope)
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
            return
        if result is None:  # a pause has ended it
            aborted = SampleResult(
                token_ids=[],
                logprobs=[],
                top_logprobs=[],
                finish_reason="abort",
                stop_reason=None,
                weight_versions=[],
            )
            result = GenerationResult(
                samples=[aborted] * params.n,
                prompt_logprobs=None,
                queued_ns=queued_ns,
                joined_ns=None,
                ended_ns=time.perf_counter_ns(),
            )
        elif listener is not None:
            _report(result, listener)
        future.set_result(result)

    async def _current(self) -> tuple[str, tinker.SamplingClient]:
        """Return the newest version and what samples with it."""
        async with self._opening:
            while True:
                version, path = self._version, self._path
                if path is None:
                    raise InfrastructureError("no weights have been loaded yet; they come with the first policy")
                if self._sampler is not None:
                    return version, self._sampler
                if self._client is None:
                    self._client = await self._sessions.enter_async_context(open_client(self._settings, self._run))
                sampler = await self._client.sampler(path)
                if path == self._path:  # else newer ones have come meanwhile
                    self._sampler = sampler

    async def _sample(
        self, sampler: tinker.SamplingClient, prompt: list[int], params: SamplingParams
    ) -> tinker.SampleResponse:
        asked = tinker.SamplingParams(
            max_tokens=params.max_tokens or self.max_model_len - len(prompt),
            seed=params.seed,
            stop=self._stop(params),
            temperature=params.temperature,
            top_p=params.top_p,
        )
        with own_errors("sample"):
            try:
                answer: tinker.SampleResponse = await sampler.sample(
                    prompt=tinker.ModelInput.from_ints(prompt),
                    num_samples=params.n,
                    sampling_params=asked,
                    include_prompt_logprobs=params.prompt_logprobs is not None,
                    topk_sample_logprobs=params.logprobs or 0,
                )
            except (tinker.RequestFailedError, tinker.APIStatusError) as error:
                if is_refusal(error):
                    raise DataError(f"Tinker refused the request: {error}") from error
                raise
            return answer

    def _stop(self, params: SamplingParams) -> list[str] | list[int]:
        """Return what ends a sample, as Tinker takes it: strings or ids."""
        ends = [] if params.ignore_eos else self._end_tokens
        if params.stop:
            return [*params.stop, *self._tokenizer.convert_ids_to_tokens(ends)]
        return [*params.stop_token_ids, *ends]

    def _result(self, sampled: tinker.SampledSequence, params: SamplingParams, version: str) -> SampleResult:
        tokens = list(sampled.tokens)
        if sampled.logprobs is None:
            raise InfrastructureError("Tinker gave no logprobs with a sample, without which nothing can be trained")
        top = [list(one or []) for one in sampled.topk_logprobs or [[]] * len(tokens)]
        span = WeightVersionSpan(version=version, start=0, end=len(tokens))
        finish: FinishReason = "stop" if sampled.stop_reason == "stop" else "length"
        return SampleResult(tokens, list(sampled.logprobs), top, finish, self._stop_reason(tokens, params), [span])

    def _stop_reason(self, tokens: list[int], params: SamplingParams) -> int | str | None:
        if tokens and tokens[-1] in params.stop_token_ids:
            return tokens[-1]
        if not params.stop:
            return None
        texts = [self._tokenizer.decode(tokens, skip_special_tokens=skip) for skip in (True, False)]
        return next((stop for text in texts for stop in params.stop if stop in text), None)


def _prompt_logprobs(prompt: list[int], answer: tinker.SampleResponse) -> PromptLogprobs:
    given = answer.prompt_logprobs or [None] * len(prompt)
    return [
        None if logprob is None else {str(token): PromptLogprob(logprob=logprob)}
        for token, logprob in zip(prompt, given, strict=True)
    ]


def _report(result: GenerationResult, listener: TokenListener) -> None:
    for index, sample in enumerate(result.samples):
        last = len(sample.token_ids) - 1
        for at, (token, logprob, top) in enumerate(
            zip(sample.token_ids, sample.logprobs, sample.top_logprobs, strict=True)
        ):
            ends = (sample.finish_reason, sample.stop_reason) if at == last else (None, None)
            listener(SampledToken(index, token, logprob, top, *ends))


def _done(value: None) -> Future[None]:
    future: Future[None] = Future()
    future.set_result(value)
    return future
