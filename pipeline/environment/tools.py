"""Tools: functions that a model calls with `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

It runs the calls of an assistant turn, and returns the tool messages that answer them. A mistake of the model
(malformed JSON, unknown tool, wrong arguments, a ToolError, a timeout) is answered with a message that the model can
act on. Any other exception of a tool is a fault of the environment and propagates.

Where calls are recorded, so are the results of tools: a conversation that goes on after a kill gets them again, and no
tool runs twice. One marked `@tool(repeatable=True)` may: it runs again instead, and its results are not recorded. Tools
that change what the environment holds in memory need that, since a kill takes that change away.
"""

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, overload

import anyio
import anyio.to_thread
import msgspec

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.environment.plain_hooks import HOOKS
from lachesis.pipeline.errors import ToolError
from lachesis.pipeline.tasks.binding import bind_arguments
from lachesis.pipeline.tasks.tool_calls import ParsedCalls
from lachesis.schemas.rollout import Message, ToolCall

__all__ = ["ToolRecord", "describe_tools", "run_tools", "tool", "tools_of"]

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__lachesis_tool__"


_REPEATABLE = "__lachesis_repeatable__"


class ToolRecord(Protocol):
    """Keeps what the tools answered that one turn called; a `Session` does."""

    def tool_results(self) -> list[str | None] | None:
        """Return what is recorded of the turn: a text for each call, None for one that may run again."""

    def check_may_run(self, tool: str) -> None:
        """Raise if a tool that may not run twice may have run already."""

    async def store_tools(self, results: list[str | None], seconds: float) -> None:
        """Store what the turn's tools answered."""


@overload
def tool(function: Function) -> Function: ...
@overload
def tool(*, repeatable: bool = False) -> Callable[[Function], Function]: ...
def tool(function: Function | None = None, *, repeatable: bool = False) -> Function | Callable[[Function], Function]:
    """Mark a method of an environment as a tool.

    Parameters are checked and converted by their annotations. `repeatable`: it may run again when a conversation goes
    on after its process was killed; else its recorded result is used.
    """

    def mark(marked: Function) -> Function:
        setattr(marked, MARK, True)
        setattr(marked, _REPEATABLE, repeatable)
        return marked

    return mark if function is None else mark(function)


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


async def run_tools(
    tools: Mapping[str, Callable[..., Any]], parsed: ParsedCalls, timeout_s: float, record: ToolRecord | None = None
) -> list[Message]:
    """Run the calls of one turn in order; return a tool message for each call, readable or not.

    `timeout_s`: seconds for all of them together; a call that is not done by then is answered so. A tool that is no
    coroutine function runs in a worker thread, which Python cannot stop: it is left behind. `record`: takes the results
    of tools that may not run twice, and gives them back; None: nothing is recorded.
    """
    end_s = anyio.current_time() - HOOKS.held_s + timeout_s  # while a plain function holds the loop, no time passes
    answers, results, begin_s = [], list[str | None](), time.monotonic()
    known = None if record is None else record.tool_results()
    for i, call in enumerate(parsed.calls):
        lasts = record is not None and not getattr(tools.get(call.name), _REPEATABLE, call.name not in tools)
        content = known[i] if lasts and known is not None and i < len(known) else None
        if content is None:
            if lasts and record is not None:
                record.check_may_run(call.name)
            content = await _answer(tools, call, end_s, timeout_s)
        results.append(content if lasts else None)
        answers.append(Message(role="tool", content=content, name=call.name, tool_call_id=call.id))
    if record is not None and known is None and any(result is not None for result in results):
        await record.store_tools(results, time.monotonic() - begin_s)
    return answers + [Message(role="tool", content=f"error: {text}") for text in parsed.errors]


async def _answer(tools: Mapping[str, Callable[..., Any]], call: ToolCall, end_s: float, timeout_s: float) -> str:
    """Return what a tool answers, or what was wrong with its call."""
    content = f"error: {call.name[:60]} did not finish within {timeout_s:g} s"
    with HOOKS.move_on_after(end_s - (anyio.current_time() - HOOKS.held_s)):
        try:
            content = str(await _run(tools, call))
        except ToolError as error:
            content = f"error: {error}"
    return content


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
