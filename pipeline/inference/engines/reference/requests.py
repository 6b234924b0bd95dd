"""Requests in the reference engine: a prompt, its parameters and its rows, the samples in the making.

A row knows when it ends, names the weights of each of its tokens, and owns its random numbers; a request settles its
future once. No model and no thread here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Container, Sequence
from concurrent.futures import Future

from lachesis.pipeline.inference.prompt_tree import PromptPath
from lachesis.pipeline.inference.protocol import FinishReason, PromptLogprobs, SamplingParams, WeightVersionSpan
from lachesis.pipeline.inference.serving.results import GenerationResult, SampledToken, SampleResult, TokenListener
from lachesis.pipeline.inference.serving.text import StopStrings

__all__ = ["GenerationRequest", "SampleRow"]


class GenerationRequest:
    """A prompt with its sampling parameters, `params.n` rows and the future of its result.

    `limit`: new tokens of a row at most. `stop`: of `params`, None if there are none. `listener`: is called with each
    token. `branches`: paths that are scored with the prompt.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        *,
        stop: StopStrings | None = None,
        listener: TokenListener | None = None,
        branches: Sequence[PromptPath] = (),
    ) -> None:
        self.prompt = prompt
        self.paths = [PromptPath(tuple(prompt)), *branches]
        self.prompt_tokens = sum(len(path.own) for path in self.paths)
        self.params = params
        self.limit = limit
        self.stop = stop
        self.top_logprobs = params.n * limit * (params.logprobs or 0) + self.prompt_tokens * (
            params.prompt_logprobs or 0
        )
        """Logprobs of likeliest tokens that it may end with."""
        self.stop_tokens = frozenset(params.stop_token_ids)
        self.listener = listener
        self.future: Future[GenerationResult] = Future()
        self.scores: list[PromptLogprobs] | None = None
        """Of the own tokens of each of `paths`, if they are requested."""
        self.queued_ns = time.perf_counter_ns()
        self.joined_ns: int | None = None
        seed = params.seed if params.seed is not None else random.SystemRandom().getrandbits(64)
        self.rows = [SampleRow(self, index, random.Random(f"{seed}/{index}")) for index in range(params.n)]

    def finish(self) -> None:
        """Settle the future, unless it was cancelled.

        A row that has not ended by itself is reported as aborted.
        """
        if self.future.set_running_or_notify_cancel():
            samples = [row.result() for row in self.rows]
            ended_ns = time.perf_counter_ns()
            prompt_logprobs = None if self.scores is None else self.scores[0]
            branches = (self.scores or [])[1:]
            self.future.set_result(
                GenerationResult(samples, prompt_logprobs, self.queued_ns, self.joined_ns, ended_ns, branches)
            )


class SampleRow:
    """The `index`-th sample in the making. `draw` gives its random numbers, one for each token."""

    def __init__(self, request: GenerationRequest, index: int, draw: random.Random) -> None:
        self.request = request
        self.index = index
        self.draw = draw
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._logprobs: list[float] = []
        self._top: list[list[tuple[int, float]]] = []
        self._spans: list[WeightVersionSpan] = []
        self._allowed: list[list[int]] = []
        self._stop_reason: int | str | None = None
        self._stops = None if request.stop is None else request.stop.search()

    def append(
        self, token: int, logprob: float, top: list[tuple[int, float]], *, version: str, end_tokens: Container[int]
    ) -> None:
        """Add a token that the weights named `version` sampled, and set `finish_reason` if it is the last."""
        params, count = self.request.params, len(self.tokens)
        self.tokens.append(token)
        self._logprobs.append(logprob)
        self._top.append(top)
        start = count
        if self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        self._spans.append(WeightVersionSpan(version=version, start=start, end=count + 1))
        if token in end_tokens and not params.ignore_eos:
            self.finish_reason = "stop"
        elif token in self.request.stop_tokens:
            self.finish_reason, self._stop_reason = "stop", token
        elif self._stops is not None and (stop := self._stops.append(token)) is not None:
            self.finish_reason, self._stop_reason = "stop", stop
        elif len(self.tokens) >= self.request.limit:
            self.finish_reason = "length"
        if self.request.listener is not None:
            self.request.listener(SampledToken(self.index, token, logprob, top, self.finish_reason, self._stop_reason))

    def record_allowed(self, token_ids: list[int]) -> None:
        """Note among which ids the next token is sampled; see `SampleResult.allowed`."""
        self._allowed.append(token_ids)

    def result(self) -> SampleResult:
        """Return the sample as it stands."""
        return SampleResult(
            self.tokens,
            self._logprobs,
            self._top,
            self.finish_reason or "abort",
            self._stop_reason,
            self._spans,
            self._allowed if self.request.params.sampling_mask else None,
        )
