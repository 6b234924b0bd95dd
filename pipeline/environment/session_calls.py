"""Connects sessions with the records of their calls: recorded answers are given again.

Only this file guarantees that a request with the recorded digest in the recorded place gets the recorded answer, that
the place of a fork is its number among those of its conversation, whenever it runs, that
results of tools which may not run twice are taken from the record, and that a tool that may have run without leaving a
result is never run again: its sample is given up instead.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.calls.recorder import CallRecorder
from lachesis.pipeline.environment.inference_requests import ModelTurn
from lachesis.pipeline.errors import NotResumableError
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.sampling_mask import MaskRows
from lachesis.schemas.calls import SessionCall, SessionEnd, ToolResults
from lachesis.schemas.columns import Column, as_bytes, view
from lachesis.schemas.rollout import FinishReason, Message

__all__ = ["CallFigures", "CallPlace", "Diverging", "GroupCalls", "SessionCalls", "recorded_turn"]

Diverging = Literal["sample", "give_up"]

_EXPERTS, _MASK = "routed_experts", "sampling_mask"


@dataclass(slots=True)
class CallFigures:
    """Figures of one environment's calls since its process started; seconds are those of generation, by sample."""

    recorded_calls: int = 0
    resumed_groups: int = 0
    resumed_calls: int = 0
    resumed_seconds: float = 0.0
    lost_groups: int = 0
    lost_seconds: float = 0.0
    diverged: int = 0

    def metrics(self, env: str) -> dict[str, float]:
        return {f"environment/{env}/{name}": float(getattr(self, name)) for name in self.__slots__}


class GroupCalls:
    """The recorded conversations of one group, as it is generated."""

    def __init__(self, recorder: CallRecorder, figures: CallFigures, diverging: Diverging = "sample") -> None:
        self.recorder = recorder
        self.figures = figures
        self.diverging = diverging
        self._attempts: dict[int, int] = {}
        for name in recorder.known.sessions:
            sample, _, attempt = name.partition(".")
            if sample.isdecimal() and attempt.isdecimal():
                self._attempts[int(sample)] = max(int(attempt), self._attempts.get(int(sample), 0))

    def name_of(self, sample: int) -> str:
        return f"{sample}.{self._attempts.get(sample, 0)}"

    def has_calls(self, sample: int) -> bool:
        """Return whether any call of the sample's newest attempt is recorded."""
        session = self.recorder.known.sessions.get(self.name_of(sample))
        return session is not None and bool(session.calls)

    def open(self, sample: int) -> "SessionCalls":
        """Return the calls of a sample, to be held from its first call on: those recorded are answered again."""
        return SessionCalls(self, self.name_of(sample))

    def give_up(self, sample: int) -> None:
        """Begin a new attempt at a sample: what the last one recorded is lost."""
        session = self.recorder.known.sessions.get(self.name_of(sample))
        self.figures.lost_seconds += session.seconds if session is not None else 0.0
        self._attempts[sample] = self._attempts.get(sample, 0) + 1

    def finished(self, sample: int) -> tuple[SessionEnd, list[list[SessionCall]]] | None:
        """Return the end of a sample and the calls of each of its sequences; None if it is not finished."""
        session = self.recorder.known.sessions.get(self.name_of(sample))
        if session is None or session.end is None:
            return None
        wanted = [*session.end.further, session.end.calls]
        if not all(wanted):
            return None
        paths = [session.path(calls[-1]) for calls in wanted]
        if [[call.index for call in path] for path in paths] != wanted:
            return None
        distinct = {call.index: call for path in paths for call in path}
        self.figures.resumed_calls += len(distinct)
        self.figures.resumed_seconds += sum(call.seconds for call in distinct.values())
        return session.end, paths


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where a call belongs in its session, and its request: see `SessionCall`."""

    index: int
    parent: int | None
    digest: bytes


@dataclass(slots=True)
class _SharedByBranches:
    """What a session and all branches of its conversation have in common."""

    next_index: int
    diverged: str | None = None
    gone: set[int] = field(default_factory=set)
    """Recorded calls that are counted as lost."""


class SessionCalls:
    """The calls of one session, from its first on, or of a branch of its conversation."""

    def __init__(self, group: GroupCalls, name: str) -> None:
        self._group = group
        self._name = name
        self._known = group.recorder.known.session(name)
        self._fork = ""
        self._replay = deque(self._known.branch(""))
        self._path: list[int] = []
        self._further: list[list[int]] = []
        self._digest = b""
        self._was_replayed = False
        self._shared = _SharedByBranches(self._known.next_index)

    def fork(self, number: int) -> "SessionCalls":
        """Return the calls of the branch that begins after the newest call; forks have numbers from 0 on."""
        branch = SessionCalls(self._group, self._name)
        branch._fork = f"{self._fork}.{number}" if self._fork else str(number)
        branch._replay = deque(self._known.branch(branch._fork))
        branch._path = list(self._path)
        branch._digest = blake2b(_encoder.encode([self._digest, number]), digest_size=16).digest()
        branch._was_replayed = self._was_replayed
        branch._shared = self._shared
        return branch

    @property
    def diverged(self) -> str | None:
        """The first request of the session that differed from the recorded one, for people."""
        return self._shared.diverged

    @property
    def name(self) -> str:
        """The attempt's name among all of the run; it stays the same when another process goes on with it."""
        return f"{self._group.recorder.group}/{self._name}"

    def digest(self, added: Sequence[Message], sampling: SamplingParams, template: Mapping[str, Any]) -> bytes:
        """Return the digest of the next request: the one before it, `added` messages, sampling and template."""
        params = msgspec.structs.replace(sampling, seed=None)
        return blake2b(_encoder.encode([self._digest, list(added), params, template]), digest_size=16).digest()

    def answer(self, digest: bytes) -> SessionCall | None:
        """Return the recorded answer to the next request; None: there is none, so it has to be sampled.

        The session does not go on yet: see `go_on_recorded`. Raises `NotResumableError` if the request differs from
        the recorded one, and such samples are to be given up.
        """
        call = self._replay[0] if self._replay else None
        if call is not None and call.digest != digest:
            self._replay.clear()
            where = f"session {self._name}" + (f", fork {self._fork}" if self._fork else "")
            self.diverge(self._behind(call), f"call {len(self._path)} of {where} asks something else than was recorded")
            call = None
        return call

    async def store(
        self,
        digest: bytes,
        prompt: Sequence[int],
        turn: ModelTurn,
        seconds: float,
        known_experts: NDArray[np.int16] | None,
    ) -> int:
        """Store the answer to the request with that digest, and return the call's index.

        The session does not go on yet: see `go_on`.
        """
        parent = self._path[-1] if self._path else None
        place = CallPlace(self._shared.next_index, parent, digest)
        self._shared.next_index += 1
        await self.record(place, prompt, turn, seconds, known_experts=known_experts)
        return place.index

    def go_on(self, index: int, digest: bytes) -> None:
        """Go on behind a call that was stored: the conversation has its answer."""
        self._path.append(index)
        self._digest, self._was_replayed = digest, False

    def go_on_recorded(self, call: SessionCall) -> None:
        """Go on behind the recorded call that `answer` returned."""
        self._replay.popleft()
        self._path.append(call.index)
        self._digest, self._was_replayed = call.digest, True
        self.count_resumed(call)

    @property
    def newest(self) -> int | None:
        """The index of the call that was answered last; None before the first."""
        return self._path[-1] if self._path else None

    @property
    def is_taken_up(self) -> bool:
        """Whether another life may have begun the session: whatever it worked with may still be there."""
        return self._group.recorder.is_taken_up

    async def check_held(self) -> None:
        """Raise `GroupTakenError` if another process may have taken the session's group up."""
        await self._group.recorder.check_held()

    @property
    def gives_up(self) -> bool:
        """Whether a sample is given up that asks something else than was recorded."""
        return self._group.diverging == "give_up"

    @property
    def recorded(self) -> list[SessionCall]:
        """All recorded calls of the session, by index, for code that keeps a tree of calls itself."""
        return [self._known.calls[index] for index in sorted(self._known.calls)]

    def diverge(self, gone: Sequence[SessionCall], text: str) -> None:
        """Note that recorded calls are not requested again.

        Raises `NotResumableError` if such samples are to be given up.
        """
        if self._shared.diverged is None:
            self._shared.diverged = text
            self._group.figures.diverged += 1
        if self.gives_up:
            raise NotResumableError(text)
        self._group.figures.lost_seconds += sum(one.seconds for one in gone if one.index not in self._shared.gone)
        self._shared.gone |= {one.index for one in gone}

    def _behind(self, first: SessionCall) -> list[SessionCall]:
        """Return a recorded call and all that continue it."""
        found = {first.index}
        for index in sorted(self._known.calls):
            if self._known.calls[index].parent in found:
                found.add(index)
        return [self._known.calls[index] for index in found]

    def count_resumed(self, call: SessionCall) -> None:
        """Count a recorded call that is answered again by code that keeps a tree of calls itself."""
        self._group.figures.resumed_calls += 1
        self._group.figures.resumed_seconds += call.seconds

    def use_paths(self, last: Sequence[int]) -> None:
        """Say that each sequence of the sample is that of one of the calls `last` and of those before it."""
        *self._further, self._path = [[call.index for call in self._known.path(one)] for one in last]

    async def record(
        self,
        place: "CallPlace",
        prompt: Sequence[int],
        turn: ModelTurn,
        seconds: float,
        *,
        known_experts: NDArray[np.int16] | None = None,
    ) -> None:
        """Store a call at its place; `prompt` are the tokens that its parent's prompt and answer lack."""
        recorder = self._group.recorder
        await recorder.store(
            SessionCall(
                group=recorder.group,
                life=recorder.life,
                session=self._name,
                index=place.index,
                parent=place.parent,
                digest=place.digest,
                prompt=as_bytes(prompt, "int32"),
                tokens=as_bytes(turn.token_ids, "int32"),
                logprobs=as_bytes(turn.logprobs, "float32"),
                versions=turn.versions,
                finish_reason="length" if turn.finish_reason == "length" else "stop",
                text=turn.text,
                fork=self._fork,
                seconds=seconds,
                columns=_columns(turn, known_experts),
                is_constrained=turn.is_constrained,
            )
        )
        self._group.figures.recorded_calls += 1

    def tool_results(self) -> list[str | None] | None:
        """Return what the tools answered that the newest call has called; None: no answer is recorded."""
        stored = self._known.tools.get((self._path[-1], self._fork)) if self._path else None
        return None if stored is None else stored.results

    def check_may_run(self, tool: str) -> None:
        """Raise `NotResumableError` if a tool that may not run twice may have run already."""
        if self._was_replayed:
            raise NotResumableError(
                f"tool {tool} may have run after call {len(self._path) - 1} of session {self._name}, and its result is "
                "not recorded; mark it @tool(repeatable=True) if it may run again"
            )

    async def store_tools(self, results: list[str | None], seconds: float) -> None:
        """Store what the tools answered that the newest call has called."""
        recorder = self._group.recorder
        await recorder.store(
            ToolResults(
                group=recorder.group,
                life=recorder.life,
                session=self._name,
                index=self._path[-1],
                results=results,
                fork=self._fork,
                seconds=seconds,
            )
        )

    async def end(
        self,
        sample: int,
        rewards: dict[str, float | None],
        finish_reason: FinishReason,
        messages: list[Message],
        thought_calls: int,
        *,
        turn_rewards: list[tuple[int, float]],
    ) -> None:
        """Store that the sample is finished, with the rewards that its environment gave."""
        recorder = self._group.recorder
        await recorder.store(
            SessionEnd(
                group=recorder.group,
                life=recorder.life,
                session=self._name,
                sample=sample,
                finish_reason=finish_reason,
                rewards=rewards,
                calls=list(self._path),
                further=list(self._further),
                messages=messages,
                thought_calls=thought_calls,
                turn_rewards=turn_rewards,
                diverged=self.diverged,
            )
        )


_encoder = msgspec.msgpack.Encoder(order="deterministic")


def recorded_turn(call: SessionCall, known_experts: NDArray[np.int16] | None) -> tuple[list[int], ModelTurn]:
    """Return the new tokens of a recorded call's prompt, and the turn that answered it."""
    prompt = view(call.prompt, "int32", len(call.prompt) // 4, "prompt").tolist()
    tokens = view(call.tokens, "int32", call.n_tokens, "tokens").tolist()
    logprobs = view(call.logprobs, "float32", call.n_tokens, "logprobs").tolist()
    experts = known_experts
    if (column := call.columns.get(_EXPERTS)) is not None:
        rows = _rows(column, np.int16)
        experts = rows if known_experts is None else np.concatenate([known_experts, rows])
    mask: MaskRows | None = None
    if (column := call.columns.get(_MASK)) is not None:
        mask = [row[row >= 0] for row in _rows(column, np.int32)]
    return prompt, ModelTurn(
        tokens, logprobs, list(call.versions), call.text, call.finish_reason, experts, mask, call.is_constrained
    )


def _rows(column: Column, dtype: type[np.int16] | type[np.int32]) -> NDArray[Any]:
    return np.frombuffer(column.data, dtype).reshape(-1, column.width)


def _columns(turn: ModelTurn, known_experts: NDArray[np.int16] | None) -> dict[str, Column]:
    """Return the columns of a turn, without the rows of experts that calls before it hold."""
    found = {}
    if turn.routed_experts is not None:
        rows = turn.routed_experts[0 if known_experts is None else len(known_experts) :]
        width = turn.routed_experts.shape[1]
        found[_EXPERTS] = Column(dtype="int16", data=as_bytes(rows, "int16"), width=width)
    if turn.sampling_mask is not None:
        width = max(1, max(map(len, turn.sampling_mask), default=1))
        mask = np.full((len(turn.sampling_mask), width), -1, np.int32)
        for at, row in enumerate(turn.sampling_mask):
            mask[at, : len(row)] = row
        found[_MASK] = Column(dtype="int32", data=as_bytes(mask, "int32"), width=width)
    return found
