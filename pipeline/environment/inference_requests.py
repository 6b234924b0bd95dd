"""Sends requests to the inference server, in a way that is safe for training.

From messages or token ids it returns token ids, or `ModelTurn`s: the tokens of one assistant turn with logprobs and the
policy version of each. Only this file guarantees that a failed request is retried and then raised as
InfrastructureError (never turned into text; as ServerAwayError if no answer can have caused it at any attempt), that a
sample aborted by a weight update is continued from its own token ids instead of being scored unfinished, and that a
turn never passes `max_context`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.common.sampling_agreement import sampling_difference
from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.plain_hooks import HOOKS
from lachesis.pipeline.errors import InfrastructureError, ServerAwayError, UnreadableAnswerError
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.sampling_mask import MaskRows
from lachesis.pipeline.runtime.retries import RetryWait, WaitLog, retry_outages
from lachesis.pipeline.tasks.thoughts import PROMPT_END_TOKENS, opened_thought
from lachesis.pipeline.telemetry.recorder import traced
from lachesis.schemas.errors import DataError
from lachesis.schemas.rollout import Message

__all__ = [
    "Inference",
    "InferenceRequests",
    "ModelTurn",
    "as_chat",
    "derive_seed",
    "joined_experts",
    "max_context_of",
]

T = TypeVar("T")

_MAX_PAUSE_S = 30.0
_MAX_TIMEOUT_FACTOR = 4
"""How many times the configured time a request may take that timed out again and again."""
_NO_MASK = (
    "the policy's server does not say which tokens top_p left, so the trainer could not compare with what was sampled: "
    "set top_p = 1, or let the reference server sample"
)
_TAIL_TOKENS = 6
"""Tokens at the end of a prompt that hold the tag it may open: "<", "think", ">" and what a template puts after it."""
_MAX_TAILS = 256
_LAST_OF_TAG = frozenset(">]▷")
_tail_texts: WeakKeyDictionary["Inference", OrderedDict[tuple[int, ...], str]] = WeakKeyDictionary()
_wait_log = WaitLog()


class Inference(Protocol):
    """What an environment needs of an inference server; `InferenceClient` has it, and so has `FakeInference`.

    Failures are InfrastructureError (retried) or DataError (not retried). Each generation has one finite logprob a
    token and contiguous version spans from 0 to its end.
    """

    async def tokenize(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids of chat messages under the server's chat template.

        `chat_template_kwargs`, parameters of the template, and `tools`, functions that it names to the model, are given
        where there are some. Raises DataError where a template knows no tools.
        """
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        """Sample `n` completions of one prompt."""
        ...


async def max_context_of(inference: Inference) -> int | None:
    """Return how many tokens the model's context has; None if the server does not say."""
    ask = getattr(inference, "max_model_len", None)
    found: int | None = None if ask is None else await ask()
    return found


class ModelTurn(NamedTuple):
    """One assistant turn: N generated tokens, the stop token included."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, str]]
    """(position in the turn, policy version): the version of the tokens from there on. The first position is 0."""
    text: str
    finish_reason: str
    """stop or length."""
    routed_experts: NDArray[np.int16] | None = None
    """int16 [rows, layers * k]: the experts that processed the first tokens of prompt and turn, as far as recorded."""
    sampling_mask: MaskRows | None = None
    """The ids among which each token was sampled; None: not recorded."""
    is_constrained: bool = False
    """Whether the text had to match something (`structured_outputs`). Its logprobs are then those of what was allowed,
    which no trainer computes, so it is never trained on."""


def joined_experts(known: NDArray[np.int16] | None, recorded: NDArray[np.int16] | None) -> NDArray[np.int16] | None:
    """Return the experts of a sequence's first tokens: those known, then those of a later request.

    A later request processes the tokens before it once more, by weights that may be newer than those they were sampled
    with, so what is known stays. Raises `UnreadableAnswerError` when both are not of one model.
    """
    if known is None or recorded is None:
        return recorded if known is None else known
    if known.shape[1] != recorded.shape[1]:
        raise UnreadableAnswerError(
            f"routed_experts: {recorded.shape[1]} a token after {known.shape[1]} in the same sequence"
        )
    return np.concatenate([known, recorded[len(known) :]])


def as_chat(message: Message) -> dict[str, Any]:
    """Return a message in the form chat templates take."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        chat["name"] = message.name
    if message.tool_call_id is not None:
        chat["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        chat["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return chat


class InferenceRequests:
    """Retrying access to an `Inference`. One instance serves any number of samples."""

    def __init__(
        self,
        inference: Inference,
        config: CollectConfig,
        report: Callable[[RetryWait], None] | None = None,
        run: SamplingParams | None = None,
        report_request: Callable[[int], None] | None = None,
    ) -> None:
        """`report` is called before a request is repeated; without it, such waits are logged. `run`: the run's sampling
        parameters; turns sampled with others are kept in `otherwise`, with the difference. `report_request` is called
        with 1 where a request begins and with -1 where it has ended, all repeats included.
        """
        self._report_request = report_request or (lambda change: None)
        self._run = run
        self.otherwise: list[tuple[list[int], str]] = []
        self._report = report or _wait_log
        self._policy = RetryPolicy(
            first_s=config.backoff_s, longest_s=_MAX_PAUSE_S, jitter=0.5, attempts=config.attempts
        )
        self._inference = inference
        self._config = config
        self._failures: dict[object, list[Exception]] = {}
        """Of each request under way, why its attempts failed."""

    def for_sample(self) -> "InferenceRequests":
        """Return the same access for one sample, whose `is_server_away` is about its own requests."""
        own = InferenceRequests(self._inference, self._config, self._report, self._run, self._report_request)
        own.otherwise = self.otherwise
        return own

    @property
    def is_server_away(self) -> bool:
        """Whether a request under way waits for a server that was away at each attempt."""
        return any(found and _are_outages(found) for found in self._failures.values())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say that a sample waits for something else than its environment's code, as it does for the model."""
        self._report_request(1)
        try:
            yield
        finally:
            self._report_request(-1)

    @property
    def template(self) -> Mapping[str, Any]:
        """The parameters of the chat template."""
        return self._config.chat_template_kwargs

    async def tokenize(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation, the generation prompt included.

        `tools`: functions, as OpenAI's routes name them, that the chat template names to the model.
        """
        chat = [as_chat(message) for message in messages]
        kwargs = self._config.chat_template_kwargs
        arguments: dict[str, Any] = {"chat_template_kwargs": kwargs} if kwargs else {}
        arguments |= {"tools": list(tools)} if tools else {}
        return await self._retry(
            "tokenize",
            lambda: self._inference.tokenize(chat, add_generation_prompt=add_generation_prompt, **arguments),
        )

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams) -> list[GeneratedSample]:
        """Return `n` samples, which `finish` makes into turns. The caller has made sure of room for one token."""
        sampling = msgspec.structs.replace(
            sampling,
            max_tokens=self.room(len(prompt_ids), sampling),
            sampling_mask=sampling.sampling_mask and sampling.top_p < 1,  # else there is none, whatever the server
        )
        asked = {"gen_ai.operation.name": "chat", "gen_ai.request.model": self._config.model}
        with traced(f"chat {self._config.model}", "client", asked) as found:
            generations = await self._retry("generate", lambda: self._inference.generate(prompt_ids, n, sampling))
            found["gen_ai.usage.input_tokens"] = len(prompt_ids)
            found["gen_ai.usage.output_tokens"] = sum(len(sample.token_ids) for sample in generations)
        if len(generations) != n:
            raise UnreadableAnswerError(f"the inference server answered {len(generations)} samples, {n} were requested")
        return generations

    async def opened_by(self, prompt_ids: Sequence[int]) -> str:
        """Return the tag with which a prompt opens the thinking of its answer, such as "<think>"; "" if none.

        The server is queried once for each end of a prompt, which a chat template makes the same for all.
        """
        text = await self._tail_text(tuple(prompt_ids[-_TAIL_TOKENS:]))
        if text.rstrip()[-1:] in _LAST_OF_TAG and not opened_thought(text):
            text = await self._tail_text(tuple(prompt_ids[-PROMPT_END_TOKENS:]))  # a tag of one token a character
        return opened_thought(text)

    async def _tail_text(self, tail: tuple[int, ...]) -> str:
        known = _tail_texts.setdefault(self._inference, OrderedDict())
        if tail not in known:
            known[tail] = await self.detokenize(list(tail))
            if len(known) > _MAX_TAILS:
                known.popitem(last=False)
        return known[tail]

    def room(self, used: int, sampling: SamplingParams) -> int | None:
        """Return how many tokens may follow `used` tokens of a sequence, None where nothing limits it."""
        if self._config.max_context is None:
            return sampling.max_tokens
        left = self._config.max_context - used
        return left if sampling.max_tokens is None else min(left, sampling.max_tokens)

    async def finish(
        self, prompt_ids: Sequence[int], generation: GeneratedSample, sampling: SamplingParams
    ) -> ModelTurn:
        """Return the turn of a sample.

        An aborted sample is continued from its own tokens until it stops or is full; one whose text must match
        something is sampled again as a whole, since what it must match begins with it. Raises InfrastructureError if
        `attempts` continuations in a row bring nothing.
        """
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[tuple[int, str]] = []
        experts = None
        mask: MaskRows = []
        masked = sampling.sampling_mask and sampling.top_p < 1
        is_constrained = sampling.structured_outputs is not None
        room = self.room(len(prompt_ids), sampling)
        parts = idle = 0
        since = datetime.now(UTC)
        while True:
            if is_constrained and generation.finish_reason == "abort":
                generation = _without_tokens(generation)
            for span in generation.weight_versions:
                if not versions or versions[-1][1] != span.version:
                    versions.append((len(ids) + span.start, span.version))
            ids += [int(token) for token in generation.token_ids]
            logprobs += [float(logprob) for logprob in generation.logprobs]
            experts = joined_experts(experts, generation.routed_experts)
            if masked and generation.sampling_mask is None:
                raise DataError(_NO_MASK)
            mask += generation.sampling_mask or []
            reason = generation.finish_reason
            if reason != "abort":
                break
            if room is not None and len(ids) >= room:
                reason = "length"
                break
            parts += 1
            if len(generation.token_ids):
                idle, since = 0, datetime.now(UTC)
            else:
                idle += 1
            if idle:
                error = InfrastructureError(
                    f"inference: a sample was aborted {idle} times in a row without a new token"
                )
                if self._policy.gives_up(idle, 0.0):
                    raise error
                self._report(RetryWait("continue an aborted sample", error, idle, since))
                await anyio.sleep(self._policy.pause_s(idle))
            rest = msgspec.structs.replace(
                sampling,
                max_tokens=None if room is None else room - len(ids),
                seed=derive_seed(sampling.seed, "continued", parts, ids),
            )
            (generation,) = await self.generate([*prompt_ids, *ids], 1, rest)
        if not ids:
            raise UnreadableAnswerError(
                f"the inference server sent a sample without a token (finish_reason {reason!r})"
            )
        # Only the server may turn ids into text: a character can lie across the seam of a continued sample.
        text = generation.text if not parts else await self.detokenize(ids[:-1] if reason == "stop" else ids)
        self._compare_sampling(ids, sampling, masked=masked)
        return ModelTurn(ids, logprobs, versions, text, reason, experts, mask if masked else None, is_constrained)

    def _compare_sampling(self, ids: list[int], sampling: SamplingParams, *, masked: bool) -> None:
        """Keep the ids in `otherwise` if they were not sampled as the run samples."""
        if self._run is not None:
            cut = 1.0 if sampling.top_p == self._run.top_p else sampling.top_p
            asked = {
                "temperature": sampling.temperature,
                "top_p": cut,
                "structured_outputs": sampling.structured_outputs,
            }
            difference = sampling_difference(asked, self._run.temperature, masked=masked)
            self.otherwise += [] if difference is None else [(ids, difference)]

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return await self._retry("detokenize", lambda: self._inference.detokenize(ids)) if ids else ""

    async def _retry(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        failures = self._failures[request] = list[Exception]()

        async def attempt() -> T:
            timeouts = sum(isinstance(failure, TimeoutError) for failure in failures)
            # Each request that timed out doubles the time of the next: a server that is only slow answers in the end.
            timeout_s = self._config.request_timeout_s * min(2**timeouts, _MAX_TIMEOUT_FACTOR)
            try:
                with HOOKS.fail_after(timeout_s):
                    return await request()
            except (InfrastructureError, TimeoutError) as error:
                failures.append(error)
                if isinstance(error, InfrastructureError):
                    raise
                raise InfrastructureError(
                    str(error)
                    or f"no answer within {timeout_s:g} s; if the server is only slow, fewer groups at once "
                    "(environments.*.concurrency), or shorter answers, make it quicker"
                ) from error

        with self.waiting():
            try:
                answer: T = await retry_outages(f"inference: {what}", self._report, policy=self._policy)(attempt)
            except InfrastructureError as error:
                kind = ServerAwayError if _are_outages(failures) else InfrastructureError
                raise kind(f"inference: {what} failed {len(failures)} times, last: {error}") from error
            finally:
                del self._failures[request]
        return answer


def _are_outages(failures: Sequence[Exception]) -> bool:
    return all(isinstance(failure, ServerAwayError) for failure in failures)


def _without_tokens(generation: GeneratedSample) -> GeneratedSample:
    return msgspec.structs.replace(
        generation,
        token_ids=generation.token_ids[:0],
        logprobs=generation.logprobs[:0],
        weight_versions=[],
        routed_experts=None,
        sampling_mask=None if generation.sampling_mask is None else [],
    )


def derive_seed(seed: int | None, *place: object) -> int | None:
    """Return a seed for one place in a group.

    Samples and turns of a seeded group therefore do not share random numbers.
    """
    if seed is None:
        return None
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
