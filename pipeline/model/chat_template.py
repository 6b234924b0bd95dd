"""Chat templates: rendering of messages, and what a template reads, by its own syntax tree. No torch.

Guarantees an error with a text for messages that a template refuses, tools that it would drop in silence, and
parameters that it does not take.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from lachesis.pipeline.common.small_files import read_small_text
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.values import check_plain

__all__ = ["read_parameters", "read_template", "render_chat", "template_text", "template_variables", "unread_parameter"]

_RESERVED = frozenset({
    "add_generation_prompt", "add_special_tokens", "chat_template", "continue_final_message", "conversation",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Parameters that are the renderer's, not the template's."""
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Variables that every template gets."""
_SYNTAX = re.compile(r"{[{%#]")
_UNRENDERABLE = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def read_template(setting: str | None) -> str | None:
    """Return the template that a setting holds, or that lies in the file which it names.

    Raises ConfigError when there is no such file, or when the syntax of the template is wrong.
    """
    if setting is None:
        return None
    where, text = "chat_template", setting
    if not _SYNTAX.search(setting):
        where = f"chat_template {setting!r:.200}"
        try:
            text = read_small_text(Path(setting))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: {error}; give a file, or the text of a template with {{{{ }}}}") from error
    try:
        template_variables(text)
    except DataError as error:
        raise ConfigError(f"{where}: {error}") from error
    return text


def template_text(tokenizer: Any, *, tools: bool = False) -> str:
    """Return the template that a tokenizer takes; with `tools`, the one it has for tools, if it has one."""
    text: str = tokenizer.get_chat_template(tools=[{}] if tools else None)
    return text


@lru_cache(maxsize=32)
def template_variables(text: str) -> frozenset[str]:
    """Return the variables that a template reads, without those that every template gets but `tools`.

    Raises DataError when its syntax is wrong.
    """
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(text))) - (_GIVEN - {"tools"})
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"the chat template is wrong in line {error.lineno}: {error.message}") from error


def unread_parameter(name: str, variables: frozenset[str]) -> str:
    """Return what is wrong with a parameter that is none of the `variables` of a template."""
    own = sorted(variables - {"tools", "bos_token", "eos_token", "pad_token", "unk_token"})
    meant = "".join(f", did you mean {near!r}?" for near in get_close_matches(name, own, n=1, cutoff=0.5))
    return f"the chat template does not read {name!r}{meant} (it reads {', '.join(own) or 'none'})"


def read_parameters(tokenizer: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of another model's parameters that the template of `tokenizer` reads, too."""
    variables = template_variables(template_text(tokenizer))
    return {name: value for name, value in parameters.items() if name in variables}


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    parameters: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
) -> list[int]:
    """Return the token ids of messages under a tokenizer's chat template.

    Raises DataError when they do not fit it, when it knows no tools and some are given, or when a parameter is not the
    template's.
    """
    given = dict(parameters or {})
    check_plain("messages", [list(messages), list(tools or []), given])  # templates walk them recursively
    if reserved := sorted(_RESERVED & given.keys()):
        raise DataError(f"chat_template_kwargs: {reserved[0]!r} is not the template's to take; leave it out.")
    variables = template_variables(template_text(tokenizer, tools=bool(tools)))
    for name in given.keys() - variables - _GIVEN:
        raise DataError(f"chat_template_kwargs: {unread_parameter(name, variables)}; leave it out.")
    if tools and "tools" not in variables:
        raise DataError(
            "the chat template of this model does not read `tools`, so the model would not hear of them; tell it of "
            "them in a system message, or give the model a template that does."
        )
    try:
        tokens: list[int] = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            add_special_tokens=add_special_tokens,
            return_dict=False,
            **given,
        )
    except _UNRENDERABLE as error:
        roles = ", ".join(str(message.get("role")) for message in messages[:8])
        raise DataError(f"messages do not fit the chat template: {error} (roles: {roles})") from error
    return tokens


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return an environment that reads what transformers' does."""
    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, by which transformers marks what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)
