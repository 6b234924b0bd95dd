"""Keeps the calls of one session as a tree: each follows the answer that it goes on from. Pure.

Guarantees that a call's prompt is the tokens of the calls before it and new ones, never text that was tokenized again;
that a history which the agent rewrote forks from the last answer that it left as it was, or begins a new root; that a
request which is sent again is distinguished from a new one; and that a path which is trained ends in an answer that
the agent got.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.extensions.endpoint.logic.conversation import (
    ChatMessage,
    ModelAnswer,
    ModelRequest,
    conversation_keys,
    next_key,
)
from lachesis.schemas.errors import DataError

__all__ = ["CallTree", "FollowedAnswer", "RecordedAnswer", "RecordedCall", "SampledAnswer"]


class SampledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the model sampled in one call: N tokens, the one that ended it included."""

    token_ids: list[int]
    logprobs: list[float]
    """Nats."""
    versions: list[tuple[int, str]]
    """(position, policy version) of the tokens from there on. The first position is 0."""
    text: str
    """Without special tokens."""
    finish_reason: str
    routed_experts: NDArray[np.int16] | None = None
    sampling_mask: list[Any] | None = None
    is_constrained: bool = False
    """Its text had to match something, so it is not trained on."""


class RecordedCall(msgspec.Struct, kw_only=True):
    """One sampled answer."""

    index: int
    place: int
    """Its index among the recorded calls of the session, those before a kill included."""
    parent: int | None
    """The call whose answer it follows; None: it begins a root."""
    new_messages: list[ChatMessage]
    """The messages after the parent's answer; of a root, all."""
    new_tokens: list[int]
    """The tokens after the parent's last one, up to the first sampled one."""
    sampled: SampledAnswer
    message: ChatMessage
    """The answer as the agent got it."""


class RecordedAnswer(msgspec.Struct, kw_only=True):
    """A request's recorded answer. `is_delivered`: the agent got it, as far as its connection says."""

    digest: str
    answer: ModelAnswer
    calls: list[int]
    is_delivered: bool = False


class FollowedAnswer(NamedTuple):
    """Where a conversation goes on. `parent` None: nowhere; `new` is what follows. `key`: that of all of it."""

    parent: int | None
    new: list[ChatMessage]
    key: bytes


class CallTree:
    """The calls of one session."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.answers: list[RecordedAnswer] = []
        self._by_conversation: dict[bytes, int] = {}
        """The newest call whose answer ends a conversation."""
        self._by_id: dict[str, int] = {}

    def followed(self, request: ModelRequest) -> FollowedAnswer:
        """Return the call whose answer ends the longest recorded beginning of a request's conversation."""
        keys = conversation_keys(request.messages, request.tools)
        for known in range(len(keys) - 2, 0, -1):
            parent = self._by_conversation.get(keys[known])
            if parent is not None:
                return FollowedAnswer(parent, request.messages[known:], keys[-1])
        return FollowedAnswer(None, request.messages, keys[-1])

    def conversation(self, answer_id: str) -> list[ChatMessage] | None:
        """Return the messages up to an answer, and its own; None if there is no such answer."""
        index = self._by_id.get(answer_id)
        if index is None:
            return None
        found: list[ChatMessage] = []
        for call in self.path(index):
            found += [*call.new_messages, call.message]
        return found

    def place_of(self, answer_id: str) -> int:
        """Return the place of the call whose answer has this id, as a dialect may have prefixed it.

        Raises `DataError` if there is none, or if it has several samples.
        """
        for one in self.answers:
            if answer_id.endswith(one.answer.id):
                if len(one.calls) > 1:
                    raise DataError(
                        f"turns: answer {answer_id:.80} has {len(one.calls)} choices, and is no single turn"
                    )
                return self.calls[one.calls[0]].place
        raise DataError(f"turns: {answer_id!r:.80} is the id of no answer of this session")

    def record(
        self,
        followed: FollowedAnswer,
        new_tokens: Sequence[int],
        sampled: Sequence[SampledAnswer],
        answer: ModelAnswer,
        *,
        digest: str,
        places: Sequence[int],
    ) -> RecordedAnswer:
        """Add an answer, of which each sample is a call. `digest`: that of the request as it was sent."""
        calls = []
        for sample, given, place in zip(sampled, answer.samples, places, strict=True):
            call = RecordedCall(
                index=len(self.calls),
                place=place,
                parent=followed.parent,
                new_messages=list(followed.new),
                new_tokens=list(new_tokens),
                sampled=sample,
                message=given.message,
            )
            self._by_conversation[next_key(followed.key, given.message)] = call.index
            self.calls.append(call)
            calls.append(call.index)
        if followed.parent is not None:
            for one in self.answers:
                one.is_delivered |= followed.parent in one.calls  # its agent has just sent it back
        recorded = RecordedAnswer(digest=digest, answer=answer, calls=calls)
        self._by_id[answer.id] = calls[0]
        self.answers.append(recorded)
        return recorded

    def repeated(self, digest: str, *, is_retry: bool) -> RecordedAnswer | None:
        """Return the recorded answer that a request wants once more; None if it wants a new one.

        It does if its client says that it is a retry, or if the last answer to the same request never arrived. An agent
        may as well send the same request twice to get two answers.
        """
        for one in reversed(self.answers):
            if one.digest == digest:
                return one if is_retry or not one.is_delivered else None
        return None

    def path(self, index: int) -> list[RecordedCall]:
        """Return the calls from a root to one of them."""
        found, at = list[RecordedCall](), int(index)
        place: int | None = at
        while place is not None:
            found.append(self.calls[place])
            place = self.calls[place].parent
        return found[::-1]

    def tokens(self, index: int) -> list[int]:
        """Return the tokens of the sequence that ends with a call."""
        return [token for call in self.path(index) for token in (*call.new_tokens, *call.sampled.token_ids)]

    def paths(self) -> Iterator[list[RecordedCall]]:
        """Yield the path to each answer that the agent got and did not go on from."""
        delivered = {index for one in self.answers if one.is_delivered for index in one.calls}
        followed = {self.calls[index].parent for index in delivered}
        for index in sorted(delivered - followed):
            yield self.path(index)

    def trained_paths(self) -> list[list[RecordedCall]]:
        """Return the paths to answers that the agent got which are trained; empty if no free answer arrived.

        Of each path, at least one answer that no later path has is free: constrained ones are not trained. The last
        path, which is scored, is that with the most sampled tokens of free answers, of several the newest.
        """
        found = list(self.paths())
        sizes = [(sum(len(call.sampled.token_ids) for call in _free(path)), path[-1].index) for path in found]
        if found:
            found.append(found.pop(sizes.index(max(sizes))))
        known, trained = set[int](), list[list[RecordedCall]]()
        for path in reversed(found):
            own = {call.index for call in _free(path)} - known
            if own:
                trained.append(path)
            known |= own
        return trained[::-1]


def _free(path: Sequence[RecordedCall]) -> list[RecordedCall]:
    return [call for call in path if not call.sampled.is_constrained]
