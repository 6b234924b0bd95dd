"""Tools: functions that a model calls with `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

It runs the calls of an assistant turn, and returns the tool messages that answer them. A mistake of the model
(malformed JSON, unknown tool, wrong arguments, a ToolError, a timeout) is answered with a message that the model can
act on. Any other exception of a tool is a fault of the environment and propagates.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from lachesis.pipeline.common.nearest import nearest
from lachesis.pipeline.environment.plain_hooks import HOOKS
from lachesis.pipeline.errors import ToolError
from lachesis.pipeline.tasks.binding import bind_arguments
from lachesis.pipeline.tasks.tool_calls import ParsedCalls
from lachesis.schemas.rollout import Message, ToolCall

__all__ = ["describe_tools", "run_tools", "tool", "tools_of"]

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__lachesis_tool__"


def tool(function: Function) -> Function:
    """Mark a method of an environment as a tool.

    Parameters are checked and converted by their annotations.
    """
    setattr(function, MARK, True)
    return function


def tools_of(environment: object) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment as bound methods by name."""
    kind = type(environment)
    return {name: getattr(environment, name) for name in dir(kind) if hasattr(getattr(kind, name, None), MARK)}


def describe_tools(tools: Mapping[str, Callable[..., Any]]) -> str:
    """Return the text for a system message that describes the tools and how to call them."""
    lines = []
    for name, function in tools.items():
        parameters = ", ".join(
            str(parameter) for key, parameter in inspect.signature(function).parameters.items() if key != "self"
        )
        lines.append(f"{name}({parameters}): {inspect.getdoc(function) or ''}".rstrip(": "))
    call = '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>'
    return "\n".join(["You may call tools:", *lines, f"To call one, write {call}"])


async def run_tools(tools: Mapping[str, Callable[..., Any]], parsed: ParsedCalls, timeout_s: float) -> list[Message]:
    """Run the calls of one turn in order; return a tool message for each call, readable or not.

    `timeout_s`: seconds for all of them together; a call that is not done by then is answered so. A tool that is no
    coroutine function runs in a worker thread, which Python cannot stop: it is left behind.
    """
    end_s = anyio.current_time() - HOOKS.held_s + timeout_s  # while a plain function holds the loop, no time passes
    answers = []
    for call in parsed.calls:
        content = f"error: {call.name[:60]} did not finish within {timeout_s:g} s"
        with HOOKS.move_on_after(end_s - (anyio.current_time() - HOOKS.held_s)):
            try:
                content = str(await _run(tools, call))
            except ToolError as error:
                content = f"error: {error}"
        answers.append(Message(role="tool", content=content, name=call.name, tool_call_id=call.id))
    return answers + [Message(role="tool", content=f"error: {text}") for text in parsed.errors]


async def _run(tools: Mapping[str, Callable[..., Any]], call: ToolCall) -> Any:
    function = tools.get(call.name)
    if function is None:
        raise ToolError(f"there is no tool {call.name[:60]!r}{nearest(call.name[:60], tools)}")
    try:
        given = msgspec.json.decode(call.arguments, type=dict[str, Any])
        arguments = bind_arguments(function, given, strict=False)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ToolError(f"{call.name}: {error}") from error
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await anyio.to_thread.run_sync(lambda: function(**arguments), abandon_on_cancel=True)
