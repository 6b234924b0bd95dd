"""Defines a request for an answer of the model, and the answer, in one form for all dialects. Pure.

Guarantees that a message has one key in every dialect: an answer that an agent sends back as a part of its history is
recognized, also if it came in one dialect and comes back in another, and any change of what the model reads is not.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from lachesis.schemas.errors import DataError
from lachesis.schemas.rollout import Message, ToolCall

__all__ = [
    "AnswerSample",
    "ChatMessage",
    "ModelAnswer",
    "ModelRequest",
    "conversation_keys",
    "next_key",
    "plain_arguments",
]

MAX_SAMPLES = 64
"""Answers of one request at most."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str
    thinking: str = ""
    """What an assistant thought before `content`, as the model wrote it, markers and the space after them included."""
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The thinking and the content: all that the model reads of the message beside its calls."""
        return self.thinking + self.content

    def as_message(self) -> Message:
        """Return it as rollouts and chat templates have it."""
        return Message(
            role=self.role,
            content=self.text,
            name=self.name,
            tool_calls=self.tool_calls,
            tool_call_id=self.tool_call_id,
        )


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for `n` answers that follow a conversation."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = []
    """Functions as OpenAI's chat completions name them."""
    model: str = "policy"
    n: int = 1
    max_tokens: int | None = None
    stop: list[str] = []
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    answer_schema: dict[str, Any] | None = None
    """The JSON schema that the answer's text must match, unless it is a call of a tool; None: any text."""
    forced_tools: list[str] = []
    """Names of tools one of which the answer must call; empty: it need not call any."""
    follows: str | None = None
    """The id of the answer that the messages follow; None: they are the whole conversation."""

    def check(self) -> None:
        """Raise `DataError` if there is nothing to answer, or a tool's name or a number cannot be served."""
        if not self.messages:
            raise DataError("there are no messages")
        if self.messages[-1].role == "assistant":
            raise DataError("the last message is the assistant's; the model cannot be made to continue a given text")
        names = [tool["function"]["name"] for tool in self.tools]
        if no_text := [name for name in names if not isinstance(name, str)]:
            raise DataError(f"tools: the name of a function is {no_text[0]!r:.60}; give text")
        missing = set(self.forced_tools) - set(names)
        if missing:
            raise DataError(f"tool_choice: there is no tool {min(missing)!r:.60} among tools")
        if not 1 <= self.n <= MAX_SAMPLES:
            raise DataError(f"n is {self.n}; it must be 1 to {MAX_SAMPLES}")

    @property
    def digest(self) -> str:
        """BLAKE2b of all that the answer depends on, 32 hex digits. How it is sent is no part of it."""
        depends = (
            [_plain(message) for message in self.messages],
            self.tools, self.n, self.max_tokens, self.stop, self.seed, self.temperature, self.top_p, self.follows,
            self.answer_schema, self.forced_tools,
        )  # fmt: skip
        return _digest(depends).hex()


class AnswerSample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the model."""

    message: ChatMessage
    finish_reason: str
    """stop, or length when it was cut."""
    stop_sequence: str | None = None
    """The text of the request's `stop` at which it ended."""
    tokens: int
    logprobs: list[tuple[str, float]] = []
    """Each token's text and logprob in nats, if they were requested."""


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request. `id` names it in every dialect, which add prefixes of their own."""

    id: str
    created_s: int
    samples: list[AnswerSample]
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(sample.tokens for sample in self.samples)


def conversation_keys(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[bytes]:
    """Return a key of each beginning of a conversation: of no message, of the first, and so on.

    Two beginnings have the same key exactly if a model reads the same of both.
    """
    keys = [_digest(list(tools))]
    for message in messages:
        keys.append(next_key(keys[-1], message))
    return keys


def next_key(key: bytes, message: ChatMessage) -> bytes:
    """Return the key of the beginning that a message makes of the one that has `key`."""
    return _digest([key, _plain(message)])


def plain_arguments(text: str) -> str:
    """Return a tool call's arguments in one spelling of the same JSON; other text as it is."""
    try:
        return msgspec.json.encode(msgspec.json.decode(text or "{}")).decode()
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return text


def _plain(message: ChatMessage) -> list[Any]:
    calls = [[call.id, call.name, plain_arguments(call.arguments)] for call in message.tool_calls]
    return [message.role, message.text, calls, message.tool_call_id, message.name]


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=16).digest()
