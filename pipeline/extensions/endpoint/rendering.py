"""Computes the tokens of a request that are not recorded yet, by the server's chat template.

Guarantees that tokens of the conversation so far are never made again from text: a request that goes on from a recorded
answer adds what the template puts after it. Tools are named by the template, or, if it reads none, in a system message;
calls in a history that it would drop are written into the message's text.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import msgspec

from lachesis.pipeline.environment.inference_requests import InferenceRequests
from lachesis.pipeline.environment.template import TurnRenderer
from lachesis.pipeline.extensions.endpoint.logic.call_tree import CallTree, FollowedAnswer, RecordedCall
from lachesis.pipeline.extensions.endpoint.logic.conversation import ModelRequest
from lachesis.pipeline.tasks.marked_calls import call_text
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.rollout import Message, ToolCall

__all__ = ["PromptRenderer", "Tokenize", "tool_text"]

Tokenize = Callable[..., Awaitable[list[int]]]
"""`InferenceRequests.tokenize`."""
_PROBE = [Message(role="user", content="a")]
_ANSWER, _CALLED = (
    Message(role="assistant", content="b", tool_calls=calls)
    for calls in ([], [ToolCall(name="f", arguments="{}", id="call12345")])
)


class PromptRenderer:
    """The rules by which one chat template renders requests. One instance serves all sessions of a run."""

    def __init__(self) -> None:
        self._reads_tools: bool | None = None
        self._drops_calls: bool | None = None
        self._turns = WeakKeyDictionary[CallTree, dict[int, TurnRenderer]]()
        """Of each session, by the call that a conversation begins with, how what follows its answers is rendered."""
        self._lock = anyio.Lock()

    async def new_tokens(
        self, requests: InferenceRequests, tree: CallTree, request: ModelRequest, followed: FollowedAnswer
    ) -> list[int]:
        """Return the tokens between the recorded ones and the answer.

        Raises `DataError` for messages that do not fit the template.
        """
        named = request.tools and not await self._template_reads(requests, request.tools)
        tokenize = partial(requests.tokenize, tools=() if named else request.tools)
        before = [Message(role="system", content=tool_text(request.tools))] if named else []
        new = await self._readable(requests, [message.as_message() for message in followed.new])
        if followed.parent is None:
            return await tokenize(_with_system(before, new))
        path = tree.path(followed.parent)
        began = await self._readable(requests, [message.as_message() for message in path[0].new_messages])
        opening = _with_system(before, began)
        turns = self._turns.setdefault(tree, {}).setdefault(path[0].index, TurnRenderer())
        return await following_tokens(tokenize, turns, opening, path[-1], new)

    async def _template_reads(self, requests: InferenceRequests, tools: Sequence[dict[str, Any]]) -> bool:
        async with self._lock:
            if self._reads_tools is None:
                try:
                    named = await requests.tokenize(_PROBE, tools=tools)
                    self._reads_tools = named != await requests.tokenize(_PROBE)  # others drop them in silence
                except DataError:
                    self._reads_tools = False
            return self._reads_tools

    async def _readable(self, requests: InferenceRequests, messages: list[Message]) -> list[Message]:
        """Return the messages with calls in their texts, if the template renders a call as if there were none."""
        if not any(message.tool_calls for message in messages):
            return messages
        async with self._lock:
            if self._drops_calls is None:
                try:
                    called = await requests.tokenize([*_PROBE, _CALLED, *_PROBE])
                    self._drops_calls = called == await requests.tokenize([*_PROBE, _ANSWER, *_PROBE])
                except DataError:
                    self._drops_calls = False  # it refuses some messages, and says so
        return [_with_calls(message) for message in messages] if self._drops_calls else messages


async def following_tokens(
    tokenize: Tokenize, turns: TurnRenderer, opening: Sequence[Message], answered: RecordedCall, new: Sequence[Message]
) -> list[int]:
    """Return the tokens that follow the sampled ones of the call `answered` and lead to the next answer.

    `turns`: that of the conversation. `opening`: the messages that its first answer follows. Some templates refuse the
    result of a tool after a message without its call: then they render the answer itself, and what follows its last
    token is taken.
    """
    answer, last = answered.message.as_message(), answered.sampled.token_ids[-1]
    try:
        return await turns.render(tokenize, opening, new, last)
    except DataError:
        if not answer.tool_calls:
            raise
    before = await tokenize([*opening, answer], add_generation_prompt=False)
    whole = await tokenize([*opening, answer, *new])
    end = len(before) - before[::-1].index(last) if last in before else 0
    if not end or whole[:end] != before[:end]:
        raise ConfigError(
            "the chat template renders an answer with calls of tools otherwise once messages follow it, so the tokens "
            "after it are not known; give the model a template that keeps what it has rendered"
        )
    return whole[end:]


def tool_text(tools: Sequence[dict[str, Any]]) -> str:
    """Return the text of a system message that names tools to the model."""
    functions = [msgspec.json.encode(tool["function"]).decode() for tool in tools]
    call = '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>'
    return "\n".join(["You may call these functions:", *functions, f"To call one, write {call}"])


def _with_calls(message: Message) -> Message:
    """Return a message with its calls in the text, as `tool_text` asks for them."""
    calls = [call_text(call.name, call.arguments) for call in message.tool_calls]
    return msgspec.structs.replace(message, content="\n".join(filter(None, [message.content, *calls])))


def _with_system(before: list[Message], messages: list[Message]) -> list[Message]:
    """Return the messages with a text before them, in their own system message if they begin with one."""
    if before and messages and messages[0].role == "system":
        content = f"{messages[0].content}\n\n{before[0].content}"
        return [Message(role="system", content=content), *messages[1:]]
    return [*before, *messages]
