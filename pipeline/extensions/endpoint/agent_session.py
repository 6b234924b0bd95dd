"""Answers the calls of one session by the policy, and records them.

Guarantees that a call is recorded before its answer is handed out, in the log, too, where the environment's calls are;
that a request which is sent again gets the recorded answer, also while the first one is under way, and after a kill;
and that a failure of inference is remembered, so that an agent that swallows it still yields no rollout.
"""

import hashlib
import itertools
import string
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import anyio.abc
import msgspec

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.environment.inference_requests import ModelTurn, derive_seed
from lachesis.pipeline.environment.sequence_draft import SequenceDraft, trained_calls
from lachesis.pipeline.environment.session import Session, check_prompt
from lachesis.pipeline.environment.session_calls import CallPlace, recorded_turn
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError, NotResumableError, PromptTooLongError
from lachesis.pipeline.extensions.endpoint.logic.answers import first_stop, read_answer
from lachesis.pipeline.extensions.endpoint.logic.call_tree import CallTree, RecordedAnswer, RecordedCall, SampledAnswer
from lachesis.pipeline.extensions.endpoint.logic.constraints import structured_outputs
from lachesis.pipeline.extensions.endpoint.logic.conversation import AnswerSample, ModelAnswer, ModelRequest
from lachesis.pipeline.extensions.endpoint.rendering import PromptRenderer
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.telemetry.recorder import traced
from lachesis.schemas.calls import SessionCall
from lachesis.schemas.errors import DataError, LachesisError
from lachesis.schemas.values import convert_plain

__all__ = ["AgentSession", "SessionEndedError", "Trained"]

Trained = Literal["all", "longest"]
"""Which sequences of a sample are trained."""

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Letters of a tool call's id; the templates of one family take exactly these."""


async def _never() -> bool:
    return False


@dataclass(slots=True)
class _BegunRequest:
    """A request that is being answered. `has_hung_up`: whether its newest client has."""

    has_hung_up: Callable[[], Awaitable[bool]]
    done: anyio.Event = field(default_factory=anyio.Event)
    found: RecordedAnswer | None = None


class SessionEndedError(DataError):
    """Raised by a call in a session that has ended, or has made as many calls as it may."""


class AgentSession:
    """The calls of one session. `session`: the sample that they make. `max_calls`: no more are answered."""

    def __init__(self, session: Session, renderer: PromptRenderer, *, max_calls: int) -> None:
        self.session = session
        self.requests = session.requests.for_sample()
        self.tree = CallTree()
        self.rewards: dict[str, float | None] | None = None
        """What was reported, by component; None: nothing was, which is no reward of 0."""
        self.ended = anyio.Event()
        """Set once it has a reward, or cannot go on."""
        self.agent_ended = anyio.Event()
        """Set once its agent has ended: it makes no more calls, and its reward may still be reported."""
        self.left_out: str | None = None
        """Why the sample is left out though it has a reward; None: it is not."""
        self._under_way = 0
        """Calls that are being answered."""
        self._context = copy_context()
        """Its group's, which says how calls are traced; requests come in that of the HTTP server."""
        self._tasks: anyio.abc.TaskGroup | None = None
        self.closing_error: LachesisError = InfrastructureError("the endpoint is stopping: try again")
        """What a call under way is answered that ends with the session."""
        self._renderer = renderer
        self._max_calls = max_calls
        self._begun: dict[str, list[_BegunRequest]] = {}
        """By digest, the requests that are being answered."""
        self._texts: dict[int, str] = {}
        self._turn_rewards: dict[int, float] = {}
        """By the place of a call the reward of its answer."""
        self._calls = session.calls
        self._left_over = [] if session.calls is None else list(session.calls.recorded)
        """Calls of the session before a kill that were not requested again yet."""
        self._were_one = all(call.parent == (call.index - 1 if call.index else None) for call in self._left_over)
        """Whether these are one conversation, whose requests come in the same order again."""
        self._first_other: str | None = None
        """The first request that was sampled while recorded calls were left over."""
        self.is_resumed = session.calls is not None and session.calls.is_taken_up
        """Whether it was begun before a kill: an agent that took it then may still be there."""
        self._retracing = anyio.Lock()
        self._next_place = max((call.index + 1 for call in self._left_over), default=0)

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Let calls be answered while the context lasts; those that are under way then end with it.

        An error of this package's own code costs the sample, and not those of others.
        """
        async with background() as tasks:
            self._tasks = tasks
            try:
                yield
                self.closing_error = self.session.failure or SessionEndedError("this session has ended")
            finally:
                self._tasks = None

    def start(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to answer a call. It goes on when its client hangs up, who may come back.

        Raises `SessionEndedError` if no calls are answered any more.
        """
        if self._tasks is None:
            raise SessionEndedError("this session has ended")
        self._context.run(self._tasks.start_soon, call)

    async def answer(
        self, request: ModelRequest, *, is_retry: bool = False, has_hung_up: Callable[[], Awaitable[bool]] = _never
    ) -> RecordedAnswer:
        """Return the answer to a request. `is_retry`: its client says that it has sent it before.

        `has_hung_up` returns whether its client waits no longer: then the same request, sent again, gets its answer.

        Raises `SessionEndedError`, `DataError` for a request that cannot be served, and `InfrastructureError`.
        """
        request.check()
        digest = request.digest
        for begun in self._begun.get(digest, []):
            if is_retry or await begun.has_hung_up():
                begun.has_hung_up = has_hung_up
                await begun.done.wait()
                if begun.found is not None:
                    return begun.found
                break
        if (known := self.tree.repeated(digest, is_retry=is_retry)) is not None:
            return known
        if self.session.failure is not None:
            raise self.session.failure
        if self.ended.is_set():
            raise SessionEndedError("this session has ended")
        if self.agent_ended.is_set():
            raise SessionEndedError("this session's agent has ended; only its reward may still be reported")
        if len(self.tree.calls) + self._under_way + request.n > self._max_calls:
            raise SessionEndedError(f"this session has made the {self._max_calls} calls that it may (max_turns)")
        begun = _BegunRequest(has_hung_up)
        self._begun.setdefault(digest, []).append(begun)
        self._under_way += request.n
        try:
            whole = self._whole(request)
            await self._retrace(whole)
            found = begun.found = await self._sample(whole, request)
        except InfrastructureError as error:
            self.session.failure = error
            self.ended.set()
            raise
        else:
            return found
        finally:
            self._under_way -= request.n
            begun.done.set()
            self._begun[digest].remove(begun)

    async def prompt_tokens(self, request: ModelRequest) -> int:
        """Return how many tokens the prompt of a request has, which is not answered.

        Raises `DataError` for one that could not be, and `InfrastructureError`.
        """
        request.check()
        whole = self._whole(request)
        followed = self.tree.followed(whole)
        known = [] if followed.parent is None else self.tree.tokens(followed.parent)
        return len(known) + len(await self._renderer.new_tokens(self.requests, self.tree, whole, followed))

    async def is_held(self) -> bool:
        """Return whether no other process may have taken the session up, while this one was stopped, say."""
        try:
            if self._calls is not None:
                await self._calls.check_held()
        except InfrastructureError as error:
            self.session.failure = error
            self.ended.set()
            return False
        return True

    def report(self, rewards: Mapping[str, float | None], turns: Mapping[str, float] | None = None) -> None:
        """Take the session's rewards, which end it. A report that is repeated as it was changes nothing.

        `turns`: further ones of single answers, by the answer's id. Raises `SessionEndedError` for another report, and
        `DataError` for an id that names no single answer of the session.
        """
        of_turns = {self.tree.place_of(name): value for name, value in (turns or {}).items()}
        if self.rewards is not None and (dict(rewards), of_turns) != (self.rewards, self._turn_rewards):
            raise SessionEndedError("this session has another reward already")
        self.rewards, self._turn_rewards = dict(rewards), of_turns
        self.ended.set()

    def fill(self, trained: Trained = "all") -> None:
        """Give the session the sequences of its calls, or the longest alone; that is the one which is scored.

        Raises `EnvironmentCodeError` if no answer arrived at the agent that can be trained on, and `NotResumableError`
        if it did not repeat what it had requested before a kill, and such samples are given up.
        """
        paths = self.tree.trained_paths()
        if not paths:
            raise EnvironmentCodeError(
                "every answer that the agent got was constrained by response_format or tool_choice, and such answers "
                "are not trained on: leave one free at least"
                if any(self.tree.paths())
                else "the agent got no answer of the model: did it use the endpoint's address?"
            )
        if trained == "longest":
            paths = paths[-1:]
        session = self.session
        if self._calls is not None:
            if self._left_over:
                count = len(self._left_over)
                text = f"{count} recorded calls of sample {session.sample} were not requested again after a kill"
                text += f"; {self._first_other or 'nothing else was'}"
                try:
                    self._calls.diverge(self._left_over, text)
                except NotResumableError as error:
                    session.failure = error
                    raise
            self._calls.use_paths([path[-1].place for path in paths])
        *further, own = trained_calls([[call.index for call in path] for path in paths])
        session.further = [_sequence(path, calls) for path, calls in zip(paths[:-1], further, strict=True)]
        trained_here = [call for call in own.union(*further) if not self.tree.calls[call].sampled.is_constrained]
        constrained = sum(call.sampled.is_constrained for call in self.tree.calls)
        session.notes["calls"] = {"all": len(self.tree.calls), "trained": len(trained_here)}
        if constrained:
            session.notes["calls"]["constrained"] = constrained
        session.messages = []
        for call in paths[-1]:
            session.add(*(message.as_message() for message in call.new_messages))
            session.add_turn(call.new_tokens, _turn(call), call.message.tool_calls, call.place)
        session.turn_rewards = dict(self._turn_rewards)

    def _whole(self, request: ModelRequest) -> ModelRequest:
        """Return the request with the whole conversation, if it names the answer that it follows."""
        if request.follows is None:
            return request
        before = self.tree.conversation(request.follows)
        if before is None:
            raise DataError("previous_response_id names no answer of this session")
        if request.messages[0].role == "system":  # instructions hold for one response alone
            before = [request.messages[0], *(before[1:] if before[0].role == "system" else before)]
            return msgspec.structs.replace(request, messages=[*before, *request.messages[1:]])
        return msgspec.structs.replace(request, messages=[*before, *request.messages])

    async def _retrace(self, request: ModelRequest) -> None:
        """Put the recorded calls that led to a request into the tree.

        An agent that has outlived a kill goes on in the middle: it does not repeat what it had requested before. Each
        answer in its history is that to a request for what stands before it, with the same tools and parameters.
        """
        if not self._left_over:
            return
        async with self._retracing:
            messages = request.messages
            known = len(messages) - len(self.tree.followed(request).new)
            for place in range(max(known, 1), len(messages)):
                if messages[place].role == "assistant":
                    earlier = msgspec.structs.replace(request, messages=messages[:place], follows=None)
                    parent = self.tree.followed(earlier).parent
                    before = None if parent is None else self.tree.calls[parent].place
                    if self._stored(earlier.digest, before, earlier.n):
                        found = await self._sample(earlier, earlier)
                        found.is_delivered = True  # its agent has just sent it back

    async def _sample(self, request: ModelRequest, asked: ModelRequest) -> RecordedAnswer:
        followed, digest = self.tree.followed(request), asked.digest
        parent = None if followed.parent is None else self.tree.calls[followed.parent]
        known = [] if parent is None else self.tree.tokens(parent.index)
        stored = self._stored(digest, None if parent is None else parent.place, request.n)
        if stored:
            for call in stored:
                self._left_over.remove(call)
                if self._calls is not None:
                    self._calls.count_resumed(call)
            experts = None if parent is None else parent.sampled.routed_experts
            found = []
            for call in stored:
                with traced(f"recorded call {call.index}"):
                    found.append(recorded_turn(call, experts))
            new_tokens, turns, places = found[0][0], [turn for _, turn in found], [call.index for call in stored]
        else:
            self._note_other(request)
            new_tokens = await self._renderer.new_tokens(self.requests, self.tree, request, followed)
            places = list(range(self._next_place, self._next_place + request.n))
            self._next_place += request.n
            turns = await self._generated(request, known, new_tokens, parent, places, digest=digest)
        prompt = [*known, *new_tokens]
        opened = bool(await self.requests.opened_by(prompt))
        samples = [
            await self._read(request, turn, opened=opened, name=f"{digest}/{place}")
            for turn, place in zip(turns, places, strict=True)
        ]
        sampled = [
            SampledAnswer(
                token_ids=turn.token_ids,
                logprobs=turn.logprobs,
                versions=turn.versions,
                text=turn.text,
                finish_reason=turn.finish_reason,
                routed_experts=turn.routed_experts,
                sampling_mask=turn.sampling_mask,
                is_constrained=turn.is_constrained,
            )
            for turn in turns
        ]
        answer = ModelAnswer(
            id=_name(f"{digest}/{places[0]}", 24),
            created_s=int(time.time()),
            samples=samples,
            prompt_tokens=len(prompt),
        )
        return self.tree.record(followed, new_tokens, sampled, answer, digest=digest, places=places)

    def _note_other(self, request: ModelRequest) -> None:
        """Remember the first request that is sampled while recorded calls are left over.

        Raises `NotResumableError` if they cannot come any more, and such samples are given up.
        """
        if self._calls is None or not self._left_over:
            return
        if self._first_other is None:
            number, last = len(self.tree.answers), request.messages[-1]
            self._first_other = f"request {number} was another one, which ends with {last.role}: {last.text[-80:]!r}"
        if self._were_one and self._calls.gives_up:
            self._calls.diverge(self._left_over, f"sample {self.session.sample}: {self._first_other}")

    def _stored(self, digest: str, parent: int | None, n: int) -> list[SessionCall]:
        """Return the calls by which a request of the same place was answered before a kill; none: it was not."""
        found = [call for call in self._left_over if call.digest == bytes.fromhex(digest) and call.parent == parent][:n]
        return [] if len(found) < n else found

    async def _generated(
        self,
        request: ModelRequest,
        known: list[int],
        new_tokens: list[int],
        parent: RecordedCall | None,
        places: list[int],
        *,
        digest: str,
    ) -> list[ModelTurn]:
        """Return new answers, which are stored in the log where calls are recorded."""
        requests, sampling, begin_s = self.requests, self._sampling(request), time.monotonic()
        prompt = [*known, *new_tokens]
        matched = structured_outputs(request, await requests.opened_by(prompt))
        sampling = msgspec.structs.replace(sampling, structured_outputs=matched)
        try:
            check_prompt(prompt, requests, sampling)
        except PromptTooLongError as error:
            raise PromptTooLongError(f"prompt is too long: {error}") from error
        generations = await requests.generate(prompt, request.n, sampling)
        turns = [await requests.finish(prompt, one, sampling) for one in generations]
        if self._calls is not None:
            seconds = (time.monotonic() - begin_s) / len(turns)
            before, experts = (None, None) if parent is None else (parent.place, parent.sampled.routed_experts)
            for turn, index in zip(turns, places, strict=True):
                place = CallPlace(index, before, bytes.fromhex(digest))
                await self._calls.record(place, new_tokens, turn, seconds, known_experts=experts)
        return turns

    def _sampling(self, request: ModelRequest) -> SamplingParams:
        """Return how to sample: as the run does, in what decides probabilities, and within the request's bounds.

        Raises `DataError` for a number that is out of range.
        """
        run = self.session.sampling
        given = {
            name: value
            for name in ("max_tokens", "seed", "stop", "temperature", "top_p")
            if (value := getattr(request, name)) is not None
        }
        bounds = convert_plain("the request", SamplingParams, given)
        limits = [limit for limit in (run.max_tokens, bounds.max_tokens) if limit is not None]
        seed = bounds.seed
        if seed is None:
            seed = derive_seed(run.seed, self.session.sample, "call", len(self.tree.calls) + self._under_way)
        return msgspec.structs.replace(run, max_tokens=min(limits, default=None), stop=bounds.stop, seed=seed)

    async def _read(self, request: ModelRequest, turn: ModelTurn, *, opened: bool, name: str) -> AnswerSample:
        """Return an answer as agents get it. Its calls have the same ids after a kill: `name` and number make them."""
        numbers = itertools.count()

        def new_id() -> str:
            return _name(f"{name}/{next(numbers)}", _ID_LENGTH)

        requests = self.requests
        whole = await requests.detokenize(turn.token_ids) if request.tools or request.stop else ""
        ended = turn.finish_reason == "stop"
        return AnswerSample(
            message=read_answer(turn.text, whole, opened=opened, has_tools=bool(request.tools), new_id=new_id),
            finish_reason=turn.finish_reason,
            stop_sequence=first_stop(whole, request.stop) if ended else None,
            tokens=len(turn.token_ids),
            logprobs=await self._named(turn) if request.logprobs else [],
        )

    async def _named(self, turn: ModelTurn) -> list[tuple[str, float]]:
        for token in turn.token_ids:
            if token not in self._texts:
                self._texts[token] = await self.requests.detokenize([token])
        return [(self._texts[token], value) for token, value in zip(turn.token_ids, turn.logprobs, strict=True)]


def _sequence(path: Sequence[RecordedCall], trained: set[int]) -> SequenceDraft:
    """Return the sequence of a path, on which the calls of these indexes are trained."""
    found = SequenceDraft()
    for call in path:
        found.put(call.new_tokens)
        found.append(_turn(call), trained=call.index in trained, call=call.place)
    return found


def _turn(call: RecordedCall) -> ModelTurn:
    sampled = call.sampled
    return ModelTurn(
        sampled.token_ids,
        sampled.logprobs,
        sampled.versions,
        sampled.text,
        sampled.finish_reason,
        sampled.routed_experts,
        sampled.sampling_mask,
        sampled.is_constrained,
    )


def _name(text: str, length: int) -> str:
    """Return letters and digits that a text is known by."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=32).digest(), "big")
    letters = []
    for _ in range(length):
        number, at = divmod(number, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[at])
    return "".join(letters)
