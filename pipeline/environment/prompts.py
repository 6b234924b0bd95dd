"""Checks an environment's prompts as a model's chat template renders them, before any run.

Given an environment, a tokenizer and the context, it returns the problems in words: syntax errors in the template,
parameters that it does not read, roles that it refuses, messages that it drops silently, turns that cannot be
distinguished, and prompts that leave no room for an answer.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.group_environment import GroupEnvironment
from lachesis.pipeline.environment.inference_requests import as_chat
from lachesis.pipeline.environment.template import PLACEHOLDERS, render_turn
from lachesis.pipeline.inference.serving.dialects import template_messages
from lachesis.pipeline.model.chat_template import render_chat, template_text, template_variables, unread_parameter
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.rollout import Message

__all__ = ["PromptProblem", "PromptReport", "check_prompts"]

_LOOK_S = 5.0
"""Seconds for counting prompts. A larger pool is sampled in a spread order, and the rest is left out."""
_MAX_PROBLEMS = 5
"""Kinds of lost messages that are named."""
_RENDERED = 16
"""Tasks, spread over the pool, that are rendered message by message."""


class PromptProblem(NamedTuple):
    """A problem. `fatal`: no group can be made of such a task; else something is lost silently."""

    text: str
    fatal: bool


class PromptReport(NamedTuple):
    """The problems found; `text` says what was checked."""

    problems: list[PromptProblem]
    text: str


Render = Callable[[Sequence[Message]], list[int]]


class _Lengths(NamedTuple):
    looked_at: int
    too_long: list[str]
    """Items that leave no room for an answer, with their tokens."""
    tight: int
    """Prompts that leave less room than an answer may take."""
    longest: int


async def check_prompts(
    env: Environment,
    tokenizer: Any,
    *,
    parameters: Mapping[str, Any],
    max_context: int | None,
    max_new_tokens: int,
    look_s: float = _LOOK_S,
) -> PromptReport:
    """Return the problems of an environment's prompts under a tokenizer's template.

    `parameters`: those of the template. `max_context`: tokens; None: not known. Errors of `env.task` propagate.
    """
    if isinstance(env, GroupEnvironment):
        return PromptReport([], "not looked at: it makes whole groups by its own code")
    try:
        variables = template_variables(template_text(tokenizer))
    except DataError as error:
        text = f"{error}; correct it, or name another one with `chat_template`"
        return PromptReport([PromptProblem(text, fatal=True)], "")

    def render(messages: Sequence[Message]) -> list[int]:
        chat = template_messages([as_chat(message) for message in messages])
        return render_chat(tokenizer, chat, parameters=known)

    known = {name: value for name, value in parameters.items() if name in variables}
    problems = [PromptProblem(text, fatal=True) for text in _unread_parameters(parameters, variables)]
    found: dict[str, PromptProblem] = {}
    for index in _spread(len(env), _RENDERED):
        for kind, problem in _lost_messages(env, index, render):
            found.setdefault(kind, problem)
    problems += [*found.values()][:_MAX_PROBLEMS]
    if not any(problem.fatal for problem in problems):
        problems += await _turn_problems(env, render)
    lengths = _lengths(env, render, max_context, max_new_tokens, look_s)
    if lengths.too_long:
        named = ", ".join(lengths.too_long[:3]) + (", ..." if len(lengths.too_long) > 3 else "")
        text = (
            f"{len(lengths.too_long)} of {lengths.looked_at} prompts leave no room for an answer in the context of "
            f"{max_context} tokens, so nothing is learned from their tasks: {named}; shorten them, or leave them out"
        )
        problems.append(PromptProblem(text, fatal=len(lengths.too_long) == lengths.looked_at))
    room = "" if max_context is None else f" of a context of {max_context}"
    text = f"{lengths.looked_at} of {len(env)} prompts take up to {lengths.longest} tokens{room}"
    if lengths.tight:
        text += f"; {lengths.tight} leave less than max_new_tokens = {max_new_tokens}, so long answers to them are cut"
    return PromptReport(problems, text)


def _spread(count: int, most: int) -> list[int]:
    return sorted({place * (count - 1) // max(1, most - 1) for place in range(most)})


def _unread_parameters(parameters: Mapping[str, Any], variables: frozenset[str]) -> Iterator[str]:
    for name in parameters:
        if name not in variables:
            yield f"chat_template_kwargs: {unread_parameter(name, variables)}"


def _lost_messages(env: Environment, index: int, render: Render) -> Iterator[tuple[str, PromptProblem]]:
    """Yield what the template refuses or drops of the prompt of a task, each with what it has in common with others."""
    task = env.task(index)
    messages = task.messages
    try:
        render(messages)
    except DataError as error:
        text = f"the prompt of item {task.item!r:.60}: {error}"
        yield str(error), PromptProblem(text, fatal=True)
        return
    for place, message in enumerate(messages):
        if not message.content:
            continue
        drafts = [[*messages[:place], _with_content(message, text), *messages[place + 1 :]] for text in PLACEHOLDERS]
        try:
            first, second = map(render, drafts)
        except DataError:
            continue  # it looks at the content
        if first == second:
            text = (
                f"the chat template drops messages of the role {message.role} in silence, as in a prompt of the roles "
                f"{_roles(messages)}: the model would never see them; say it in another role, or give a template that "
                "keeps them"
            )
            yield text, PromptProblem(text, fatal=False)


async def _turn_problems(env: Environment, render: Render) -> list[PromptProblem]:
    """Return what keeps a conversation from going on after the first answer, if the environment has more turns."""
    several = env.tools or type(env).respond is not Environment.respond
    if env.max_turns < 2 or not several:
        return []
    opening = env.task(0).messages
    added = Message(role="user", content="1")
    if env.tools:
        added = Message(role="tool", content="1", name=next(iter(env.tools)))
    answered = [*opening, Message(role="assistant", content="a")]
    try:
        first, second = [render([*answered, _with_content(added, text)]) for text in PLACEHOLDERS]
    except DataError as error:
        goes_on = "a tool" if env.tools else "`respond`"
        text = f"a conversation that goes on by {goes_on}: {error}"
        return [PromptProblem(text, fatal=True)]
    if first == second:
        text = (
            f"the chat template drops messages of the role {added.role} in silence: the model would never see "
            f"{'what its tools answer' if env.tools else 'what `respond` says'}; answer in another role, or give a "
            "template that keeps them"
        )
        return [PromptProblem(text, fatal=True)]

    async def tokenize(messages: Sequence[Message]) -> list[int]:
        return render(messages)

    try:
        await render_turn(tokenize, opening, [added], -1)
    except ConfigError as error:
        return [PromptProblem(str(error), fatal=True)]
    return []


def _lengths(env: Environment, render: Render, max_context: int | None, max_new_tokens: int, look_s: float) -> _Lengths:
    too_long: list[str] = []
    looked_at = tight = longest = 0
    until_s = time.monotonic() + look_s
    for place, index in enumerate(_in_spread_order(len(env))):
        if place >= _RENDERED and time.monotonic() > until_s:
            break
        task = env.task(index)
        try:
            tokens = len(render(task.messages))
        except DataError:
            continue  # its roles are named already
        looked_at += 1
        longest = max(longest, tokens)
        if max_context is not None and tokens >= max_context:
            too_long.append(f"item {task.item!r:.60} has {tokens} tokens")
        elif max_context is not None and tokens + max_new_tokens > max_context:
            tight += 1
    return _Lengths(looked_at, too_long, tight, longest)


def _in_spread_order(count: int) -> Iterator[int]:
    """Yield every index below `count`, the first ones spread over the pool."""
    first = _spread(count, _RENDERED)
    yield from first
    known = set(first)
    stride = max(1, count // 1000)
    for offset in range(stride):
        for index in range(offset, count, stride):
            if index not in known:
                yield index


def _with_content(message: Message, content: str) -> Message:
    return Message(role=message.role, content=content, name=message.name, tool_call_id=message.tool_call_id)


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message.role for message in messages[:8])
