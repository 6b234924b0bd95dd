"""The engine: one thread owns the model, batches all requests and decodes them together.

Any thread may call `submit` with prompt token ids and sampling parameters; it gets a future of `GenerationResult`.
Guarantees:

- Requests join and leave at token boundaries; the samples of one request share the reading of its prompt, and so do its
  prompt logprobs where one token is sampled.
- Every token's logprob is that of the weights it was sampled with, and spans name those weights exactly. New weights
  take effect between two tokens; rows in flight are then read in again: no cache of old weights is ever mixed in.
- The queue is bounded. A cancelled future's work is dropped at the next token.
- If the model itself fails, every future gets InfrastructureError, and so does every later `submit`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import torch

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.engines.reference.decoding import DecodingBatch
from lachesis.pipeline.inference.engines.reference.decoding_choice import choose_decoding
from lachesis.pipeline.inference.engines.reference.graphed_call import GraphPool
from lachesis.pipeline.inference.engines.reference.next_token import allowed_tokens, read_draw, row_settings
from lachesis.pipeline.inference.engines.reference.placement import fitted
from lachesis.pipeline.inference.engines.reference.prompt_scoring import PromptScorer, top_logprobs
from lachesis.pipeline.inference.engines.reference.requests import GenerationRequest, SampleRow
from lachesis.pipeline.inference.engines.reference.token_sampler import TokenSampler
from lachesis.pipeline.inference.prompt_tree import PromptPath
from lachesis.pipeline.inference.protocol import PauseMode, SamplingParams
from lachesis.pipeline.inference.serving.engine import EngineFullError
from lachesis.pipeline.inference.serving.results import GenerationResult, TokenListener
from lachesis.pipeline.inference.serving.text import StopStrings
from lachesis.pipeline.model.context import context_length, positions_change_at
from lachesis.pipeline.model.tensors import load_tensors, vocabulary_of
from lachesis.schemas.errors import DataError

__all__ = ["Engine"]


class Engine:
    """A context manager: entering starts the thread, leaving ends it and fails unfinished requests."""

    scores_branches = True

    def __init__(
        self,
        model: Any,
        *,
        eos_token_id: int | Collection[int],
        weight_version: str,
        config: EngineConfig | None = None,
        decode: Callable[..., str] | None = None,
    ) -> None:
        """`eos_token_id`: the tokens that end a sample, see `end_tokens`. `decode`: as a tokenizer's.

        Without `decode` requests cannot have stop strings. Raises `ConfigError` when the model cannot be decoded.
        """
        self.config = config or EngineConfig()
        self.max_model_len: int = self.config.max_model_len or context_length(model.config)
        self._model = model
        self._vocabulary = vocabulary_of(model) or 0
        self._eos = frozenset({eos_token_id} if isinstance(eos_token_id, int) else eos_token_id)
        self._decode = decode
        self._weight_version = weight_version
        self._batch: DecodingBatch = choose_decoding(model, self.max_model_len)
        self._sampler = TokenSampler(GraphPool(self._batch.device))
        self._scorer: PromptScorer | None = None
        self._rows: list[SampleRow] = []
        self._waiting: deque[GenerationRequest] = deque()
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._changed = threading.Condition()
        self._paused: PauseMode | None = None
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="inference-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # From any thread

    @property
    def weight_version(self) -> str:
        """Name of the weights that sample the next token."""
        return self._weight_version

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds."""
        return self._paused is not None

    @property
    def waiting(self) -> int:
        """Requests that have no place yet."""
        with self._changed:
            return sum(not request.future.cancelled() for request in self._waiting)

    @property
    def running(self) -> int:
        """Samples being decoded."""
        return len(self._rows)

    @property
    def decoding(self) -> str:
        """How the model is decoded, for people."""
        return self._batch.about

    def check_alive(self) -> None:
        """Raise InfrastructureError when the engine does not run."""
        if self._failure is not None:
            raise InfrastructureError(f"the engine failed: {self._failure!r}; restart the server.") from self._failure
        if self._closed or not self._thread.is_alive():
            raise InfrastructureError("the engine is not running.")

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        listener: TokenListener | None = None,
        branches: Sequence[PromptPath] = (),
    ) -> Future[GenerationResult]:
        """Queue a request. Cancel the future to drop its work. `listener` is called with each token.

        `branches`: see `SamplingEngine.submit`.

        Raises DataError when it can never be served, EngineFullError when the queue is full, InfrastructureError when
        the engine does not run.
        """
        if params.structured_outputs is not None:
            raise DataError(
                "structured_outputs (response_format, or a forced tool_choice): the reference server cannot constrain "
                'an answer; vLLM can (kind = "vllm")'
            )
        limit = self._limit(prompt, params)
        for path in branches:
            self._limit(path.tokens, params)
        request = GenerationRequest(
            prompt, params, limit, stop=self._stop_strings(params), listener=listener, branches=branches
        )
        self._check_top_logprobs(request)
        with self._changed:
            self.check_alive()
            self._waiting = deque(request for request in self._waiting if not request.future.cancelled())
            if len(self._waiting) >= self.config.max_waiting_requests:
                raise EngineFullError(f"{len(self._waiting)} requests are waiting already; try again a little later.")
            self._waiting.append(request)
            self._changed.notify()
        return request.future

    def pause(self, mode: PauseMode) -> Future[None]:
        """Start nothing new until `resume`. The future is done when the pause holds.

        keep: samples in flight freeze and go on later. wait: they finish first. abort: they end with what they have,
        waiting requests with nothing, finish reason "abort".
        """
        return self._command(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Go on after `pause`."""
        return self._command(self._resume)

    def load_weights(self, tensors: dict[str, torch.Tensor], weight_version: str) -> Future[None]:
        """Exchange all weights between two tokens. The future raises DataError if they do not fit the model."""
        return self._command(lambda: self._load(tensors, weight_version))

    def _command(self, action: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        with self._changed:
            self.check_alive()
            self._commands.append((action, future))
            self._changed.notify()
        return future

    def _stop_strings(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        if self._decode is None:
            raise DataError("stop: this engine reads no text; use stop_token_ids.")
        whole = partial(self._decode, skip_special_tokens=False)
        if not params.skip_special_tokens:
            return StopStrings(params.stop, whole)
        return StopStrings(params.stop, partial(self._decode, skip_special_tokens=True), whole)

    def _check_top_logprobs(self, request: GenerationRequest) -> None:
        if request.top_logprobs > self.config.max_top_logprobs:
            raise DataError(
                f"logprobs and prompt_logprobs ask for {request.top_logprobs} logprobs of likeliest tokens "
                f"({request.params.n} samples of at most {request.limit} tokens, a prompt of {request.prompt_tokens}); "
                f"{self.config.max_top_logprobs} are the most: lower them, max_tokens or n."
            )

    def _limit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        if not prompt:
            raise DataError("token_ids is empty; a prompt has at least one token.")
        if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
            raise DataError(f"token_ids must lie in 0..{self._vocabulary - 1}, the model's vocabulary.")
        if params.n > self.config.max_running_sequences:
            raise DataError(
                f"n is {params.n}, the server decodes at most {self.config.max_running_sequences} together."
            )
        room = self.max_model_len - len(prompt)
        if (params.max_tokens or 1) > room:
            raise DataError(
                f"{len(prompt)} prompt tokens and max_tokens {params.max_tokens or 1} exceed the context of "
                f"{self.max_model_len} tokens."
            )
        return params.max_tokens or room

    # In the engine's thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except Exception as error:  # noqa: BLE001 - handed on to every caller, here and in check_alive
            self._failure = error
        finally:
            self._fail_all()

    def _turn(self) -> bool:
        """Do what is due: commands, joining requests, one token for every row. Return False when closed."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._closed:
                return False
        while self._commands:  # one by one: if one fails, those behind it are failed with all else
            action, future = self._commands.popleft()
            _finish_command(future, action)
        self._drop_cancelled()
        if self._paused is None:
            self._join()
        if self._rows and self._paused != "keep":
            self._next_token()
        return True

    def _has_work(self) -> bool:
        can_join = self._paused is None and self._waiting
        can_decode = self._paused != "keep" and self._rows
        return bool(self._closed or self._commands or can_join or can_decode)

    def _join(self) -> None:
        """Move waiting requests into the batch while places and the prefill budget last, oldest first."""
        joining: list[GenerationRequest] = []
        longest = 0
        tops = sum(request.top_logprobs for request in {row.request for row in self._rows})
        with self._changed:
            while self._waiting:
                request = self._waiting[0]
                longest = max(longest, request.prompt_tokens)
                places = self.config.max_running_sequences - len(self._rows) - sum(len(r.rows) for r in joining)
                too_long = joining and longest * (len(joining) + 1) > self.config.max_prefill_tokens
                tops += request.top_logprobs
                too_many = (joining or self._rows) and tops > self.config.max_top_logprobs
                if len(request.rows) > places or too_long or too_many:
                    break
                joining.append(self._waiting.popleft())
        if not joining:
            return
        joined_ns = time.perf_counter_ns()
        for request in joining:
            request.joined_ns = joined_ns
        self._rows += [row for request in joining for row in request.rows]  # first, so that a failure reaches them
        ended = self._score([request for request in joining if request.params.prompt_logprobs is not None])
        if ended:
            self._rows = [row for row in self._rows if row.request not in ended]
            joining = [request for request in joining if request not in ended]
            for request in ended:
                request.finish()
        if joining:
            self._batch.prefill([request.prompt for request in joining], [len(request.rows) for request in joining])

    def _score(self, requests: list[GenerationRequest]) -> set[GenerationRequest]:
        """Compute the prompt logprobs of the requests; return those that have ended, with a token each.

        That token needs no second reading of the prompt.
        """
        if not requests:
            return set()
        if self._scorer is None:
            apart = positions_change_at(self._model.config, self.max_model_len) is not None
            self._scorer = PromptScorer(self._model, max_tokens=self.config.max_prefill_tokens, apart=apart)
        top_k = [request.params.prompt_logprobs or 0 for request in requests for _ in request.paths]
        found = iter(self._scorer.score([path for request in requests for path in request.paths], top_k))
        rows: list[SampleRow] = []
        logits: list[torch.Tensor] = []
        for request in requests:
            first, *branches = [next(found) for _ in request.paths]
            request.scores = [scores.logprobs for scores in (first, *branches)]
            if request.limit == 1:
                rows += request.rows
                logits += [first.next_logits] * len(request.rows)
        if rows:
            self._draw(rows, torch.stack(logits))
        return {row.request for row in rows}

    def _draw(self, rows: Sequence[SampleRow], logits_BV: torch.Tensor) -> list[int]:
        """Sample a token for each row by its logits, and return them."""
        params = [row.request.params for row in rows]
        uniform = [row.draw.random() for row in rows]
        settings = row_settings([p.temperature for p in params], [p.top_p for p in params], uniform)
        logprobs_BV, drawn = self._sampler(logits_BV, settings)
        tokens, logprobs = read_draw(drawn)
        for index, row in enumerate(rows):
            top_k = row.request.params.logprobs
            top = top_logprobs(logprobs_BV[index : index + 1], top_k)[0] if top_k else []
            if row.request.params.sampling_mask:
                row.record_allowed(allowed_tokens(logprobs_BV[index], row.request.params.top_p))
            row.append(tokens[index], logprobs[index], top, version=self._weight_version, end_tokens=self._eos)
        return tokens

    def _next_token(self) -> None:
        """Sample a token for every row, settle the rows that end, and read the token into the others."""
        tokens = self._draw(self._rows, self._batch.logits)
        going = [index for index, row in enumerate(self._rows) if row.finish_reason is None]
        if len(going) < len(self._rows):
            self._retain(going)
        if going:
            self._batch.append_tokens([tokens[index] for index in going])

    def _retain(self, going: list[int]) -> None:
        """Keep the rows at these indexes; settle every request whose last row has ended."""
        before, self._rows = self._rows, [self._rows[index] for index in going]
        self._batch.select_rows(going)
        running = {row.request for row in self._rows}
        for request in {row.request for row in before} - running:
            request.finish()

    def _drop_cancelled(self) -> None:
        with self._changed:
            self._waiting = deque(request for request in self._waiting if not request.future.cancelled())
        going = [index for index, row in enumerate(self._rows) if not row.request.future.cancelled()]
        if len(going) < len(self._rows):
            self._retain(going)

    def _pause(self, mode: PauseMode) -> None:
        self._paused = mode
        if mode == "wait":
            while self._rows and not self._closed:
                self._next_token()
                self._drop_cancelled()
        elif mode == "abort":
            self._retain([])
            with self._changed:
                waiting, self._waiting = self._waiting, deque()
            for request in waiting:
                request.finish()

    def _resume(self) -> None:
        self._paused = None

    def _load(self, tensors: dict[str, torch.Tensor], weight_version: str) -> None:
        load_tensors(self._model, fitted(tensors, self._model))
        self._weight_version = weight_version
        if self._rows:
            self._batch.clear()
            self._batch.prefill([row.request.prompt + row.tokens for row in self._rows], [1] * len(self._rows))

    def _fail_all(self) -> None:
        reason = f"the engine failed: {self._failure!r}" if self._failure is not None else "the engine was closed"
        with self._changed:
            self._closed = True
            requests = {row.request for row in self._rows} | set(self._waiting)
            futures: list[Future[Any]] = [request.future for request in requests]
            futures += [future for _, future in self._commands]
            self._rows, self._commands = [], deque()
            self._waiting.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(InfrastructureError(f"{reason}; the request was not completed."))


def _finish_command(future: Future[None], action: Callable[[], None]) -> None:
    """Run a command for its caller: a DataError is the caller's, anything else the engine's."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        action()
    except DataError as error:
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(InfrastructureError(f"the engine failed: {error!r}"))
        raise
    else:
        future.set_result(None)
