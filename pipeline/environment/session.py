"""Keeps a session: one sample's conversation, and its training sequences.

The environment calls `generate` and `add`; the session keeps the tokens of the sequence so far. Where calls are
recorded, a request that is recorded gets its recorded answer. Only this file guarantees that generated text is never
tokenised again, that a sequence ends with a generated token, that what branches of a conversation share is trained
once, and that a failed request is remembered, so that an environment that swallows the exception still yields no
rollout.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from lachesis.pipeline.common.real_number import finite_number
from lachesis.pipeline.environment.inference_requests import InferenceRequests, ModelTurn, derive_seed
from lachesis.pipeline.environment.sequence_draft import SequenceDraft, trained_calls
from lachesis.pipeline.environment.session_calls import SessionCalls, recorded_turn
from lachesis.pipeline.environment.template import TurnRenderer
from lachesis.pipeline.errors import EnvironmentCodeError, PromptTooLongError
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.marked_calls import may_be_marked_call
from lachesis.pipeline.tasks.task import Task
from lachesis.pipeline.tasks.thoughts import thought_spans
from lachesis.pipeline.tasks.tool_calls import CALL_MARKER, ParsedCalls, parse_tool_calls
from lachesis.pipeline.telemetry.recorder import traced
from lachesis.schemas.calls import MAX_FORK_CHARS, SessionCall, SessionEnd
from lachesis.schemas.errors import DataError, LachesisError
from lachesis.schemas.rollout import Message, ToolCall

__all__ = ["Reply", "SampleEnded", "Session", "SharedFirstTurn"]

_MAX_FORKS = 1024
"""Forks of one sample."""


class SampleEnded(Exception):  # noqa: N818 - no error: the conversation is over
    """Raised by `generate` when no further turn is possible: turn limit, context full, or the last turn was cut.

    An environment need not catch it, except in branches of a conversation (`Session.fork`): one that ends must not end
    the others. The sample stands as it is and is scored.
    """

    def __init__(self, fork: str = "") -> None:
        """`fork`: of which branch the conversation is over, "": of the sample's own."""
        super().__init__(f"fork {fork} can have no further turn" if fork else "the sample can have no further turn")
        self.fork = fork


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The model's answer in one turn."""

    text: str
    """Without special tokens."""
    finish_reason: str
    """stop, or length when it was cut."""
    tool_calls: list[ToolCall] = []
    tool_errors: list[str] = []
    """What was wrong with tool calls that cannot be read."""
    thought_calls: int = 0
    """Tool calls that the model only thought of, between `<think>` and `</think>` say, or shows in a block of code;
    none of them is run."""


class SharedFirstTurn:
    """The first turn of some samples of a group, generated in one request, so that the prompt is read only once."""

    def __init__(
        self, requests: InferenceRequests, messages: Sequence[Message], samples: Sequence[int], sampling: SamplingParams
    ) -> None:
        self.messages = list(messages)
        self._requests = requests
        self._samples = list(samples)
        self._sampling = sampling
        self._lock = anyio.Lock()
        self._prompt_ids: list[int] = []
        self._generations: list[GeneratedSample] = []
        self._failure: LachesisError | None = None

    def __contains__(self, sample: int) -> bool:
        return sample in self._samples

    async def sample(self, sample: int) -> tuple[list[int], GeneratedSample]:
        """Return the prompt's ids and the sample's generation; the first caller requests all of them."""
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._generations:
                try:
                    self._prompt_ids = await self._requests.tokenize(self.messages)
                    check_prompt(self._prompt_ids, self._requests, self._sampling)
                    self._generations = await self._requests.generate(
                        self._prompt_ids, len(self._samples), self._sampling
                    )
                except LachesisError as error:
                    self._failure = error
                    raise
        return self._prompt_ids, self._generations[self._samples.index(sample)]


@dataclass(slots=True)
class _SharedByForks:
    """What a session and all forks of it have in common."""

    failure: LachesisError | None = None
    turn_rewards: dict[int, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=dict)
    """By call the one that it continues."""
    forks: int = 0
    is_branched: bool = False
    """Whether a fork has generated a turn."""


class Session(SequenceDraft):
    """One sample under way. `messages` is the conversation so far; `state` is the environment's to use.

    It is the sequence of this conversation itself. `further` are other sequences that the sample is trained on, in
    which the model worked on the same task: those of sub-agents, say, or of a conversation before its compaction.

    `fork()` returns a branch: a session that goes on from this point by itself. Branches may be forked again, and run
    one after the other or at once. Credit by branch follows one rule:

    - `reward_turn(x)` of a branch is its reward. It credits the branch's turn, and each turn before it in the
      conversation, with the mean over the branches there: of k branches at one point, each weighs 1 / k.
    - The turns of a branch are compared with those of its sibling branches at the same depth, other turns with those
      of the other samples.
    - The sample's own reward credits every turn of every branch.
    - What branches share is trained once.

    Formula, proof and sources (TreeRL, arXiv:2506.11902) are in `normalizer/logic/turns.py`. It is unbiased whatever
    the number of branches is, if that is fixed before one of them generates, and if none sees what another one did; if
    one does, give the sample the reward instead. Raters and `reward` judge this conversation, not its branches.
    """

    def __init__(
        self,
        task: Task,
        sample: int,
        *,
        opening: SharedFirstTurn,
        requests: InferenceRequests,
        sampling: SamplingParams,
        max_turns: int,
        calls: SessionCalls | None = None,
        may_fork: bool = True,
    ) -> None:
        """`calls`: those recorded of the sample, to which further ones are added; None: they are not recorded.

        `may_fork`: False if its turns are made by code that knows one conversation alone.
        """
        super().__init__()
        self.task = task
        self.sample = sample
        self.messages = task.messages
        self.replies: list[Reply] = []
        self.further: list[SequenceDraft] = []
        self.state: dict[str, Any] = {}
        self.ended = anyio.Event()
        """Set once the sample is finished with its rewards, and that is stored if its calls are."""
        self._shared = _SharedByForks()
        self._forks: list[Session] = []
        self._place = ""
        self.inherited_turns = 0
        """Of a fork: turns that it has in common with the session that was forked."""
        self.newest_call: int | None = None
        """The call that was answered last, None before the first."""
        self._is_generating = False
        self._may_fork = may_fork
        self._max_turns = max_turns
        self._requests = requests
        self._sampling = sampling
        self._opening = opening
        self._first: list[Message] = []
        self._turns = TurnRenderer()
        self._answered = 0
        self._calls = calls

    @classmethod
    def of_group(cls, task: Task, sample: int, requests: InferenceRequests, sampling: SamplingParams) -> "Session":
        """Return an empty session, to be filled, for a sample that a `GroupEnvironment` made."""
        opening = SharedFirstTurn(requests, [], [sample], sampling)
        return cls(task, sample, opening=opening, requests=requests, sampling=sampling, max_turns=0, may_fork=False)

    @property
    def requests(self) -> InferenceRequests:
        """Access to the model, for code that holds the conversation itself and adds its turns by `add_turn`."""
        return self._requests

    @property
    def sampling(self) -> SamplingParams:
        """How the run samples."""
        return self._sampling

    @property
    def sequences(self) -> list[SequenceDraft]:
        """All sequences that the sample is trained on; the last one is that of the conversation."""
        known, branches = set(self.turns), list[SequenceDraft]()
        for fork in reversed(self.branches()):
            branches.append(fork.without(known))
            known.update(fork.turns)
        return [*self.further, *reversed(branches), self]

    @property
    def failure(self) -> LachesisError | None:
        """Why the sample is lost, with all forks of the session; None: it is not."""
        return self._shared.failure

    @failure.setter
    def failure(self, error: LachesisError) -> None:
        self._shared.failure = error

    @property
    def turn_rewards(self) -> dict[int, float]:
        """By call the rewards of single turns; see `reward_turn`."""
        return self._shared.turn_rewards

    @turn_rewards.setter
    def turn_rewards(self, rewards: dict[int, float]) -> None:
        self._shared.turn_rewards = rewards

    @property
    def turn_parents(self) -> dict[int, int | None] | None:
        """By call the one that it continues, None for the first; None: the conversation has no branches."""
        return self._shared.parents if self._shared.is_branched else None

    @property
    def notes(self) -> dict[str, Any]:
        """Values to be read in the group's metadata (`samples`): plain ones of a few KiB."""
        return self._shared.notes

    @property
    def text(self) -> str:
        """The latest reply's text, empty before the first."""
        return self.replies[-1].text if self.replies else ""

    @property
    def thought_calls(self) -> int:
        """Tool calls of all turns that the model only thought of or showed, and that were not run."""
        own = sum(reply.thought_calls for reply in self.replies[self.inherited_turns :])
        return own + sum(fork.thought_calls for fork in self._forks)

    @property
    def diverged(self) -> str | None:
        """Where a conversation that went on after a kill had another request than before it; None: nowhere."""
        return None if self._calls is None else self._calls.diverged

    @property
    def calls(self) -> SessionCalls | None:
        """The recorded calls, for code that holds the conversation itself; None: they are not recorded."""
        return self._calls

    @property
    def tool_record(self) -> "Session | None":
        """The session where it keeps the results of tools; None: calls are not recorded."""
        return None if self._calls is None else self

    @property
    def turns_left(self) -> int:
        return self._max_turns - len(self.replies)

    def add(self, *messages: Message | str) -> None:
        """Append messages to the conversation, for the model to answer; plain text is a user's message."""
        self.messages += [Message(role="user", content=m) if isinstance(m, str) else m for m in messages]

    def fork(self) -> "Session":
        """Return a branch: a session that goes on from here with the same task, messages and turns.

        It has a copy of `state`, and counts its turns from those so far. Which recorded calls are a branch's is decided
        by the order in which a session is forked: fork it before the branches run, not in them.

        Raises `EnvironmentCodeError` while the session generates, where code holds the conversation itself, if
        `state` cannot be copied, and for the fork after the 1,024th of a sample.
        """
        shared, number = self._shared, len(self._forks)
        place = f"{self._place}.{number}" if self._place else str(number)
        if self._is_generating:
            raise EnvironmentCodeError("session.fork(): the session generates; await its session.generate() first")
        if not self._may_fork or (self.replies and self.newest_call is None):
            raise EnvironmentCodeError(
                "session.fork(): in a group, an agent or a StepEnv, other code makes the turns, and knows one "
                "conversation alone; fork where the environment's own rollout() calls session.generate()"
            )
        if shared.forks >= _MAX_FORKS or len(place) > MAX_FORK_CHARS:
            raise EnvironmentCodeError(
                f"session.fork(): sample {self.sample} has {shared.forks} forks, the last of them {place.count('.')} "
                f"levels deep; a sample has at most {_MAX_FORKS}, whose numbers fit into {MAX_FORK_CHARS} characters"
            )
        try:
            state = copy.deepcopy(self.state)
        except Exception as error:  # what an environment keeps there may raise anything
            raise EnvironmentCodeError(
                f"session.fork(): session.state cannot be copied: {type(error).__name__}: {error}; keep there what "
                "copy.deepcopy takes, or give its class a __deepcopy__"
            ) from error
        branch = Session(
            self.task,
            self.sample,
            opening=self._opening,
            requests=self._requests,
            sampling=self._sampling,
            max_turns=self._max_turns,
            calls=None if self._calls is None else self._calls.fork(number),
        )
        self.copied_to(branch)
        branch.messages, branch.replies, branch.state = list(self.messages), list(self.replies), state
        branch._shared, branch._place, branch.inherited_turns = shared, place, len(self.replies)
        branch._turns = self._turns
        branch.newest_call, branch._first, branch._answered = self.newest_call, self._first, self._answered
        shared.forks += 1
        self._forks.append(branch)
        return branch

    def branches(self) -> list["Session"]:
        """Return the forks, and forks of forks, that end in an answer of their own, by their place."""
        continued = set(self._shared.parents.values())
        found = list[Session]()
        for fork in self._forks:
            if len(fork.replies) > fork.inherited_turns and fork.newest_call not in continued:
                found.append(fork)
            found += fork.branches()
        return found

    def reward_turn(self, value: float, turn: int = -1) -> None:
        """Give a turn a reward of its own, in addition to that of the sample; several for one turn add up.

        `turn` is its place in `replies`. It credits this turn, and those before it by `advantage.turn_discount`; turns
        that get none have a reward of 0. How it is shared with branches is said in `Session`. Raises
        `EnvironmentCodeError` for what is no number, and if there is no such turn.
        """
        try:
            reward = finite_number(value)
        except ValueError as error:
            raise EnvironmentCodeError(f"reward_turn: {error}; give a finite number") from error
        if not -len(self.turns) <= turn < len(self.turns):
            raise EnvironmentCodeError(
                f"reward_turn({reward:g}, {turn}): the model has answered {len(self.turns)} times; await "
                "session.generate() first"
            )
        call = self.turns[turn]
        self.turn_rewards[call] = self.turn_rewards.get(call, 0.0) + reward

    async def generate(self) -> Reply:
        """Let the model answer the conversation; append and return its reply.

        Raises SampleEnded when no further turn is possible; InfrastructureError or DataError when inference failed.
        """
        await anyio.lowlevel.checkpoint()
        if self.failure is not None:
            raise self.failure
        if self.replies and (self.turns_left <= 0 or self.finish_reason == "length"):
            raise SampleEnded(self._place)
        if self._is_generating:
            raise EnvironmentCodeError("session.generate(): the session generates already; fork it for each branch")
        self._is_generating = True
        try:
            new, turn, parsed = await self._turn()
        except LachesisError as error:
            if self.replies and isinstance(error, PromptTooLongError):  # by what was added to it: the task itself fits
                self.finish_reason = "length"
                raise SampleEnded(self._place) from error
            self.failure = error
            raise
        finally:
            self._is_generating = False
        self.put(new)
        call = len(self._shared.parents) if self._calls is None else self._calls.newest
        if call is not None:
            self._shared.parents[call] = self.newest_call
            self.newest_call = call
        self._shared.is_branched |= bool(self._place)
        return self._add_reply(turn, parsed, call)

    def add_turn(
        self, new: Sequence[int], turn: ModelTurn, calls: Sequence[ToolCall] = (), call: int | None = None
    ) -> None:
        """Append a turn that `requests` generated for code that holds the conversation itself.

        `new`: the tokens between the sequence so far and the turn. The messages that led to it are added before.
        `call`: its number, as in `SequenceDraft.append`.
        """
        self.put(new)
        self._add_reply(turn, ParsedCalls(list(calls), []), call)

    def _add_reply(self, turn: ModelTurn, parsed: ParsedCalls, call: int | None = None) -> Reply:
        self.append(turn, call=call)
        reply = Reply(
            text=turn.text,
            finish_reason=turn.finish_reason,
            tool_calls=parsed.calls,
            tool_errors=parsed.errors,
            thought_calls=parsed.thought,
        )
        self.replies.append(reply)
        self.messages.append(Message(role="assistant", content=turn.text, tool_calls=parsed.calls))
        self._answered = len(self.messages)
        return reply

    def tool_results(self) -> list[str | None] | None:
        """See `ToolRecord`."""
        return None if self._calls is None else self._calls.tool_results()

    def check_may_run(self, tool: str) -> None:
        """See `ToolRecord`; the sample is lost then."""
        try:
            if self._calls is not None:
                self._calls.check_may_run(tool)
        except LachesisError as error:
            self.failure = error
            raise

    async def store_tools(self, results: list[str | None], seconds: float) -> None:
        """See `ToolRecord`."""
        if self._calls is not None:
            await self._calls.store_tools(results, seconds)

    async def end(self, rewards: dict[str, float | None]) -> None:
        """Record that the sample is finished, if its calls are."""
        if self._calls is not None:
            if self._shared.is_branched:
                newest = [one.newest_call for one in (*self.branches(), self)]
                self._calls.use_paths([call for call in newest if call is not None])
            await self._calls.end(
                self.sample,
                rewards,
                self.finish_reason,
                self.messages,
                self.thought_calls,
                turn_rewards=sorted(self.turn_rewards.items()),
            )
        self.ended.set()

    def restore(self, end: SessionEnd, paths: Sequence[Sequence[SessionCall]]) -> None:
        """Become what the session was when it ended, by the calls of each sequence; nothing runs again."""
        trained = trained_calls([[call.index for call in path] for path in paths])
        self.further = [SequenceDraft() for _ in paths[1:]]
        for one, path, own in zip(self.sequences, paths, trained, strict=True):
            for call in path:
                prompt, turn = recorded_turn(call, one.routed_experts)
                one.put(prompt)
                one.append(turn, trained=call.index in own, call=call.index)
                if one is self:
                    self.replies.append(Reply(text=turn.text, finish_reason=turn.finish_reason))
        self.replies[-1] = msgspec.structs.replace(self.replies[-1], thought_calls=end.thought_calls)
        self.turn_rewards = dict(end.turn_rewards)
        self._shared.parents = {call.index: call.parent for path in paths for call in path}
        self._shared.is_branched = any(call.fork for path in paths for call in path)
        self.messages = list(end.messages)
        self.finish_reason = end.finish_reason

    async def _turn(self) -> tuple[list[int], ModelTurn, ParsedCalls]:
        """Return the tokens that lead to the next turn, the turn, and the tool calls in it.

        The turn is the recorded one, or a new one, which is recorded before it is returned. The wait may be
        cancelled: up to the end nothing changes that the next call would begin with.
        """
        if self._calls is None:
            new, turn = await self._sampled_turn()
            return new, turn, await self._parsed(new, turn)
        added = self.messages[self._answered :] if self.replies else self.messages
        digest = self._calls.digest(added, self._sampling, self._requests.template)
        call = self._calls.answer(digest)
        if call is not None:
            self._first = self._first or list(self.messages)
            with traced(f"recorded call {call.index}"):
                new, turn = recorded_turn(call, self.routed_experts)
            parsed = await self._parsed(new, turn)
            self._calls.go_on_recorded(call)
            return new, turn, parsed
        begin_s = time.monotonic()
        new, turn = await self._sampled_turn()
        index = await self._calls.store(digest, new, turn, time.monotonic() - begin_s, self.routed_experts)
        parsed = await self._parsed(new, turn)
        self._calls.go_on(index, digest)
        return new, turn, parsed

    async def _sampled_turn(self) -> tuple[list[int], ModelTurn]:
        """Return the tokens that lead to a new turn, and the turn."""
        requests, sampling = self._requests, self._sampling
        is_opening = not self.replies and not self._place and self.sample in self._opening
        if is_opening and self.messages == self._opening.messages:
            self._first = list(self.messages)
            prompt_ids, generation = await self._opening.sample(self.sample)
            return prompt_ids, await requests.finish(prompt_ids, generation, self._seeded("opening"))
        if not self.replies:
            self._first = list(self.messages)
            new = await requests.tokenize(self.messages)
            check_prompt(new, requests, sampling)
        else:
            added = self.messages[self._answered :]
            new = await self._turns.render(requests.tokenize, self._first, added, self.tokens[-1])
        prompt_ids = [*self.tokens, *new]
        room = requests.room(len(prompt_ids), sampling)
        if room is not None and room < 1:
            self.finish_reason = "length"
            raise SampleEnded(self._place)
        seeded = self._seeded(len(self.replies))
        (generation,) = await requests.generate(prompt_ids, 1, seeded)
        return new, await requests.finish(prompt_ids, generation, seeded)

    async def _parsed(self, new: Sequence[int], turn: ModelTurn) -> ParsedCalls:
        """Return the tool calls of a turn that comes after `new` tokens.

        A template may open a thought in the prompt, and special tokens may mark thoughts, which the text does not
        show: where a call is not seen to be thought, both are looked at.
        """
        if CALL_MARKER not in turn.text and not (self._max_turns > 1 and may_be_marked_call(turn.text)):
            return parse_tool_calls(turn.text)
        opened = bool(await self._requests.opened_by([*self.tokens, *new]))
        if thought_spans(turn.text):
            return parse_tool_calls(turn.text, opened=opened)
        said = turn.token_ids[:-1] if turn.finish_reason == "stop" else turn.token_ids
        return parse_tool_calls(turn.text, whole=await self._requests.detokenize(said), opened=opened)

    def _seeded(self, turn: object) -> SamplingParams:
        place = [self._place] if self._place else []
        seed = derive_seed(self._sampling.seed, self.sample, *place, turn)
        return msgspec.structs.replace(self._sampling, seed=seed)


def check_prompt(prompt_ids: Sequence[int], requests: InferenceRequests, sampling: SamplingParams) -> None:
    """Raise PromptTooLongError when a prompt leaves no room for a token, DataError when it has none."""
    if not prompt_ids:
        raise DataError("the chat template turns the prompt into no token at all")
    room = requests.room(len(prompt_ids), sampling)
    if room is not None and room < 1:
        raise PromptTooLongError(
            f"the prompt has {len(prompt_ids)} tokens and leaves no room for an answer in the context of "
            f"{len(prompt_ids) + room}"
        )
