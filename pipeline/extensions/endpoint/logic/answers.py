"""Reads a model's text as a message: its thinking, what it says, and its calls of tools. Pure."""

from collections.abc import Callable, Sequence

import msgspec

from lachesis.pipeline.extensions.endpoint.logic.conversation import ChatMessage, plain_arguments
from lachesis.pipeline.tasks.marked_calls import CALL_TOKENS
from lachesis.pipeline.tasks.thoughts import thought_spans
from lachesis.pipeline.tasks.tool_calls import CALL_MARKER, parse_tool_calls, text_without_calls

__all__ = ["first_stop", "read_answer"]


def read_answer(text: str, whole: str, *, opened: bool, has_tools: bool, new_id: Callable[[], str]) -> ChatMessage:
    """Return the message of an answer.

    `whole`: the text with special tokens, which may mark calls and thoughts. `opened`: the prompt ends in an open
    thought, in which the answer begins. Without tools nothing is read as a call; nor is what cannot be read as one.
    `new_id` makes the id of each call.
    """
    calls = parse_tool_calls(text, whole=whole, opened=opened).calls if has_tools else []
    said = text
    if calls:
        before = text if CALL_MARKER in text else _before_call_token(text, whole)
        said = text_without_calls(before, opened=opened)
    thinking_end = _end_of_thinking(said, opened=opened)
    return ChatMessage(
        role="assistant",
        thinking=said[:thinking_end],
        content=said[thinking_end:],
        tool_calls=[
            msgspec.structs.replace(call, id=new_id(), arguments=plain_arguments(call.arguments)) for call in calls
        ],
    )


def first_stop(whole: str, stops: Sequence[str]) -> str | None:
    """Return the text at which an answer ended, of those at which it had to; None if it ended by itself."""
    places = [(whole.find(stop), -len(stop), stop) for stop in stops if stop in whole]
    return min(places)[2] if places else None


def _before_call_token(text: str, whole: str) -> str:
    """Return the text before the special token that begins calls."""
    places = [place for token in CALL_TOKENS if (place := whole.find(token)) >= 0]
    return whole[: min(places)] if places else text


def _end_of_thinking(text: str, *, opened: bool) -> int:
    """Return where the thought ends with which a text begins, and the space after it; 0 if it begins with none."""
    spans = thought_spans(text, opened=opened)
    if not spans or text[: spans[0][0]].strip():
        return 0
    end = spans[0][1]
    return end + len(text[end:]) - len(text[end:].lstrip())
